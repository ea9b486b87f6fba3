r"""PPO on Atari games, from pixels (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Algorithm 1  PPO, Actor-Critic Style                                         here
1  for iteration = 1, 2, ... do                                              main
2      for actor = 1, 2, ..., N do                                           all N at once
3          run policy π_θold in the environment for T timesteps              rollout
4          compute advantage estimates Â_1, ..., Â_T                         estimate_advantages
5      end for
6      optimize surrogate L wrt θ, with K epochs and minibatch size M ≤ NT   update
7      θ_old ← θ                                                             the next rollout's θ
8  end for

The defaults are the paper's Table 5, on Breakout: 10 million agent steps, 40 million frames; on 2
cores of an AMD EPYC (Zen 5) 1.6 hours, at 1,691 steps/s (2,007 with --bf16). The mean of the last
100 games is 274.8 in the paper. Here, with --bf16, it was 55.6 in one run of the defaults, 364.6 in
one with --network nature, and 362.1, the mean of three, with --learning-rate 1e-3: see README.md.

  python ppo_atari.py                               train, on the CPU
  python ppo_atari.py --network nature              train with the wider network of [Mni+15]
  python ppo_atari.py --cuda --compile              train, on a GPU (no results of it here)
  python ppo_atari.py --resume RUN_DIR              go on after an interruption, bit for bit
  python ppo_atari.py --evaluate RUN_DIR --render   watch what it learned; --video records it
  python ppo_atari.py --network nature --num-epochs 4 --vf-coef 0.25 --clip-value-loss \
      --anneal learning-rate                        the settings of OpenAI's Baselines
"""

import argparse
import csv
import gc
import hashlib
import io
import json
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from math import inf
from pathlib import Path
from types import SimpleNamespace

# Read when torch loads. An idle thread shall spin for a moment, as waking it costs each inference
# half a millisecond, and then sleep, as the emulators need the cores. Large tensors shall live in
# huge pages: to have small ones mapped takes about a fifth of an update. What --compile makes shall
# not depend on timings: a resumed run is to be the same run.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

import ale_py
import gymnasium as gym
import matplotlib
import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordVideo
from matplotlib.figure import Figure
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).name

# ------------------------------------------------------------------------------------ Settings


def fail(message, status=2):
    """Say what is wrong in one line on standard error, and leave: 2 for bad input, 1 later."""
    print(f"{SCRIPT}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(status)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):  # no "(default: None)"
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def number(kind, low, high=inf):
    """A type for argparse: a finite int or float from low to high."""

    def parse(text):
        value = kind(text)
        if not (low <= value <= high and value < inf):
            limits = f"at least {low}" if high == inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} is not {limits}")
        return value

    parse.__name__ = kind.__name__
    return parse


# fmt: off
def make_parser():
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False,
                    formatter_class=Help)
    count, not_negative, fraction = number(int, 1), number(float, 0), number(float, 0, 1)
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("the task").add_argument
    add("--env-id", default="BreakoutNoFrameskip-v4", help="gymnasium's id of an Atari game")
    add("--seed", type=number(int, 0, 2**63 - 1), default=1,
        help="of the network, the actions, the minibatches and the games")
    add("--total-steps", type=count, default=10_000_000, help="agent steps, of 4 frames each")

    add = parser.add_argument_group("Table 5 of the paper, in its order").add_argument
    add("--num-steps", type=count, default=128, help="T, the horizon of a rollout")
    add("--learning-rate", type=not_negative, default=2.5e-4,
        help="Adam's step size, times α: see --anneal")
    add("--num-epochs", type=count, default=3, help="K, passes over a rollout (Baselines: 4)")
    add("--minibatch-size", type=count, default=32 * 8, help="M")
    add("--gamma", type=fraction, default=0.99, help="γ, the discount")
    add("--gae-lambda", type=fraction, default=0.95, help="λ of GAE")
    add("--num-envs", type=count, default=8, help="N, the number of actors")
    add("--clip-eps", type=not_negative, default=0.1, help="ε of Eq. 7, times α")
    add("--vf-coef", type=not_negative, default=1.0, help="c1 of Eq. 9, where L^VF is "
        "(V - V^targ)²; Baselines writes ½ before the square, so its 0.5 is 0.25 here")
    add("--ent-coef", type=not_negative, default=0.01, help="c2 of Eq. 9")
    add("--anneal", choices=("both", "learning-rate", "none"), default="both",
        help="what α multiplies, falling from 1 to 0 (Baselines' last version and CleanRL keep ε)")
    add("--network", choices=("paper", "nature"), default="paper",
        help="that of [Mni+16], as Sec. 6.4 says, or that of [Mni+15], as in Baselines and CleanRL")

    add = parser.add_argument_group("not in the paper; in OpenAI's Baselines").add_argument
    add("--norm-adv", action=switch, default=True, help="normalise each minibatch's advantages")
    add("--orthogonal", action=switch, default=True, help="orthogonal init, small policy head")
    add("--max-grad-norm", type=not_negative, default=0.5, help="of the gradient; 0: any")
    add("--adam-eps", type=not_negative, default=1e-5, help="Adam's ε (PyTorch: 1e-8)")
    add("--clip-value-loss", action=switch, default=False, help="hold V within ε of its old value")

    add = parser.add_argument_group("the machine").add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--cuda", action=switch, default=False, help="train on the GPU")
    add("--bf16", action=switch, default=False, help="the network's trunk in bfloat16")
    add("--compile", action=switch, default=False, help="torch.compile; CUDA graphs on a GPU")
    add("--threads", type=number(int, 1, 1024), default=cores,
        help="for the emulators and, on a CPU, the update")

    add = parser.add_argument_group("the run").add_argument
    add("--run-dir", help="a new folder (default: one under runs/, named after the run)")
    add("--checkpoint-every", type=count, help="in iterations (default: about 15 times in a run)")
    add("--goal-score", type=number(float, -inf), help="stop once the mean of 100 games is this")
    add("--resume", metavar="RUN_DIR", help="go on with its settings, of which --total-steps (and "
        "with it α), --goal-score, --cuda and --threads can be changed")
    add("--evaluate", metavar="RUN_DIR", help="play whole games with its best policy (or give a "
        ".pt file); learn nothing")
    add("--episodes", type=count, default=10, help="games to evaluate")
    add("--render", action=switch, default=False, help="evaluate in a window")
    add("--video", action=switch, default=False, help="evaluate, recording to RUN_DIR/videos")
    return parser
