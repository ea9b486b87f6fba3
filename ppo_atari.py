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
  python ppo_atari.py --env-id PongNoFrameskip-v4   another game
  python ppo_atari.py --resume RUN_DIR              go on after an interruption
  python ppo_atari.py --evaluate RUN_DIR --render   watch what it learned; --video records it
  torchrun --nproc-per-node 4 ppo_atari.py          on 4 processes; --cuda: on 4 GPUs
  python ppo_atari.py --num-epochs 4 --vf-coef 0.25 --clip-value-loss --anneal learning-rate
                                                    the settings of OpenAI's Baselines
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

# torchrun starts several processes. This one's number, its number on this machine, and how many:
RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

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
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordVideo
from matplotlib.figure import Figure
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings

Count, Seed = Annotated[int, 1, inf], Annotated[int, 0, 2**63 - 1]  # type, lowest, highest
Positive, NonNegative = Annotated[float, 1e-12, inf], Annotated[float, 0, inf]
Fraction = Annotated[float, 0, 1]


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium's id of an Atari game
    seed: Seed = 1  # seed of the network, the actions, the minibatches and the games
    total_steps: Count = 10_000_000  # agent steps of 4 frames, rounded down to whole rollouts

    # Table 5 of the paper, in its order
    num_steps: Count = 128  # T, horizon: steps of each actor in a rollout
    learning_rate: NonNegative = 2.5e-4  # Adam's step size at the start
    num_epochs: Count = 3  # K, passes over a rollout (Baselines: 4)
    minibatch_size: Annotated[int, 2, inf] = 32 * 8  # M, samples in a minibatch
    gamma: Fraction = 0.99  # γ, discount
    gae_lambda: Fraction = 0.95  # λ of GAE (Eq. 11)
    num_envs: Count = 8  # N, number of actors; torchrun's processes share them
    clip_eps: NonNegative = 0.1  # ε, clipping parameter of Eq. 7 at the start
    vf_coef: NonNegative = 1.0  # c1 of Eq. 9; the value loss has no factor ½ (Baselines: 0.25)
    ent_coef: NonNegative = 0.01  # c2 of Eq. 9, weight of the entropy bonus
    # linearly anneal learning rate and ε, the learning rate only (Baselines), or neither
    anneal: Literal["both", "learning-rate", "none"] = "both"

    # Not in the paper: the network is ppo1's, the rest is from OpenAI's Baselines
    network: Literal["nature", "paper"] = "nature"  # of [Mni+15]; "paper": of Sec. 6.4, [Mni+16]
    # standardise advantages over each minibatch (ppo2), over the rollout (ppo1), or not at all
    norm_adv: Literal["minibatch", "rollout", "none"] = "minibatch"
    orthogonal: bool = True  # orthogonal initial weights; the policy's last layer 100 times smaller
    max_grad_norm: NonNegative = 0.5  # clip the gradient's norm at this; 0: do not clip
    adam_eps: Positive = 1e-5  # Adam's ε (PyTorch's default: 1e-8)
    # value loss: the larger of two errors, that of V and that of V clipped to its old value ± ε
    clip_value_loss: bool = False

    # The run
    cuda: bool = False  # train on the GPU
    bf16: bool = False  # bfloat16, except in the two heads: faster on some CPUs, slower on others
    compile: bool | None = None  # use torch.compile; if not given: from 500_000 steps on
    threads: Count = torch.get_num_threads()  # threads of the emulators and of torch
    run_dir: str = ""  # a new directory for the records; if not given: one in runs/
    goal_score: float | None = None  # stop when the last 100 games average this score
    resume: str = ""  # directory of a run: go on with it, with its settings
    evaluate: str = ""  # directory of a run (its best.pt), or a .pt file: play it, do not train
    episodes: Count = 10  # with --evaluate: number of games
    deterministic: bool = False  # with --evaluate: take the most probable action, do not sample
    render: bool = False  # with --evaluate: show a window
    video: bool = False  # with --evaluate: record to RUN_DIR/videos

    def __post_init__(self):
        self.batch_size = self.num_steps * self.num_envs  # T × N
        check(self)
        self.num_iterations = self.total_steps // self.batch_size


# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """Algorithm 1 of the paper. `checkpoint`: what a run to be resumed has saved."""
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    games = Games(args.env_id, args.num_envs // WORLD_SIZE, args.threads, pin_memory=args.cuda)
    net = ActorCritic(games.num_actions, args.network, args.orthogonal, args.bf16).to(device)
    # not in the paper: Baselines' ε for Adam (--adam-eps 1e-8); `update` sets the learning rate
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    batch = make_batch(args.num_steps, len(games.frames), device)
    policy, loss = compile_both(args.cuda) if args.compile else (act, ppo_loss)

    with Run(args, checkpoint, net=net, optimizer=optimizer) as run:
        seed = derive_seed(run.seed, RANK)  # torchrun's processes play games of their own
        torch.manual_seed(seed)
        games.reset(seed)
        for iteration in range(run.iteration, args.num_iterations):  # line 1
            learning_rate, clip_eps = anneal(args, iteration)
            episodes = rollout(games, net, policy, batch)  # lines 2, 3
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 4
            stats = update(loss, net, optimizer, batch, learning_rate, clip_eps, args)  # line 6
            episodes, stop = gather(episodes, run.stop)  # from all of torchrun's processes
            if run.log(episodes, stats) or stop:  # --goal-score is reached, or Ctrl-C
                break


# ------------------------------------------------------------------------------------- Network


class ActorCritic(nn.Module):
    """Policy π(a|s) and value V(s), two linear heads on one convolutional trunk.

    paper:  the network of [Mni+16] (arXiv:1602.01783, Sec. 8), as in Sec. 6.4
    nature: not in the paper: the larger one of [Mni+15] (Nature 518, Methods), as in ppo1
    """

    def __init__(self, num_actions, network="nature", orthogonal=True, bf16=False):
        super().__init__()
        if network == "paper":
            convolutions = [(4, 16, 8, 4), (16, 32, 4, 2)]  # channels in, out, kernel, stride
            flat, hidden = 32 * 9 * 9, 256
        else:
            convolutions = [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
            flat, hidden = 64 * 7 * 7, 512
        layers = [layer for shape in convolutions for layer in (nn.Conv2d(*shape), nn.ReLU())]
        layers.insert(-1, nn.Flatten())  # before the last ReLU: same values, faster backward pass
        self.trunk = nn.Sequential(*layers, nn.Linear(flat, hidden), nn.ReLU())
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
    gumbel = -torch.empty_like(logits).exponential_().log()
    actions = (logits + gumbel).argmax(-1, keepdim=True)  # argmax(logits + Gumbel noise) ~ π
    log_probs = logits.log_softmax(-1).gather(-1, actions)
    return actions.squeeze(-1), log_probs.squeeze(-1), values


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, num_envs, device):
    """Storage for one rollout, reused in every iteration: tensors (T, N), unless noted.

    Frames, actions and log_probs are on `device`; the rest is on the CPU, where `gae` is fastest.
    """
    shape = (num_steps, num_envs)
    return SimpleNamespace(
        # (T, N, 4, 84, 84); channels are last in memory, which makes convolutions fastest
        frames=torch.zeros(*shape, 84, 84, 4, dtype=torch.uint8, device=device).movedim(-1, 2),
        actions=torch.zeros(shape, dtype=torch.int64, device=device),
        log_probs=torch.zeros(shape, device=device),  # log π_θold(a_t|s_t)
        fired=torch.zeros(shape),  # 1 where `Games` pressed FIRE, not the policy
        rewards=torch.zeros(shape),
        terminated=torch.zeros(shape),  # 1 where a life was lost or the game was over
        truncated=torch.zeros(shape),  # 1 where the frame limit ended the game
        # set after the last step:
        values=None,  # V(s_t)
        next_values=None,  # V of what step t led to, before any reset
        advantages=None,  # Â_t
        targets=None,  # V^targ_t
    )


@torch.no_grad()
def rollout(games, net, policy, batch):
    """Run π_θold for T timesteps in N games, filling `batch`.

    policy: `act`, compiled or not; after a lost life `Games` presses FIRE instead. Returns
    (t, score, length) of each game that ended at step t = 0, ..., T - 1.
    """
    num_steps, device, episodes = len(batch.rewards), batch.frames.device, []
    values = torch.zeros(num_steps + 1, len(games.frames), device=device)  # V(s_0), ..., V(s_T)
    last_values = torch.zeros_like(batch.rewards)  # V of the last state before a time limit
    for t in range(num_steps):
        batch.frames[t].copy_(games.frames, non_blocking=True)
        batch.actions[t], batch.log_probs[t], values[t] = policy(net, batch.frames[t])
        batch.fired[t] = torch.from_numpy(games.press_fire)
        actions = batch.actions[t].cpu().numpy()  # waits for the copy of games.frames, too
        rewards, terminated, truncated, last_frames, finished = games.step(actions)
        batch.rewards[t] = torch.from_numpy(rewards).sign()  # not in the paper: [Mni+15]'s clipping
        batch.terminated[t] = torch.from_numpy(terminated)
        batch.truncated[t] = torch.from_numpy(truncated)
        if truncated.any():  # not in the paper: at a time limit, V (Pardo et al. 2018)
            # laid out as batch.frames: for another layout `act` would be compiled again
            last_frames = last_frames.to(device, memory_format=torch.channels_last)
            last_values[t] = policy(net, last_frames)[2].cpu()
        episodes += [(t, *episode) for episode in finished]
    values[num_steps] = policy(net, games.frames.to(device, memory_format=torch.channels_last))[2]
    values = values.cpu()
    batch.values = values[:-1]
    batch.next_values = torch.where(batch.truncated > 0, last_values, values[1:])
    return episodes


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
    """Table 5's step size and clipping ε in iteration 0, 1, ...; α falls from 1 to 0."""
    alpha = 1 - iteration / args.num_iterations
    learning_rate = args.learning_rate * (1 if args.anneal == "none" else alpha)
    return learning_rate, args.clip_eps * (alpha if args.anneal == "both" else 1)


def compile_both(cuda):
    """`act` and `ppo_loss`, compiled; on the GPU as CUDA graphs."""
    print("compiling, which takes about a minute (--no-compile begins at once)", flush=True)
    # deterministic: else torch picks kernels by timing, and the same seed may round differently
    options = {"triton.cudagraphs": cuda, "deterministic": True}
    return [torch.compile(f, options=options, fullgraph=True) for f in (act, ppo_loss)]


def update(loss, net, optimizer, batch, learning_rate, clip_eps, args):
    """K epochs of minibatches on one rollout (Algorithm 1, line 6).

    loss: `ppo_loss`, compiled or not. Returns scalars to log, among them the statistics of
    `ppo_loss`, averaged over the minibatches. Raises FloatingPointError if a statistic is not
    finite.
    """
    device = batch.frames.device
    names = ("frames", "actions", "log_probs", "values", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1).to(device) for name in names}  # (T·N, ...)
    # not in the paper: where `Games` pressed FIRE, the policy's action had no effect, so Â = 0
    # (before standardising, which then makes the mean of all Â 0)
    samples["advantages"] = samples["advantages"] * (1 - batch.fired.flatten().to(device))
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        samples["advantages"] = standardise(samples["advantages"])
    optimizer.param_groups[0]["lr"] = learning_rate
    clip_eps = torch.tensor(clip_eps, device=device)  # a tensor: a new float would recompile
    all_stats = []
    for _ in range(args.num_epochs):
        order = torch.randperm(len(samples["targets"]), device=device)
        for indices in order.split(args.minibatch_size // WORLD_SIZE):
            minibatch = {name: x[indices] for name, x in samples.items()}
            optimizer.zero_grad()  # before the loss: CUDA graphs reuse the gradients' memory
            minus_objective, stats = loss(net, **minibatch, clip_eps=clip_eps, args=args)
            minus_objective.backward()
            average([p.grad for p in net.parameters()])  # over torchrun's processes
            # not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)
            grad_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or inf)
            optimizer.step()
            stats |= {"grad_norm": grad_norm}
            all_stats.append(torch.stack(list(stats.values())))
    means = torch.stack(all_stats).mean(0)
    average([means])
    stats = dict(zip(stats, means.tolist(), strict=True))
    check_finite(**stats)
    # Â = V^targ − V is what V leaves unexplained
    unexplained = (batch.advantages.var() / batch.targets.var()).item()
    return stats | {"explained_variance": 1 - unexplained, "learning_rate": learning_rate}


