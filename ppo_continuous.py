r"""PPO on state vectors (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Algorithm 1  PPO, Actor-Critic Style                                         here
1  for iteration = 1, 2, ... do                                              train
2      for actor = 1, 2, ..., N do                                           all N at each timestep
3          run policy π_θold in the environment for T timesteps              rollout
4          compute advantage estimates Â_1, ..., Â_T                         estimate_advantages
5      end for
6      optimize surrogate L wrt θ, with K epochs and minibatch size M ≤ NT   update
7      θ_old ← θ                                                             rollout acts with θ
8  end for

The defaults are the paper's Table 3 with an annealed learning rate; small tasks have their own
(TASKS). Anything that is not in the paper says so, mostly with the flag that turns it off, in
brackets. "Baselines" is OpenAI's ppo2; "ppo1" is the authors' first code.

  python ppo_continuous.py                               learn CartPole-v1
  python ppo_continuous.py --env-id HalfCheetah-v5       a million steps, continuous actions
  python ppo_continuous.py --resume RUN_DIR              go on after an interruption
  python ppo_continuous.py --evaluate RUN_DIR --render   watch what it learned; --video records it
  python ppo_continuous.py --env-id HalfCheetah-v5 --no-norm-obs --no-norm-reward --norm-adv none \
      --no-clip-actions --no-orthogonal --anneal none --max-grad-norm 0 --adam-eps 1e-8
                                                  without what is not in the paper and has a flag
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo
from matplotlib.figure import Figure
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings

Count, Seed = Annotated[int, 1, inf], Annotated[int, 0, 2**63 - 1]  # type, lowest, highest
Positive, NonNegative = Annotated[float, 1e-12, inf], Annotated[float, 0, inf]
Fraction = Annotated[float, 0, 1]


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id of a task whose observations are vectors
    seed: Seed = 1  # seed of the network, the actions, the minibatches and the task
    total_steps: Count = 1_000_000  # agent steps, rounded down to whole rollouts (T × N)

    # Table 3 of the paper, in its order
    num_steps: Count = 2048  # T, horizon: steps of each actor in a rollout
    learning_rate: NonNegative = 3e-4  # Adam's step size at the start
    num_epochs: Count = 10  # K, passes over a rollout
    minibatch_size: Annotated[int, 2, inf] = 64  # M, samples in a minibatch
    gamma: Fraction = 0.99  # γ, discount
    gae_lambda: Fraction = 0.95  # λ of GAE (Eq. 11); 1 gives Eq. 10
    num_envs: Count = 1  # N, number of actors (not in the table)

    # L^CLIP (Eq. 7); L^KLPEN (Eq. 8) with an adaptive or a fixed β; none: neither, L^CPI (Eq. 6)
    objective: Literal["clip", "kl-adaptive", "kl-fixed", "none"] = "clip"
    clip_eps: NonNegative = 0.2  # ε, clipping parameter of Eq. 7 at the start
    kl_target: Positive = 0.01  # with kl-adaptive: d_targ of Sec. 4, the KL it aims at
    kl_beta: Positive = 1.0  # with kl-fixed: β of Eq. 8; with kl-adaptive: its first value
    vf_coef: NonNegative = 1.0  # c1 of Eq. 9, weight of the value loss, which has no factor ½
    ent_coef: NonNegative = 0.0  # c2 of Eq. 9, weight of the entropy bonus

    # Not in the paper: from OpenAI's Baselines (target_kl: from Spinning Up)
    norm_obs: bool = True  # normalise observations, clip them at ±10
    norm_reward: bool = True  # divide rewards by the std of returns, clip them at ±10
    clip_actions: bool = True  # clip actions to the task's bounds before the task gets them
    # standardise advantages over each minibatch (ppo2), over the rollout (ppo1), or not at all
    norm_adv: Literal["minibatch", "rollout", "none"] = "minibatch"
    # linearly anneal learning rate and ε, the learning rate only, or neither
    anneal: Literal["both", "learning-rate", "none"] = "learning-rate"
    orthogonal: bool = True  # orthogonal initial weights; the policy's last layer 100 times smaller
    max_grad_norm: NonNegative = 0.5  # clip the gradient's norm at this; 0: do not clip
    adam_eps: Positive = 1e-5  # Adam's ε (PyTorch's default: 1e-8)
    target_kl: NonNegative = 0.0  # end the epochs once the KL exceeds 1.5 × this; 0: never

    # The run
    compile: bool | None = None  # use torch.compile; if not given: from 500_000 steps on
    threads: Count = 1  # torch's threads; more than 1 slows down networks this small
    run_dir: str = ""  # a new directory for the records; if not given: one in runs/
    goal_score: float | None = None  # stop when the last 100 episodes average this score
    resume: str = ""  # directory of a run: go on with it, with its settings
    evaluate: str = ""  # directory of a run (its best.pt), or a .pt file: play it, do not train
    episodes: Count = 10  # with --evaluate: number of episodes
    deterministic: bool = False  # with --evaluate: take the most probable action, do not sample
    render: bool = False  # with --evaluate: show a window
    video: bool = False  # with --evaluate: record to RUN_DIR/videos

    def __post_init__(self):
        self.batch_size = self.num_steps * self.num_envs  # T × N
        check(self)
        self.num_iterations = self.total_steps // self.batch_size


# fmt: off
TASKS = {  # defaults for tasks that Table 3 does not solve, or solves slowly
    "CartPole-v1": {"total_steps": 100_000, "num_envs": 4, "num_steps": 256, "learning_rate": 1e-3,
                    "minibatch_size": 256},
    "Pendulum-v1": {"total_steps": 200_000, "num_envs": 4, "num_steps": 256, "learning_rate": 1e-3,
                    "gamma": 0.95},
    "LunarLander-v3": {"num_envs": 16, "num_steps": 1024, "num_epochs": 4, "gamma": 0.999,
                       "gae_lambda": 0.98, "ent_coef": 0.01},  # RL Zoo's
    "LunarLanderContinuous-v3": {"num_envs": 16, "num_steps": 1024},
}
# fmt: on

# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """Algorithm 1 of the paper. `checkpoint`: what a run to be resumed has saved."""
    torch.manual_seed(args.seed)
    envs = make_envs(args)
    net = ActorCritic(envs.single_observation_space, envs.single_action_space, args)
    # not in the paper: Baselines' ε for Adam (--adam-eps 1e-8); `update` sets the learning rate
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    penalty = Penalty(args.kl_beta)
    batch = make_batch(args.num_steps, envs)
    gradients = compile_gradients(net) if args.compile else compute_gradients

    with Run(args, checkpoint, net=net, optimizer=optimizer, penalty=penalty) as run:
        torch.manual_seed(run.seed)
        batch.raw_obs[-1] = torch.from_numpy(envs.reset(seed=run.seed)[0])
        for iteration in range(run.iteration, args.num_iterations):  # line 1
            learning_rate, clip_eps = anneal(args, iteration)
            episodes = rollout(envs, net, batch)  # lines 2, 3
            if args.norm_reward:  # not in the paper (--no-norm-reward)
                scale_rewards(batch, net.return_moments, args.gamma)
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 4
            stats = update(gradients, net, optimizer, batch, learning_rate, clip_eps,  # line 6
                           penalty.beta, args)  # fmt: skip
            if args.objective == "kl-adaptive":  # Sec. 4
                penalty.adapt(stats["kl"], args.kl_target)
            if args.norm_obs:  # not in the paper (--no-norm-obs); after the update: it changes π
                net.obs_moments.add(batch.raw_obs[:-1].flatten(0, 1))
            if run.log(episodes, stats) or run.stop:  # --goal-score is reached, or Ctrl-C
                break


# ------------------------------------------------------------------------------------- Network


class ActorCritic(nn.Module):
    """Policy π(a|s) (PPO's Sec. 6.1) and value V(s), two networks of two layers of 64 tanh units.

    obs_moments holds the running mean and variance of the observations, return_moments those of
    the discounted returns. obs: (..., observation size), normalised; raw_obs: not normalised.
    """

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        self.discrete = isinstance(action_space, Discrete)
        self.num_outputs = int(action_space.n) if self.discrete else action_space.shape[0]
        self.actor = mlp(obs_space.shape[0], self.num_outputs)
        self.critic = mlp(obs_space.shape[0], 1)
        self.log_std = None if self.discrete else nn.Parameter(torch.zeros(self.num_outputs))
        self.obs_moments, self.return_moments = RunningMoments(*obs_space.shape), RunningMoments()
        self.norm_obs = args.norm_obs
        if args.orthogonal:  # not in the paper: Baselines' initialisation (--no-orthogonal)
            for net, head_gain in ((self.actor, 0.01), (self.critic, 1.0)):
                layer_init(net[0], gain=2**0.5)
                layer_init(net[2], gain=2**0.5)
                layer_init(net[4], head_gain)

    def normalise(self, raw_obs):
        """Raw observations as the networks take them, float32."""
        if self.norm_obs:  # not in the paper: as in ppo2, over past rollouts (--no-norm-obs)
            raw_obs = ((raw_obs - self.obs_moments.mean) / self.obs_moments.std).clamp(-10, 10)
        return raw_obs.float()

    def pi_params(self, obs):
        """The parameters of π(·|s): logits (..., number of actions), or means and log stds
        (..., 2 × action size)."""
        out = self.actor(obs)
        return out if self.discrete else torch.cat((out, self.log_std.expand_as(out)), -1)

    def distribution(self, pi_params):
        """π(·|s): a softmax, or independent normals whose std is the same for every s (TRPO's
        App. D)."""
        if self.discrete:
            return Categorical(logits=pi_params, validate_args=False)
        mean, log_std = pi_params.chunk(2, -1)
        return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)

    def pi(self, obs):
        """π(·|s)"""
        return self.distribution(self.pi_params(obs))

    def value(self, obs):
        """V(s), (..., observation size) -> (...)"""
        return self.critic(obs).squeeze(-1)


def mlp(num_inputs, num_outputs):
    """Two layers of 64 tanh units and a linear head."""
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
                         nn.Linear(64, num_outputs))  # fmt: skip


def layer_init(layer, gain):
    """Give a layer orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)