# fmt: on

CHANGEABLE = {
    "resume": {"total_steps", "goal_score", "cuda", "threads"},
    "evaluate": {"episodes", "render", "video", "seed", "cuda"},
}


def parse_args(argv=None):
    """The settings, checked, and the checkpoint that --resume or --evaluate names, or None."""
    parser = make_parser()
    args = parser.parse_args(argv)
    # parsed once more, without defaults: what is then set was typed
    unset = argparse.Namespace(**dict.fromkeys(vars(args)))
    given = {k: v for k, v in vars(parser.parse_args(argv, unset)).items() if v is not None}
    flag = {name: "--" + name.replace("_", "-") for name in vars(args)}

    checkpoint = None
    task = next((task for task in CHANGEABLE if task in given), None)
    if task is not None:
        for name in given.keys() - CHANGEABLE[task] - {task}:
            fail(f"{flag[name]}: --{task} takes it from the checkpoint; leave it out")
        checkpoint = load_checkpoint(Path(given[task]), task)
        here = {"run_dir": given[task]} if task == "resume" else {"cuda": False}
        args = argparse.Namespace(**{**vars(args), **checkpoint["settings"], **here, **given})
        if args.render and args.video:
            fail("--render, --video: a window or a recording, not both at once")
    elif given.keys() & {"episodes", "render", "video"}:
        fail("--episodes, --render and --video go with --evaluate RUN_DIR")

    batch_size = args.num_steps * args.num_envs
    if batch_size % args.minibatch_size:
        fail(f"--minibatch-size {args.minibatch_size} does not divide the {batch_size} samples of "
             f"a rollout, --num-steps × --num-envs")  # fmt: skip
    if args.total_steps < batch_size:
        fail(f"--total-steps {args.total_steps} is less than one rollout's {batch_size}")
    if args.cuda and not torch.cuda.is_available():
        fail("--cuda: no CUDA GPU that this build of torch can use; --no-cuda is for the CPU")
    game_settings(args.env_id)
    if args.checkpoint_every is None:
        args.checkpoint_every = max(1, args.total_steps // batch_size // 15)
    if args.run_dir is None:
        name = f"{Path(SCRIPT).stem}-{args.env_id.replace('/', '-')}-seed{args.seed}"
        args.run_dir = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return args, checkpoint


# --------------------------------------------------------------------------------- Environment

FIRE = 1  # its place in the action set of every game that has it


def game_settings(env_id):
    """What gymnasium has registered under a game's id: its ROM, its sticky actions, its limit."""
    try:
        spec = gym.spec(env_id)
    except gym.error.Error as e:
        fail(f"--env-id {env_id}: {e} A game's id is like PongNoFrameskip-v4 or ALE/Pong-v5")
    if not str(spec.entry_point).startswith("ale_py"):
        fail(f"--env-id {env_id}: not an Atari game, such as PongNoFrameskip-v4 or ALE/Pong-v5")
    return spec.kwargs


class Games:
    """N games on C++ threads, preprocessed as in [Mni+15]: 4 frames a step, of which the last two
    are merged by their maximum, grey, 84 × 84, the last four stacked. A game starts with FIRE, if
    it has that action, and a random number of no-ops, below 30.

    A lost life ends the return but not the game. In some games the ball then waits for FIRE, so
    the next action is FIRE, whatever the policy chose. None of this is in the PPO paper, but such
    is its testbed, the Arcade Learning Environment, since [Mni+15].

    frames:     (N, 84, 84, 4) uint8, what the agents see now, the newest frame last
    press_fire: (N,) bool, where the next action will be FIRE
    """

    def __init__(self, env_id, num_envs, threads, pin_memory=False, noop_max=30):
        settings = game_settings(env_id)
        self.envs = AtariVectorEnv(
            settings["game"],
            num_envs,
            num_threads=min(threads, num_envs),
            repeat_action_probability=settings["repeat_action_probability"],
            full_action_space=settings["full_action_space"],
            max_num_frames_per_episode=settings["max_num_frames_per_episode"],
            autoreset_mode=AutoresetMode.SAME_STEP,  # no dummy step between two games
            life_loss_info=True,  # a lost life is `terminated`, and the game goes on
            reward_clipping=False,  # the score wants raw rewards
            use_fire_reset=True,
            noop_max=noop_max,
        )
        actions = self.envs.ale.get_action_set()
        self.num_actions = len(actions)
        self.has_fire = actions[FIRE] == ale_py.Action.FIRE
        self.frames = torch.zeros(num_envs, 84, 84, 4, dtype=torch.uint8, pin_memory=pin_memory)

    def reset(self, seed):
        """Start N new games, whose course depends on `seed` (an int) and the actions alone."""
        obs, info = self.envs.reset(seed=seed)
        self._see(obs)
        self.frame_numbers = info["episode_frame_number"]
        self.scores = np.zeros(len(obs), dtype=np.int64)
        self.lengths = np.zeros(len(obs), dtype=np.int64)
        self.press_fire = np.zeros(len(obs), dtype=bool)

    def step(self, actions):
        """Step every game with actions (N,); one that ends starts anew within the step.

        Returns (N,) rewards, raw; (N,) terminated, a life lost or the game over; (N,) truncated,
        the frame limit met; (N, 4, 84, 84) final_obs, what a game showed last, valid only where it
        ended; and a list of the finished games' (score, length in steps).
        """
        actions = np.where(self.press_fire, FIRE, actions)
        obs, rewards, terminated, truncated, info = self.envs.step(actions)
        self._see(obs)
        self.scores += rewards
        self.lengths += 1
        over = info["episode_frame_number"] <= self.frame_numbers  # within a game it rises
        finished = list(zip(self.scores[over].tolist(), self.lengths[over].tolist(), strict=True))
        self.scores[over] = self.lengths[over] = 0
        self.frame_numbers = info["episode_frame_number"]
        self.press_fire = terminated & ~over & self.has_fire
        return rewards, terminated, truncated, info.get("final_obs"), finished

    def _see(self, obs):
        # (N, 4, 84, 84) -> (N, 84, 84, 4): convolutions are fastest with channels last, and this
        # is the fastest way to get them
        np.stack([obs[:, k] for k in range(4)], axis=-1, out=self.frames.numpy())


class PressFireAtStart(gym.Wrapper):
    """As `Games` does, before the no-ops; for a scalar environment that steps single frames."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        if self.env.unwrapped.get_action_meanings()[FIRE] == "FIRE":
            obs, _, _, _, info = self.env.step(FIRE)
        return obs, info


def make_scalar_env(env_id, render_mode=None, noop_max=30):
    """One game that can be shown and recorded; (4, 84, 84) frames, the same as those of `Games`."""
    env = PressFireAtStart(gym.make(env_id, frameskip=1, render_mode=render_mode))
    env = AtariPreprocessing(env, noop_max=noop_max, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


# ------------------------------------------------------------------------------------- Network


class ActorCritic(nn.Module):
    """Policy π(a|s) and value V(s), two linear heads on one convolutional trunk.

    paper:  the network of [Mni+16] (arXiv:1602.01783, Sec. 8), as Sec. 6.4 says
    nature: the network of [Mni+15] (Nature 518, Methods), wider and deeper
    """

    def __init__(self, num_actions, network="paper", orthogonal=True, bf16=False):
        super().__init__()
        if network == "paper":
            convolutions = [(4, 16, 8, 4), (16, 32, 4, 2)]  # channels in, out, kernel, stride
            flat, hidden = 32 * 9 * 9, 256
        else:
            convolutions = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
            flat, hidden = 64 * 7 * 7, 512
        layers = [layer for shape in convolutions for layer in (nn.Conv2d(*shape), nn.ReLU())]
        # Flatten before the last convolution's ReLU: the same values, and faster, as that ReLU's
        # backward pass then has its output and its gradient in the same memory layout
        layers.insert(-1, nn.Flatten())
        self.trunk = nn.Sequential(*layers, nn.Linear(flat, hidden), nn.ReLU())
        self.policy = nn.Linear(hidden, num_actions)
        self.value = nn.Linear(hidden, 1)
        self.bf16 = bf16
        if orthogonal:  # not in the paper: Baselines' initialisation (--no-orthogonal)
            for layer in self.modules():
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    gain = {self.policy: 0.01, self.value: 1.0}.get(layer, 2**0.5)
                    nn.init.orthogonal_(layer.weight, gain)
                    nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, frames):
        """frames (B, 84, 84, 4) uint8 -> logits (B, number of actions), values (B,), float32."""
        x = frames.permute(0, 3, 1, 2).to(torch.bfloat16 if self.bf16 else torch.float32)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x.mul_(1 / 255))
        x = x.float()  # the heads stay float32 under --bf16
        return self.policy(x), self.value(x).squeeze(-1)


def act(net, frames):
    """Sample a ~ π(·|s) for frames (B, 84, 84, 4). Returns a, log π(a|s) and V(s), each (B,)."""
    logits, values = net(frames)
    gumbel = -torch.empty_like(logits).exponential_().log()
    actions = (logits + gumbel).argmax(-1, keepdim=True)  # a sample from the softmax of logits
    log_probs = logits.log_softmax(-1).gather(-1, actions)
    return actions.squeeze(-1), log_probs.squeeze(-1), values


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, num_envs, device):
    """Room for one rollout, used again by every iteration. All (T, N), but values (T + 1, N) and
    frames (T, N, 84, 84, 4). What the games tell stays on the host, where 128 tiny steps of `gae`
    are cheapest; what the network reads and says is on its device."""
    shape = (num_steps, num_envs)
    return SimpleNamespace(
        frames=torch.zeros(*shape, 84, 84, 4, dtype=torch.uint8, device=device),
        actions=torch.zeros(shape, dtype=torch.int64, device=device),
        log_probs=torch.zeros(shape, device=device),
        values=torch.zeros(num_steps + 1, num_envs, device=device),  # V(s_0), ..., V(s_T)
        by_policy=torch.zeros(shape),  # 0 where FIRE was pressed whatever the policy chose
        rewards=torch.zeros(shape),
        terminated=torch.zeros(shape),
        truncated=torch.zeros(shape),
        final_values=torch.zeros(shape),  # where truncated, V of what the game showed last
    )


@torch.no_grad()
def rollout(games, policy, batch):
    """Run π_θold for T timesteps in N games, filling `batch` (Algorithm 1, line 3).

    Returns (t, score, length) of each game that finished at step t = 0, ..., T - 1.
    """
    num_steps, finished = len(batch.rewards), []
    for t in range(num_steps):
        batch.frames[t].copy_(games.frames, non_blocking=True)
        batch.actions[t], batch.log_probs[t], batch.values[t] = policy(batch.frames[t])
        batch.by_policy[t] = torch.from_numpy(~games.press_fire)
        actions = batch.actions[t].cpu().numpy()  # waits for the device, so frames may change now
        rewards, terminated, truncated, final_obs, over = games.step(actions)
        batch.rewards[t] = torch.from_numpy(rewards).sign()  # not in the paper: [Mni+15]'s clipping
        batch.terminated[t] = torch.from_numpy(terminated)
        batch.truncated[t] = torch.from_numpy(truncated)
        if truncated.any():
            last_frames = torch.from_numpy(final_obs).permute(0, 2, 3, 1).contiguous()
            batch.final_values[t] = policy(last_frames.to(batch.frames.device))[2].cpu()
        finished += [(t, score, length) for score, length in over]
    batch.values[num_steps] = policy(games.frames.to(batch.frames.device))[2]
    return finished


# ---------------------------------------------------------------------------------- Advantages


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Advantage estimates of a rollout (PPO's Eq. 11, 12). Arguments and result are (T, N).

    next_values[t] is V of the true successor of step t; where terminated, it is not used.
    What comes after a terminated step is worth nothing; a truncated step is worth its successor's
    value still. The sum goes past neither.
    """
    deltas = rewards + gamma * (1 - terminated) * next_values - values  # PPO's Eq. 12
    decay = gamma * gae_lambda * (1 - terminated) * (1 - truncated)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + decay[t] * advantage  # PPO's Eq. 11
        advantages[t] = advantage
    return advantages


def estimate_advantages(batch, gamma, gae_lambda):
    """Fill in a rollout's advantages Â_t and value targets V^targ_t (PPO's Algorithm 1, line 4).

    Returns the explained variance: the share of the targets' variance that the values account for.
    """
    values = batch.values.cpu()
    next_values = torch.where(batch.truncated.bool(), batch.final_values, values[1:])
    batch.advantages = gae(batch.rewards, values[:-1], next_values, batch.terminated,
                           batch.truncated, gamma, gae_lambda)  # fmt: skip
    batch.targets = batch.advantages + values[:-1]  # V^targ; the PPO paper leaves it open
    unexplained = batch.advantages.var(correction=0) / batch.targets.var(correction=0)
    return 1 - unexplained.item()


# -------------------------------------------------------------------------------------- Update


def ppo_loss(logits, values, batch, clip_eps, vf_coef, ent_coef, norm_adv, clip_value_loss):
    """Minus the objective of Eq. 9 on a minibatch, and five diagnostics of it, detached.

    logits (M, number of actions) and values (M,) are those of θ; `batch` has, each (M,), the
    actions, log_probs and values of θ_old, advantages, targets, and by_policy: 0 where FIRE was
    pressed whatever the policy chose. Such a step says nothing of π and counts in L^VF alone.
    """

    def mean(x):
        return (x * batch.by_policy).sum() / batch.by_policy.sum().clamp(min=1)

    advantages = batch.advantages
    if norm_adv:  # not in the paper: Baselines' normalisation (--no-norm-adv)
        advantages = advantages - mean(advantages)
        advantages = advantages / (mean(advantages.square()).sqrt() + 1e-8)

    log_pi = logits.log_softmax(-1)
    log_ratio = log_pi.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1) - batch.log_probs
    ratio = log_ratio.exp()  # r_t(θ), Eq. 6
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    l_clip = mean(torch.min(ratio * advantages, clipped * advantages))  # Eq. 7
    entropy = mean(-(log_pi.exp() * log_pi).sum(-1))  # S[π_θ]

    value_errors = (values - batch.targets).square()
    if clip_value_loss:  # not in the paper: Baselines takes the larger of two errors, that of V
        # and that of V held within ε of its old value (off unless --clip-value-loss)
        near = batch.values + (values - batch.values).clamp(-clip_eps, clip_eps)
        value_errors = torch.max(value_errors, (near - batch.targets).square())
    l_vf = value_errors.mean()  # without ½, as in the paper

    objective = l_clip - vf_coef * l_vf + ent_coef * entropy  # Eq. 9
    approx_kl = mean(ratio - 1 - log_ratio)  # of KL(π_θold ‖ π_θ): joschu.net/blog/kl-approx, k3
    clip_fraction = mean(((ratio - 1).abs() > clip_eps).float())
    return -objective, torch.stack((-l_clip, l_vf, entropy, approx_kl, clip_fraction)).detach()


STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


def anneal(args, iteration, num_iterations):
    """The step size of Adam and ε in an iteration (from 0 on): Table 5's, with α from 1 to 0."""
    alpha = 1 - iteration / num_iterations
    learning_rate = args.learning_rate * (1 if args.anneal == "none" else alpha)
    return learning_rate, args.clip_eps * (alpha if args.anneal == "both" else 1)


def update(loss, net, optimizer, batch, clip_eps, args):
    """K epochs of minibatches on one rollout (Algorithm 1, line 6).

    loss(minibatch, ε) runs `net` and returns `ppo_loss`. Returns the means of STATS and the norm of
    the weights; FloatingPointError if one of them is not finite.
    """
    device = batch.frames.device
    names = ("frames", "actions", "log_probs", "by_policy", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1).to(device) for name in names}  # (T·N, ...)
    samples["values"] = batch.values[:-1].flatten()
    clip_eps = torch.tensor(clip_eps, device=device)
    sums, count = torch.zeros(len(STATS), device=device), 0
    for _ in range(args.num_epochs):
        order = torch.randperm(batch.targets.numel(), device=device)
        for indices in order.split(args.minibatch_size):
            minibatch = {name: x.index_select(0, indices) for name, x in samples.items()}
            optimizer.zero_grad()  # before the loss: CUDA graphs use the gradients' memory again
            minus_objective, stats = loss(SimpleNamespace(**minibatch), clip_eps)
            minus_objective.backward()
            # not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)
            grad_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or inf)
            optimizer.step()
            sums += torch.cat((stats, grad_norm.view(1)))
            count += 1
    means = dict(zip(STATS, (sums / count).tolist(), strict=True))  # waits for the device
    means["weight_norm"] = nn.utils.get_total_norm(list(net.parameters())).item()
    for name, mean in means.items():
        if not np.isfinite(mean):
            raise FloatingPointError(f"{name} is {mean}")
    return means


