"""TRPO on state vectors (Schulman et al. 2015, https://arxiv.org/abs/1502.05477).

The practical algorithm of Sec. 6, "single path", in our words               here
1  for iteration = 1, 2, ... do                                              train
2      run policy π_θold, collecting states, actions and rewards             rollout
3      estimate the Q-values of the state-action pairs                       estimate_advantages
4      maximise the surrogate L, keeping the mean KL at most δ:              update
           g: the surrogate's gradient                                       trust_region_step
           y → A y, A being the Hessian of the mean KL                       fisher_vector_product
           s ≈ A⁻¹ g, without ever forming A                                 conjugate_gradient
           θ ← θ_old + β s, β shrinking until L improves and KL ≤ δ          line_search
5      θ_old ← θ                                                             rollout acts with θ
6  end for

The paper estimates the Q-values without a critic. Here, as is usual today, advantages take their
place, estimated by GAE (arXiv 1506.02438) with a critic that is fitted after the policy's step.
Exact advantages in place of exact Q-values change the surrogate only by a constant (Sec. 5). The
networks are those of the PPO paper (arXiv 1707.06347). Anything else that is not in the paper says
so, mostly with the flag that turns it off, in brackets. "Vine", the paper's other way to collect
samples, is left out. "Baselines" is OpenAI's trpo_mpi, "ppo2" its PPO.

  python trpo_continuous.py                              learn CartPole-v1
  python trpo_continuous.py --env-id HalfCheetah-v5      a million steps, continuous actions
  python trpo_continuous.py --env-id my_module:My-v0     a task that my_module.py registers
  python trpo_continuous.py --resume RUN_DIR             go on; any flag changes a setting
  python trpo_continuous.py --evaluate RUN_DIR --render  watch what it learned; --video: record it
"""

import hashlib
import json
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from math import ceil, inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium import wrappers
from gymnasium.spaces import Box, Discrete
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium's id of a task whose observations are vectors
    seed: int = 1  # seed of the network, the actions, the minibatches and the task
    total_steps: float = 1_000_000  # agent steps, rounded down to whole rollouts (T × N)

    # The trust region: Sec. 6, App. C and E
    max_kl: float = 0.01  # δ, the bound of the mean KL in Eq. 14
    cg_iters: int = 10  # k, iterations of conjugate gradient
    fvp_fraction: float = 1.0  # share of the rollout's states used to compute A (App. C.1: 0.1)
    cg_damping: float = 0.1  # not in the paper: added to A's diagonal (Baselines)
    line_search_steps: int = 10  # not in the paper: tries of the line search (Baselines)
    backtrack_coef: float = 0.8  # factor on β after a failed try (Spinning Up's value)
    # not in the paper: least improvement, as a share of gᵀ(step) (Schulman's own code: 0.1)
    accept_ratio: float = 0.0

    # The batch; N, T, K and M are the PPO paper's letters
    num_envs: int = 1  # N, number of actors
    num_steps: int = 1024  # T, steps of each actor in a rollout (Baselines' value)
    gamma: float = 0.99  # γ, discount (the paper's value)

    # Not in the paper: from OpenAI's Baselines
    gae_lambda: float = 0.98  # λ of GAE; 1: returns minus V
    num_epochs: int = 5  # K, the critic's passes over a rollout
    minibatch_size: int = 64  # M, samples in one of the critic's minibatches
    learning_rate: float = 1e-3  # Adam's step size for the critic
    norm_obs: bool = True  # normalise observations, clip them at ±10 (ppo2)
    norm_reward: bool = True  # divide rewards by the std of returns, clip them at ±10 (ppo2)
    clip_actions: bool = True  # clip actions to the task's bounds before the task gets them
    norm_adv: Literal["rollout", "none"] = "rollout"  # standardise the advantages of a rollout
    orthogonal: bool = True  # orthogonal initial weights; the policy's last layer 100 times smaller

    # The run
    threads: int = 1  # torch's threads; more than 1 slows down networks this small
    run_dir: str = ""  # a new or empty directory for the records; if not given: one in runs/
    goal_score: float | None = None  # stop once the last 100 episodes average this or more
    eval_every: float = 0  # every so many steps log the score of --episodes, deterministic
    resume: str = ""  # directory of a run: go on with it, with its settings
    evaluate: str = ""  # directory of a run (its best.pt), or a .pt file: play it, do not train
    episodes: int = 10  # with --evaluate, --eval-every: number of episodes
    deterministic: bool = False  # with --evaluate: take the most probable action, do not sample
    render: bool = False  # with --evaluate: show a window
    video: bool = False  # with --evaluate: record to RUN_DIR/videos

    def __post_init__(self):
        self.batch_size = self.num_steps * self.num_envs  # T × N
        check(self)
        self.total_steps, self.eval_every = int(self.total_steps), int(self.eval_every)
        self.num_iterations = self.total_steps // self.batch_size


