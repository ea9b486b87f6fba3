r"""TRPO on state vectors (Schulman et al. 2015, https://arxiv.org/abs/1502.05477).

The practical algorithm of Sec. 6, "single path", in our lines               here
1  for iteration = 1, 2, ... do                                              main
2      run policy π_θold, collecting states, actions and rewards             rollout
3      estimate the Q-values of the state-action pairs                       estimate_advantages
4      maximise the surrogate over the pairs, with the mean KL at most δ:    update
           g: the surrogate's gradient; A: the KL's second derivatives       trust_region_step
           s ≈ A⁻¹ g, without ever forming A                                 conjugate_gradient
           θ ← θ_old + β s, β shrinking until L improves and KL ≤ δ          line_search
5      θ_old ← θ                                                             the next rollout's θ
6  end for

The paper has no critic. As is usual today, GAE's advantages stand for the Q-values, which changes
the surrogate by a constant only, and a critic is fitted after the policy's step (fit_critic).

  python trpo_continuous.py                              learn CartPole-v1, in half a minute
  python trpo_continuous.py --env-id HalfCheetah-v5      a million steps, Box actions
  python trpo_continuous.py --resume RUN_DIR             go on after an interruption, bit for bit
  python trpo_continuous.py --evaluate RUN_DIR --render  watch what it learned; --video records it
"""

import argparse
import csv
import gc
import hashlib
import io
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import RecordVideo
from matplotlib.figure import Figure
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).name

# ------------------------------------------------------------------------------------ Settings

TASKS = {  # where the defaults do not do, or not soon; a flag given by hand wins
    "CartPole-v1": {
        "total_steps": 100_000, "num_envs": 4, "num_steps": 256,
    },
    "Pendulum-v1": {
        "total_steps": 300_000, "num_envs": 4, "num_steps": 512, "gamma": 0.95,
    },
    "LunarLander-v3": {  # normalising observations moves π too (main), which costs more here
        "num_envs": 4, "num_steps": 1000, "minibatch_size": 100, "norm_obs": False,
    },
    "LunarLanderContinuous-v3": {
        "num_envs": 4, "num_steps": 1000, "minibatch_size": 100, "norm_obs": False,
    },
}  # fmt: skip


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
                    formatter_class=Help,
                    epilog=f"Other defaults than these have: {', '.join(TASKS)}.")
    count, not_negative, fraction = number(int, 1), number(float, 0), number(float, 0, 1)
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("the task").add_argument
    add("--env-id", default="CartPole-v1", help="gymnasium's id of a task with Box observations")
    add("--seed", type=number(int, 0, 2**63 - 1), default=1,
        help="of the network, the actions, the minibatches and the task")
    add("--total-steps", type=count, default=1_000_000, help="agent steps")

    add = parser.add_argument_group("the trust region, Sec. 6 and App. C").add_argument
    add("--max-kl", type=number(float, 1e-12), default=0.01, help="δ of Eq. 14, the paper's")
    add("--cg-iters", type=count, default=10, help="of conjugate gradient, the paper's k")
    add("--cg-damping", type=not_negative, default=0.1, help="added to the diagonal of A, which "
        "shortens the step too; not in the paper: Baselines'")
    add("--fvp-fraction", type=number(float, 1e-9, 1), default=1.0,
        help="share of the states that A is the mean of; App. C.1 takes 0.1")
    add("--line-search-steps", type=count, default=10,
        help="tries of the line search; the paper gives no number (10: Baselines')")
    add("--backtrack-coef", type=number(float, 0.01, 0.99), default=0.8,
        help="β shrinks to this share at each try (0.8: Spinning Up's; Baselines': 0.5)")

    add = parser.add_argument_group("the batch").add_argument
    add("--num-envs", type=count, default=1, help="N, the number of actors")
    add("--num-steps", type=count, default=1024, help="T, the horizon of a rollout (Baselines')")
    add("--gamma", type=fraction, default=0.99, help="γ, the discount, the paper's")

    add = parser.add_argument_group("the critic and GAE; not in the paper").add_argument
    add("--gae-lambda", type=fraction, default=0.98,
        help="λ of GAE (Baselines'); 1: Monte-Carlo returns")
    add("--num-epochs", type=count, default=5, help="the critic's passes over a rollout "
        "(Baselines')")
    add("--minibatch-size", type=count, default=64, help="the critic's (Baselines')")
    add("--learning-rate", type=not_negative, default=1e-3,
        help="Adam's step size for the critic (Baselines')")

    add = parser.add_argument_group("not in the paper; in OpenAI's Baselines").add_argument
    add("--norm-obs", action=switch, default=True, help="normalise observations, clip them at 10")
    add("--norm-reward", action=switch, default=True,
        help="scale rewards by the std of returns, clip them at 10")
    add("--norm-adv", action=switch, default=True, help="normalise a rollout's advantages")
    add("--orthogonal", action=switch, default=True, help="orthogonal init, small policy head")

    add = parser.add_argument_group("the machine").add_argument
    add("--threads", type=number(int, 1, 1024), default=1,
        help="torch's; more than 1 slows networks this small")
    add("--compile", action=switch, default=False,
        help="torch.compile the critic's step; needs a C++ compiler")

    add = parser.add_argument_group("the run").add_argument
    add("--run-dir", help="a new folder (default: one under runs/, named after the run)")
    add("--checkpoint-every", type=count, help="in iterations (default: about 15 times in a run)")
    add("--goal-score", type=number(float, -inf), help="stop once the mean of 100 episodes is this")
    add("--resume", metavar="RUN_DIR", help="go on with its settings, of which --total-steps, "
        "--goal-score and --threads can be changed")
    add("--evaluate", metavar="RUN_DIR", help="play whole episodes with its best policy (or give "
        "a .pt file); learn nothing")
    add("--episodes", type=count, default=10, help="episodes to evaluate")
    add("--render", action=switch, default=False, help="evaluate in a window")
    add("--video", action=switch, default=False, help="evaluate, recording to RUN_DIR/videos")
    return parser
