"""PPO on Atari games, from pixels (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Algorithm 1  PPO, Actor-Critic Style                                         here
1  for iteration = 1, 2, ... do                                              train
2      for actor = 1, 2, ..., N do                                           all N at each timestep
3          run policy π_θold in the environment for T timesteps              rollout
4          compute advantage estimates Â_1, ..., Â_T                         estimate_advantages
5      end for
6      optimize surrogate L wrt θ, with K epochs and minibatch size M ≤ NT   update
7      θ_old ← θ                                                             rollout acts with θ
8  end for

The defaults are the paper's Table 5, with a larger network (--network paper is that of Sec. 6.4).
Anything that is not in the paper says so, mostly with the flag that turns it off, in brackets.
"Baselines" is OpenAI's ppo2; "ppo1" is the authors' first code.

  python ppo_atari.py [--cuda]                      train on Breakout, on the CPU or the GPU
  python ppo_atari.py --env-id PongNoFrameskip-v4   another game; my_module:My-v0: your own
  python ppo_atari.py --resume RUN_DIR              go on; any flag changes a setting
  python ppo_atari.py --evaluate RUN_DIR --render   watch what it learned; --video: record it
  torchrun --nproc-per-node 4 ppo_atari.py          on 4 processes; --cuda: on 4 GPUs
  python ppo_atari.py --num-epochs 4 --vf-coef 0.25 --clip-value-loss --anneal learning-rate
                                                    the settings of OpenAI's Baselines
"""

import hashlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

# torchrun starts several processes. This one's number, its number on this machine, and how many:
torchrun = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}  # a cluster may set RANK
RANK, LOCAL_RANK = int(torchrun.get("RANK", 0)), int(torchrun.get("LOCAL_RANK", 0))
WORLD_SIZE = int(torchrun.get("WORLD_SIZE", 1))

# before torch loads:
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # idle threads leave the cores to the emulators
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: updates are a fifth faster
if RANK > 0:
    os.environ["TQDM_DISABLE"] = "1"  # only process 0 shows its progress

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from ale_py.vector_env import AtariVectorEnv
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium's id of an Atari game
    seed: int = 1  # seed of the network, the actions, the minibatches and the games
    total_steps: float = 10_000_000  # agent steps of 4 frames, rounded down to whole rollouts

    # Table 5 of the paper, in its order
    num_steps: int = 128  # T, horizon: steps of each actor in a rollout
    learning_rate: float = 2.5e-4  # Adam's step size at the start
    num_epochs: int = 3  # K, passes over a rollout (Baselines: 4)
    minibatch_size: int = 32 * 8  # M, samples in a minibatch
    gamma: float = 0.99  # γ, discount
    gae_lambda: float = 0.95  # λ of GAE (Eq. 11)
    num_envs: int = 8  # N, number of actors; torchrun's processes share them
    clip_eps: float = 0.1  # ε, clipping parameter of Eq. 7 at the start
    vf_coef: float = 1.0  # c1 of Eq. 9; the value loss has no ½ (Baselines: 0.5, with ½)
    ent_coef: float = 0.01  # c2 of Eq. 9, weight of the entropy bonus
    # linearly anneal learning rate and ε, the learning rate only (Baselines), or neither
    anneal: Literal["both", "learning-rate", "none"] = "both"

    # Not in the paper: the network is ppo1's, the rest is from OpenAI's Baselines
    network: Literal["nature", "paper"] = "nature"  # of [Mni+15]; "paper": of Sec. 6.4, [Mni+16]
    # standardise advantages over each minibatch (ppo2), over the rollout (ppo1), or not at all
    norm_adv: Literal["minibatch", "rollout", "none"] = "minibatch"
    orthogonal: bool = True  # orthogonal initial weights; the policy's last layer 100 times smaller
    max_grad_norm: float = 0.5  # clip the gradient's norm at this; 0: do not clip
    adam_eps: float = 1e-5  # Adam's ε (PyTorch's default: 1e-8)
    # value loss: the larger of two errors, that of V and that of V clipped to its old value ± ε
    clip_value_loss: bool = False

    # The run
    cuda: bool = False  # train on the GPU
    bf16: bool = False  # bfloat16, except in the two heads: faster on some CPUs, slower on others
    cuda_graphs: bool = True  # with --cuda: policy and gradient as CUDA graphs; off to debug them
    threads: int = torch.get_num_threads()  # threads of the emulators and of torch (torchrun: 1)
    run_dir: str = ""  # a new or empty directory for the records; if not given: one in runs/
    goal_score: float | None = None  # stop once the last 100 games average this or more
    eval_every: float = 0  # every so many steps log the score of --episodes, deterministic
    resume: str = ""  # directory of a run: go on with it, with its settings
    evaluate: str = ""  # directory of a run (its best.pt), or a .pt file: play it, do not train
    episodes: int = 10  # with --evaluate, --eval-every: number of games
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
        counts = {"seed": 0, "minibatch_size": 2 * WORLD_SIZE}  # the others: 1
        low = counts.get(field.name, 1) if field.type is int else 0
        high = 1 if field.name in ("gamma", "gae_lambda") else inf
        flag, value = "--" + field.name.replace("_", "-"), getattr(args, field.name)
        if field.type in (int, float) and not (low <= value <= high and isfinite(value)):
            raise ValueError(f"{flag} {value}: need a number from {low} to {high}")
    if args.batch_size % args.minibatch_size:
        raise ValueError(f"--minibatch-size: need a divisor of T × N = {args.batch_size}")
    if args.num_envs % WORLD_SIZE or args.minibatch_size % WORLD_SIZE:
        raise ValueError(f"--num-envs, --minibatch-size: need multiples of {WORLD_SIZE} processes")
    if args.total_steps < args.batch_size:
        raise ValueError(f"--total-steps: need at least T × N = {args.batch_size}")
    if args.render and args.video:
        raise ValueError("--render, --video: choose one")
    if not args.evaluate and (args.render or args.video or args.deterministic):
        raise ValueError("--render, --video, --deterministic: add --evaluate RUN_DIR")


# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """Algorithm 1. `checkpoint`: what a run to be resumed has saved. Returns the Run;
    its `stop` tells whether a signal ended it early."""
    device = choose_device(args)
    act_fn, backpropagate_fn = act, backpropagate
    if args.cuda and args.cuda_graphs:
        act_fn, backpropagate_fn = Recorded(act), Recorded(backpropagate)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:  # what is open in it is closed in the end, or after an error
        games = Games(args.env_id, args.num_envs // WORLD_SIZE, args.threads, pin_memory=args.cuda)
        stack.callback(games.envs.close)
        net = ActorCritic(games.num_actions, args.network, args.orthogonal, args.bf16).to(device)
        # not in the paper: Baselines' ε for Adam (--adam-eps 1e-8); `update` sets the learning rate
        optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
        run = Run(args, checkpoint, net=net, optimizer=optimizer)
        stack.callback(run.close)
        seed = derive_seed(run.seed, RANK)  # torchrun's processes play games of their own
        torch.manual_seed(seed)
        games.reset(seed)
        for iteration in range(run.iteration, args.num_iterations):  # line 1
            learning_rate, clip_eps = anneal(args, iteration)
            batch, episodes = rollout(games, net, act_fn, args.num_steps)  # lines 2, 3
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 4
            stats = update(backpropagate_fn, net, optimizer, batch,  # line 6
                           learning_rate, clip_eps, args)  # fmt: skip
            episodes, stop = gather(episodes, run.stop)  # of all of torchrun's processes
            if run.log(episodes, stats) or stop:  # the goal is reached, or a signal asks to stop
                break
        run.save()
    return run


# ------------------------------------------------------------------------------------- Network

STACK = 4  # images in an observation


class ActorCritic(nn.Module):
    """Policy π(a|s) and value V(s), two linear heads on one convolutional trunk.

    paper:  the network of [Mni+16] (arXiv:1602.01783, Sec. 8), as in Sec. 6.4
    nature: not in the paper: the larger one of [Mni+15] (Nature 518, Methods), as in ppo1
    """

    def __init__(self, num_actions, network="nature", orthogonal=True, bf16=False):
        super().__init__()
        # Flatten before the last convolution's ReLU: same values, faster backward pass
        if network == "paper":
            self.trunk = nn.Sequential(
                nn.Conv2d(STACK, 16, 8, stride=4), nn.ReLU(),  # 84 × 84 -> 20 × 20
                nn.Conv2d(16, 32, 4, stride=2), nn.Flatten(), nn.ReLU(),  # -> 9 × 9
                nn.Linear(32 * 9 * 9, 256), nn.ReLU())  # fmt: skip
        else:
            self.trunk = nn.Sequential(
                nn.Conv2d(STACK, 32, 8, stride=4), nn.ReLU(),  # 84 × 84 -> 20 × 20
                nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),  # -> 9 × 9
                nn.Conv2d(64, 64, 3, stride=1), nn.Flatten(), nn.ReLU(),  # -> 7 × 7
                nn.Linear(64 * 7 * 7, 512), nn.ReLU())  # fmt: skip
        hidden = self.trunk[-2].out_features
        self.policy_head = nn.Linear(hidden, num_actions)
        self.value_head = nn.Linear(hidden, 1)
        self.bf16 = bf16
        if orthogonal:  # not in the paper: Baselines' initialisation (--no-orthogonal)
            for layer in self.trunk:
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    layer_init(layer, gain=2**0.5)
            layer_init(self.policy_head, gain=0.01)
            layer_init(self.value_head, gain=1.0)
        self.to(memory_format=torch.channels_last)  # as the frames are

    def forward(self, frames):
        """frames (B, 4, 84, 84) uint8 -> logits (B, number of actions), values (B,), float32."""
        x = frames.to(torch.bfloat16 if self.bf16 else torch.float32)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x.mul_(1 / 255))  # not in the paper: pixels scaled to [0, 1]
        x = x.float()  # the heads stay float32 under --bf16
        return self.policy_head(x), self.value_head(x).squeeze(-1)


def layer_init(layer, gain):
    """Give a layer orthogonal weights and zero biases."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)