def check(args):
    """Raise ValueError if a setting is out of its range, or if settings do not go together."""
    for field in fields(args):
        low = {"seed": 0, "minibatch_size": 2}.get(field.name, 1) if field.type is int else 0
        high = 1 if field.name in ("gamma", "gae_lambda", "fvp_fraction", "backtrack_coef") else inf
        flag, value = "--" + field.name.replace("_", "-"), getattr(args, field.name)
        if field.type in (int, float) and not (low <= value <= high and isfinite(value)):
            raise ValueError(f"{flag} {value}: need a number from {low} to {high}")
    if args.batch_size % args.minibatch_size:
        raise ValueError(f"--minibatch-size: need a divisor of T × N = {args.batch_size}")
    if not args.fvp_fraction:
        raise ValueError("--fvp-fraction: need a share above 0")
    if args.total_steps < args.batch_size:
        raise ValueError(f"--total-steps: need at least T × N = {args.batch_size}")
    if args.render and args.video:
        raise ValueError("--render, --video: choose one")
    if not args.evaluate and (args.render or args.video or args.deterministic):
        raise ValueError("--render, --video, --deterministic: add --evaluate RUN_DIR")


TASKS = {  # defaults for tasks that the settings above do not solve, or solve slowly
    "CartPole-v1": {"total_steps": 100_000, "num_envs": 4, "num_steps": 256},
    "Pendulum-v1": {"total_steps": 300_000, "num_envs": 4, "num_steps": 512, "gamma": 0.95},
    # the landers' observations are scaled already
    "LunarLander-v3": {"num_envs": 4, "num_steps": 1000, "minibatch_size": 100, "norm_obs": False},
    "LunarLanderContinuous-v3": {"num_envs": 4, "num_steps": 1000, "minibatch_size": 100,
                                 "norm_obs": False},
}  # fmt: skip

# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """The practical algorithm of Sec. 6. `checkpoint`: what a run to be resumed has saved. Returns
    the Run; its `stop` tells whether a signal ended it early."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:  # what is open in it is closed in the end, or after an error
        envs = [stack.enter_context(make_env(args)) for _ in range(args.num_envs)]
        net = ActorCritic(envs[0].observation_space, envs[0].action_space, args)
        # not in the paper: a critic, fitted by Adam (Baselines)
        optimizer = torch.optim.Adam(net.critic.parameters(), args.learning_rate, fused=True)
        run = Run(args, checkpoint, net=net, optimizer=optimizer)
        stack.callback(run.close)
        torch.manual_seed(run.seed)
        obs = np.stack([env.reset(seed=run.seed + n)[0] for n, env in enumerate(envs)])
        discounted = np.zeros(args.num_envs)  # discounted returns so far, for `scale_rewards`
        for iteration in range(run.iteration, args.num_iterations):  # line 1
            batch, obs, episodes = rollout(envs, obs, net, args.num_steps)  # line 2
            if args.norm_reward:  # not in the paper (--no-norm-reward)
                discounted = scale_rewards(batch, discounted, net.return_moments, args.gamma)
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 3
            stats = update(net, optimizer, batch, args)  # line 4
            if args.norm_obs:  # not in the paper (--no-norm-obs); after the update: it changes π
                net.obs_moments.add(batch.raw_obs.flatten(0, 1))
            if run.log(episodes, stats) or run.stop:  # the goal, or a signal
                break
        run.save()
    return run


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
                *hidden, head = [layer for layer in net if isinstance(layer, nn.Linear)]
                for layer in hidden:
                    layer_init(layer, gain=2**0.5)
                layer_init(head, head_gain)

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
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh(),
                         nn.Linear(64, 64), nn.Tanh(),
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


def draw_noise(net, *shape):
    """The noise that makes `act` sample π, for `shape` observations: (*shape, A), A being the
    number of actions, or the action size."""
    noise = torch.empty(*shape, net.num_outputs)
    if net.discrete:  # Gumbel's: argmax(logits + noise) is a sample of the softmax
        return noise.exponential_().log().neg()
    return noise.normal_() * net.log_std.exp()


def act(net, raw_obs, noise=0.0):
    """Actions a ~ π(·|s) for raw_obs (..., observation size); without noise, the most probable."""
    out = net.actor(net.normalise(torch.as_tensor(raw_obs))) + torch.as_tensor(noise)
    return out.argmax(-1) if net.discrete else out