# ------------------------------------------------------------------------------------- Records

PAPER_SCORES = {  # Table 6: PPO's mean of the last 100 games, after 40 million frames
    "beam_rider": 1590.0, "breakout": 274.8, "pong": 20.7, "qbert": 14293.3, "seaquest": 1204.5,
    "space_invaders": 942.5,
}  # fmt: skip


class Records:
    """A run's folder: config.json, episodes.csv, TensorBoard's events, checkpoints, the picture.

    steps and returns: of every finished episode, the agent steps at its end and its return.
    """

    def __init__(self, args, checkpoint):
        self.args, self.run_dir = args, Path(args.run_dir)
        self.steps, self.returns = [], []
        self.best, self.best_step, self.best_net = -inf, 0, None
        self.started = self.last_time = self.last_line = time.time()
        self.last_step = 0
        path = self.run_dir / "episodes.csv"
        modules = (torch, gym, ale_py, np, matplotlib)
        config = {
            "script": SCRIPT,
            "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "device": torch.cuda.get_device_name() if args.cuda else "cpu",
            "versions": {module.__name__: module.__version__ for module in modules},
            "settings": vars(args),
        }
        # TensorBoard writes in a thread of its own, whose error comes back in add_scalar
        threading.excepthook = lambda failure: None
        try:
            if checkpoint is None:
                self.run_dir.mkdir(parents=True)
                self.csv = open(path, "x")  # noqa: SIM115
                self.csv.write("step,return,length,seconds\n")
            else:
                if os.path.getsize(path) < checkpoint["csv_bytes"]:
                    fail(f"--resume: {path} is shorter than at the checkpoint")
                self.csv = open(path, "r+")  # noqa: SIM115
                self.csv.truncate(checkpoint["csv_bytes"])  # what came later will come again
                for row in csv.DictReader(self.csv):
                    self.steps.append(int(row["step"]))
                    self.returns.append(float(row["return"]))
                self.best, self.best_step = checkpoint["best"], checkpoint["best_step"]
                self.started -= checkpoint["seconds"]
                self.last_step = checkpoint["step"]
            text = json.dumps(config, indent=2) + "\n"
            replace(self.run_dir / "config.json", lambda file: file.write(text.encode()))
            self.writer = SummaryWriter(self.run_dir, purge_step=self.last_step + 1)
        except (KeyError, TypeError, ValueError):
            fail(f"--resume: {path} is damaged: it is not what this run wrote")
        except OSError as e:
            fail(f"{e.filename or self.run_dir}: {e.strerror}; --run-dir wants a new folder, "
                 f"--resume a run's")  # fmt: skip
        total = args.total_steps - args.total_steps % (args.num_steps * args.num_envs)
        self.bar = tqdm(total=total, initial=self.last_step, unit=" steps", disable=None)

    @property
    def score(self):
        """Mean return of the last 100 episodes (fewer at first), the PPO paper's measure."""
        return float(np.mean(self.returns[-100:])) if self.returns else float("nan")

    @property
    def seconds(self):
        """Spent on training, before a resumption too."""
        return time.time() - self.started

    def reached(self, goal):
        return goal is not None and len(self.returns) >= 100 and self.score >= goal

    def log(self, iteration, step, episodes, scalars, net):
        """Record an iteration that ended at `step`: episodes (step, return, length), scalars."""
        for end, score, length in episodes:
            self.csv.write(f"{end},{score},{length},{self.seconds:.1f}\n")
            self.steps.append(end)
            self.returns.append(score)
        self.csv.flush()
        if episodes and self.reached(self.best):
            self.best, self.best_step = self.score, step
            self.best_net = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        now = time.time()
        speed = (step - self.last_step) / (now - self.last_time)
        for name, value in {**scalars, "score": self.score, "steps_per_second": speed}.items():
            if name != "score" or self.returns:
                self.writer.add_scalar(name, value, step)
        progress = f"episode {len(self.returns)}, mean of last 100: {self.score:.1f}"
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update(step - self.last_step)
        self.last_step, self.last_time = step, now
        if self.bar.disable and now - self.last_line > 30:  # no terminal: a line now and then
            self.last_line = now
            hours = (self.args.total_steps - step) / speed / 3600
            print(f"iteration {iteration}, step {step:,} of {self.args.total_steps:,}, "
                  f"episode {len(self.returns)}, mean of last 100: {self.score:.1f}, "
                  f"{speed:.0f} steps/s, {hours:.1f} h left", flush=True)  # fmt: skip

    def save(self, iteration, step, net, optimizer):
        """Write the checkpoint, the best policy so far, and the picture."""
        about = {"script": SCRIPT, "settings": vars(self.args)}
        best = {"best": self.best, "best_step": self.best_step}
        if self.best_net is not None:
            save(
                self.run_dir / "best.pt",
                {**about, **best, "net": self.best_net, "step": self.best_step},
            )
            self.best_net = None
        self.csv.flush()
        os.fsync(self.csv.fileno())
        progress = {"iteration": iteration, "step": step, "seconds": self.seconds,
                    "csv_bytes": os.path.getsize(self.csv.name)}  # fmt: skip
        learned = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        save(self.run_dir / "checkpoint.pt", {**about, **best, **progress, **learned})
        self.draw()
        gc.collect()  # a figure's parts refer to each other; figures would pile up

    def draw(self):
        """learning_curve.png: each episode's return, their mean over 100, the published score."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.steps, self.returns, ".", ms=2, alpha=0.25, label="one game")
        if len(self.returns) >= 100:
            means = np.convolve(self.returns, np.full(100, 1 / 100), mode="valid")
            axes.plot(self.steps[99:], means, color="tab:blue", label="mean of the last 100")
        published = PAPER_SCORES.get(game_settings(self.args.env_id)["game"])
        if published is not None:
            label = f"paper, after 10 million steps: {published}"
            axes.axhline(published, ls="--", color="tab:gray", label=label)
        axes.set(xlabel="agent steps (4 frames each)", ylabel="score of a game", xlim=(0, None))
        axes.set_title(f"PPO on {self.args.env_id}, seed {self.args.seed}")
        axes.legend(loc="upper left", markerscale=5, framealpha=1)
        replace(self.run_dir / "learning_curve.png", lambda f: figure.savefig(f, dpi=120))

    def close(self):
        for record in (self.bar, self.csv, self.writer):
            with suppress(OSError):  # a full disk, of which the run has told already
                record.close()


def replace(path, write):
    """Write a file beside and rename it, so that a kill at any moment leaves the old one whole."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def save(path, contents):
    """Save plain data (numbers, strings, tensors, lists, dicts) whole or not at all."""
    buffer = io.BytesIO()  # torch.save itself would hide the operating system's error
    torch.save(contents, buffer)
    replace(path, lambda file: file.write(buffer.getbuffer()))


