"""Stable-Baselines3's PPO with the settings of ppo_atari.py: do the two learn alike?

  pip install -r tests/benchmarks/requirements.txt
  python tests/benchmarks/sb3_atari.py --stop 1000000                   Table 5, first million steps
  python tests/benchmarks/sb3_atari.py --stop 1000000 --network nature  any settings of ppo_atari.py

Step size and ε fall over --total-steps, 10 million, wherever --stop ends the run. It leaves a
folder, runs/sb3_atari-... unless --run-dir names one, with the config.json and episodes.csv that
plots/compare.py reads. The network is built by ppo_atari.py. Known differences, all of them SB3's:

- a lost life costs a no-op, FIRE and the next button (RIGHT in Breakout), which the agent does not
  see and which are not counted as steps, and clears the stack of frames; a game starts with 1 to 30
  no-ops, then FIRE and RIGHT, where ppo_atari.py has FIRE and then 0 to 29 no-ops
- two frames are merged before they are grey and not after
- advantages are divided by an unbiased deviation
- step size and ε are those of one iteration later
- `length` is a quarter of a game's frames, with those of which the agent sees nothing
"""

import argparse
import csv
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
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
    if `orthogonal`, SB3 initialises it again, in the same way."""

    def __init__(self, observation_space, network, orthogonal):
        trunk = ppo_atari.ActorCritic(1, network, orthogonal).trunk
        trunk = trunk.to(memory_format=torch.contiguous_format)
        super().__init__(observation_space, trunk[-2].out_features)
        self.trunk = trunk

    def forward(self, frames):
        return self.trunk(frames)


class Record(BaseCallback):
    """Write each finished game's row of episodes.csv; stop the run at a step."""

    def __init__(self, file, stop):
        super().__init__()
        self.rows, self.file, self.stop, self.scores = csv.writer(file), file, stop, []
        self.rollouts = 0
        self.rows.writerow(("step", "return", "length"))

    def _on_step(self):
        for info in self.locals["infos"]:
            if "episode" in info:  # a whole game's raw score, and its length in single frames
                score, length = info["episode"]["r"], info["episode"]["l"] // 4
                self.rows.writerow((self.num_timesteps, score, length))
                self.scores.append(score)
        return self.num_timesteps < self.stop

    def _on_rollout_end(self):
        self.rollouts += 1
        if self.rollouts % 20 == 0:
            self.file.flush()
            print(f"step {self.num_timesteps:,}, episode {len(self.scores)}, mean of last 100: "
                  f"{np.mean(self.scores[-100:] or np.nan):.1f}", flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All other flags are those of ppo_atari.py."
    )
    parser.add_argument("--stop", type=int, required=True, help="agent steps after which to stop")
    parser.add_argument("--run-dir", help="a new folder (default: one under runs/)")
    own, flags = parser.parse_known_args()
    args, _ = ppo_atari.parse_args(flags)
    for name in ("resume", "evaluate", "goal_score", "compile", "bf16", "clip_value_loss"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is not for Stable-Baselines3")
    if args.norm_adv == "rollout":
        parser.error("--norm-adv rollout is not for Stable-Baselines3")
    if not args.max_grad_norm or own.stop > args.total_steps:
        parser.error("--max-grad-norm must be above 0, and --stop not above --total-steps")
    run_dir = Path(own.run_dir or f"runs/sb3_atari-{args.env_id}-seed{args.seed}")
    run_dir.mkdir(parents=True)
    args.run_dir = str(run_dir)

    torch.set_num_threads(args.threads)
    env = make_atari_env(args.env_id, args.num_envs, args.seed, env_kwargs={"frameskip": 1})
    falls = {"both": (True, True), "learning-rate": (True, False), "none": (False, False)}
    learning_rate, clip_eps = (
        (lambda alpha, x=x: x * max(alpha, 0)) if falling else x
        for x, falling in zip((args.learning_rate, args.clip_eps), falls[args.anneal], strict=True)
    )
    model = PPO(
        "CnnPolicy", VecFrameStack(env, 4), n_steps=args.num_steps, n_epochs=args.num_epochs,
        batch_size=args.minibatch_size, learning_rate=learning_rate, clip_range=clip_eps,
        gamma=args.gamma, gae_lambda=args.gae_lambda, vf_coef=args.vf_coef, ent_coef=args.ent_coef,
        max_grad_norm=args.max_grad_norm, seed=args.seed,
        normalize_advantage=args.norm_adv == "minibatch",
        device="cuda" if args.cuda else "cpu",
        policy_kwargs={
            "features_extractor_class": Trunk,
            "features_extractor_kwargs": {
                "network": args.network, "orthogonal": args.orthogonal,
            },
            "net_arch": [], "ortho_init": args.orthogonal,
            "optimizer_kwargs": {"eps": args.adam_eps},
        },
    )  # fmt: skip
    modules = (torch, stable_baselines3, ppo_atari.gym, ppo_atari.ale_py, np)
    config = {
        "script": Path(__file__).name,
        "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "device": str(model.device),
        "versions": {module.__name__: module.__version__ for module in modules},
        "settings": {**vars(args), "stop": own.stop},
    }
    (run_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with open(run_dir / "episodes.csv", "x") as file:
        model.learn(args.total_steps, callback=Record(file, own.stop))
    print(run_dir)


if __name__ == "__main__":
    main()