# fmt: on

CHANGEABLE = {
    "resume": {"total_steps", "goal_score", "threads"},
    "evaluate": {"episodes", "render", "video", "seed"},
}


def parse_args(argv=None):
    """The settings, checked, and the checkpoint that --resume or --evaluate names, or None."""
    parser = make_parser()
    args = parser.parse_args(argv)
    # parsed once more, without defaults: what is then set was typed
    unset = argparse.Namespace(**dict.fromkeys(vars(args)))
    given = {k: v for k, v in vars(parser.parse_args(argv, unset)).items() if v is not None}
    flag = {name: "--" + name.replace("_", "-") for name in vars(args)}
    args = argparse.Namespace(**{**vars(args), **TASKS.get(args.env_id, {}), **given})

    checkpoint = None
    task = next((task for task in CHANGEABLE if task in given), None)
    if task is not None:
        for name in given.keys() - CHANGEABLE[task] - {task}:
            fail(f"{flag[name]}: --{task} takes it from the checkpoint; leave it out")
        checkpoint = load_checkpoint(Path(given[task]), task)
        here = {"run_dir": given[task]} if task == "resume" else {}
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
    check_task(args.env_id)
    if args.compile and shutil.which(os.environ.get("CXX", "g++")) is None:
        fail("--compile wants a C++ compiler: g++, or what the variable CXX names")
    if args.checkpoint_every is None:
        args.checkpoint_every = max(1, args.total_steps // batch_size // 15)
    if args.run_dir is None:
        name = f"{Path(SCRIPT).stem}-{args.env_id.replace('/', '-')}-seed{args.seed}"
        args.run_dir = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return args, checkpoint


# --------------------------------------------------------------------------------- Environment


def check_task(env_id):
    """Refuse a task that gymnasium cannot make, or whose spaces the networks here do not fit."""
    try:
        env = gym.make(env_id, disable_env_checker=True)
    except Exception as e:  # unknown, or whatever its maker meets
        fail(f"--env-id {env_id}: {e} A task's id is like HalfCheetah-v5")
    obs_space, action_space = env.observation_space, env.action_space
    env.close()
    if not (isinstance(obs_space, Box) and len(obs_space.shape) == 1):
        fail(f"--env-id {env_id}: it shows {obs_space}; wanted is a Box of one dimension")
    floats = isinstance(action_space, Box) and np.issubdtype(action_space.dtype, np.floating)
    if not (isinstance(action_space, Discrete) or floats and len(action_space.shape) == 1):
        fail(f"--env-id {env_id}: its actions are {action_space}; wanted is Discrete, or a Box of "
             f"floats of one dimension")  # fmt: skip


class Environments:
    """N environments, stepped one after the other; one whose episode ends starts anew at once.

    obs:                (N, observation size), what the agents see now
    discounted_returns: (N,), r_t + γ r_{t-1} + γ² r_{t-2} + ... back to the episode's beginning,
        by whose std Baselines scales rewards
    """

    def __init__(self, env_id, num_envs, gamma):
        self.envs = [gym.make(env_id, disable_env_checker=True) for _ in range(num_envs)]
        self.action_space = self.envs[0].action_space
        self.obs = np.zeros((num_envs, *self.envs[0].observation_space.shape))
        self.gamma = gamma

    def reset(self, seed):
        """Start N new episodes, whose course depends on `seed` (an int) and the actions alone."""
        for n, env in enumerate(self.envs):
            self.obs[n], _ = env.reset(seed=seed_of(seed, n))
        self._check(self.obs)
        self.scores, self.lengths = [0.0] * len(self.envs), [0] * len(self.envs)
        self.discounted_returns = np.zeros(len(self.envs))
        self.ended = np.zeros(len(self.envs), dtype=bool)

    def step(self, actions):
        """Step every environment with actions (N,) or (N, action size).

        Returns (N,) rewards; (N,) terminated; (N,) truncated, the time limit met; a list of
        those truncated, (n, what environment n showed last); and a list of the finished episodes'
        (return, length). Raises FloatingPointError for what is not finite.
        """
        # not in the paper: as in Baselines, clipped for the environment alone, not in log π(a|s)
        if isinstance(self.action_space, Box):
            actions = actions.clip(self.action_space.low, self.action_space.high)
        else:
            actions = (actions + self.action_space.start).tolist()
        num_envs = len(self.envs)
        rewards = np.zeros(num_envs)
        terminated, truncated = np.zeros(num_envs, dtype=bool), np.zeros(num_envs, dtype=bool)
        final_obs, finished = [], []
        for n, env in enumerate(self.envs):
            self.obs[n], rewards[n], terminated[n], truncated[n], _ = env.step(actions[n])
            self.scores[n] += float(rewards[n])
            self.lengths[n] += 1
        self._check(rewards, self.obs)  # before a reset hides what was seen
        self.discounted_returns *= self.gamma * ~self.ended
        self.discounted_returns += rewards
        self.ended = terminated | truncated
        for n in np.flatnonzero(self.ended).tolist():
            finished.append((self.scores[n], self.lengths[n]))
            self.scores[n], self.lengths[n] = 0.0, 0
            if truncated[n]:
                final_obs.append((n, self.obs[n].copy()))
            self.obs[n], _ = self.envs[n].reset()
            self._check(self.obs[n])
        return rewards, terminated, truncated, final_obs, finished

    def _check(self, *seen):
        if not all(np.isfinite(x).all() for x in seen):
            raise FloatingPointError(f"the environment gave {' and '.join(map(str, seen))}")


# ------------------------------------------------------------------------------------- Network


class RunningMoments(nn.Module):
    """Mean and variance of all the samples so far; in buffers, so that checkpoints hold them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    def add(self, samples):
        """Take in samples (B, *shape), merging the moments of two sets (Chan et al. 1979)."""
        count = len(samples)
        total = self.count + count
        shift = samples.mean(0) - self.mean
        squares = self.var * self.count + samples.var(0, correction=0) * count
        self.var.copy_((squares + shift.square() * self.count * count / total) / total)
        self.mean += shift * count / total
        self.count.copy_(total)


class Categorical:
    """Softmax policies: π(a|s) of B states, from logits (B, number of actions); a (B,)."""

    def __init__(self, logits):
        self.log_pi = logits.log_softmax(-1)

    def __getitem__(self, index):
        return Categorical(self.log_pi[index])

    def copy(self):
        return Categorical(self.log_pi.detach())

    def numbers(self):
        """What describes π(·|s): log π of every action, (B, number of actions)."""
        return self.log_pi

    def metric(self):
        """The diagonal of M, (B, number of actions), where E_a[∇log π ∇log πᵀ] = Jᵀ M J."""
        return self.log_pi.exp()

    def sample(self):
        return torch.multinomial(self.log_pi.exp(), 1).squeeze(-1)

    def log_prob(self, actions):
        return self.log_pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self):
        return -(self.log_pi.exp() * self.log_pi).sum(-1)

    def kl(self, new):
        """KL(self ‖ new) in every state, (B,)"""
        return (self.log_pi.exp() * (self.log_pi - new.log_pi)).sum(-1)


class Gaussian:
    """Normal policies: π(a|s) of B states, from means (B, D) and the logarithms of the stds (D,),
    which do not depend on the state; a (B, D), its components independent."""

    def __init__(self, mean, log_std):
        self.mean, self.log_std = mean, log_std

    def __getitem__(self, index):
        return Gaussian(self.mean[index], self.log_std)

    def copy(self):
        return Gaussian(self.mean.detach(), self.log_std.detach().clone())

    def numbers(self):
        """What describes π(·|s): means and logarithms of stds, (B, 2D)."""
        return torch.cat((self.mean, self.log_std.expand_as(self.mean)), -1)

    def metric(self):
        """The diagonal of M, (2D,): the second derivatives of KL(π ‖ π') by them at π' = π."""
        inverse_variance = (-2 * self.log_std).exp()
        return torch.cat((inverse_variance, torch.full_like(inverse_variance, 2)))

    def sample(self):
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def log_prob(self, actions):
        z = (actions - self.mean) * (-self.log_std).exp()
        constant = 0.5 * math.log(2 * math.pi) * z.shape[-1]
        return -0.5 * z.square().sum(-1) - (self.log_std.sum() + constant)

    def entropy(self):
        entropy = (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
        return entropy.expand(len(self.mean))

    def kl(self, new):
        """KL(self ‖ new) in every state, (B,)"""
        squares = (2 * self.log_std).exp() + (self.mean - new.mean).square()
        kl = new.log_std - self.log_std + 0.5 * squares * (-2 * new.log_std).exp() - 0.5
        return kl.sum(-1)


class ActorCritic(nn.Module):
    """Policy π(a|s) and value V(s), two networks of two layers of 64 tanh units (PPO's Sec. 6.1).

    obs_moments: of the observations; return_moments: of the discounted returns.
    """

    def __init__(self, obs_size, action_space, orthogonal=True, norm_obs=True):
        super().__init__()
        gaussian = isinstance(action_space, Box)
        num_outputs = action_space.shape[0] if gaussian else int(action_space.n)
        self.actor = mlp(obs_size, 64, 64, num_outputs)
        self.critic = mlp(obs_size, 64, 64, 1)
        self.log_std = nn.Parameter(torch.zeros(num_outputs)) if gaussian else None
        self.norm_obs = norm_obs
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments()
        if orthogonal:  # not in the paper: Baselines' initialisation (--no-orthogonal)
            for layer in (*self.actor, *self.critic):
                if isinstance(layer, nn.Linear):
                    gain = {self.actor[-1]: 0.01, self.critic[-1]: 1.0}.get(layer, 2**0.5)
                    nn.init.orthogonal_(layer.weight, gain)
                    nn.init.zeros_(layer.bias)

    def normalise(self, obs):
        """Observations (B, observation size) as the networks take them, float32."""
        if self.norm_obs:  # not in the paper: Baselines' normalisation (--no-norm-obs)
            moments = self.obs_moments
            obs = ((obs - moments.mean) / (moments.var + 1e-8).sqrt()).clamp(-10, 10)
        return obs.float()

    def pi(self, obs):
        """π(·|s) for normalised obs (B, observation size)."""
        out = self.actor(obs)
        return Categorical(out) if self.log_std is None else Gaussian(out, self.log_std)

    def forward(self, obs):
        """π(·|s) and V(s), (B,), for normalised obs (B, observation size)."""
        return self.pi(obs), self.critic(obs).squeeze(-1)


def mlp(*sizes):
    """Linear layers of these sizes with tanh between them."""
    layers = [layer for ends in pairwise(sizes) for layer in (nn.Linear(*ends), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, envs):
    """Room for one rollout, used again by every iteration. All (T, N), but values (T + 1, N),
    raw_obs (T, N, observation size) and actions, (T, N, action size) for a Box.

    `rollout` adds obs (T·N, observation size), normalised, and pi and log_probs of T·N samples;
    `estimate_advantages` adds advantages and targets, (T, N).
    """
    shape = (num_steps, len(envs.envs))
    discrete = isinstance(envs.action_space, Discrete)
    return SimpleNamespace(
        raw_obs=torch.zeros(num_steps, *envs.obs.shape, dtype=torch.float64),
        actions=torch.zeros(
            *shape, *envs.action_space.shape, dtype=torch.int64 if discrete else torch.float32
        ),
        values=torch.zeros(num_steps + 1, len(envs.envs)),  # V(s_0), ..., V(s_T)
        rewards=torch.zeros(shape),
        discounted_returns=torch.zeros(shape, dtype=torch.float64),
        terminated=torch.zeros(shape),
        truncated=torch.zeros(shape),
        final_values=torch.zeros(shape),  # where truncated, V of what the environment showed last
    )


def numpy_policy(net, num_steps, num_envs):
    """π_θ for a few raw observations at a time, for which numpy takes a quarter of torch's time.

    Returns a function of t = 0, ..., T - 1 and obs (N, observation size) that samples actions.
    """
    linear = [layer for layer in net.actor if isinstance(layer, nn.Linear)]
    *hidden, last = [(m.weight.detach().T.numpy(), m.bias.detach().numpy()) for m in linear]
    mean, std = net.obs_moments.mean.numpy(), (net.obs_moments.var + 1e-8).sqrt().numpy()
    noise = torch.empty(num_steps, num_envs, len(last[1]))
    if net.log_std is None:
        noise = noise.exponential_().log().neg().numpy()  # Gumbel's: argmax(logits + it) is ~ π
    else:
        noise = (noise.normal_() * net.log_std.detach().exp()).numpy()

    def policy(t, obs):
        x = ((obs - mean) / std).clip(-10, 10) if net.norm_obs else obs
        x = x.astype(np.float32)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        out = x @ last[0] + last[1] + noise[t]
        return out.argmax(-1) if net.log_std is None else out

    return policy


@torch.no_grad()
def rollout(envs, net, batch):
    """Run π_θold for T timesteps in N environments, filling `batch` (PPO's Algorithm 1, line 3).

    Returns (t, return, length) of each episode that finished at step t = 0, ..., T - 1.
    """
    num_steps, finished, final_obs = len(batch.rewards), [], []
    raw_obs, actions, rewards, terminated, truncated, discounted_returns = (
        x.numpy() for x in (batch.raw_obs, batch.actions, batch.rewards, batch.terminated,
                            batch.truncated, batch.discounted_returns)
    )  # fmt: skip  # the same memory, cheaper to fill
    policy = numpy_policy(net, num_steps, len(envs.obs))
    for t in range(num_steps):
        raw_obs[t] = envs.obs
        actions[t] = policy(t, envs.obs)
        rewards[t], terminated[t], truncated[t], last, over = envs.step(actions[t])
        discounted_returns[t] = envs.discounted_returns
        final_obs += [(t, n, obs) for n, obs in last]
        finished += [(t, score, length) for score, length in over]

    # what else is wanted of π_θold, in one pass: the same but for rounding, and much cheaper
    batch.obs = net.normalise(batch.raw_obs.flatten(0, 1))  # (T·N, observation size)
    pi, values = net(batch.obs)
    batch.pi = pi.copy()  # π_θold stays what it was when the update changes the stds
    batch.log_probs = batch.pi.log_prob(batch.actions.flatten(0, 1))  # (T·N,)
    batch.values[:-1] = values.view(num_steps, -1)
    batch.values[-1] = net(net.normalise(torch.from_numpy(envs.obs)))[1]
    for t, n, obs in final_obs:
        batch.final_values[t, n] = net(net.normalise(torch.from_numpy(obs)))[1]
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


def scale_rewards(batch, moments):
    """Divide a rollout's rewards by the std of all discounted returns so far; clip them at 10.

    Not in the paper: Baselines' scaling (--no-norm-reward)
    """
    moments.add(batch.discounted_returns.flatten())
    batch.rewards.div_((moments.var + 1e-8).sqrt()).clamp_(-10, 10)


# -------------------------------------------------------------------------------------- Update


def flat(tensors):
    """Tensors of any shape, end to end in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def surrogate(pi, batch):
    """L_θold(θ), the objective of Eq. 14 with q = π_θold (Sec. 5.1) and advantages for Q."""
    ratio = (pi.log_prob(batch.actions) - batch.log_probs).exp()
    return (ratio * batch.advantages).mean()


def fisher_vector_product(pi, weights):
    """The function y -> A y, where A, the KL's second derivatives at θ_old, is the mean over states
    of Jᵀ M J (App. C.1, Eq. 56).

    pi: π_θold of B states, with the graph that leads to `weights`, tensors of W numbers in all; y
    and A y are (W,). J is the derivative by the weights of the numbers that describe π(·|s), M is
    π's metric. The paper's other form, differentiating the KL twice (Eq. 57), gives the same and
    takes 1.6 times as long with 2,048 states on one core.
    """
    numbers = pi.numbers()
    metric = pi.metric().detach() / len(numbers)  # M, and the mean over states
    u = torch.zeros_like(numbers, requires_grad=True)
    # reverse mode gives Jᵀu; that is linear in u, so its derivative by u, along y, is J y
    jt_u = flat(torch.autograd.grad(numbers, weights, u, create_graph=True))

    def product(y):
        (j_y,) = torch.autograd.grad(jt_u, u, y, retain_graph=True)
        return flat(torch.autograd.grad(numbers, weights, metric * j_y, retain_graph=True))

    return product


def conjugate_gradient(product, b, num_iters, tolerance=1e-10):
    """Solve A x = b for a positive definite A, given as product(y) = A y; App. C.

    Returns x and the norm of the residual b - A x. Ends early once its square is `tolerance` times
    b's or less, or where A turns out not to be positive: then with the x so far.
    """
    x = torch.zeros_like(b)
    residual, p = b.clone(), b.clone()
    squares = residual @ residual
    small = tolerance * squares
    for _ in range(num_iters):
        if squares <= small:
            break
        a_p = product(p)
        curvature = p @ a_p
        if not curvature > 0:
            break
        step = squares / curvature
        x += step * p
        residual -= step * a_p
        squares, squares_before = residual @ residual, squares
        p = residual + squares / squares_before * p
    return x, squares.sqrt().item()


@torch.no_grad()
def line_search(measure, weights, full_step, max_kl, num_tries, backtrack_coef):
    """Move the weights by as much of `full_step`, (W,), as improves and keeps to δ (App. C).

    measure() returns the surrogate's improvement and KL(π_θold ‖ π_θ) at the weights as they are.
    Returns the fraction of the step taken, the improvement and the KL: zeros if every try fails,
    and then the weights are what they were, bit for bit.
    """
    old = flat(weights)
    fraction = 1.0
    for _ in range(num_tries):
        nn.utils.vector_to_parameters(old + fraction * full_step, weights)
        improvement, kl = measure()
        if 0 < improvement < inf and kl <= max_kl:  # neither holds of nan
            return fraction, improvement, kl
        fraction *= backtrack_coef
    nn.utils.vector_to_parameters(old, weights)
    return 0.0, 0.0, 0.0


def trust_region_step(net, batch, args):
    """Maximise the surrogate in the trust region around θ_old (Eq. 14), moving θ.

    batch: obs (B, observation size), actions, π_θold as pi, its log_probs of the actions, and the
    advantages. Returns what happened; FloatingPointError, θ untouched, for a gradient or an A that
    is not finite.
    """
    weights = list(net.actor.parameters())
    if net.log_std is not None:
        weights.append(net.log_std)
    l_old = surrogate(net.pi(batch.obs), batch)
    g = flat(torch.autograd.grad(l_old, weights))
    if not g.isfinite().all():
        raise FloatingPointError(f"the surrogate's gradient is {g.norm().item()}")

    obs = batch.obs
    if args.fvp_fraction < 1:
        obs = obs[torch.randperm(len(obs))[: math.ceil(args.fvp_fraction * len(obs))]]
    product = fisher_vector_product(net.pi(obs), weights)

    def damped(y):  # not in the paper: Baselines' damping (--cg-damping 0)
        return product(y) + args.cg_damping * y

    s, residual = conjugate_gradient(damped, g, args.cg_iters)
    s_a_s = s @ damped(s)
    if not s_a_s.isfinite():
        raise FloatingPointError(f"sᵀAs is {s_a_s.item()}")
    fraction, improvement, kl, expected = 0.0, 0.0, 0.0, 0.0
    if s_a_s > 0:  # else, with a gradient of zero, there is nowhere to go
        # β s of App. C; with the damping in sᵀAs too, as in Baselines, its KL is below δ mostly
        full_step = (2 * args.max_kl / s_a_s).sqrt() * s

        def measure():
            pi = net.pi(batch.obs)
            improvement = surrogate(pi, batch) - l_old
            return improvement.item(), batch.pi.kl(pi).mean().item()

        fraction, improvement, kl = line_search(
            measure, weights, full_step, args.max_kl, args.line_search_steps, args.backtrack_coef
        )
        expected = fraction * (g @ full_step).item()  # to first order
    return {"kl": kl, "improvement": improvement, "expected_improvement": expected,
            "step_fraction": fraction, "cg_residual": residual,
            "grad_norm": g.norm().item()}  # fmt: skip


def gradient_step(net, optimizer, minibatch):
    """Move the critic by one step of Adam on a minibatch, its gradient zero before."""
    values = net.critic(minibatch.obs).squeeze(-1)
    (values - minibatch.targets).square().mean().backward()
    optimizer.step()


def fit_critic(step_of_adam, net, optimizer, batch, args):
    """Regress V(s) on V^targ, K epochs of minibatches; not in the paper: Baselines'.

    step_of_adam: `gradient_step`, or what --compile makes of it.
    """
    for _ in range(args.num_epochs):
        order = torch.randperm(len(batch.obs))
        obs, targets = batch.obs[order], batch.targets[order]  # once an epoch, then sliced
        for start in range(0, len(order), args.minibatch_size):
            end = start + args.minibatch_size
            optimizer.zero_grad()
            minibatch = SimpleNamespace(obs=obs[start:end], targets=targets[start:end])
            step_of_adam(net, optimizer, minibatch)


def update(step_of_adam, net, optimizer, batch, args):
    """The policy's step and the critic's regression on one rollout.

    Returns what happened; FloatingPointError if a part of it is not finite.
    """
    advantages = batch.advantages.flatten()  # (T, N) -> (T·N,)
    # not in the paper: Baselines' normalisation (--no-norm-adv). Only that the mean becomes 0
    # matters: β s is the same for any scale
    if args.norm_adv:
        advantages = advantages - advantages.mean()
        advantages = advantages / (advantages.square().mean().sqrt() + 1e-8)
    samples = SimpleNamespace(obs=batch.obs, actions=batch.actions.flatten(0, 1), pi=batch.pi,
                              log_probs=batch.log_probs, advantages=advantages,
                              targets=batch.targets.flatten())  # fmt: skip
    stats = trust_region_step(net, samples, args)
    fit_critic(step_of_adam, net, optimizer, samples, args)
    with torch.no_grad():
        pi, values = net(samples.obs)
        stats["entropy"] = pi.entropy().mean().item()
        stats["value_loss"] = (values - samples.targets).square().mean().item()
        stats["weight_norm"] = nn.utils.get_total_norm(list(net.parameters())).item()
    for name, value in stats.items():
        if not np.isfinite(value):
            raise FloatingPointError(f"{name} is {value}")
    return stats


# ------------------------------------------------------------------------------------- Records

LABELS = {
    "one": "one episode", "x": "agent steps", "y": "return of an episode",
    "published": "OpenAI's Baselines, 1 million steps, older versions of the tasks",
}  # fmt: skip

PUBLISHED_SCORES = {  # of Baselines' TRPO; the paper's own tasks and numbers of steps are others
    "HalfCheetah-v5": 1289.7, "Hopper-v5": 1912.9, "InvertedDoublePendulum-v5": 6731.6,
    "InvertedPendulum-v5": 905.1, "Reacher-v5": -4.82, "Swimmer-v5": 95.0, "Walker2d-v5": 2342.6,
}  # fmt: skip


def published_score(env_id):
    return PUBLISHED_SCORES.get(env_id)


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
        names = ("torch", "gymnasium", "ale_py", "mujoco", "Box2D", "numpy", "matplotlib")
        modules = [sys.modules[name] for name in names if name in sys.modules]
        config = {
            "script": SCRIPT,
            "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "device": "cpu",
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

    def save(self, iteration, step, learned):
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
        save(self.run_dir / "checkpoint.pt", {**about, **best, **progress, **learned})
        self.draw()
        gc.collect()  # a figure's parts refer to each other; figures would pile up

    def draw(self):
        """learning_curve.png: each episode's return, their mean over 100, the published score."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.steps, self.returns, ".", ms=2, alpha=0.25, label=LABELS["one"])
        if len(self.returns) >= 100:
            means = np.convolve(self.returns, np.full(100, 1 / 100), mode="valid")
            axes.plot(self.steps[99:], means, color="tab:blue", label="mean of the last 100")
        published = published_score(self.args.env_id)
        if published is not None:
            label = f"{LABELS['published']}: {published}"
            axes.axhline(published, ls="--", color="tab:gray", label=label)
        axes.set(xlabel=LABELS["x"], ylabel=LABELS["y"], xlim=(0, None))
        axes.set_title(f"TRPO on {self.args.env_id}, seed {self.args.seed}")
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
    """Play whole episodes with a saved policy, sampling its actions. Returns their returns."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    mode = "human" if args.render else "rgb_array" if args.video else None
    displays = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
    if args.render and sys.platform == "linux" and not displays & os.environ.keys():
        fail("--render: no display here; --video records to a file", 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # GLFW's
            env = gym.make(args.env_id, render_mode=mode, disable_env_checker=True)
            env.reset(seed=args.seed)
            if mode is not None:
                env.render()
        if args.video:
            path = Path(args.evaluate)
            folder = (path.parent if path.suffix == ".pt" else path) / "videos"
            folder = folder / time.strftime("%Y%m%d-%H%M%S")
            env = RecordVideo(env, str(folder), lambda episode: True, disable_logger=True)
    except Exception as e:  # no display, no room
        fail(f"--{'render' if args.render else 'video'}: {e}", 1)
    obs_size = env.observation_space.shape[0]
    net = ActorCritic(obs_size, env.action_space, norm_obs=args.norm_obs)
    net.load_state_dict(checkpoint["net"])  # the observations' moments too
    scores = []
    for episode in range(args.episodes):
        obs, _ = env.reset(seed=args.seed if episode == 0 else None)
        score, length, over = 0.0, 0, False
        while not over:
            pi = net.pi(net.normalise(torch.from_numpy(obs).view(1, -1)))
            action = pi.sample()[0].numpy()
            if isinstance(env.action_space, Box):
                action = action.clip(env.action_space.low, env.action_space.high)
            else:
                action = int(action + env.action_space.start)
            obs, reward, terminated, truncated, _ = env.step(action)
            score, length, over = score + float(reward), length + 1, terminated or truncated
        scores.append(score)
        print(f"episode {episode + 1}: return {score:g}, {length} steps", flush=True)
    env.close()
    print(f"{args.env_id}: {np.mean(scores):.1f} ± {np.std(scores):.1f} (mean ± std) over "
          f"{len(scores)} episodes, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return scores


# ---------------------------------------------------------------------------------------- main


def main(argv=None):
    """Train as Sec. 6 says, or evaluate; `argv` is the command line."""
    args, checkpoint = parse_args(argv)
    if args.evaluate is not None:
        return evaluate(args, checkpoint)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    envs = Environments(args.env_id, args.num_envs, args.gamma)
    net = ActorCritic(envs.obs.shape[1], envs.action_space, args.orthogonal, args.norm_obs)
    optimizer = torch.optim.Adam(net.critic.parameters(), args.learning_rate,
                                 fused=not args.compile)  # fmt: skip
    batch = make_batch(args.num_steps, envs)
    step_of_adam = gradient_step
    if args.compile:  # loss, backward pass and Adam become one program
        torch._logging.set_logs(dynamo=logging.ERROR)  # no warning that it leaves profiling out
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # else it becomes several
            torch._dynamo.config.trace_autograd_ops = True
        step_of_adam = torch.compile(gradient_step, dynamic=False)

    def learned():
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_steps // batch_size
    iteration = 0
    if checkpoint is not None:
        iteration = checkpoint["iteration"]
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    records = Records(args, checkpoint)
    size = sum(p.numel() for p in net.parameters())
    tqdm.write(f"{args.env_id}: observations {envs.obs.shape[1:]}, actions {envs.action_space}; "
               f"{size:,} weights; {num_iterations} iterations of {args.num_envs} actors × "
               f"{args.num_steps} steps, a checkpoint every {args.checkpoint_every}; "
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
                # New episodes, and all that is random seeded anew, also in a run that goes on: so a
                # resumed run is the same run.
                records.save(iteration, step, learned())
                seed = seed_of(args.seed, iteration)
                torch.manual_seed(seed)
                envs.reset(seed)
                fresh = False

            finished = rollout(envs, net, batch)  # line 2
            if args.norm_reward:
                scale_rewards(batch, net.return_moments)
            explained = estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 3
            stats = update(step_of_adam, net, optimizer, batch, args)  # line 4
            if args.norm_obs:  # for the next rollout; this moves π, by a KL that δ does not bound
                net.obs_moments.add(batch.raw_obs.flatten(0, 1))

            iteration += 1
            episodes = [(step + (t + 1) * args.num_envs, r, n) for t, r, n in finished]
            stats["explained_variance"] = explained
            records.log(iteration, iteration * batch_size, episodes, stats, net)
        if interrupts:
            records.draw()
        else:
            records.save(iteration, iteration * batch_size, learned())
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
    print(f"finished: {iteration * batch_size:,} steps, mean of the last 100 episodes "
          f"{records.score:.1f}, {records.seconds / 60:.0f} min, {args.run_dir}")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