def act(net, frames):
    """Sample a ~ π(·|s) for frames (B, 4, 84, 84). Returns a, log π(a|s) and V(s), each (B,)."""
    logits, values = net(frames)
    # written out, since torch.distributions takes several times as long for so few numbers
    gumbel = -torch.empty_like(logits).exponential_().log()
    actions = (logits + gumbel).argmax(-1, keepdim=True)  # argmax(logits + Gumbel noise) ~ π
    log_probs = logits.log_softmax(-1).gather(-1, actions)
    return actions.squeeze(-1), log_probs.squeeze(-1), values


# ------------------------------------------------------------------------------------- Rollout


@torch.no_grad()
def rollout(games, net, act_fn, num_steps):
    """Run π_θold for T timesteps in N games.

    act_fn: `act`, or a recording of it; after a lost life `Games` presses FIRE instead of the
    sampled action. Returns the batch of T × N samples, and (t, score, length) of each game that
    ended at step t = 0, ..., T - 1.
    """
    shape, device = (num_steps, len(games.frames)), next(net.parameters()).device
    batch = SimpleNamespace(
        # (T, N, 4, 84, 84); channels are last in memory, which makes convolutions fastest
        frames=torch.empty(*shape, 84, 84, STACK, dtype=torch.uint8, device=device).movedim(-1, 2),
        actions=torch.empty(shape, dtype=torch.int64, device=device),  # (T, N), like all below
        log_probs=torch.empty(shape, device=device),  # log π_θold(a_t|s_t)
        # on the CPU, where `gae` is fastest:
        fired=torch.empty(shape),  # 1 where `Games` pressed FIRE, not the policy
        rewards=torch.empty(shape),
        terminated=torch.empty(shape),  # 1 where a life was lost or the game was over
    )
    values = torch.empty(num_steps + 1, shape[1], device=device)  # V(s_0), ..., V(s_T)
    episodes = []
    for t in range(num_steps):
        batch.frames[t].copy_(games.frames, non_blocking=True)
        batch.actions[t], batch.log_probs[t], values[t] = act_fn(net, frames=batch.frames[t])
        batch.fired[t] = torch.from_numpy(games.press_fire)
        actions = batch.actions[t].cpu().numpy()  # waits for the copy of games.frames, too
        rewards, terminated, finished = games.step(actions)
        batch.rewards[t] = torch.from_numpy(rewards).sign()  # not in the paper: [Mni+15]'s clipping
        batch.terminated[t] = torch.from_numpy(terminated)
        episodes += [(t, *episode) for episode in finished]
    # V(s_T), by act_fn since it is fast. After a game's end V(s_{t+1}) is the next game's: `gae`
    # does not use it
    frames = games.frames.to(device, memory_format=torch.channels_last)
    values[num_steps] = act_fn(net, frames=frames)[2]
    values = values.cpu()
    batch.values, batch.next_values = values[:-1], values[1:]  # V(s_t), V(s_{t+1})
    return batch, episodes


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
    truncated = torch.zeros_like(batch.terminated)  # a game cut off at 27,000 steps counts as over
    batch.advantages = gae(batch.rewards, batch.values, batch.next_values, batch.terminated,
                           truncated, gamma, gae_lambda)  # fmt: skip
    batch.targets = batch.advantages + batch.values  # V^targ; the PPO paper leaves it open
    # not in the paper: where `Games` pressed FIRE, the policy's action had no effect, so Â = 0
    # (standardising makes it the same for all of them, −mean/std)
    batch.advantages = batch.advantages * (1 - batch.fired)


