r"""TRPO on state vectors (Schulman et al. 2015, https://arxiv.org/abs/1502.05477).

The practical algorithm of Sec. 6, "single path", in our words               here
1  for iteration = 1, 2, ... do                                              train
2      run policy π_θold, collecting states, actions and rewards             rollout
3      estimate the Q-values of the state-action pairs                       estimate_advantages
4      maximise the surrogate over the pairs, with the mean KL at most δ:    update
           g: the surrogate's gradient                                       trust_region_step
           y → A y, A being the Hessian of the mean KL                       fisher_vector_product
           s ≈ A⁻¹ g, without ever forming A                                 conjugate_gradient
           θ ← θ_old + β s, β shrinking until L improves and KL ≤ δ          line_search
5      θ_old ← θ                                                             rollout acts with θ
6  end for

The paper estimates the Q-values without a critic. Here, as is usual today, advantages stand for
them, estimated by GAE (arXiv 1506.02438) with a critic that is fitted after the policy's step
(fit_critic). In expectation, exact advantages change the surrogate by a constant only (Sec. 5);
GAE's are biased by V's errors, the less the larger λ is. The network is that of PPO (arXiv
1707.06347). The paper's other way of sampling, "vine", is left out. Every other step that the
paper leaves out is marked "not in the paper"; "Baselines" is OpenAI's trpo_mpi, and ppo2 its PPO.

  python trpo_continuous.py                              learn CartPole-v1
  python trpo_continuous.py --env-id HalfCheetah-v5      a million steps, Box actions
  python trpo_continuous.py --resume RUN_DIR             go on after an interruption, bit for bit
  python trpo_continuous.py --evaluate RUN_DIR --render  watch what it learned; --video records it
"""

import argparse
import gc
import hashlib
import io
import json
import os
import signal
import sys
import time
import warnings
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from math import ceil, inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import RecordVideo
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings

# fmt: off
SETTINGS = [  # flag, default, type and range, symbol, meaning
    "task",
    ("env-id", "CartPole-v1", (str,), "ID", "Gymnasium's id of a task with Box observations"),
    ("seed", 1, (int, 0, 2**63 - 1), "SEED", "seeds network, actions, minibatches and task"),
    ("total-steps", 1_000_000, (int, 1), "STEPS", "agent steps"),
    "trust region, Sec. 6, App. C and E of the paper",
    ("max-kl", 0.01, (float, 1e-12), "δ", "KL bound of Eq. 14, the paper's"),
    ("cg-iters", 10, (int, 1), "k", "iterations of conjugate gradient, the paper's"),
    ("cg-damping", 0.1, (float, 0), "DAMPING", "not in the paper: on A's diagonal (Baselines)"),
    ("fvp-fraction", 1.0, (float, 1e-9, 1), "SHARE", "of the states in A's mean; App. C.1: 0.1"),
    ("line-search-steps", 10, (int, 1), "TRIES", "tries of the line search (Baselines')"),
    ("backtrack-coef", 0.8, (float, 0.01, 0.99), "FACTOR", "of β per failed try (Spinning Up's)"),
    "batch",
    ("num-envs", 1, (int, 1), "N", "number of actors"),
    ("num-steps", 1024, (int, 1), "T", "steps of each actor in a rollout (Baselines: 1024)"),
    ("gamma", 0.99, (float, 0, 1), "γ", "discount (the paper: 0.99)"),
    "not in the paper; in OpenAI's Baselines: critic, GAE, scaling",
    ("gae-lambda", 0.98, (float, 0, 1), "λ", "of GAE; 1: returns minus V"),
    ("num-epochs", 5, (int, 1), "K", "the critic's passes over a rollout"),
    ("minibatch-size", 64, (int, 1), "M", "samples in one of the critic's minibatches"),
    ("learning-rate", 1e-3, (float, 0), "LR", "Adam's step size for the critic"),
    ("norm-obs", True, bool, None, "normalise observations, clip them at ±10 (ppo2's)"),
    ("norm-reward", True, bool, None, "divide rewards by the returns' std, clip at ±10 (ppo2's)"),
    ("norm-adv", "rollout", ["rollout", "none"], None, "standardise a rollout's advantages"),
    ("clip-actions", True, bool, None, "clip actions to their Box, for the environment alone"),
    ("orthogonal", True, bool, None, "orthogonal initial weights, a small policy head"),
    "machine",
    ("threads", 1, (int, 1, 1024), "THREADS", "of torch; more than 1 slows networks this small"),
    "run",
    ("run-dir", None, (str,), "DIR", "new directory (default: runs/, then the run's name)"),
    ("checkpoint-every", None, (int, 1), "ITERATIONS",
     "between checkpoints, which restart the episodes; default: about 15 a run, at least 4 apart"),
    ("goal-score", None, (float, -inf), "SCORE", "stop at this mean of the last 100 episodes"),
    ("resume", None, (str,), "RUN_DIR", "go on with a run and its settings, of which only "
     "--total-steps, --goal-score and --threads can be changed"),
    ("evaluate", None, (str,), "RUN_DIR", "play a run's best policy [of the newest], or a file's"),
    ("episodes", 10, (int, 1), "EPISODES", "episodes to evaluate"),
    ("deterministic", False, bool, None, "take the policy's mode instead of sampling"),
    ("render", False, bool, None, "evaluate in a window"),
    ("video", False, bool, None, "evaluate, recording to RUN_DIR/videos"),
]
TASKS = {  # tasks that the defaults do not solve, or only slowly; flags win
    "CartPole-v1": {"total_steps": 100_000, "num_envs": 4, "num_steps": 256},
    "Pendulum-v1": {"total_steps": 300_000, "num_envs": 4, "num_steps": 512, "gamma": 0.95},
    # --norm-obs can move π outside the trust region (see train); without it these two learn better
    "LunarLander-v3": {"num_envs": 4, "num_steps": 1000, "minibatch_size": 100, "norm_obs": False},
    "LunarLanderContinuous-v3": {"num_envs": 4, "num_steps": 1000, "minibatch_size": 100,
                                 "norm_obs": False},
}
# fmt: on

# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """The practical algorithm of Sec. 6. `checkpoint`: that of a run to resume, which Run loads."""
    torch.manual_seed(args.seed)
    envs = Environments(args.env_id, args.num_envs, args.gamma, args.clip_actions)
    net = ActorCritic(envs.obs.shape[1], envs.action_space, args.orthogonal, args.norm_obs)
    optimizer = torch.optim.Adam(net.critic.parameters(), args.learning_rate, fused=True)
    batch = make_batch(args.num_steps, envs)

    with Run(args, checkpoint, net=net, optimizer=optimizer) as run:
        for iteration in run.iterations():  # line 1
            if run.at_checkpoint:  # also at the start; not in the paper, for exact resuming
                envs.reset(run.seed)  # how often: --checkpoint-every
            episodes = rollout(envs, net, batch)  # line 2
            if args.norm_reward:  # not in the paper (--no-norm-reward)
                scale_rewards(batch, net.return_moments)
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 3
            stats = update(net, optimizer, batch, args)  # line 4
            if args.norm_obs:  # not in the paper (--no-norm-obs); moves π by a KL not bounded by δ
                net.obs_moments.add(batch.raw_obs.flatten(0, 1))
            run.log(episodes, stats)


# ------------------------------------------------------------------------------------- Network


class ActorCritic(nn.Module):
    """Policy π(a|s) (PPO's Sec. 6.1) and value V(s), two networks of two layers of 64 tanh units.

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
        if self.norm_obs:  # not in the paper: ppo2's, here fixed within a rollout (--no-norm-obs)
            moments = self.obs_moments
            obs = ((obs - moments.mean) / (moments.var + 1e-8).sqrt()).clamp(-10, 10)
        return obs.float()

    def pi(self, obs):
        """π(·|s) for normalised obs (B, observation size): a softmax, or independent normals, whose
        std is the same for every s (TRPO's App. D)."""
        out = self.actor(obs)
        if self.log_std is None:
            return Categorical(logits=out, validate_args=False)
        normal = Normal(out, self.log_std.exp(), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def forward(self, obs):
        """π(·|s) and V(s), (B,), for normalised obs (B, observation size)."""
        return self.pi(obs), self.critic(obs).squeeze(-1)


def mlp(*sizes):
    """Linear layers of these sizes with tanh between them."""
    layers = [layer for ends in pairwise(sizes) for layer in (nn.Linear(*ends), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


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
        deviations = self.var * self.count + samples.var(0, correction=0) * count
        self.var.copy_((deviations + shift.square() * self.count * count / total) / total)
        self.mean += shift * count / total
        self.count.copy_(total)


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, envs):
    """Storage for one rollout, reused in every iteration: fields of shape (T, N), unless noted."""
    shape = (num_steps, len(envs.obs))
    dtype = torch.int64 if isinstance(envs.action_space, Discrete) else torch.float32
    return SimpleNamespace(
        raw_obs=torch.zeros(num_steps, *envs.obs.shape, dtype=torch.float64),  # (T, N, obs size)
        obs=None,  # (T·N, observation size), normalised
        actions=torch.zeros(*shape, *envs.action_space.shape, dtype=dtype),  # (T, N[, action size])
        pi_old=None,  # π_θold(·|s) of T·N states
        log_probs=None,  # (T·N,), log π_θold(a|s)
        values=torch.zeros(num_steps + 1, len(envs.obs)),  # V(s_0), ..., V(s_T)
        rewards=torch.zeros(shape),
        discounted_returns=torch.zeros(shape, dtype=torch.float64),  # r_t + γ r_{t-1} + ...
        terminated=torch.zeros(shape),
        truncated=torch.zeros(shape),
        final_values=torch.zeros(shape),  # where truncated: V of the episode's last observation
        advantages=None,  # (T, N), Â_t
        targets=None,  # (T, N), V^targ_t
    )


@torch.no_grad()
def rollout(envs, net, batch):
    """Run π_θold for T timesteps in N environments, filling `batch` (PPO's Algorithm 1, line 3).

    Returns (t, return, length) of each episode that finished at step t = 0, ..., T - 1.
    """
    num_steps, episodes, cut = len(batch.rewards), [], []
    tensors = {name: x for name, x in vars(batch).items() if torch.is_tensor(x)}
    b = SimpleNamespace(**{name: x.numpy() for name, x in tensors.items()})  # same memory, faster
    policy = numpy_policy(net, num_steps, len(envs.obs))  # samples π_θold; faster than torch
    for t in range(num_steps):
        b.raw_obs[t], b.actions[t] = envs.obs, policy(t, envs.obs)
        b.rewards[t], b.terminated[t], b.truncated[t], final_obs, finished = envs.step(b.actions[t])
        b.discounted_returns[t] = envs.discounted_returns
        cut += [(t, n, obs) for n, obs in final_obs]
        episodes += [(t, *episode) for episode in finished]

    # log-probs and values of the whole rollout, in one batch: much faster, same up to rounding
    batch.obs = net.normalise(batch.raw_obs.flatten(0, 1))  # (T·N, observation size)
    batch.pi_old, values = net(batch.obs)
    batch.log_probs = batch.pi_old.log_prob(batch.actions.flatten(0, 1))  # (T·N,)
    batch.values[:-1] = values.view(num_steps, -1)
    batch.values[-1] = net.critic(net.normalise(torch.from_numpy(envs.obs))).squeeze(-1)
    for t, n, obs in cut:  # not in the paper: at a time limit, bootstrap from V
        batch.final_values[t, n] = net.critic(net.normalise(torch.from_numpy(obs))).squeeze(-1)
    return episodes


def numpy_policy(net, num_steps, num_envs):
    """π_θ in numpy, since torch takes five times as long for a single observation.

    Returns policy(t, obs), which samples actions for raw obs (N, observation size) with the noise
    of step t = 0, ..., T - 1.
    """
    linear = [layer for layer in net.actor if isinstance(layer, nn.Linear)]
    *hidden, head = [(m.weight.detach().T.numpy(), m.bias.detach().numpy()) for m in linear]
    mean, std = net.obs_moments.mean.numpy(), (net.obs_moments.var + 1e-8).sqrt().numpy()
    noise = torch.empty(num_steps, num_envs, len(head[1]))
    if net.log_std is None:
        noise = noise.exponential_().log().neg().numpy()  # Gumbel's: argmax(logits + noise) ~ π
    else:
        noise = (noise.normal_() * net.log_std.detach().exp()).numpy()

    def policy(t, obs):
        x = ((obs - mean) / std).clip(-10, 10) if net.norm_obs else obs
        x = x.astype(np.float32)
        for weight, bias in hidden:
            x = np.tanh(x @ weight + bias)
        out = x @ head[0] + head[1] + noise[t]
        return out.argmax(-1) if net.log_std is None else out

    return policy


# ---------------------------------------------------------------------------------- Advantages


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Advantage estimates of a rollout (PPO's Eq. 11, 12). Arguments and result are (T, N).

    next_values[t] is V of the state that step t led to, before any reset; unused where the step
    terminated, as nothing follows. Where it was truncated (a time limit), it stands for what would
    have followed. Both end the sum of Eq. 11 (its last exponent, printed T−t+1, should be T−t−1).
    """
    deltas = rewards + gamma * (1 - terminated) * next_values - values  # PPO's Eq. 12
    # the factors (1 - ...), above too: not in the paper (PPO's), where no episode ends
    decay = gamma * gae_lambda * (1 - terminated) * (1 - truncated)
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        advantage = deltas[t] + decay[t] * advantage  # PPO's Eq. 11: Â_t = δ_t + γλ Â_{t+1}
        advantages[t] = advantage
    return advantages


def estimate_advantages(batch, gamma, gae_lambda):
    """Fill in a rollout's advantages Â_t and value targets V^targ_t."""
    values = batch.values.to(batch.rewards.device)  # in ppo_atari V may be on a GPU
    next_values = torch.where(batch.truncated.bool(), batch.final_values, values[1:])
    batch.advantages = gae(batch.rewards, values[:-1], next_values, batch.terminated,
                           batch.truncated, gamma, gae_lambda)  # fmt: skip
    batch.targets = batch.advantages + values[:-1]  # V^targ; the PPO paper leaves it open


def standardise(advantages):
    """Shift and scale to mean 0 and std 1. Not in the paper: Baselines' (--norm-adv none)"""
    advantages = advantages - advantages.mean()
    return advantages / (advantages.square().mean().sqrt() + 1e-8)


def scale_rewards(batch, moments):
    """Divide a rollout's rewards by the std of all discounted returns so far; clip them at ±10.

    Not in the paper: ppo2's scaling (--no-norm-reward), here once a rollout, not at every step
    """
    moments.add(batch.discounted_returns.flatten())
    batch.rewards.div_((moments.var + 1e-8).sqrt()).clamp_(-10, 10)


# -------------------------------------------------------------------------------------- Update


def flat(tensors):
    """Tensors of any shape, end to end in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def surrogate(pi, samples):
    """L_θold(θ), the objective of Eq. 14 with q = π_θold (Sec. 5.1) and advantages for Q."""
    ratio = (pi.log_prob(samples.actions) - samples.log_probs).exp()
    return (ratio * samples.advantages).mean()


def fisher_vector_product(net, obs, weights):
    """The function y -> A y, where A is the Hessian of the mean KL(π_θold ‖ π_θ) at θ_old, which is
    the Fisher matrix there: by differentiating the KL twice, the generic way of App. C.1.

    obs: the states of the mean, (B, observation size); weights: the policy's, at θ_old, tensors of
    W numbers in all. y and A y are (W,).
    """
    with torch.no_grad():
        pi_old = net.pi(obs)
    kl = kl_divergence(pi_old, net.pi(obs)).mean()
    gradient = flat(torch.autograd.grad(kl, weights, create_graph=True))

    def product(y):
        return flat(torch.autograd.grad(gradient @ y, weights, retain_graph=True))

    return product


def conjugate_gradient(product, b, num_iters, tolerance=1e-10):
    """Solve A x = b for a positive definite A, given as product(y) = A y; App. C.

    Returns x and the norm of the residual b - A x. Not in the paper: stops early once
    |b - A x|² ≤ tolerance · |b|² (Baselines: an absolute bound) or at a direction p of no positive
    curvature.
    """
    x = torch.zeros_like(b)
    residual, p = b.clone(), b.clone()
    residual_sq = residual @ residual
    enough = tolerance * residual_sq
    for _ in range(num_iters):
        if residual_sq <= enough:
            break
        a_p = product(p)
        curvature = p @ a_p
        if not curvature > 0:
            break
        alpha = residual_sq / curvature
        x += alpha * p
        residual -= alpha * a_p
        residual_sq, previous = residual @ residual, residual_sq
        p = residual + residual_sq / previous * p
    return x, residual_sq.sqrt().item()


@torch.no_grad()
def line_search(measure, weights, full_step, max_kl, num_tries, backtrack_coef):
    """Move θ by `full_step` = β s, (W,), with β shrunk until L improves and KL ≤ δ (App. C).

    measure() returns the surrogate's improvement and KL(π_θold ‖ π_θ) at the weights as they are.
    Returns the fraction of the step taken, the improvement and the KL: zeros if every try fails,
    and then the weights are what they were, bit for bit. Not in the paper: a limit of tries (as in
    Baselines).
    """
    theta_old = flat(weights)
    fraction = 1.0
    for _ in range(num_tries):
        nn.utils.vector_to_parameters(theta_old + fraction * full_step, weights)
        improvement, kl = measure()
        if 0 < improvement < inf and kl <= max_kl:  # both are false for nan
            return fraction, improvement, kl
        fraction *= backtrack_coef
    nn.utils.vector_to_parameters(theta_old, weights)
    return 0.0, 0.0, 0.0


def trust_region_step(net, samples, args):
    """Maximise the surrogate in the trust region around θ_old (Eq. 14), moving θ.

    samples: obs (B, observation size), actions, pi_old, its log_probs of the actions, advantages.
    Returns scalars to log; raises FloatingPointError, θ untouched, if g or A is not finite.
    """
    weights = list(net.actor.parameters())
    if net.log_std is not None:
        weights.append(net.log_std)
    l_old = surrogate(net.pi(samples.obs), samples)
    g = flat(torch.autograd.grad(l_old, weights))
    if not g.isfinite().all():
        raise FloatingPointError(f"the surrogate's gradient is {g.norm().item()}")

    obs = samples.obs
    if args.fvp_fraction < 1:  # App. C.1: a tenth is enough; Baselines: a fifth (--fvp-fraction)
        obs = obs[torch.randperm(len(obs))[: ceil(args.fvp_fraction * len(obs))]]
    product = fisher_vector_product(net, obs, weights)

    def damped(y):  # not in the paper: Baselines' damping (--cg-damping 0)
        return product(y) + args.cg_damping * y

    s, residual = conjugate_gradient(damped, g, args.cg_iters)
    s_a_s = s @ damped(s)
    if not s_a_s.isfinite():
        raise FloatingPointError(f"sᵀAs is {s_a_s.item()}")
    # β s of App. C; the damping in sᵀAs, as in Baselines, makes it shorter. 0 where s = 0
    full_step = (2 * args.max_kl / s_a_s).sqrt() * s if s_a_s > 0 else torch.zeros_like(s)

    def measure():
        pi = net.pi(samples.obs)
        improvement = surrogate(pi, samples) - l_old
        return improvement.item(), kl_divergence(samples.pi_old, pi).mean().item()

    fraction, improvement, kl = line_search(
        measure, weights, full_step, args.max_kl, args.line_search_steps, args.backtrack_coef
    )
    expected = fraction * (g @ full_step).item()  # to first order
    return {"kl": kl, "improvement": improvement, "expected_improvement": expected,
            "step_fraction": fraction, "cg_residual": residual,
            "grad_norm": g.norm().item()}  # fmt: skip


def fit_critic(net, optimizer, batch, args):
    """Regress V(s) on V^targ, K epochs of minibatches. Not in the paper: Baselines'."""
    for _ in range(args.num_epochs):
        order = torch.randperm(len(batch.obs))
        obs, targets = batch.obs[order], batch.targets.flatten()[order]
        for start in range(0, len(order), args.minibatch_size):
            end = start + args.minibatch_size
            values = net.critic(obs[start:end]).squeeze(-1)
            optimizer.zero_grad()
            (values - targets[start:end]).square().mean().backward()
            optimizer.step()


def update(net, optimizer, batch, args):
    """The policy's step and the critic's regression on one rollout.

    Returns the scalars to log; raises FloatingPointError if one is not finite (explained_variance
    may be so, where all targets are equal).
    """
    advantages = batch.advantages.flatten()  # (T, N) -> (T·N,)
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        advantages = standardise(advantages)  # scaling leaves β s as it is, shifting adds noise
    samples = SimpleNamespace(obs=batch.obs, actions=batch.actions.flatten(0, 1),
                              pi_old=batch.pi_old, log_probs=batch.log_probs,
                              advantages=advantages)  # fmt: skip
    stats = trust_region_step(net, samples, args)
    fit_critic(net, optimizer, batch, args)
    with torch.no_grad():
        pi, values = net(batch.obs)
    stats["entropy"] = pi.entropy().mean().item()
    stats["value_loss"] = (values - batch.targets.flatten()).square().mean().item()
    stats["weight_norm"] = nn.utils.get_total_norm(list(net.parameters())).item()
    for name, value in stats.items():
        if not isfinite(value):
            raise FloatingPointError(f"{name} is {value}")
    # Â = V^targ − V is what V leaves unexplained
    unexplained = batch.advantages.var(correction=0) / batch.targets.var(correction=0)
    return stats | {"explained_variance": 1 - unexplained.item()}


# ============ The paper's part ends here. What follows runs the environments and keeps records.

# --------------------------------------------------------------------------------- Environment


class Environments:
    """N environments, stepped one after the other; one whose episode ends starts anew at once.

    obs:                (N, observation size), what the agents see now
    discounted_returns: (N,), r_t + γ r_{t-1} + γ² r_{t-2} + ... back to the episode's beginning
    """

    def __init__(self, env_id, num_envs, gamma, clip_actions=True, **rendering):
        try:
            self.envs = [gym.make(env_id, disable_env_checker=True, **rendering)
                         for _ in range(num_envs)]  # fmt: skip
        except Exception as e:  # unknown, or whatever its maker meets
            fail(f"--env-id {env_id}: {e} (need a task like HalfCheetah-v5; Atari: ppo_atari.py)")
        obs, actions = self.envs[0].observation_space, self.envs[0].action_space
        if not (isinstance(obs, Box) and len(obs.shape) == 1):
            fail(f"--env-id {env_id}: observes {obs}; need a Box of one dimension (Atari: "
                 f"ppo_atari.py)")  # fmt: skip
        floats = isinstance(actions, Box) and np.issubdtype(actions.dtype, np.floating)
        if not (isinstance(actions, Discrete) or floats and len(actions.shape) == 1):
            fail(f"--env-id {env_id}: acts by {actions}; need Discrete, or a Box of floats of "
                 f"one dimension")  # fmt: skip
        self.action_space, self.gamma, self.clip_actions = actions, gamma, clip_actions
        self.obs = np.zeros((num_envs, *obs.shape))

    def reset(self, seed):
        """Start N new episodes, deterministic given `seed` (an int) and the actions."""
        for n, env in enumerate(self.envs):
            self.obs[n], _ = env.reset(seed=derive_seed(seed, n))
        self._check(self.obs)
        self.returns, self.discounted_returns = np.zeros((2, len(self.envs)))
        self.lengths, self.ended = np.zeros(len(self.envs), int), np.zeros(len(self.envs), bool)

    def step(self, actions):
        """Step every environment with actions (N,) or (N, action size).

        Returns (N,) rewards; (N,) terminated; (N,) truncated, the time limit met; a list of (n,
        last observation) of those truncated; and a list of the finished episodes' (return,
        length). Raises FloatingPointError for an observation or reward that is not finite.
        """
        if isinstance(self.action_space, Discrete):
            actions = (actions + self.action_space.start).tolist()
        elif self.clip_actions:
            # not in the paper: as in Baselines, and not in log π(a|s) (--no-clip-actions)
            actions = actions.clip(self.action_space.low, self.action_space.high)
        rewards = np.zeros(len(actions))
        terminated, truncated = np.zeros((2, len(actions)), dtype=bool)
        final_obs, finished = [], []
        for n, env in enumerate(self.envs):
            self.obs[n], rewards[n], terminated[n], truncated[n], _ = env.step(actions[n])
        self._check(rewards, self.obs)  # before a reset hides it
        self.returns += rewards
        self.lengths += 1
        self.discounted_returns = self.discounted_returns * (self.gamma * ~self.ended) + rewards
        self.ended = terminated | truncated
        for n in np.flatnonzero(self.ended).tolist():
            finished.append((self.returns[n].item(), self.lengths[n].item()))
            self.returns[n] = self.lengths[n] = 0
            if truncated[n]:
                final_obs.append((n, self.obs[n].copy()))
            self.obs[n], _ = self.envs[n].reset()
            self._check(self.obs[n])
        return rewards, terminated, truncated, final_obs, finished

    def _check(self, *seen):
        if not all(np.isfinite(x).all() for x in seen):
            raise FloatingPointError(f"the environment gave {' and '.join(map(str, seen))}")


# ------------------------------------------------------------------------------------- Records

PUBLISHED_BY = "OpenAI's Baselines, 1 million steps, older versions of the tasks"
PUBLISHED_SCORES = {  # Baselines' TRPO; the paper's Swimmer, Hopper and Walker are earlier tasks
    "HalfCheetah-v5": 1289.7, "Hopper-v5": 1912.9, "InvertedDoublePendulum-v5": 6731.6,
    "InvertedPendulum-v5": 905.1, "Reacher-v5": -4.82, "Swimmer-v5": 95.0, "Walker2d-v5": 2342.6,
}  # fmt: skip


class Run(AbstractContextManager):
    """A run in its directory: config.json, episodes.csv, TensorBoard's events, checkpoint.pt,
    best.pt, learning_curve.png. As a context manager it reports in one line how the run ended.

    learned:       {name: what training changes}, each with a state_dict(), among them "net"
    episodes:      (step, return, length, seconds) of each finished episode; step: where it ended
    at_checkpoint: whether the run was saved just now; all that is random then starts from `seed`
    """

    def __init__(self, args, checkpoint, **learned):
        self.args, self.learned, self.run_dir = args, learned, Path(args.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=checkpoint is not None)
        names = ("step", "episodes", "best", "seconds")
        start = restore(checkpoint, *names, **learned) if checkpoint else (0, [], -inf, 0.0)
        self.step, self.episodes, self.best, seconds = start
        self.saved = self.step  # where --resume would go on
        self.last_time = self.last_picture = time.time()
        self.started = self.last_time - seconds

        device = next(learned["net"].parameters()).device
        libraries = ("torch", "gymnasium", "ale_py", "mujoco", "Box2D", "numpy", "matplotlib")
        config = {
            "script": SCRIPT,
            "sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": {n: sys.modules[n].__version__ for n in libraries if n in sys.modules},
            "settings": vars(args),
        }
        write_whole(self.run_dir / "config.json", json.dumps(config, indent=2).encode())
        self.csv = open(self.run_dir / "episodes.csv", "w")  # noqa: SIM115
        self._write([("step", "return", "length", "seconds"), *self.episodes])
        # not SummaryWriter, whose thread would report a full disk on its own
        events = self.run_dir / f"events.out.tfevents.{time.time_ns()}"
        self.events = RecordWriter(open(events, "xb"))  # noqa: SIM115
        self.events.write(Event(file_version="brain.Event:2").SerializeToString())
        restart = Event(step=self.step + 1, session_log=SessionLog(status=SessionLog.START))
        self.events.write(restart.SerializeToString())  # TensorBoard drops repeated steps
        num_weights = sum(p.numel() for p in learned["net"].parameters())
        print(f"{args.env_id}: {num_weights:,} weights; {args.num_iterations} iterations of "
              f"{args.num_envs} actors × {args.num_steps} steps, a checkpoint every "
              f"{args.checkpoint_every}; {device}, {args.threads} threads; "
              f"{args.run_dir}")  # fmt: skip
        lines = {"mininterval": 30, "maxinterval": 30, "bar_format": "{percentage:.0f}%{r_bar}\n"}
        style = {} if sys.stdout.isatty() else lines  # without a terminal, a line now and then
        self.bar = tqdm(total=args.num_iterations * args.batch_size, initial=self.step,
                        unit=" steps", file=sys.stdout, **style)  # fmt: skip

    def __exit__(self, kind, error, _):
        for end in (self.bar.close, self.csv.close, self.events.close):
            with suppress(OSError):  # a full disk, reported below
                end()
        if kind is None:
            print(f"finished: {self.step:,} steps, mean of the last 100 episodes {self.score:.1f}, "
                  f"{(time.time() - self.started) / 60:.0f} min, {self.run_dir}")  # fmt: skip
        elif kind is KeyboardInterrupt:
            print(f"interrupted at step {self.step:,}; --resume {self.run_dir} goes on from step "
                  f"{self.saved:,}", file=sys.stderr)  # fmt: skip
            with suppress(OSError):
                self.draw()
            raise SystemExit(130)
        elif issubclass(kind, (FloatingPointError, OSError)):
            fail(f"iteration {self.step // self.args.batch_size + 1}: {error}; any checkpoint in "
                 f"{self.run_dir} is intact", 1)  # fmt: skip

    def iterations(self):
        """Yield the iterations' numbers, from 0 or the checkpoint's on, saving now and then.

        At every checkpoint all that is random is seeded anew, also in a run that goes on: so a
        resumed run is the uninterrupted run, bit for bit.
        """
        first = self.step // self.args.batch_size
        for iteration in range(first, self.args.num_iterations):
            if self.reached(self.args.goal_score):
                break
            self.at_checkpoint = iteration == first or iteration % self.args.checkpoint_every == 0
            if self.at_checkpoint:
                self.save()
                self.seed = derive_seed(self.args.seed, iteration)
                torch.manual_seed(self.seed)
            yield iteration
        self.save()
        self.draw()

    @property
    def score(self):
        """Mean return of the last 100 episodes (fewer at first), the PPO paper's measure."""
        return float(np.mean([row[1] for row in self.episodes[-100:]] or nan))

    def reached(self, goal):
        """Whether 100 episodes have finished and the last 100 average at least `goal`."""
        return goal is not None and len(self.episodes) >= 100 and self.score >= goal

    def log(self, episodes, stats):
        """Record an iteration: (t, return, length) of episodes that ended in it, and scalars."""
        now, step, num_envs = time.time(), self.step + self.args.batch_size, self.args.num_envs
        seconds = round(now - self.started, 1)
        rows = [(self.step + (t + 1) * num_envs, *rest, seconds) for t, *rest in episodes]
        self.episodes += rows
        self._write(rows)
        if episodes and self.reached(self.best):
            self.best = self.score
            self._save("best.pt", net=self.learned["net"].state_dict(), step=step)

        stats["steps_per_second"] = (step - self.step) / (now - self.last_time)
        if self.episodes:
            stats["score"] = self.score
        values = [Summary.Value(tag=name, simple_value=value) for name, value in stats.items()]
        event = Event(wall_time=now, step=step, summary=Summary(value=values))
        self.events.write(event.SerializeToString())
        self.events.flush()
        text = f"episode {len(self.episodes)}, mean of last 100: {self.score:.1f}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.step)
        self.step, self.last_time = step, now

    def _write(self, rows):
        self.csv.writelines(",".join(map(str, row)) + "\n" for row in rows)
        self.csv.flush()

    def save(self):
        """Write checkpoint.pt, and the picture if it is 10 s old."""
        state = {name: part.state_dict() for name, part in self.learned.items()}
        self._save("checkpoint.pt", **state, step=self.step, episodes=self.episodes,
                   seconds=time.time() - self.started)  # fmt: skip
        self.saved = self.step
        if time.time() - self.last_picture > 10:
            self.draw()

    def _save(self, name, **state):
        """Save plain data, with what every checkpoint says of its run."""
        state = {"script": SCRIPT, "settings": vars(self.args), "best": self.best} | state
        buffer = io.BytesIO()  # torch.save to a file would hide the operating system's error
        torch.save(state, buffer)
        write_whole(self.run_dir / name, buffer.getbuffer())

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
        axes.legend(loc="upper left", markerscale=5, framealpha=1)
        figure.savefig(self.run_dir / "learning_curve.png", dpi=120)
        gc.collect()  # a figure's parts refer to each other; figures would pile up
        self.last_picture = time.time()


def write_whole(path, contents):
    """Write bytes beside `path`, then rename: a kill at any moment leaves the old file whole."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_bytes(contents)
    os.replace(beside, path)


def newest_run():
    """The folder in runs/ with this script's newest checkpoint."""
    found = [path for path in Path("runs").glob("*/checkpoint.pt")
             if f'"{SCRIPT}"' in path.with_name("config.json").read_text()]  # fmt: skip
    if not found:
        fail(f"--evaluate: no run of {SCRIPT} in runs/; need its directory")
    return str(max(found, key=os.path.getmtime).parent)


def load_checkpoint(path, flag):
    """What --resume or --evaluate names, and its path. It is plain data: loading runs no code."""
    if flag == "resume":
        path = path / "checkpoint.pt"
    elif path.suffix != ".pt":
        path = path / ("best.pt" if (path / "best.pt").exists() else "checkpoint.pt")
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] == SCRIPT and checkpoint["settings"].keys():
            return checkpoint | {"where": f"--{flag} {path}", "path": path}
        why = f"is {checkpoint['script']}'s"
    except OSError as e:
        why = e.strerror
    except Exception as e:  # whatever torch meets in a file that is cut short or foreign
        why = type(e).__name__
    fail(f"--{flag} {path}: {why}; need a whole checkpoint of {SCRIPT}, of plain data")


def restore(checkpoint, *names, **learned):
    """Load the states of modules and optimizers. Returns the checkpoint's entries of the names."""
    try:
        for name, part in learned.items():
            part.load_state_dict(checkpoint[name])
        return [checkpoint[name] for name in names]
    except (KeyError, RuntimeError, TypeError, ValueError) as e:
        why = f"{checkpoint['where']}: {type(e).__name__} {e}"
        fail(f"{why}; need a whole checkpoint of {SCRIPT}, of this version")


def derive_seed(seed, index):
    """A seed of 31 bits, an int, for an index: an iteration, an environment."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0] >> 1)


# ---------------------------------------------------------------------------------- Evaluation


@torch.no_grad()
def evaluate(args, checkpoint):
    """Play whole episodes with a saved policy. Returns their returns."""
    torch.manual_seed(args.seed)
    displays = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
    if args.render and sys.platform == "linux" and not displays & os.environ.keys():
        fail("--render: no display here; --video records to a file", 1)
    mode = "human" if args.render else "rgb_array"
    rendering = {"render_mode": mode} if args.render or args.video else {}
    envs = Environments(args.env_id, 1, args.gamma, args.clip_actions, **rendering)
    net = ActorCritic(envs.obs.shape[1], envs.action_space, norm_obs=args.norm_obs)
    [step] = restore(checkpoint, "step", net=net)  # the observations' moments too
    try:
        if args.video:
            folder = checkpoint["path"].parent / "videos" / time.strftime("%Y%m%d-%H%M%S")
            envs.envs[0] = RecordVideo(envs.envs[0], folder, lambda k: k < args.episodes,
                                       disable_logger=True)  # fmt: skip
        with warnings.catch_warnings(action="ignore"):  # GLFW's
            envs.reset(args.seed)
    except Exception as e:  # no display, no room
        fail(f"--{'render' if args.render else 'video' if args.video else 'evaluate'}: {e}", 1)
    recording = f", recording to {folder}" if args.video else ""
    print(f"playing {checkpoint['path']}{recording}", flush=True)
    returns = []
    while len(returns) < args.episodes:
        pi = net.pi(net.normalise(torch.from_numpy(envs.obs)))
        actions = pi.mode if args.deterministic else pi.sample()
        *_, finished = envs.step(actions.numpy())
        for total, length in finished:
            returns.append(total)
            print(f"episode {len(returns)}: return {total:g}, {length} steps", flush=True)
    envs.envs[0].close()
    print(f"{args.env_id}: {np.mean(returns):.1f} ± {np.std(returns):.1f} (mean ± std) over "
          f"{len(returns)} episodes, with the policy of step {step:,}")  # fmt: skip
    return returns


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name
ROWS = {row[0].replace("-", "_"): row for row in SETTINGS if isinstance(row, tuple)}
CHANGEABLE = {  # flags allowed beside --resume or --evaluate
    "resume": {"total_steps", "goal_score", "threads"},
    "evaluate": {"episodes", "deterministic", "render", "video", "seed"},
}


def fail(message, status=2):
    """Print a one-line error and exit (2: bad arguments, 1: failed run)."""
    print(f"{SCRIPT}: error: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(status)


def make_parser(defaults):
    """SETTINGS as flags, which stay unset if not given; --help shows `defaults`."""
    parser = argparse.ArgumentParser(
        usage=f"python {SCRIPT} [FLAG ...]", description=__doc__.splitlines()[0],
        epilog="examples:\n" + __doc__[__doc__.index("  python") :],
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, add_help=False,
    )  # fmt: skip
    parser.add_argument("-h", "--help", action="store_true", help="show this and exit")
    parser.error = lambda message: fail(f"{message}; --help lists all flags")
    for row in SETTINGS:
        if isinstance(row, str):
            add = parser.add_argument_group(row).add_argument
            continue
        flag, _, kind, symbol, words = row
        default = defaults[flag.replace("-", "_")]
        if default is not None and default is not False:
            words += f" [{f'{default:_}' if type(default) is int else default}]"
        if kind is bool:
            add(f"--{flag}", help=words, action=argparse.BooleanOptionalAction)
        elif isinstance(kind, list):
            add(f"--{flag}", help=words, choices=kind)
        else:
            optional = "?" if flag == "evaluate" else None  # without a value: the newest run
            add(f"--{flag}", help=words, type=kind[0], metavar=symbol, nargs=optional)
    return parser


def parse_args(argv=None):
    """The settings, checked, and the checkpoint that --resume or --evaluate names, or None."""
    settings = {name: row[1] for name, row in ROWS.items()}
    given = vars(make_parser(settings).parse_args(argv))
    settings |= TASKS.get(given.get("env_id", settings["env_id"]), {})
    if given.pop("help", False):
        make_parser(settings).print_help()  # the task's own defaults
        raise SystemExit
    for name, value in given.items():
        flag, _, kind, *_ = ROWS[name]
        if isinstance(kind, tuple) and kind[1:]:  # (type, lowest) or (type, lowest, highest)
            low, high = (*kind[1:], inf)[:2]
            if not (low <= value <= high and abs(value) < inf):
                limits = f"at least {low}" if high == inf else f"from {low} to {high}"
                fail(f"--{flag} {value}: need a finite number {limits}")

    checkpoint = None
    job = next((job for job in CHANGEABLE if job in given), None)
    if job is not None:
        for name in sorted(given.keys() - CHANGEABLE[job] - {job}):
            fail(f"--{ROWS[name][0]}: leave it out; --{job} goes by the checkpoint's settings")
        if given[job] is None:
            given[job] = newest_run()
        checkpoint = load_checkpoint(Path(given[job]), job)
        settings |= checkpoint["settings"] | {"run_dir": given[job]}
    elif alone := given.keys() & {"episodes", "deterministic", "render", "video"}:
        fail(f"--{min(alone)} goes with --evaluate RUN_DIR")
    args = argparse.Namespace(**(settings | given))

    args.batch_size = args.num_steps * args.num_envs
    args.num_iterations = args.total_steps // args.batch_size
    if args.render and args.video:
        fail("--render, --video: a window or a recording, not both at once")
    if args.batch_size % args.minibatch_size:
        fail(f"--minibatch-size {args.minibatch_size}: need a divisor of T × N = {args.batch_size}")
    if args.num_iterations == 0:
        fail(f"--total-steps {args.total_steps}: need at least T × N = {args.batch_size}")
    args.checkpoint_every = args.checkpoint_every or max(4, args.num_iterations // 15)
    name = f"{Path(SCRIPT).stem}-{args.env_id.replace('/', '-')}-seed{args.seed}"
    args.run_dir = args.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return args, checkpoint


def main(argv=None):
    """Train or evaluate; `argv` is the command line."""
    try:
        args, checkpoint = parse_args(argv)
        torch.set_num_threads(args.threads)
        if args.evaluate is not None:
            return evaluate(args, checkpoint)
        return train(args, checkpoint)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except FloatingPointError as e:
        fail(e, 1)
    except OSError as e:
        hint = "; need a new --run-dir, or --resume" if isinstance(e, FileExistsError) else ""
        fail(f"{e.filename or args.run_dir}: {e.strerror or e}{hint}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    main()