class RunningMoments(nn.Module):
    """Mean and variance of all the samples so far; in buffers, so that checkpoints hold them."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @property
    def std(self):
        return (self.var + 1e-8).sqrt()

    def add(self, samples):
        """Take in samples (B, *shape), merging the moments of two sets (Chan et al. 1979)."""
        count = len(samples)
        total = self.count + count
        shift = samples.mean(0) - self.mean
        deviations = self.var * self.count + samples.var(0, correction=0) * count
        self.var.copy_((deviations + shift.square() * self.count * count / total) / total)
        self.mean += shift * count / total
        self.count.copy_(total)


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, envs):
    """Storage for one rollout, reused in every iteration: tensors (T, N), unless noted."""
    obs_shape, action_space = envs.single_observation_space.shape, envs.single_action_space
    dtype = torch.int64 if isinstance(action_space, Discrete) else torch.float32
    num_envs, shape = envs.num_envs, (num_steps, envs.num_envs)
    return SimpleNamespace(
        # (T + 1, N, observation size), s_0, ..., s_T; the next rollout goes on from the last row
        raw_obs=torch.zeros(num_steps + 1, num_envs, *obs_shape).double(),
        # (T, N, observation size), what step t led to, before any reset
        next_obs=torch.zeros(*shape, *obs_shape).double(),
        actions=torch.zeros(*shape, *action_space.shape, dtype=dtype),  # (T, N[, action size])
        rewards=torch.zeros(shape),
        terminated=torch.zeros(shape),  # 1 where the episode ended
        truncated=torch.zeros(shape),  # 1 where a time limit cut it off
        # (N,) array, of the unfinished episodes, for `scale_rewards`
        discounted_return=np.zeros(num_envs),
        # set after the last step:
        obs=None,  # (T, N, observation size), normalised
        pi_old=None,  # (T, N, ...), the parameters of π_θold(·|s_t)
        log_probs=None,  # log π_θold(a_t|s_t)
        values=None,  # V(s_t)
        next_values=None,  # V of next_obs
        advantages=None,  # Â_t
        targets=None,  # V^targ_t
    )


@torch.no_grad()
def rollout(envs, net, batch):
    """Run π_θold for T timesteps in N environments, filling `batch`.

    Returns (t, return, length) of each episode that ended at step t = 0, ..., T - 1.
    """
    num_steps, episodes = len(batch.rewards), []
    names = ("raw_obs", "next_obs", "actions", "rewards", "terminated", "truncated")
    b = SimpleNamespace(**{name: getattr(batch, name).numpy() for name in names})  # same memory
    policy = make_policy(net, num_steps, envs.num_envs)
    b.raw_obs[0] = b.raw_obs[-1]  # go on where the last rollout ended
    for t in range(num_steps):
        b.actions[t] = policy(t, b.raw_obs[t])
        obs, b.rewards[t], b.terminated[t], b.truncated[t], info = envs.step(b.actions[t])
        b.raw_obs[t + 1] = b.next_obs[t] = obs
        for n in np.flatnonzero(b.terminated[t] + b.truncated[t]):  # obs[n] begins a new episode
            b.next_obs[t, n] = info["final_obs"][n]
            episode = info["final_info"]["episode"]
            episodes.append((t, float(episode["r"][n]), int(episode["l"][n])))
    check_finite(observation=b.raw_obs, next_observation=b.next_obs, reward=b.rewards)

    batch.obs = net.normalise(batch.raw_obs[:-1])
    batch.pi_old = net.pi_params(batch.obs)
    batch.log_probs = net.distribution(batch.pi_old).log_prob(batch.actions)
    batch.values = net.value(batch.obs)
    # not in the paper: at a time limit, bootstrap from V (Pardo et al. 2018)
    batch.next_values = net.value(net.normalise(batch.next_obs))
    return episodes


def make_policy(net, num_steps, num_envs):
    """π_θ as a function policy(t, raw_obs) -> actions, on arrays (N, ...); t = 0, ..., T - 1.

    In numpy, and with all noise drawn beforehand: torch takes three times as long for one
    observation.
    """
    linear = [layer for layer in net.actor if isinstance(layer, nn.Linear)]
    *hidden, (head_weight, head_bias) = [(m.weight.T.numpy(), m.bias.numpy()) for m in linear]
    mean, std = net.obs_moments.mean.numpy(), net.obs_moments.std.numpy()
    noise = torch.empty(num_steps, num_envs, net.num_outputs)
    if net.discrete:
        noise = noise.exponential_().log().neg().numpy()  # Gumbel's: argmax(logits + noise) ~ π
    else:
        noise = (noise.normal_() * net.log_std.exp()).numpy()

    def policy(t, raw_obs):
        x = ((raw_obs - mean) / std).clip(-10, 10) if net.norm_obs else raw_obs
        x = x.astype(np.float32)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        out = x @ head_weight + head_bias + noise[t]
        return out.argmax(-1) if net.discrete else out

    return policy


# ---------------------------------------------------------------------------------- Advantages


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Advantage estimates of a rollout (PPO's Eq. 11, 12). Arguments and result are (T, N).

    next_values[t] is V of the state to which step t led, before any reset. Where the episode ended
    (terminated), no rewards follow, and this V is not used. Where a time limit cut it off
    (truncated), this V stands for the rewards that would have followed. The sum of Eq. 11 stops at
    both. Its last exponent is T−t−1; the paper prints T−t+1.
    """
    # the factors (1 - ...): not in the PPO paper, where no episode ends before step T
    deltas = rewards + gamma * (1 - terminated) * next_values - values  # PPO's Eq. 12
    decay = gamma * gae_lambda * (1 - terminated) * (1 - truncated)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + decay[t] * advantage  # PPO's Eq. 11: Â_t = δ_t + γλ Â_{t+1}
        advantages[t] = advantage
    return advantages