def standardise(advantages):
    """Shift and scale to mean 0 and std 1. Not in the paper: Baselines' (--norm-adv none)"""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


# -------------------------------------------------------------------------------------- Update


def ppo_loss(net, frames, actions, log_probs, values, advantages, targets, clip_eps, args):
    """The loss on a minibatch, Eq. 9 with a minus sign, and the minibatch's statistics.

    The tensors have M rows; log_probs, log π(a|s), and values, V(s), are those of θ_old.
    """
    if args.norm_adv == "minibatch":  # not in the paper (--norm-adv none)
        advantages = standardise(advantages)

    logits, new_values = net(frames)
    log_pi = logits.log_softmax(-1)
    log_ratio = log_pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - log_probs
    ratio = log_ratio.exp()  # r_t(θ) = π_θ(a|s) / π_θold(a|s), Eq. 6
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    l_clip = torch.min(ratio * advantages, clipped * advantages).mean()  # Eq. 7
    value_errors = (new_values - targets).square()
    if args.clip_value_loss:  # not in the paper: Baselines', off by default
        clipped_values = values + (new_values - values).clamp(-clip_eps, clip_eps)
        value_errors = torch.max(value_errors, (clipped_values - targets).square())
    l_vf = value_errors.mean()  # without ½, as in the paper
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()  # S[π_θ]
    l_total = l_clip - args.vf_coef * l_vf + args.ent_coef * entropy  # Eq. 9

    # KL(π_θold ‖ π_θ), estimated as k3 of joschu.net/blog/kl-approx
    approx_kl = (ratio - 1 - log_ratio).mean()
    clip_fraction = ((ratio - 1).abs() > clip_eps).float().mean()
    stats = {"policy_loss": -l_clip, "value_loss": l_vf, "entropy": entropy,
             "approx_kl": approx_kl, "clip_fraction": clip_fraction}  # fmt: skip
    return -l_total, {name: x.detach() for name, x in stats.items()}


def anneal(args, iteration):
    """Table 5's step size and clipping ε in iteration 0, 1, ...; α falls from 1 towards 0."""
    alpha = 1 - iteration / args.num_iterations
    learning_rate = args.learning_rate * (1 if args.anneal == "none" else alpha)
    return learning_rate, args.clip_eps * (alpha if args.anneal == "both" else 1)


def backpropagate(net, args, **tensors):
    """Compute the gradient of `ppo_loss` on some samples. Returns its statistics."""
    net.zero_grad()
    loss, stats = ppo_loss(net, **tensors, args=args)
    loss.backward()
    return stats


