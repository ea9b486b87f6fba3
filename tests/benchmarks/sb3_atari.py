"""Stable-Baselines3's PPO at the settings of ppo_atari.py, the paper's Table 5: the same curve?

  pip install -r tests/benchmarks/requirements.txt
  python tests/benchmarks/sb3_atari.py --network paper --stop 1050000

Step size and ε fall over 10 million steps, wherever --stop ends the run. It writes config.json and
episodes.csv, which plots/compare.py reads, to runs/sb3_atari-... The network is ppo_atari.py's.
What differs in Stable-Baselines3:

- after a lost life and at a game's start it presses other buttons, which the agent does not see and
  which are not counted as steps; a lost life clears the stack of frames
- two frames are merged before they are grey and not after
- advantages are divided by an unbiased deviation
- step size and ε are those of one iteration later
- `length` is a quarter of a game's frames, with those that the agent does not see
"""

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecFrameStack

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import ppo_atari


class Trunk(BaseFeaturesExtractor):
    """The trunk of ppo_atari.py's network, for frames (B, 4, 84, 84) that SB3 has divided by 255;
    SB3 gives it orthogonal weights again, in the same way."""

    def __init__(self, observation_space, network):
        trunk = ppo_atari.ActorCritic(1, network).trunk
        super().__init__(observation_space, trunk[-2].out_features)
        self.trunk = trunk.to(memory_format=torch.contiguous_format)

    def forward(self, frames):
        return self.trunk(frames)


class Record(BaseCallback):
    """Write each finished game's row of episodes.csv; stop the run at a step."""

    def __init__(self, file, stop):
        super().__init__()
        self.file, self.stop = file, stop
        print("step,return,length", file=file)

    def _on_step(self):
        for info in self.locals["infos"]:
            if "episode" in info:  # a whole game's raw score, and its length in single frames
                score, length = info["episode"]["r"], info["episode"]["l"] // 4
                print(self.num_timesteps, score, length, sep=",", file=self.file, flush=True)
        return self.num_timesteps < self.stop


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stop", type=int, required=True, help="agent steps after which to stop")
    parser.add_argument("--env-id", default="BreakoutNoFrameskip-v4")
    parser.add_argument("--network", choices=("nature", "paper"), default="nature")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    own = parser.parse_args()
    args = ppo_atari.Args(**{k: v for k, v in vars(own).items() if k != "stop"})
    run_dir = Path(f"runs/sb3_atari-{args.env_id}-{args.network}-seed{args.seed}")
    run_dir.mkdir(parents=True)

    torch.set_num_threads(args.threads)
    env = VecFrameStack(make_atari_env(args.env_id, args.num_envs, args.seed), 4)
    model = PPO(
        "CnnPolicy", env, n_steps=args.num_steps, n_epochs=args.num_epochs, seed=args.seed,
        batch_size=args.minibatch_size, gamma=args.gamma, gae_lambda=args.gae_lambda,
        learning_rate=lambda alpha: args.learning_rate * alpha,  # α falls from 1 to 0
        clip_range=lambda alpha: args.clip_eps * alpha, vf_coef=args.vf_coef,
        ent_coef=args.ent_coef, max_grad_norm=args.max_grad_norm, device="cpu", verbose=1,
        policy_kwargs={"features_extractor_class": Trunk, "net_arch": [],
                       "features_extractor_kwargs": {"network": args.network},
                       "optimizer_kwargs": {"eps": args.adam_eps}},
    )  # fmt: skip
    modules = (torch, stable_baselines3, ppo_atari.gym, ppo_atari.ale_py, ppo_atari.np)
    config = {
        "script": Path(__file__).name,
        "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "device": "cpu",
        "versions": {module.__name__: module.__version__ for module in modules},
        "settings": asdict(args) | {"stop": own.stop},
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2))
    with open(run_dir / "episodes.csv", "w") as file:
        steps = args.num_iterations * args.batch_size
        model.learn(steps, Record(file, own.stop), log_interval=20)
    print(run_dir)


if __name__ == "__main__":
    main()