def estimate_advantages(batch, gamma, gae_lambda):
    """Fill in a rollout's advantages Â_t and value targets V^targ_t."""
    batch.advantages = gae(batch.rewards, batch.values, batch.next_values, batch.terminated,
                           batch.truncated, gamma, gae_lambda)  # fmt: skip
    batch.targets = batch.advantages + batch.values  # V^targ; the PPO paper leaves it open


def standardise(advantages):
    """Shift and scale to mean 0 and std 1. Not in the paper: Baselines' (--norm-adv none)"""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def scale_rewards(batch, moments, gamma):
    """Divide a rollout's rewards by the std of all discounted returns so far; clip them at ±10.

    A discounted return is r_t + γ r_{t-1} + γ² r_{t-2} + ... within an episode. Not in the paper:
    ppo2's scaling (--no-norm-reward), here once a rollout, not at every step.
    """
    rewards, returns = batch.rewards.numpy(), np.zeros(batch.rewards.shape)
    not_done = ((1 - batch.terminated) * (1 - batch.truncated)).numpy()
    for t in range(len(rewards)):
        returns[t] = rewards[t] + gamma * batch.discounted_return
        batch.discounted_return = returns[t] * not_done[t]
    moments.add(torch.from_numpy(returns).flatten())
    batch.rewards.div_(moments.std).clamp_(-10, 10)