# ============ The paper's part ends here. What follows runs the environments and keeps records.

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
            use_fire_reset=True, noop_max=noop_max,
            autoreset_mode=AutoresetMode.SAME_STEP,  # no dummy step between two games
            life_loss_info=True,  # a lost life is `terminated`, and the game goes on
            reward_clipping=False,  # the score needs raw rewards
        )  # fmt: skip
        actions = self.envs.ale.get_action_set()
        self.num_actions = len(actions)
        self.has_fire = actions[FIRE] == ale_py.Action.FIRE
        self.frames = torch.zeros(num_envs, 4, 84, 84, dtype=torch.uint8, pin_memory=pin_memory)

    def reset(self, seed):
        """Start N new games, deterministic given `seed` (an int) and the actions."""
        obs, info = self.envs.reset(seed=seed)
        self.frames.copy_(torch.from_numpy(obs))
        self.frame_numbers = info["episode_frame_number"]
        self.scores, self.lengths = np.zeros((2, len(obs)), dtype=np.int64)
        self.press_fire = np.zeros(len(obs), dtype=bool)

    def step(self, actions):
        """Step every game with actions (N,); one that ends starts anew within the step.

        Returns (N,) rewards, raw; (N,) terminated, a life lost or the game over; (N,) truncated,
        the frame limit met; last_frames (N, 4, 84, 84), valid only where a game was truncated, and
        None if none was; a list of the finished games' (score, length in steps).
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
        last_frames = torch.from_numpy(info["final_obs"]) if truncated.any() else None
        return rewards, terminated, truncated, last_frames, finished


def game_settings(env_id):
    """The settings of Gymnasium's task, as AtariVectorEnv's keyword arguments."""
    flag = f"--env-id {env_id}"
    try:
        env = gym.make(env_id)
    except (gym.error.Error, ImportError) as e:
        sys.exit(f"{flag}: {e}")
    if not isinstance(env.unwrapped, ale_py.AtariEnv):
        sys.exit(f"{flag}: need an Atari game, as PongNoFrameskip-v4 (others: ppo_continuous.py)")
    names = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
    settings = {"repeat_action_probability": 0.25} | env.spec.kwargs  # Gymnasium's default
    if (skip := settings.get("frameskip", 4)) not in (1, 4):
        sys.exit(f"{flag}: skips {skip} frames; need 4, as in -NoFrameskip-v4 or ALE/...-v5")
    if other := [name for name in ("mode", "difficulty", "continuous") if settings.get(name)]:
        sys.exit(f"{flag}: {' and '.join(other)} cannot be set here")
    return {name: settings[name] for name in names if settings.get(name) is not None}


class PressFireAtStart(gym.Wrapper):
    """Press FIRE at a game's start, before the no-ops (1 to 30 here), as `Games` does."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        meanings = self.env.unwrapped.get_action_meanings()
        if "FIRE" in meanings:
            obs, _, _, _, info = self.env.step(meanings.index("FIRE"))
        return obs, info