def load_checkpoint(path, task):
    """What --resume or --evaluate needs. A checkpoint is plain data: loading it runs no code."""
    if task == "resume":
        path = path / "checkpoint.pt"
    elif path.suffix != ".pt":
        path = path / ("best.pt" if (path / "best.pt").exists() else "checkpoint.pt")
    try:
        contents = io.BytesIO(path.read_bytes())
    except OSError as e:
        fail(f"--{task}: {path}: {e.strerror}; the folder of a run is wanted")
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(contents, map_location="cpu", weights_only=True)
    except Exception as e:  # whatever the reader meets in a file that is cut short or foreign
        fail(f"--{task}: {path} is not a whole checkpoint of plain data ({type(e).__name__})")
    known = isinstance(checkpoint, dict) and {"settings", "net", "step"} <= checkpoint.keys()
    if not known or checkpoint.get("script") != SCRIPT:
        fail(f"--{task}: {path} is not a checkpoint of {SCRIPT}")
    if task == "resume" and "optimizer" not in checkpoint:
        fail(f"--{task}: {path} holds a policy alone; it can be evaluated")
    return checkpoint


def seed_of(seed, iteration):
    """The seed, an int of 31 bits, of all that is random from a checkpoint on."""
    return int(np.random.SeedSequence((seed, iteration)).generate_state(1)[0] >> 1)