# -------------------------------------------------------------------------------------- Update


def ppo_loss(net, obs, actions, pi_old, log_probs, advantages, targets, clip_eps, beta, args):
    """The loss on a minibatch, Eq. 9 with a minus sign, and the minibatch's statistics.

    --objective chooses the policy's term of Eq. 9.

    The tensors have M rows; pi_old and log_probs, log π(a|s), are those of π_θold.
    """
    if args.norm_adv == "minibatch":  # not in the paper (--norm-adv none)
        advantages = standardise(advantages)

    pi, values = net.pi(obs), net.value(obs)
    log_ratio = pi.log_prob(actions) - log_probs
    ratio = log_ratio.exp()  # r_t(θ) = π_θ(a|s) / π_θold(a|s)
    l_policy = ratio * advantages  # L^CPI, Eq. 6
    if args.objective == "clip":
        clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
        l_policy = torch.min(l_policy, clipped * advantages)  # L^CLIP, Eq. 7
    elif args.objective in ("kl-fixed", "kl-adaptive"):
        kl = kl_divergence(net.distribution(pi_old), pi)
        l_policy = l_policy - beta * kl  # L^KLPEN, Eq. 8
    l_policy = l_policy.mean()
    l_vf = (values - targets).square().mean()  # without ½, as in the paper
    entropy = pi.entropy().mean()  # S[π_θ]
    # The critic has its own network (Sec. 6.1). Adam divides each gradient by its usual size, so
    # here c1 matters little: only through Adam's ε and --max-grad-norm
    l_total = l_policy - args.vf_coef * l_vf + args.ent_coef * entropy  # Eq. 9

    # KL(π_θold ‖ π_θ), estimated as k3 of joschu.net/blog/kl-approx
    approx_kl = (ratio - 1 - log_ratio).mean()
    clip_fraction = ((ratio - 1).abs() > clip_eps).float().mean()
    stats = {"policy_loss": -l_policy, "value_loss": l_vf, "entropy": entropy,
             "approx_kl": approx_kl, "clip_fraction": clip_fraction}  # fmt: skip
    return -l_total, {name: x.detach() for name, x in stats.items()}


class Penalty(nn.Module):
    """β of Eq. 8, in a buffer, so that checkpoints hold it."""

    def __init__(self, beta):
        super().__init__()
        self.register_buffer("beta", torch.tensor(float(beta)))

    def adapt(self, kl, kl_target):
        """Sec. 4, after an update that moved π by this KL: the β to use in the next."""
        if kl < kl_target / 1.5:
            self.beta /= 2
        elif kl > kl_target * 1.5:
            self.beta *= 2
        self.beta.clamp_(1e-12, 1e12)  # not in the paper: float32 must not reach 0 or infinity