# ------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
def rollout(envs, obs, net, num_steps):
    """Run π_θold for T timesteps in N environments.

    obs: (N, observation size), what the environments show now. Returns the batch of T × N samples,
    what they show at the end, and (t, return, length) of each episode that ended at step
    t = 0, ..., T - 1.
    """
    shape, obs, episodes = (num_steps, len(envs)), obs.copy(), []
    raw_obs, next_obs = np.zeros((2, *shape, obs.shape[1]))
    actions = np.zeros((*shape, *envs[0].action_space.shape), np.int64 if net.discrete else "f4")
    rewards, terminated, truncated = np.zeros((3, *shape), "f4")
    noise = draw_noise(net, *shape).numpy()  # all of it at once, which is faster
    act_fn = act_in_numpy(net)  # or, slower: lambda *args: act(net, *args)
    for t in range(num_steps):
        raw_obs[t] = obs
        actions[t] = act_fn(obs, noise[t])
        for n, env in enumerate(envs):
            obs[n], rewards[t, n], terminated[t, n], truncated[t, n], info = env.step(actions[t, n])
            next_obs[t, n] = obs[n]
            if terminated[t, n] or truncated[t, n]:
                episodes.append((t, float(info["episode"]["r"]), int(info["episode"]["l"])))
                obs[n], _ = env.reset()
    check_finite(observation=raw_obs, next_observation=next_obs, reward=rewards)

    batch = SimpleNamespace(
        raw_obs=torch.from_numpy(raw_obs),  # (T, N, observation size)
        actions=torch.from_numpy(actions),  # (T, N[, action size])
        rewards=torch.from_numpy(rewards),  # (T, N), like all below that say nothing else
        terminated=torch.from_numpy(terminated),  # 1 where the episode ended
        truncated=torch.from_numpy(truncated),  # 1 where a time limit cut it off
    )
    batch.obs = net.normalise(batch.raw_obs)  # (T, N, observation size)
    batch.pi_old = net.pi_params(batch.obs)  # (T, N, ...), the parameters of π_θold(·|s_t)
    batch.log_probs = net.distribution(batch.pi_old).log_prob(batch.actions)  # log π_θold(a_t|s_t)
    batch.values = net.value(batch.obs)  # V(s_t)
    # V of what step t led to, before any reset; not in the paper: at a time limit, bootstrap from
    # it (Pardo et al. 2018)
    batch.next_values = net.value(net.normalise(torch.from_numpy(next_obs)))
    return batch, obs, episodes