def make_scalar_env(env_id, render_mode=None, noop_max=30):
    """One game that can be shown and recorded; (4, 84, 84) frames, the same as those of `Games`."""
    env = PressFireAtStart(gym.make(env_id, frameskip=1, render_mode=render_mode))
    if env.unwrapped.get_action_meanings()[0] != "NOOP":  # Backgammon and Video Checkers have none
        noop_max = 0
    env = AtariPreprocessing(env, noop_max=noop_max, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


def check_finite(**values):
    """Raise FloatingPointError if one of these numbers or arrays is not finite."""
    for name, value in values.items():
        value = np.asarray(value)
        if not np.isfinite(value).all():
            raise FloatingPointError(f"{name} is {value[~np.isfinite(value)][0]}")


# ------------------------------------------------------------------------------------- Records

PUBLISHED_BY = "PPO paper (10M steps)"
PUBLISHED_SCORES = {  # Table 6: PPO's mean of the last 100 games
    "BeamRiderNoFrameskip-v4": 1590.0, "BreakoutNoFrameskip-v4": 274.8,
    "PongNoFrameskip-v4": 20.7, "QbertNoFrameskip-v4": 14293.3, "SeaquestNoFrameskip-v4": 1204.5,
    "SpaceInvadersNoFrameskip-v4": 942.5,
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
    """Play whole games with a saved policy. Returns the score of each."""
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    if args.render:
        need_display()
    env = make_scalar_env(args.env_id, "human" if args.render else "rgb_array")
    if args.video:
        folder = f"{args.run_dir}/videos/{time.strftime('%Y%m%d-%H%M%S')}"
        env = RecordVideo(env, folder, lambda game: True, fps=15, disable_logger=True)
        print(f"recording to {folder}")
    meanings = env.unwrapped.get_action_meanings()
    net = ActorCritic(len(meanings), args.network, bf16=args.bf16).to(device)
    net.load_state_dict(checkpoint["net"])
    scores = []
    for game in range(args.episodes):
        obs, info = env.reset(seed=args.seed if game == 0 else None)
        score, length, lives, done = 0.0, 0, info["lives"], False
        while not done:
            frames = torch.from_numpy(obs[None]).to(device)
            action = net(frames)[0].argmax() if args.deterministic else act(net, frames)[0]
            if info["lives"] < lives and meanings[FIRE] == "FIRE":  # as in training
                action = FIRE
            lives = info["lives"]
            obs, reward, terminated, truncated, info = env.step(int(action))
            score, length, done = score + reward, length + 1, terminated or truncated
        scores.append(score)
        print(f"game {game + 1}: score {score:g}, {length} steps", flush=True)
    env.close()
    print(f"{args.env_id}: {np.mean(scores):.5g} ± {np.std(scores):.2g} (mean ± std) over "
          f"{len(scores)} games, with the policy of step {checkpoint['step']:,}")  # fmt: skip
    return scores


def need_display():
    """Exit if no window can be opened here."""
    import pygame  # which draws most tasks' windows

    pygame.display.init()
    if pygame.display.get_driver() == "offscreen" and "SDL_VIDEODRIVER" not in os.environ:
        sys.exit("--render: there is no display; --video records to a file")


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name
MAY_CHANGE = {  # settings that may differ from the checkpoint's
    "resume": {"total_steps", "goal_score", "cuda", "compile", "threads"},
    "evaluate": {"seed", "episodes", "deterministic", "render", "video", "cuda", "threads"},
}


def first_flags(env_id: str = Args.env_id, resume: str = "", evaluate: str = ""):
    """The flags on which the defaults of the others depend."""
    return env_id, resume, evaluate


def parse_args(argv=None):
    """The settings, and the checkpoint that --resume or --evaluate names, or None."""
    style = {"args": argv, "description": __doc__, "config": (tyro.conf.DisallowNone,)}
    first, _ = tyro.cli(first_flags, **style, return_unknown_args=True, add_help=False)
    _, resume, evaluate = first
    if resume and evaluate:
        sys.exit("--resume, --evaluate: use one of them, not both")
    if not (resume or evaluate):
        return tyro.cli(Args, **style, default=Args()), None
    job = "resume" if resume else "evaluate"
    checkpoint = load_checkpoint(Path(resume or evaluate), best=job == "evaluate")
    if resume and "episodes" not in checkpoint:
        sys.exit(f"--resume {resume}: holds only a policy; name the directory of the run")
    names = {field.name for field in fields(Args)}  # an older version may have had others
    saved = Args(**{name: value for name, value in checkpoint["settings"].items()
                    if name in names and value is not None})  # fmt: skip
    saved.cuda = saved.cuda and job == "resume"  # --evaluate plays on the CPU unless told to
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


# torchrun's processes divide N and M among themselves and average their gradients. Each
# standardises the advantages of its own part, as in Baselines.


def average(tensors):
    """Replace tensors by their means over the processes."""
    if WORLD_SIZE > 1:
        for x in tensors:
            dist.all_reduce(x.div_(WORLD_SIZE))


def gather(episodes, stop):
    """The episodes of all processes, by the step at which they ended; the largest `stop`."""
    everyone = [(episodes, stop)] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(everyone, (episodes, stop))
    episodes = sorted(sum((episodes for episodes, _ in everyone), []), key=lambda row: row[0])
    return episodes, max(stop for _, stop in everyone)


def main(argv=None):
    """Train or evaluate; `argv` is the command line."""
    args, checkpoint = parse_args(argv)
    if args.num_envs % WORLD_SIZE or args.minibatch_size % WORLD_SIZE:
        sys.exit(f"--num-envs, --minibatch-size: need multiples of the {WORLD_SIZE} processes")
    if args.minibatch_size < 2 * WORLD_SIZE:
        sys.exit(f"--minibatch-size: need 2 samples or more for each of {WORLD_SIZE} processes")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
    torch.set_num_threads(args.threads)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.cuda and gpus <= LOCAL_RANK:
        sys.exit(f"--cuda: torch {torch.__version__} finds {gpus} usable GPUs, and this process "
                 f"needs number {LOCAL_RANK}; --no-cuda runs on the CPU")  # fmt: skip
    if gpus and not args.cuda and not args.evaluate and RANK == 0:
        print("a GPU is here: --cuda uses it")
    if args.cuda:
        torch.cuda.set_device(LOCAL_RANK)
        torch.set_float32_matmul_precision("high")  # TF32, as cuDNN's convolutions use anyway
        torch.backends.cudnn.deterministic = True  # the same seed, the same run
    try:
        if args.evaluate:
            return evaluate(args, checkpoint)
        args.compile = choose_compile(args)
        if WORLD_SIZE > 1:
            dist.init_process_group("nccl" if args.cuda else "gloo")
        if RANK > 0:  # only the records of process 0 are kept
            scratch = tempfile.TemporaryDirectory()
            args.run_dir, sys.stdout = f"{scratch.name}/run", open(os.devnull, "w")  # noqa: SIM115
        train(args, checkpoint)
    except FloatingPointError as e:
        sys.exit(f"{SCRIPT}: stopped, {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot print γ shows ?
    main()