def anneal(args, iteration):
    """Adam's step size and clipping ε in iteration 0, 1, ...; α falls from 1 to 0.

    Not in the paper for these tasks: α is Table 5's, for Atari (--anneal none)
    """
    alpha = 1 - iteration / args.num_iterations
    learning_rate = args.learning_rate * (1 if args.anneal == "none" else alpha)
    return learning_rate, args.clip_eps * (alpha if args.anneal == "both" else 1)


def compute_gradients(net, samples, indices, clip_eps, beta, args):
    """Backpropagate `ppo_loss` on some samples. Returns its statistics."""
    minibatch = {name: x[indices] for name, x in samples.items()}
    loss, stats = ppo_loss(net, **minibatch, clip_eps=clip_eps, beta=beta, args=args)
    loss.backward()
    # not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)
    grad_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or inf)
    return stats | {"grad_norm": grad_norm}


def compile_gradients(net):
    """`compute_gradients` as one compiled program."""
    torch._dynamo.config.trace_autograd_ops = True  # loss.backward() too
    print("compiling, which takes about a minute (--no-compile begins at once)", flush=True)
    pi = net.pi(torch.zeros(1, len(net.obs_moments.mean)))
    kl_divergence(pi, pi)  # caches the formula for its type; looking it up cannot be compiled
    return torch.compile(compute_gradients, fullgraph=True, dynamic=False)


def update(gradients, net, optimizer, batch, learning_rate, clip_eps, beta, args):
    """K epochs of minibatches on one rollout (Algorithm 1, line 6).

    gradients: `compute_gradients`, compiled or not. Returns scalars to log, among them the
    statistics of `ppo_loss`, averaged over the minibatches. Raises FloatingPointError if a
    statistic is not finite.
    """
    names = ("obs", "actions", "pi_old", "log_probs", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1) for name in names}  # (T·N, ...)
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        samples["advantages"] = standardise(samples["advantages"])
    optimizer.param_groups[0]["lr"] = learning_rate
    clip_eps = torch.tensor(clip_eps)  # a tensor: a new float would recompile
    all_stats = []
    for _ in range(args.num_epochs):
        for indices in torch.randperm(args.batch_size).split(args.minibatch_size):
            optimizer.zero_grad()
            stats = gradients(net, samples, indices, clip_eps, beta, args)
            optimizer.step()
            all_stats.append(torch.stack(list(stats.values())))
        # not in the paper: Spinning Up's early stop, here after a whole epoch; off by default
        if args.target_kl and mean_kl(net, batch) > 1.5 * args.target_kl:
            break
    stats = dict(zip(stats, torch.stack(all_stats).mean(0).tolist(), strict=True))
    stats["kl"] = mean_kl(net, batch)
    check_finite(**stats)
    # Â = V^targ − V is what V leaves unexplained
    unexplained = (batch.advantages.var() / batch.targets.var()).item()
    return stats | {"explained_variance": 1 - unexplained, "learning_rate": learning_rate,
                    "beta": beta.item()}  # fmt: skip


@torch.no_grad()
def mean_kl(net, batch):
    """KL(π_θold ‖ π_θ), exact, averaged over a rollout's states: d of Sec. 4."""
    return kl_divergence(net.distribution(batch.pi_old), net.pi(batch.obs)).mean().item()


# ============ The paper's part ends here. What follows runs the environments and keeps records.

# --------------------------------------------------------------------------------- Environment


def make_envs(args):
    """N environments. One whose episode ends begins the next within the same step: its last
    observation is in info["final_obs"], its return and length in info["final_info"]."""
    makers = [lambda: make_env(args)] * args.num_envs
    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def make_env(args, **rendering):
    """One environment that takes the policy's actions and records its episodes."""
    flag = f"--env-id {args.env_id}"
    try:
        env = gym.make(args.env_id, **rendering)
    except (gym.error.Error, ImportError) as e:
        sys.exit(f"{flag}: {e} (Atari games: ppo_atari.py)")
    obs, actions = env.observation_space, env.action_space
    if not (isinstance(obs, Box) and len(obs.shape) == 1):
        sys.exit(f"{flag}: observes {obs}; need a Box of one dimension (Atari: ppo_atari.py)")
    floats = isinstance(actions, Box) and np.issubdtype(actions.dtype, np.floating)
    if not (isinstance(actions, Discrete) or floats and len(actions.shape) == 1):
        sys.exit(f"{flag}: acts by {actions}; need Discrete, or a Box of floats of one dimension")
    return RecordEpisodeStatistics(PolicyActions(env, args.clip_actions))