@torch.no_grad()
def evaluate(args, checkpoint):
    """Play whole games with a saved policy, sampling its actions. Returns their scores."""
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    mode = "human" if args.render else "rgb_array" if args.video else None
    try:
        env = make_scalar_env(args.env_id, mode)
        if args.video:
            path = Path(args.evaluate)
            folder = (path.parent if path.suffix == ".pt" else path) / "videos"
            folder = folder / time.strftime("%Y%m%d-%H%M%S")
            env = RecordVideo(env, str(folder), lambda game: True, fps=15, disable_logger=True)
    except Exception as e:  # no display, no room
        fail(f"--{'render' if args.render else 'video'}: {e}", 1)
    meanings = env.unwrapped.get_action_meanings()
    net = ActorCritic(len(meanings), args.network, bf16=args.bf16).to(device)
    net.load_state_dict(checkpoint["net"])
    scores = []
    for game in range(args.episodes):
        obs, info = env.reset(seed=args.seed if game == 0 else None)
        score, length, over = 0.0, 0, False
        lives = info["lives"]
        while not over:
            frames = torch.from_numpy(obs).permute(1, 2, 0).unsqueeze(0).contiguous()
            action = act(net, frames.to(device))[0].item()
            if info["lives"] < lives and meanings[FIRE] == "FIRE":  # as in training
                action = FIRE
            lives = info["lives"]
            obs, reward, terminated, truncated, info = env.step(action)
            score, length, over = score + reward, length + 1, terminated or truncated
        scores.append(score)
        print(f"game {game + 1}: score {score:g}, {length} steps", flush=True)
    env.close()
    print(f"{args.env_id}: {np.mean(scores):.1f} ± {np.std(scores):.1f} (mean ± std) over "
          f"{len(scores)} games, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return scores


# ---------------------------------------------------------------------------------------- main


def main(argv=None):
    """Train by Algorithm 1, or evaluate; `argv` is the command line."""
    args, checkpoint = parse_args(argv)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    torch.backends.cudnn.deterministic = True  # or a resumed run would not repeat itself
    if args.cuda:
        torch.set_float32_matmul_precision("high")  # TF32, which cuDNN's convolutions use already
    if args.evaluate is not None:
        return evaluate(args, checkpoint)

    device = torch.device("cuda" if args.cuda else "cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    games = Games(args.env_id, args.num_envs, args.threads, pin_memory=args.cuda)
    net = ActorCritic(games.num_actions, args.network, args.orthogonal, args.bf16).to(device)
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    batch = make_batch(args.num_steps, args.num_envs, device)

    def policy(frames):
        return act(net, frames)

    def loss(minibatch, clip_eps):
        return ppo_loss(
            *net(minibatch.frames), minibatch, clip_eps, vf_coef=args.vf_coef,
            ent_coef=args.ent_coef, norm_adv=args.norm_adv, clip_value_loss=args.clip_value_loss,
        )  # fmt: skip

    if args.compile:
        mode = "reduce-overhead" if args.cuda else "default"  # the former captures CUDA graphs
        policy = torch.compile(policy, mode=mode, fullgraph=True)
        loss = torch.compile(loss, mode=mode, fullgraph=True)

    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_steps // batch_size
    iteration = 0
    if checkpoint is not None:
        iteration = checkpoint["iteration"]
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    records = Records(args, checkpoint)
    size = sum(p.numel() for p in net.parameters())
    tqdm.write(f"{args.env_id}: {games.num_actions} actions; {args.network} network, {size:,} "
               f"weights; {num_iterations} iterations of {args.num_envs} actors × "
               f"{args.num_steps} steps, a checkpoint every {args.checkpoint_every}; {device}, "
               f"{args.threads} threads; {args.run_dir}")  # fmt: skip

    interrupts = []

    def interrupt(*_):  # Ctrl-C: finish the iteration, so that the records are complete
        interrupts.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one does not wait

    handler_before = signal.signal(signal.SIGINT, interrupt)
    fresh = True  # just started or resumed
    try:
        while (
            iteration < num_iterations and not records.reached(args.goal_score) and not interrupts
        ):
            step = iteration * batch_size
            if fresh or iteration % args.checkpoint_every == 0:
                # New games, and all that is random seeded anew, also in a run that goes on: so a
                # resumed run is the same run.
                records.save(iteration, step, net, optimizer)
                seed = seed_of(args.seed, iteration)
                torch.manual_seed(seed)
                games.reset(seed)
                fresh = False

            learning_rate, clip_eps = anneal(args, iteration, num_iterations)
            optimizer.param_groups[0]["lr"] = learning_rate
            finished = rollout(games, policy, batch)  # line 3
            explained = estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 4
            stats = update(loss, net, optimizer, batch, clip_eps, args)  # line 6

            iteration += 1
            episodes = [(step + (t + 1) * args.num_envs, r, n) for t, r, n in finished]
            stats |= {"explained_variance": explained, "learning_rate": learning_rate}
            records.log(iteration, iteration * batch_size, episodes, stats, net)
        if interrupts:
            records.draw()
        else:
            records.save(iteration, iteration * batch_size, net, optimizer)
    except KeyboardInterrupt:
        interrupts.append(True)  # the second one; the last checkpoint is whole
    except FloatingPointError as e:
        fail(f"iteration {iteration + 1}: {e}; {args.run_dir}/checkpoint.pt is from before", 1)
    except OSError as e:
        fail(f"{e}; the last checkpoint in {args.run_dir} is whole", 1)
    finally:
        records.close()
        signal.signal(signal.SIGINT, handler_before)
    if interrupts:
        print(f"interrupted; go on with: python {SCRIPT} --resume {args.run_dir}", file=sys.stderr)
        raise SystemExit(130)
    print(f"finished: {iteration * batch_size:,} steps, mean of the last 100 games "
          f"{records.score:.1f}, {records.seconds / 60:.0f} min, {args.run_dir}")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