def update(backpropagate_fn, net, optimizer, batch, learning_rate, clip_eps, args):
    """K epochs of minibatches on one rollout (Algorithm 1, line 6).

    backpropagate_fn: `backpropagate`, or a recording of it, in which only tensors can change.
    Returns scalars to log, among them the statistics of `ppo_loss`, averaged over the minibatches.
    Raises FloatingPointError if one is not finite.
    """
    device = batch.frames.device
    names = ("frames", "actions", "log_probs", "values", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1).to(device) for name in names}  # (T·N, ...)
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        samples["advantages"] = standardise(samples["advantages"])
    optimizer.param_groups[0]["lr"] = learning_rate
    eps = torch.tensor(clip_eps, device=device)
    all_stats = []
    for _ in range(args.num_epochs):
        order = torch.randperm(len(samples["targets"]), device=device)
        for indices in order.split(args.minibatch_size // WORLD_SIZE):
            minibatch = {name: take(x, indices) for name, x in samples.items()}
            stats = backpropagate_fn(net, args, **minibatch, clip_eps=eps)
            average([p.grad for p in net.parameters()])  # over torchrun's processes
            # not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)
            grad_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or inf)
            optimizer.step()
            stats = stats | {"grad_norm": grad_norm}
            all_stats.append(torch.stack(list(stats.values())))
    means = torch.stack(all_stats).mean(0)
    average([means])
    stats = dict(zip(stats, means.tolist(), strict=True))
    check_finite(**stats)
    unexplained = (batch.targets - batch.values).var() / batch.targets.var()
    return stats | {"explained_variance": 1 - unexplained.item(), "learning_rate": learning_rate,
                    "clip_eps": clip_eps}  # fmt: skip


# ============ The paper's part ends here. What follows is speed, environments and records.

# --------------------------------------------------------------------------------------- Speed


def take(x, indices):
    """x[indices]. Frames are copied in the order of their memory, which is 20 times as fast."""
    return x[indices] if x.ndim < 4 else x.movedim(1, -1).index_select(0, indices).movedim(-1, 1)


class Recorded:
    """A function as a CUDA graph: the GPU gets all its operations at once, instead of one by one
    from Python. The results are the same, bit for bit.

    The first call runs the function, and the second records it. From then on, a call copies its
    tensors to where the recorded ones lie, and repeats the operations, without Python: numbers
    (those in args, too), `if` and `print` stay as they were. What changes must be a tensor on the
    GPU, passed by name, as clip_eps is. The next call overwrites the results.
    """

    def __init__(self, function):
        self.function, self.tensors, self.graph = function, None, None

    def __call__(self, *fixed, **tensors):
        if self.tensors is None:
            self.tensors = {name: x.clone() for name, x in tensors.items()}
            return self.function(*fixed, **tensors)
        for name, x in tensors.items():
            self.tensors[name].copy_(x)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(self.graph):
                    self.results = self.function(*fixed, **self.tensors)
            except RuntimeError as e:
                e.add_note("what copies to the CPU cannot be recorded: --no-cuda-graphs runs it")
                raise
        self.graph.replay()
        return self.results


# --------------------------------------------------------------------------------- Environment

FIRE = 1  # its index in every action set with NOOP and FIRE


class Games:
    """N games on C++ threads, preprocessed as in [Mni+15]; none of this is in the PPO paper.

    Each action is repeated for 4 frames. The pixelwise maximum of the last two becomes one grey
    84 × 84 image; an observation is the last 4 images. A game starts with FIRE and fewer than 30
    no-ops. A lost life counts as terminated, although the game goes on. The next action is then
    FIRE, because some games wait for it; in games without FIRE nothing is pressed.

    frames:     (N, 4, 84, 84) uint8, what the agents see now, the newest image last
    press_fire: (N,) bool, where the next action will be FIRE
    """

    def __init__(self, env_id, num_envs, threads, pin_memory=False, noop_max=30):
        self.envs = AtariVectorEnv(
            **game_settings(env_id), num_envs=num_envs, num_threads=min(threads, num_envs),
            stack_num=STACK, use_fire_reset=True, noop_max=noop_max,
            autoreset_mode=AutoresetMode.SAME_STEP,  # no dummy step between two games
            life_loss_info=True,  # a lost life is `terminated`, and the game goes on
            reward_clipping=False,  # the score needs raw rewards
        )  # fmt: skip
        actions = self.envs.ale.get_action_set()
        self.num_actions = len(actions)
        self.has_fire = actions[FIRE] == ale_py.Action.FIRE
        self.frames = torch.zeros(num_envs, STACK, 84, 84, dtype=torch.uint8, pin_memory=pin_memory)

    def reset(self, seed):
        """Start N new games, deterministic given `seed` (an int) and the actions."""
        obs, info = self.envs.reset(seed=seed)
        self.frames.copy_(torch.from_numpy(obs))
        self.frame_numbers = info["episode_frame_number"]
        self.scores, self.lengths = np.zeros((2, len(obs)), dtype=np.int64)
        self.press_fire = np.zeros(len(obs), dtype=bool)

    def step(self, actions):
        """Step every game with actions (N,); one that ends starts anew within the step.

        Returns (N,) rewards, raw; (N,) terminated, a life lost or the game over; a list of the
        finished games' (score, length in steps).
        """
        actions = np.where(self.press_fire, FIRE, actions)
        obs, rewards, terminated, truncated, info = self.envs.step(actions)
        self.frames.copy_(torch.from_numpy(obs))
        self.scores += rewards
        self.lengths += 1
        game_over = info["episode_frame_number"] <= self.frame_numbers  # rises within a game
        finished = [(int(self.scores[n]), int(self.lengths[n])) for n in np.flatnonzero(game_over)]
        self.scores[game_over] = self.lengths[game_over] = 0
        self.frame_numbers = info["episode_frame_number"]
        self.press_fire = terminated & ~game_over & self.has_fire  # not in the paper
        return rewards, terminated | truncated, finished