class PolicyActions(gym.Wrapper):
    """Takes actions as the policy gives them: any float32 for a Box, from 0 on for Discrete."""

    def __init__(self, env, clip_actions):
        super().__init__(env)
        self.space, self.clip_actions = env.action_space, clip_actions

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        return self.checked(obs), {}

    def step(self, action):
        if isinstance(self.space, Discrete):
            action = self.space.start + action
        else:
            if self.clip_actions:  # not in the paper: from Baselines (--no-clip-actions)
                action = action.clip(self.space.low, self.space.high)
            action = action.astype(self.space.dtype)
        obs, reward, terminated, truncated, _ = self.env.step(action)
        if np.ndim(reward):
            raise ValueError(f"a reward must be one number; it is {reward}")
        return self.checked(obs), reward, terminated, truncated, {}  # other infos cost time

    def checked(self, obs):
        obs = np.array(obs)  # a copy: some tasks change theirs in place
        if obs.shape != self.observation_space.shape:
            raise ValueError(f"an observation must be a {self.observation_space}; it is {obs}")
        return obs


def check_finite(**values):
    """Raise FloatingPointError if one of these numbers or arrays is not finite."""
    for name, value in values.items():
        value = np.asarray(value)
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} is {value[~np.isfinite(value)][0]}")


# ------------------------------------------------------------------------------------- Records

PUBLISHED_BY = "OpenAI's Baselines (1M steps, older task)"
PUBLISHED_SCORES = {  # Baselines' PPO, the mean of 6 seeds; the paper has only curves, Fig. 3
    "HalfCheetah-v5": 1668.6, "Hopper-v5": 2316.2, "InvertedDoublePendulum-v5": 7102.9,
    "InvertedPendulum-v5": 809.4, "Reacher-v5": -6.71, "Swimmer-v5": 111.2, "Walker2d-v5": 3425.0,
}  # fmt: skip