# ---------------------------------------------------------------------------------- Advantages


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Advantage estimates of a rollout (PPO's Eq. 11, 12). Arguments and result are (T, N);
    terminated and truncated are 0 or 1.

    next_values[t] is V of the state to which step t led, before any reset. Where the episode ended
    (terminated), no rewards follow, and this V is not used. Where a time limit cut it off
    (truncated), this V stands for the rewards that would have followed. The sum of Eq. 11 stops at
    both. Its last exponent is T−t−1; the paper prints T−t+1.
    """
    # the factors (1 - ...): not in the PPO paper, where no episode ends before step T
    deltas = rewards + gamma * (1 - terminated) * next_values - values  # PPO's Eq. 12
    decay = gamma * gae_lambda * (1 - terminated) * (1 - truncated)
    deltas, decay = deltas.numpy(), decay.numpy()  # the loop is six times as fast on arrays
    advantages, advantage = np.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + decay[t] * advantage  # PPO's Eq. 11: Â_t = δ_t + γλ Â_{t+1}
        advantages[t] = advantage
    return torch.from_numpy(advantages)


def estimate_advantages(batch, gamma, gae_lambda):
    """Add a rollout's advantages Â_t and value targets V^targ_t, both (T, N), to the batch."""
    batch.advantages = gae(batch.rewards, batch.values, batch.next_values, batch.terminated,
                           batch.truncated, gamma, gae_lambda)  # fmt: skip
    batch.targets = batch.advantages + batch.values  # V^targ; the PPO paper leaves it open


def standardise(advantages):
    """Shift and scale to mean 0 and std 1. Not in the paper: Baselines' (--norm-adv none)"""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def scale_rewards(batch, discounted, moments, gamma):
    """Divide a rollout's rewards by the std of all discounted returns so far; clip them at ±10.

    A discounted return looks back, as in ppo2: r_t + γ r_{t-1} + γ² r_{t-2} + ... within an
    episode. discounted: (N,), the sums at the previous rollout's last step; returns those at this
    one's, 0 where an episode has just ended. Not in the paper: ppo2's scaling (--no-norm-reward),
    here once a rollout, not at every step.
    """
    rewards, returns = batch.rewards.numpy(), np.zeros(batch.rewards.shape)
    not_done = ((1 - batch.terminated) * (1 - batch.truncated)).numpy()
    for t in range(len(rewards)):
        returns[t] = rewards[t] + gamma * discounted
        discounted = returns[t] * not_done[t]
    moments.add(torch.from_numpy(returns).flatten())
    batch.rewards.div_(moments.std).clamp_(-10, 10)
    return discounted


# -------------------------------------------------------------------------------------- Update


def flat(tensors):
    """Tensors of any shape, end to end in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def surrogate(pi, samples):
    """L_θold(θ), the objective of Eq. 14. Its q, the policy that chose the actions, is π_θold
    (Sec. 5.1), and advantages take the place of its Q-values."""
    ratio = (pi.log_prob(samples.actions) - samples.log_probs).exp()
    return (ratio * samples.advantages).mean()


def fisher_vector_product(net, obs, weights):
    """Return a function that computes A y, (W,) -> (W,). A is the Hessian of the mean
    KL(π_θold ‖ π_θ) at θ_old, which is the Fisher matrix there.

    It differentiates the KL twice, the generic way of App. C.1. obs: the states to average
    over, (B, observation size); weights: the policy's tensors, W numbers in all.
    """
    pi = net.pi_params(obs)
    kl = kl_divergence(net.distribution(pi.detach()), net.distribution(pi)).mean()
    gradient = flat(torch.autograd.grad(kl, weights, create_graph=True))

    def product(y):
        return flat(torch.autograd.grad(gradient @ y, weights, retain_graph=True))

    return product


def conjugate_gradient(product, b, num_iters, tolerance=1e-10):
    """Solve A x = b for a positive definite A, given as product(y) = A y; App. C.

    Returns x and the norm of the residual b - A x. Stops once |b - A x|² ≤ tolerance · |b|².
    p: the direction of an iteration's step, which is alpha · p.
    """
    x = torch.zeros_like(b)
    residual, p = b.clone(), b.clone()
    residual_sq = residual @ residual
    enough = tolerance * residual_sq
    for _ in range(num_iters):
        if residual_sq <= enough:  # not in the paper: close enough (Baselines: |b - A x|² < 1e-10)
            break
        a_p = product(p)
        curvature = p @ a_p
        if not curvature > 0:  # not in the paper: rounding can make pᵀAp ≤ 0
            break
        alpha = residual_sq / curvature
        x += alpha * p
        residual -= alpha * a_p
        residual_sq, previous = residual @ residual, residual_sq
        p = residual + residual_sq / previous * p
    return x, residual_sq.sqrt().item()


@torch.no_grad()
def line_search(measure, weights, full_step, expected, args):
    """Move θ by `full_step` = β s, (W,), with β shrunk until L improves and KL ≤ δ (App. C).

    measure() returns the surrogate's improvement and KL(π_θold ‖ π_θ) at the weights as they are;
    expected: the improvement by the full step, to first order. Returns the fraction of the step
    taken, the improvement and the KL. If every try fails, it puts the old weights back, bit for
    bit, and returns zeros.
    """
    theta_old = flat(weights)
    fraction = 1.0
    for _ in range(args.line_search_steps):  # not in the paper: a limit of tries (Baselines)
        nn.utils.vector_to_parameters(theta_old + fraction * full_step, weights)
        improvement, kl = measure()
        enough = args.accept_ratio * fraction * expected  # 0, by default
        if enough < improvement < inf and kl <= args.max_kl:  # both are false for nan
            return fraction, improvement, kl
        fraction *= args.backtrack_coef
    nn.utils.vector_to_parameters(theta_old, weights)
    return 0.0, 0.0, 0.0


def trust_region_step(net, samples, args):
    """Maximise the surrogate in the trust region around θ_old (Eq. 14), moving θ.

    samples: obs (B, observation size), actions, π_θold's pi_old and log_probs, advantages.
    Returns scalars to log; raises FloatingPointError, θ unchanged, if g or sᵀAs is not finite.
    """
    weights = list(net.actor.parameters())
    if net.log_std is not None:
        weights.append(net.log_std)
    l_old = surrogate(net.pi(samples.obs), samples)
    g = flat(torch.autograd.grad(l_old, weights))
    check_finite(policy_gradient=g)

    obs = samples.obs
    if args.fvp_fraction < 1:  # App. C.1: a tenth is enough; Baselines: a fifth (--fvp-fraction)
        obs = obs[torch.randperm(len(obs))[: ceil(args.fvp_fraction * len(obs))]]
    product = fisher_vector_product(net, obs, weights)

    def damped(y):  # not in the paper: Baselines' damping (--cg-damping 0)
        return product(y) + args.cg_damping * y

    s, residual = conjugate_gradient(damped, g, args.cg_iters)
    s_a_s = s @ damped(s)
    check_finite(curvature_along_the_step=s_a_s)
    # β s of App. C, or 0 if s = 0. As in Baselines sᵀAs has the damping: a shorter step
    full_step = (2 * args.max_kl / s_a_s).sqrt() * s if s_a_s > 0 else torch.zeros_like(s)

    pi_old = net.distribution(samples.pi_old)

    def measure():
        pi = net.pi(samples.obs)
        improvement = surrogate(pi, samples) - l_old
        return improvement.item(), kl_divergence(pi_old, pi).mean().item()

    expected = (g @ full_step).item()  # by the full step, to first order
    fraction, improvement, kl = line_search(measure, weights, full_step, expected, args)
    return {"kl": kl, "improvement": improvement, "expected_improvement": fraction * expected,
            "step_fraction": fraction, "cg_residual": residual,
            "grad_norm": g.norm().item()}  # fmt: skip


def fit_critic(net, optimizer, obs, targets, args):
    """Regress V(s) on V^targ, K epochs of minibatches. Not in the paper: Baselines'."""
    for _ in range(args.num_epochs):
        for indices in torch.randperm(len(obs)).split(args.minibatch_size):
            optimizer.zero_grad()
            (net.value(obs[indices]) - targets[indices]).square().mean().backward()
            optimizer.step()


def update(net, optimizer, batch, args):
    """The policy's step and the critic's regression on one rollout.

    Returns the scalars to log. Raises FloatingPointError if one is not finite.
    """
    names = ("obs", "actions", "pi_old", "log_probs", "advantages", "targets")  # (T·N, ...) each
    samples = SimpleNamespace(**{name: getattr(batch, name).flatten(0, 1) for name in names})
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        samples.advantages = standardise(samples.advantages)
    stats = trust_region_step(net, samples, args)
    fit_critic(net, optimizer, samples.obs, samples.targets, args)
    with torch.no_grad():
        stats["entropy"] = net.pi(samples.obs).entropy().mean().item()
        stats["value_loss"] = (net.value(samples.obs) - samples.targets).square().mean().item()
    check_finite(**stats)
    unexplained = (batch.targets - batch.values).var() / batch.targets.var()
    return stats | {"explained_variance": 1 - unexplained.item()}


# ============ The paper's part ends here. What follows is speed, environments and records.

# --------------------------------------------------------------------------------------- Speed


def act_in_numpy(net):
    """`act` on arrays, until θ changes: for one observation torch takes three times as long."""
    linear = [layer for layer in net.actor if isinstance(layer, nn.Linear)]
    *hidden, (head_weight, head_bias) = [(m.weight.T.numpy(), m.bias.numpy()) for m in linear]
    mean, std = net.obs_moments.mean.numpy(), net.obs_moments.std.numpy()

    def actor(raw_obs):
        x = ((raw_obs - mean) / std).clip(-10, 10) if net.norm_obs else raw_obs
        x = x.astype(np.float32)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        return x @ head_weight + head_bias

    def act_fn(raw_obs, noise):
        out = actor(raw_obs) + noise
        return out.argmax(-1) if net.discrete else out

    obs = mean + std * np.array([[1.0], [100.0]])  # one as usual; one far out, to be clipped
    if not np.allclose(actor(obs), net.actor(net.normalise(torch.from_numpy(obs))), 1e-3, 1e-5):
        raise RuntimeError("act_in_numpy is not net.actor: change both, or act_fn in `rollout`")
    return act_fn


# --------------------------------------------------------------------------------- Environment


def make_env(args, **rendering):
    """One environment that takes actions as the policy gives them, and records its episodes."""
    try:
        env = gym.make(args.env_id, **rendering)
    except (gym.error.Error, ImportError) as e:
        sys.exit(f"--env-id {args.env_id}: {e} (Atari games: ppo_atari.py)")
    obs_space, space = env.observation_space, env.action_space
    vectors = isinstance(obs_space, Box) and len(obs_space.shape) == 1
    floats = isinstance(space, Box) and np.issubdtype(space.dtype, np.floating)
    if not (vectors and (isinstance(space, Discrete) or floats and len(space.shape) == 1)):
        env.close()
        sys.exit(f"--env-id {args.env_id}: observes {obs_space}, acts by {space}; need a Box of "
                 "one dimension, and Discrete or a Box of floats of one dimension. A module of "
                 "yours can register the task in a wrapper, such as gymnasium.wrappers."
                 "FlattenObservation: --env-id my_module:My-v0")  # fmt: skip

    def action_of(action):
        if isinstance(space, Discrete):
            return space.start + action
        if args.clip_actions:  # not in the paper: from Baselines (--no-clip-actions)
            action = action.clip(space.low, space.high)
        return action.astype(space.dtype)

    def checked(obs):
        obs = np.array(obs, dtype=np.float64)  # a copy: some tasks change theirs in place
        if obs.shape != obs_space.shape:
            raise ValueError(f"an observation must be a {obs_space}; it is {obs}")
        return obs

    env = wrappers.TransformObservation(env, checked, None)
    env = wrappers.TransformAction(env, action_of, None)
    return wrappers.RecordEpisodeStatistics(env)


def check_finite(**values):
    """Raise FloatingPointError if one of these numbers or arrays is not finite."""
    for name, value in values.items():
        value = np.asarray(value)
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} is {value[~np.isfinite(value)][0]}")