def game_settings(env_id):
    """The settings of Gymnasium's task, as AtariVectorEnv's keyword arguments."""
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError) as e:
        sys.exit(f"--env-id {env_id}: {e}")
    task = {"repeat_action_probability": 0.25, "frameskip": 4} | env.spec.kwargs  # its defaults
    other = any(task.get(name) for name in ("mode", "difficulty", "continuous"))
    if not isinstance(env.unwrapped, ale_py.AtariEnv) or task["frameskip"] not in (1, 4) or other:
        sys.exit(f"--env-id {env_id}: need an Atari game in its usual mode that skips 4 frames, as "
                 "PongNoFrameskip-v4 or ALE/Pong-v5 (other tasks: ppo_continuous.py)")  # fmt: skip
    names = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
    return {name: task[name] for name in names if task.get(name) is not None}


def make_env(args, **rendering):
    """One game that can be shown and recorded; (4, 84, 84) frames, as those of `Games`."""
    env = gym.make(args.env_id, frameskip=1, **rendering)
    noop_max = 30 if env.unwrapped.get_action_meanings()[0] == "NOOP" else 0  # a few have no no-op
    env = wrappers.AtariPreprocessing(env, noop_max=noop_max)
    env = wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    return wrappers.RecordEpisodeStatistics(env)


def check_finite(**values):
    """Raise FloatingPointError if one of these numbers or arrays is not finite."""
    for name, value in values.items():
        value = np.asarray(value)
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} is {value[~np.isfinite(value)][0]}")


# ------------------------------------------------------------------------------------- Records