class Run(AbstractContextManager):
    """A run and its directory: config.json, episodes.csv, TensorBoard's events, checkpoint.pt,
    best.pt, learning_curve.png. To be used in a `with` statement, which saves it at the end.

    learned:   {name: what training changes}, each with a state_dict(), among them "net"
    iteration: where to begin, 0 in a new run; seed: for all that is random from there on
    episodes:  (step, return, length, seconds) of each finished episode; step: where it ended
    stop:      number of the signal that asked to stop, SIGINT (Ctrl-C) or SIGTERM; else 0
    """

    def __init__(self, args, checkpoint, **learned):
        self.args, self.learned, self.stop = args, learned, 0
        start = checkpoint or {"step": 0, "episodes": [], "best": -inf, "seconds": 0.0}
        self.step, self.episodes, self.best = start["step"], start["episodes"], start["best"]
        if checkpoint:
            for name, part in learned.items():
                part.load_state_dict(checkpoint[name])
        self.iteration = self.step // args.batch_size
        self.seed = derive_seed(args.seed, self.iteration)  # a resumed run plays other episodes
        self.last_log = self.last_save = time.time()
        self.started = self.last_log - start["seconds"]

        name = time.strftime(f"{Path(SCRIPT).stem}-{args.env_id}-seed{args.seed}-%Y%m%d-%H%M%S")
        args.run_dir = args.run_dir or "runs/" + name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.run_dir)
        if self.dir.exists() and not checkpoint:
            sys.exit(f"--run-dir {self.dir}: exists; name a new one, or --resume this one")
        self.dir.mkdir(parents=True, exist_ok=True)
        device = next(learned["net"].parameters()).device
        libraries = ("torch", "gymnasium", "ale_py", "mujoco", "Box2D", "numpy")
        config = {
            "script": SCRIPT,
            "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {n: sys.modules[n].__version__ for n in libraries if n in sys.modules},
            "settings": asdict(args),
        }
        (self.dir / "config.json").write_text(json.dumps(config, indent=2))
        self.write_rows([("step", "return", "length", "seconds"), *self.episodes], mode="w")
        self.tensorboard = SummaryWriter(self.dir, purge_step=self.step + 1)
        print(f"{args.env_id}: {args.num_iterations} iterations of {args.num_envs} actors × "
              f"{args.num_steps} steps on {device}; records in {self.dir}", flush=True)  # fmt: skip
        style = {"ncols": 80}
        if not sys.stderr.isatty():  # in a file: a line every 30 seconds
            style = {"mininterval": 30, "bar_format": "{desc}: {percentage:.0f}% {r_bar}\n"}
        self.bar = tqdm(total=args.num_iterations * args.batch_size, initial=self.step,
                        unit="step", unit_scale=True, **style)  # fmt: skip
        signals = signal.SIGINT, signal.SIGTERM
        self.handlers = {number: signal.signal(number, self.on_signal) for number in signals}

    def on_signal(self, number, frame):
        """Ask the run to stop after this iteration; a second Ctrl-C ends it at once."""
        self.stop = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nstopping after this iteration; Ctrl-C again stops at once, unsaved\n")

    @property
    def score(self):
        """Mean return of the last 100 episodes (of all, if fewer), the PPO paper's measure."""
        return float(np.mean([row[1] for row in self.episodes[-100:]] or nan))

    def log(self, episodes, stats):
        """Record an iteration: (t, return, length) of the episodes that ended in it, and scalars.

        Saves the run once a minute. Returns whether --goal-score is reached.
        """
        args, now = self.args, time.time()
        rows = [(self.step + (t + 1) * args.num_envs, *episode, round(now - self.started, 1))
                for t, *episode in episodes]  # fmt: skip
        self.step += args.batch_size
        self.episodes += rows
        self.write_rows(rows)
        enough = len(self.episodes) >= 100
        if enough and self.score > self.best:
            self.best = self.score
            self.write("best.pt", net=self.learned["net"].state_dict())
        stats |= {"score": self.score, "steps_per_second": args.batch_size / (now - self.last_log)}
        for name, value in stats.items():
            self.tensorboard.add_scalar(name, value, self.step)
        text = f"score {self.score:.5g}, episode {len(self.episodes)}"
        self.bar.set_description_str(text, refresh=False)
        self.bar.update(args.batch_size)
        self.last_log = now
        if now - self.last_save > 60:
            self.save()
        return enough and args.goal_score is not None and self.score >= args.goal_score

    def write_rows(self, rows, mode="a"):
        with open(self.dir / "episodes.csv", mode) as file:
            file.writelines(",".join(map(str, row)) + "\n" for row in rows)

    def save(self):
        """Write checkpoint.pt and learning_curve.png."""
        state = {name: part.state_dict() for name, part in self.learned.items()}
        seconds = time.time() - self.started
        self.write("checkpoint.pt", **state, episodes=self.episodes, seconds=seconds)
        self.draw()
        self.last_save = time.time()

    def write(self, name, **state):
        """Save plain data. A kill at any moment leaves the old file whole."""
        state |= {"script": SCRIPT, "settings": asdict(self.args)}
        state |= {"step": self.step, "best": self.best}
        torch.save(state, self.dir / f"{name}.tmp")
        os.replace(self.dir / f"{name}.tmp", self.dir / name)

    def draw(self):
        """learning_curve.png: each episode's return, their mean over 100, the published score."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        steps, returns = [row[0] for row in self.episodes], [row[1] for row in self.episodes]
        axes.plot(steps, returns, ".", ms=2, alpha=0.25, label="one episode")
        if len(returns) >= 100:
            means = np.convolve(returns, np.full(100, 1 / 100), mode="valid")
            axes.plot(steps[99:], means, color="tab:blue", label="mean of the last 100")
        if published := PUBLISHED_SCORES.get(self.args.env_id):
            axes.axhline(published, ls="--", color="tab:gray", label=f"{PUBLISHED_BY}: {published}")
        axes.set(xlabel="agent steps", ylabel="return of an episode", xlim=(0, None))
        axes.set_title(f"{SCRIPT} on {self.args.env_id}, seed {self.args.seed}")
        figure.legend(loc="outside lower center", ncols=3, markerscale=5)
        figure.savefig(self.dir / "learning_curve.png", dpi=120)

    def __exit__(self, failed, *_):
        """Save the run unless it failed, and print the commands to watch it and to go on."""
        if not failed:
            self.save()
        self.bar.close()
        self.tensorboard.close()
        python = sys.executable.removeprefix(f"{os.getcwd()}/")  # such as .venv/bin/python
        command = shlex.join([python, os.path.relpath(__file__)])
        run_dir = shlex.quote(str(self.dir))
        if not failed:
            count = min(len(self.episodes), 100)
            score = f"score {self.score:.5g}, the mean return of the last {count} episodes"
            print(f"step {self.step:,}: {score if count else 'no episode has ended yet'}")
            print(f"watch:  {command} --evaluate {run_dir} --render")
        if self.step < self.bar.total and (self.dir / "checkpoint.pt").exists():
            print(f"go on:  {command} --resume {run_dir}", flush=True)
        for number, handler in self.handlers.items():  # from now on, signals end the process again
            signal.signal(number, handler)
        if self.stop and not failed:
            sys.exit(128 + self.stop)


def derive_seed(*numbers):
    """A seed of 31 bits, an int, from others."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def load_checkpoint(path, best):
    """The checkpoint in a run's directory, or a .pt file. Loading plain data runs no code."""
    if path.suffix != ".pt":
        path /= "best.pt" if best and (path / "best.pt").exists() else "checkpoint.pt"
    if not path.exists():
        sys.exit(f"{path}: does not exist (a run first saves itself after a minute)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = checkpoint["script"]
    except Exception as e:  # torch raises many kinds for a damaged or foreign file
        sys.exit(f"{path}: cannot be read as a checkpoint of {SCRIPT} ({type(e).__name__})")
    if script != SCRIPT:
        sys.exit(f"{path}: is a checkpoint of {script}, not of {SCRIPT}")
    checkpoint["settings"] |= {"resume": "", "evaluate": "", "run_dir": str(path.parent)}
    return checkpoint


# ---------------------------------------------------------------------------------- Evaluation


@torch.no_grad()
def evaluate(args, checkpoint):
    """Play whole episodes with a saved policy. Returns the return of each."""
    torch.manual_seed(args.seed)
    if args.render:
        need_display()
    elif sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo then draws without a display
    mode = {"render_mode": "human" if args.render else "rgb_array"}
    env = make_env(args, **(mode if args.render or args.video else {}))
    if args.video:
        folder = f"{args.run_dir}/videos/{time.strftime('%Y%m%d-%H%M%S')}"
        env = RecordVideo(env, folder, lambda episode: True, disable_logger=True)
        print(f"recording to {folder}")
    net = ActorCritic(env.observation_space, env.action_space, args)
    net.load_state_dict(checkpoint["net"])  # the moments of the observations too
    returns = []
    for episode in range(args.episodes):
        obs, info = env.reset(seed=args.seed if episode == 0 else None)
        while "episode" not in info:  # until the last step
            pi = net.pi(net.normalise(torch.from_numpy(obs)))
            action = pi.mode if args.deterministic else pi.sample()
            obs, _, _, _, info = env.step(action.numpy())
        score, length = float(info["episode"]["r"]), info["episode"]["l"]
        returns.append(score)
        print(f"episode {episode + 1}: return {score:.5g}, {length} steps", flush=True)
    env.close()
    print(f"{args.env_id}: {np.mean(returns):.5g} ± {np.std(returns):.2g} (mean ± std) over "
          f"{len(returns)} episodes, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return returns


def need_display():
    """Exit if no window can be opened here."""
    import pygame  # which draws most tasks' windows

    pygame.display.init()
    if pygame.display.get_driver() == "offscreen" and "SDL_VIDEODRIVER" not in os.environ:
        sys.exit("--render: there is no display; --video records to a file")


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name
MAY_CHANGE = {  # settings that may differ from the checkpoint's
    "resume": {"total_steps", "goal_score", "compile", "threads"},
    "evaluate": {"seed", "episodes", "deterministic", "render", "video"},
}


def first_flags(env_id: str = Args.env_id, resume: str = "", evaluate: str = ""):
    """The flags on which the defaults of the others depend."""
    return env_id, resume, evaluate


def parse_args(argv=None):
    """The settings, and the checkpoint that --resume or --evaluate names, or None."""
    style = {"args": argv, "description": __doc__, "config": (tyro.conf.DisallowNone,)}
    first, _ = tyro.cli(first_flags, **style, return_unknown_args=True, add_help=False)
    env_id, resume, evaluate = first
    if resume and evaluate:
        sys.exit("--resume, --evaluate: use one of them, not both")
    if not (resume or evaluate):
        return tyro.cli(Args, **style, default=Args(**TASKS.get(env_id, {}))), None
    job = "resume" if resume else "evaluate"
    checkpoint = load_checkpoint(Path(resume or evaluate), best=job == "evaluate")
    if resume and "episodes" not in checkpoint:
        sys.exit(f"--resume {resume}: holds only a policy; name the directory of the run")
    names = {field.name for field in fields(Args)}  # an older version may have had others
    saved = Args(**{name: value for name, value in checkpoint["settings"].items()
                    if name in names and value is not None})  # fmt: skip
    args = tyro.cli(Args, **style, default=saved)
    for name in sorted(names - MAY_CHANGE[job] - {job}):
        if getattr(args, name) != getattr(saved, name):
            sys.exit(f"--{name.replace('_', '-')}: leave it out; --{job} takes it from the run")
    return args, checkpoint


def check(args):
    """Raise ValueError if a setting is out of its range, or if settings do not go together."""
    for field in fields(args):
        low, high = getattr(field.type, "__metadata__", (-inf, inf))
        value, flag = getattr(args, field.name), field.name.replace("_", "-")
        if isinstance(value, int | float) and not (low <= value <= high and isfinite(value)):
            limits = f"of at least {low}" if high == inf else f"from {low} to {high}"
            raise ValueError(f"--{flag} {value}: need a number {limits}")
    if args.batch_size % args.minibatch_size:
        raise ValueError(f"--minibatch-size: need a divisor of T × N = {args.batch_size}")
    if args.total_steps < args.batch_size:
        raise ValueError(f"--total-steps: need at least T × N = {args.batch_size}")
    if (args.render or args.video or args.deterministic) and not args.evaluate:
        raise ValueError("--render, --video, --deterministic: add --evaluate RUN_DIR")
    if args.render and args.video:
        raise ValueError("--render, --video: need one of them, not both")


def choose_compile(args):
    """Whether to compile: by default only in long runs, as it takes about a minute."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    possible = headers.exists() and shutil.which(os.environ.get("CXX", "g++"))
    if args.compile and not possible:
        sys.exit("--compile: needs a C++ compiler (g++ or $CXX) and Python.h; or use --no-compile")
    if args.compile is None:
        return bool(possible) and args.total_steps >= 500_000
    return args.compile


def main(argv=None):
    """Train or evaluate; `argv` is the command line."""
    args, checkpoint = parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        if args.evaluate:
            return evaluate(args, checkpoint)
        args.compile = choose_compile(args)
        train(args, checkpoint)
    except FloatingPointError as e:
        sys.exit(f"{SCRIPT}: stopped, {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot print γ shows ?
    main()