# ------------------------------------------------------------------------------------- Records

LIBRARIES = ("torch", "gymnasium", "mujoco", "Box2D", "numpy")
PUBLISHED_BY = "OpenAI's Baselines (1M steps, older task)"
PUBLISHED_SCORES = {  # Baselines' TRPO; the paper's Swimmer, Hopper and Walker are earlier tasks
    "HalfCheetah-v5": 1289.7, "Hopper-v5": 1912.9, "InvertedDoublePendulum-v5": 6731.6,
    "InvertedPendulum-v5": 905.1, "Reacher-v5": -4.82, "Swimmer-v5": 95.0, "Walker2d-v5": 2342.6,
}  # fmt: skip


class Run:
    """A run and its directory. learned: {name: module or optimizer}, what training changes.

    iteration: where to begin, 0 in a new run; seed: for all that is random from there on
    step:      steps so far; episodes: (last step, return, length, seconds) of each finished one
    stats:     the scalars logged last; stop: whether a signal has asked to stop
    """

    def __init__(self, args, checkpoint, **learned):
        self.args, self.learned, self.stop, start = args, learned, False, checkpoint or {}
        self.step, self.best = start.get("step", 0), start.get("best", -inf)
        self.episodes, self.stats = start.get("episodes", []), start.get("stats", {})
        for name, part in learned.items() if checkpoint else ():
            saved = dict(checkpoint[name])
            if "param_groups" in saved:  # an optimizer: its step size is that of the flags
                saved["param_groups"] = part.state_dict()["param_groups"]
            part.load_state_dict(saved)
        self.iteration = self.step // args.batch_size
        self.seed = derive_seed(args.seed, self.iteration)  # a resumed run plays other episodes

        name = f"{SCRIPT[:-3]}-{args.env_id}-seed{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.dir = Path(args.run_dir or "runs/" + name.replace("/", "-").replace(":", "-"))
        sha = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        versions = {n: sys.modules[n].__version__ for n in LIBRARIES if n in sys.modules}
        config = {"script": SCRIPT, "sha256": sha, "versions": versions, "settings": asdict(args)}
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            resumed = checkpoint and checkpoint["settings"]["run_dir"] == args.run_dir
            if not resumed and any(self.dir.iterdir()):
                sys.exit(f"--run-dir {self.dir}: is not empty; name a new one, or --resume it")
            (self.dir / "config.json").write_text(json.dumps(config, indent=2))
        except OSError as e:
            sys.exit(f"--run-dir {self.dir}: {e.strerror}")
        self.tensorboard = SummaryWriter(self.dir, purge_step=self.step + 1)
        print(f"{args.env_id}: {args.num_iterations} iterations of {args.num_envs} actors × "
              f"{args.num_steps} steps; records in {self.dir}", flush=True)  # fmt: skip
        style = {"ncols": 80}
        if not sys.stderr.isatty():  # in a file: a line every 30 seconds
            style = {"mininterval": 30, "bar_format": "{desc}: {percentage:.0f}% {r_bar}\n"}
        self.bar = tqdm(total=args.num_iterations * args.batch_size, initial=self.step,
                        unit="step", unit_scale=True, **style)  # fmt: skip
        self.last_log = self.last_save = time.monotonic()
        self.started = self.last_log - start.get("seconds", 0.0)
        self.handlers = {}
        with suppress(AttributeError, ValueError):  # ValueError: not in the main thread
            for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"):  # Windows lacks the last two
                number = getattr(signal, name)
                if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self.handlers[number] = signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        """Ask the run to stop after this iteration; a second Ctrl-C ends it at once."""
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = True
        with suppress(OSError):  # nobody may be there to read it
            os.write(2, b"\nstopping after this iteration; Ctrl-C again stops at once, unsaved\n")

    @property
    def score(self):
        """Mean return of the last 100 episodes (of all, if fewer), the PPO paper's measure."""
        return float(np.mean([row[1] for row in self.episodes[-100:]] or nan))

    def log(self, episodes, stats):
        """Record an iteration: (t, return, length) of the episodes that ended in it, and scalars.

        Saves the run once a minute. Returns whether --goal-score is reached.
        """
        args, now = self.args, time.monotonic()
        self.episodes += [(self.step + (t + 1) * args.num_envs, *episode,
                           round(now - self.started, 1)) for t, *episode in episodes]  # fmt: skip
        self.step += args.batch_size
        stats |= {"score": self.score, "steps_per_second": args.batch_size / (now - self.last_log)}
        if args.eval_every and self.step % args.eval_every < args.batch_size:
            played = play(self.learned["net"], make_env(args), args, sample=False)
            stats["eval_score"] = float(np.mean([score for score, _ in played]))
        for name, value in stats.items():
            self.tensorboard.add_scalar(name, value, self.step)
        text = f"score {self.score:.5g}, episode {len(self.episodes)}"
        self.bar.set_description_str(text, refresh=False)
        self.bar.update(args.batch_size)
        self.stats, self.last_log = stats, time.monotonic()
        enough = len(self.episodes) >= 100
        if enough and self.score > self.best:
            self.best = self.score
            self.write("best.pt")
        if self.last_log - self.last_save > 60:
            self.save()
        return enough and args.goal_score is not None and self.score >= args.goal_score

    def save(self):
        """Write checkpoint.pt, episodes.csv and learning_curve.png."""
        state = {name: part.state_dict() for name, part in self.learned.items()}
        self.write("checkpoint.pt", **state, episodes=self.episodes, stats=self.stats,
                   seconds=time.monotonic() - self.started)  # fmt: skip
        rows = [("step", "return", "length", "seconds"), *self.episodes]
        (self.dir / "episodes.csv").write_text("".join(",".join(map(str, r)) + "\n" for r in rows))
        try:
            self.draw()
        except Exception as e:  # such as a matplotlibrc that asks for LaTeX, where there is none
            print(f"learning_curve.png: cannot be drawn ({type(e).__name__})", flush=True)
        self.last_save = time.monotonic()

    def write(self, name, **more):
        """Write plain data: best.pt, or with `more` checkpoint.pt. A kill at any moment leaves the
        old file whole."""
        state = {"script": SCRIPT, "settings": asdict(self.args), "step": self.step,
                 "best": self.best, "net": self.learned["net"].state_dict()}  # fmt: skip
        torch.save(state | more, self.dir / "new.pt")
        os.replace(self.dir / "new.pt", self.dir / name)

    def draw(self):
        """learning_curve.png: each episode's return, their mean over 100, the published score."""
        from matplotlib.figure import Figure  # not above: the file's end chooses its backend first

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        steps, returns = [row[0] for row in self.episodes], [row[1] for row in self.episodes]
        axes.plot(steps, returns, ".", ms=2, alpha=0.25, label="one episode")
        if len(returns) >= 100:
            means = np.convolve(returns, np.full(100, 1 / 100), mode="valid")
            axes.plot(steps[99:], means, color="tab:blue", label="mean of the last 100")
        if published := PUBLISHED_SCORES.get(self.args.env_id):
            axes.axhline(published, ls="--", color="tab:gray", label=f"{PUBLISHED_BY}: {published}")
        axes.set(xlabel="agent steps", ylabel="return of an episode", xlim=(0, None),
                 title=f"{SCRIPT} on {self.args.env_id}, seed {self.args.seed}")  # fmt: skip
        figure.legend(loc="outside lower center", ncols=3, markerscale=5)
        figure.savefig(self.dir / "learning_curve.png", dpi=120)

    def close(self):
        """Close what is open, and print the commands to watch the run and to go on."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        self.tensorboard.close()
        python = sys.executable.removeprefix(f"{os.getcwd()}/")  # such as .venv/bin/python
        command = shlex.join([python, os.path.relpath(__file__)])
        run_dir, count = shlex.quote(str(self.dir)), min(len(self.episodes), 100)
        if (self.dir / "checkpoint.pt").exists():
            print(f"step {self.step:,}: score {self.score:.5g}, the mean of {count} episodes")
            print(f"watch:  {command} --evaluate {run_dir} --render")
            if self.step < self.bar.total:
                print(f"go on:  {command} --resume {run_dir}", flush=True)


def derive_seed(*numbers):
    """A seed of 31 bits, an int, from others."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def load_checkpoint(path, best):
    """The checkpoint in a run's directory, or a .pt file. Loading plain data runs no code."""
    if path.suffix != ".pt":
        path /= "best.pt" if best and (path / "best.pt").exists() else "checkpoint.pt"
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != SCRIPT:
            raise ValueError(f"it is of {checkpoint['script']}")
    except Exception as e:  # torch raises many kinds for a damaged or foreign file
        sys.exit(f"{path}: cannot be read as a checkpoint of {SCRIPT} ({e!r:.80})")
    checkpoint["settings"] |= {"resume": "", "evaluate": "", "run_dir": str(path.parent)}
    return checkpoint