LIBRARIES = ("torch", "gymnasium", "ale_py", "numpy")
PUBLISHED_BY = "PPO paper (10M steps)"
PUBLISHED_SCORES = {  # Table 6: PPO's mean of the last 100 games
    "BeamRiderNoFrameskip-v4": 1590.0, "BreakoutNoFrameskip-v4": 274.8,
    "PongNoFrameskip-v4": 20.7, "QbertNoFrameskip-v4": 14293.3, "SeaquestNoFrameskip-v4": 1204.5,
    "SpaceInvadersNoFrameskip-v4": 942.5,
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
    """Play --episodes whole games, then close the task. Yields each score and length.

    sample: whether to sample actions, or else to take the most probable ones
    """
    device, meanings = next(net.parameters()).device, env.unwrapped.get_action_meanings()
    try:
        for k in range(args.episodes):
            (obs, info), length, lives = env.reset(seed=args.seed if k == 0 else None), 0, inf
            while "episode" not in info:  # until the last step
                frames = torch.from_numpy(obs[None]).to(device)
                action = int(act(net, frames)[0] if sample else net(frames)[0].argmax())
                if info["lives"] < lives and meanings[FIRE] == "FIRE":  # a life's first action
                    action = FIRE
                lives = info["lives"]
                obs, _, _, _, info = env.step(action)
                length += 1
            yield float(info["episode"]["r"]), length
    finally:
        env.close()  # which ends a video


def evaluate(args, checkpoint):
    """Play whole games with a saved policy. Returns the score of each."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    display = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")))
    if args.render and not display and sys.platform == "linux":
        sys.exit("--render: there is no display; --video records to a file")
    env = make_env(args, render_mode="human" if args.render else "rgb_array")
    if args.video:
        folder = f"{args.run_dir}/videos/{time.strftime('%Y%m%d-%H%M%S')}"
        # a video stays in memory until it is written, so it ends after 5,000 steps
        env = wrappers.RecordVideo(env, folder, lambda game: True, fps=15, video_length=5000)
        print(f"recording to {folder}")
    net = ActorCritic(env.action_space.n, args.network, bf16=args.bf16).to(choose_device(args))
    net.load_state_dict(checkpoint["net"])
    scores = []
    for score, length in play(net, env, args, sample=not args.deterministic):
        scores.append(score)
        print(f"game {len(scores)}: score {score:g}, {length} steps", flush=True)
    print(f"{args.env_id}: {np.mean(scores):.5g} ± {np.std(scores):.2g} (mean ± std) over "
          f"{len(scores)} games, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return scores


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name


def first_flags(env_id: str = Args.env_id, resume: str = "", evaluate: str = ""):
    """The flags on which the defaults of the others depend."""
    return env_id, resume, evaluate


def parse_args(argv=()):
    """The settings, and the checkpoint that --resume or --evaluate names, or None."""
    style = {"args": argv, "description": __doc__, "config": (tyro.conf.DisallowNone,)}
    first, _ = tyro.cli(first_flags, **style, return_unknown_args=True, add_help=False)
    _, resume, evaluate = first
    if not (resume or evaluate):
        return tyro.cli(Args, **style), None
    checkpoint = load_checkpoint(Path(resume or evaluate), best=bool(evaluate))
    if resume and (evaluate or "episodes" not in checkpoint):
        sys.exit(f"--resume {resume}: need the directory of a run, and no --evaluate")
    old = checkpoint["settings"]  # an older version's may lack some, and have others
    saved = Args(**{f.name: old[f.name] for f in fields(Args) if old.get(f.name) is not None})
    saved.cuda = saved.cuda and bool(resume)  # --evaluate plays on the CPU unless told to
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


# torchrun's processes divide N and M among themselves and average their gradients. Each
# standardises the advantages of its own part, as in Baselines.


def average(tensors):
    """Replace tensors by their means over the processes."""
    if WORLD_SIZE > 1:
        for x in tensors:
            dist.all_reduce(x.div_(WORLD_SIZE))


def gather(episodes, stop):
    """The episodes of all processes, by the step at which they ended; whether one is to stop."""
    everyone = [(episodes, stop)] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(everyone, (episodes, stop))
    episodes = sorted(sum((episodes for episodes, _ in everyone), []), key=lambda row: row[0])
    return episodes, any(stop for _, stop in everyone)


def choose_device(args):
    """The CPU, or with --cuda the GPU, made ready."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not args.cuda:
        if gpus and not args.evaluate:
            print("a GPU is here: --cuda uses it")
        return torch.device("cpu")
    if gpus <= LOCAL_RANK:
        sys.exit(f"--cuda: torch {torch.__version__} finds {gpus} usable GPUs, and this process "
                 f"needs number {LOCAL_RANK}; --no-cuda runs on the CPU")  # fmt: skip
    torch.cuda.set_device(LOCAL_RANK)
    torch.set_float32_matmul_precision("high")  # TF32, as cuDNN's convolutions use anyway
    torch.backends.cudnn.deterministic = True  # the same seed, the same run
    return torch.device("cuda")


def main(argv=()):
    """Train or evaluate; `argv`: the flags of the command line."""
    args, checkpoint = parse_args(argv)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    try:
        if args.evaluate:
            return evaluate(args, checkpoint)
        if WORLD_SIZE > 1:
            dist.init_process_group("nccl" if args.cuda else "gloo")
        if RANK > 0:  # only the records of process 0 are kept
            scratch, sys.stdout = tempfile.TemporaryDirectory(), open(os.devnull, "w")  # noqa: SIM115
            args = replace(args, run_dir=scratch.name, eval_every=0)
        if train(args, checkpoint).stop:
            sys.exit(130)  # not 0, so that `a && b` stops, too
    except FloatingPointError as e:
        sys.exit(f"{SCRIPT}: stopped, {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"  # draw to files; a notebook's backend may not be here
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        main(sys.argv[1:])