# ---------------------------------------------------------------------------------- Evaluation


@torch.no_grad()
def play(net, env, args, sample):
    """Play --episodes whole episodes, then close the task. Yields each return and length.

    sample: whether to sample actions, or else to take the most probable ones
    """
    try:
        for k in range(args.episodes):
            (obs, info), length = env.reset(seed=args.seed if k == 0 else None), 0
            while "episode" not in info:  # until the last step
                action = act(net, obs, draw_noise(net) if sample else 0.0).numpy()
                obs, _, _, _, info = env.step(action)
                length += 1
                if length % 10_000 == 0:
                    print(f"episode {k + 1}: {length:,} steps so far", flush=True)
            yield float(info["episode"]["r"]), length
    finally:
        env.close()  # which ends a video


def evaluate(args, checkpoint):
    """Play whole episodes with a saved policy. Returns the return of each."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if not any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))):
        if args.render and sys.platform == "linux":
            sys.exit("--render: there is no display; --video records to a file")
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo then draws without a display
    rendering = {"render_mode": "human" if args.render else "rgb_array"}
    env = make_env(args, **(rendering if args.render or args.video else {}))
    if args.video:
        folder = f"{args.run_dir}/videos/{time.strftime('%Y%m%d-%H%M%S')}"
        # a video stays in memory until it is written, so it ends after 5,000 steps
        env = wrappers.RecordVideo(env, folder, lambda episode: True, video_length=5000)
        print(f"recording to {folder}")
    net = ActorCritic(env.observation_space, env.action_space, args)
    net.load_state_dict(checkpoint["net"])  # the moments of the observations too
    returns = []
    for score, length in play(net, env, args, sample=not args.deterministic):
        returns.append(score)
        print(f"episode {len(returns)}: return {score:.5g}, {length} steps", flush=True)
    print(f"{args.env_id}: {np.mean(returns):.5g} ± {np.std(returns):.2g} (mean ± std) over "
          f"{len(returns)} episodes, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return returns


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name


def first_flags(env_id: str = Args.env_id, resume: str = "", evaluate: str = ""):
    """The flags on which the defaults of the others depend."""
    return env_id, resume, evaluate


def parse_args(argv=()):
    """The settings, and the checkpoint that --resume or --evaluate names, or None."""
    style = {"args": argv, "description": __doc__, "config": (tyro.conf.DisallowNone,)}
    first, _ = tyro.cli(first_flags, **style, return_unknown_args=True, add_help=False)
    env_id, resume, evaluate = first
    if not (resume or evaluate):
        return tyro.cli(Args, **style, default=Args(**TASKS.get(env_id, {}))), None
    checkpoint = load_checkpoint(Path(resume or evaluate), best=bool(evaluate))
    if resume and (evaluate or "episodes" not in checkpoint):
        sys.exit(f"--resume {resume}: need the directory of a run, and no --evaluate")
    old = checkpoint["settings"]  # an older version's may lack some, and have others
    saved = Args(**{f.name: old[f.name] for f in fields(Args) if old.get(f.name) is not None})
    args = tyro.cli(Args, **style, default=saved)
    for name, value in asdict(saved).items():
        if resume and value != getattr(args, name) and name != "resume":
            print(f"{name} {value} -> {getattr(args, name)}")
    return args, checkpoint


class Output:
    """Standard output or error that never stops a run. If its reader has gone (`| head -1`), it
    writes to standard error, and if that has gone, too, nowhere."""

    def __init__(self, stream):
        null = os.open(os.devnull, os.O_WRONLY)
        self.stream, self.others = stream or os.fdopen(null, "w"), [2, null]
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # one that cannot show γ shows ?

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(self.others.pop(0), self.stream.fileno())
            self.write("")  # what is still to be written


def main(argv=()):
    """Train or evaluate; `argv`: the flags of the command line."""
    args, checkpoint = parse_args(argv)
    try:
        if args.evaluate:
            return evaluate(args, checkpoint)
        if train(args, checkpoint).stop:
            sys.exit(130)  # not 0, so that `a && b` stops, too
    except FloatingPointError as e:
        sys.exit(f"{SCRIPT}: stopped, {e}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"  # draw to files; a notebook's backend may not be here
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        main(sys.argv[1:])
