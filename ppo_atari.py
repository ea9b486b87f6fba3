r"""PPO on Atari games, from pixels (Schulman et al. 2017, https://arxiv.org/abs/1707.06347).

Algorithm 1  PPO, Actor-Critic Style                                         here
1  for iteration = 1, 2, ... do                                              train
2      for actor = 1, 2, ..., N do                                           all N at each timestep
3          run policy π_θold in the environment for T timesteps              rollout
4          compute advantage estimates Â_1, ..., Â_T                         estimate_advantages
5      end for
6      optimize surrogate L wrt θ, with K epochs and minibatch size M ≤ NT   update
7      θ_old ← θ                                                             rollout acts with θ
8  end for

The defaults are the paper's Table 5, with a larger network (Sec. 6.4's: --network paper).
Every step that the paper leaves out is marked "not in the paper", with its flag if it has one.
"Baselines" is OpenAI's last ppo2 (its first annealed ε, too), "ppo1" the authors' first code.

  python ppo_atari.py [--cuda]                      train on Breakout, on the CPU or the GPU
  python ppo_atari.py --env-id PongNoFrameskip-v4   another game
  python ppo_atari.py --resume RUN_DIR              go on after an interruption, bit for bit
  python ppo_atari.py --evaluate RUN_DIR --render   watch what it learned; --video records it
  torchrun --nproc-per-node 4 ppo_atari.py          on 4 processes; --cuda: on 4 GPUs
  python ppo_atari.py --num-epochs 4 --vf-coef 0.25 --clip-value-loss --anneal learning-rate
                                                    the settings of OpenAI's Baselines
"""

import argparse
import gc
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from contextlib import AbstractContextManager, suppress
from math import inf, isfinite, nan
from pathlib import Path
from types import SimpleNamespace

# To be set before torch loads. Idle threads spin briefly, then sleep, so that the emulators get the
# cores. Large tensors live in huge pages, which makes an update a fifth faster. Compiled code must
# not depend on timings, or a resumed run would not be the same run.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, RecordVideo
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn
from tqdm import tqdm

# ------------------------------------------------------------------------------------ Settings

# fmt: off
SETTINGS = [  # flag, default, type and range, symbol, meaning
    "task",
    ("env-id", "BreakoutNoFrameskip-v4", (str,), "ID", "Gymnasium's id of an Atari game"),
    ("seed", 1, (int, 0, 2**63 - 1), "SEED", "seeds network, actions, minibatches and games"),
    ("total-steps", 10_000_000, (int, 1), "STEPS", "agent steps, of 4 frames each"),
    "Table 5 of the paper, in its order",
    ("num-steps", 128, (int, 1), "T", "horizon: steps of each actor in a rollout"),
    ("learning-rate", 2.5e-4, (float, 0), "LR", "Adam's step size, times α (see --anneal)"),
    ("num-epochs", 3, (int, 1), "K", "passes over a rollout (Baselines: 4)"),
    ("minibatch-size", 32 * 8, (int, 2), "M", "samples in a minibatch"),
    ("gamma", 0.99, (float, 0, 1), "γ", "discount"),
    ("gae-lambda", 0.95, (float, 0, 1), "λ", "of GAE"),
    ("num-envs", 8, (int, 1), "N", "number of actors"),
    ("clip-eps", 0.1, (float, 0), "ε", "clipping parameter of Eq. 7, times α"),
    ("vf-coef", 1.0, (float, 0), "c1", "of Eq. 9; L^VF has no ½ (Baselines: 0.25)"),
    ("ent-coef", 0.01, (float, 0), "c2", "of Eq. 9"),
    ("anneal", "both", ["both", "learning-rate", "none"], None,
     "what α multiplies as it falls from 1 to 0: step size and ε, or (Baselines) the former alone"),
    "network; the paper's is in Sec. 6.4",
    ("network", "nature", ["nature", "paper"], None,
     "of [Mni+15], as in ppo1, or of [Mni+16], as in Sec. 6.4"),
    "not in the paper; in OpenAI's Baselines",
    ("norm-adv", "minibatch", ["rollout", "minibatch", "none"], None,
     "standardise the advantages of a whole rollout (ppo1) or of each minibatch (ppo2)"),
    ("orthogonal", True, bool, None, "orthogonal initial weights, a small policy head"),
    ("max-grad-norm", 0.5, (float, 0), "NORM", "clip the gradient's norm; 0 disables"),
    ("adam-eps", 1e-5, (float, 0), "EPS", "Adam's ε (PyTorch: 1e-8)"),
    ("clip-value-loss", False, bool, None,
     "L^VF: the larger of V's error and that of V clipped to its old value ± Eq. 7's ε"),
    "machine",
    ("cuda", False, bool, None, "train on the GPU (untested)"),
    ("bf16", False, bool, None, "bfloat16 up to the heads (slower on some CPUs: measure)"),
    ("compile", None, bool, None, "torch.compile [on the CPU, from 500_000 steps on]"),
    ("threads", torch.get_num_threads(), (int, 1, 1024), "THREADS", "of emulators and torch"),
    "run",
    ("run-dir", None, (str,), "DIR", "new directory (default: runs/, then the run's name)"),
    ("checkpoint-every", None, (int, 1), "ITERATIONS",
     "between checkpoints, which restart the games; default: about 15 a run, at least 4 apart"),
    ("goal-score", None, (float, -inf), "SCORE", "stop at this mean of the last 100 games"),
    ("resume", None, (str,), "RUN_DIR", "go on with a run and its settings, of which only "
     "--total-steps (and with it α), --goal-score, --cuda, --compile and --threads can be changed"),
    ("evaluate", None, (str,), "RUN_DIR", "play a run's best policy [of the newest], or a file's"),
    ("episodes", 10, (int, 1), "GAMES", "games to evaluate"),
    ("deterministic", False, bool, None, "take the most probable action instead of sampling"),
    ("render", False, bool, None, "evaluate in a window"),
    ("video", False, bool, None, "evaluate, recording to RUN_DIR/videos"),
]
# fmt: on

# ----------------------------------------------------------------------------------- Algorithm


def train(args, checkpoint=None):
    """Algorithm 1 of the paper. `checkpoint`: that of a run to resume, which Run loads."""
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    # N is divided among torchrun's PROCESSES (without it 1); RANK is this one's number, from 0
    games = Games(args.env_id, args.num_envs // PROCESSES, args.threads, pin_memory=args.cuda)
    net = ActorCritic(games.num_actions, args.network, args.orthogonal, args.bf16).to(device)
    args.seed += RANK << 64  # the same weights everywhere, but games and actions of their own
    # not in the paper: Baselines' ε for Adam (--adam-eps 1e-8); `update` sets the step size
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    batch = make_batch(args.num_steps, len(games.frames), device)

    def policy(frames):  # this and the loss are what --compile compiles
        return act(net, frames)

    def loss(minibatch, clip_eps):
        return ppo_loss(*net(minibatch.frames), minibatch, clip_eps, args.vf_coef, args.ent_coef,
                        args.norm_adv, args.clip_value_loss)  # fmt: skip

    if args.compile:
        mode = "reduce-overhead" if args.cuda else "default"  # "reduce-overhead": CUDA graphs
        policy = torch.compile(policy, mode=mode, fullgraph=True)
        loss = torch.compile(loss, mode=mode, fullgraph=True)

    with Run(args, checkpoint, net=net, optimizer=optimizer) as run:
        for iteration in run.iterations():  # line 1
            if run.at_checkpoint:  # also at the start; not in the paper, for exact resuming
                games.reset(run.seed)  # how often: --checkpoint-every
            learning_rate, clip_eps = anneal(args, iteration)
            episodes = rollout(games, policy, batch)  # lines 2, 3
            estimate_advantages(batch, args.gamma, args.gae_lambda)  # line 4
            stats = update(loss, net, optimizer, batch, learning_rate, clip_eps, args)  # line 6
            run.log(gather(episodes), stats)  # those of all torchrun's processes


# ------------------------------------------------------------------------------------- Network


class ActorCritic(nn.Module):
    """Policy π(a|s) and value V(s), two linear heads on one convolutional trunk.

    nature: not in the paper: that of [Mni+15] (Nature 518, Methods), ppo1's (--network paper)
    paper:  the network of [Mni+16] (arXiv:1602.01783, Sec. 8), smaller, as in Sec. 6.4
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
            for layer in self.modules():
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    gain = {self.policy_head: 0.01, self.value_head: 1.0}.get(layer, 2**0.5)
                    nn.init.orthogonal_(layer.weight, gain)
                    nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)  # as the frames are stored: fastest

    def forward(self, frames):
        """frames (B, 84, 84, 4) uint8 -> logits (B, number of actions), values (B,), float32."""
        x = frames.permute(0, 3, 1, 2).to(torch.bfloat16 if self.bf16 else torch.float32)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = self.trunk(x.mul_(1 / 255))  # not in the paper: pixels scaled to [0, 1]
        x = x.float()  # the heads stay float32 under --bf16
        return self.policy_head(x), self.value_head(x).squeeze(-1)


def act(net, frames):
    """Sample a ~ π(·|s) for frames (B, 84, 84, 4). Returns a, log π(a|s) and V(s), each (B,)."""
    logits, values = net(frames)
    gumbel = -torch.empty_like(logits).exponential_().log()
    actions = (logits + gumbel).argmax(-1, keepdim=True)  # argmax(logits + Gumbel noise) ~ π
    log_probs = logits.log_softmax(-1).gather(-1, actions)
    return actions.squeeze(-1), log_probs.squeeze(-1), values


# ------------------------------------------------------------------------------------- Rollout


def make_batch(num_steps, num_envs, device):
    """Storage for one rollout, reused in every iteration: fields of shape (T, N), unless noted.

    What the network reads and returns is on `device`; the rest on the CPU, where `gae` is fastest.
    """
    shape = (num_steps, num_envs)
    return SimpleNamespace(
        frames=torch.zeros(*shape, 84, 84, 4, dtype=torch.uint8, device=device),
        actions=torch.zeros(shape, dtype=torch.int64, device=device),
        log_probs=torch.zeros(shape, device=device),  # log π_θold(a_t|s_t)
        values=torch.zeros(num_steps + 1, num_envs, device=device),  # V(s_0), ..., V(s_T)
        policy_mask=torch.zeros(shape),  # 0 where FIRE was pressed, whatever the policy chose
        rewards=torch.zeros(shape),
        terminated=torch.zeros(shape),
        truncated=torch.zeros(shape),
        final_values=torch.zeros(shape),  # where truncated: V of the game's last frames
        advantages=None,  # (T, N), Â_t
        targets=None,  # (T, N), V^targ_t
    )


@torch.no_grad()
def rollout(games, policy, batch):
    """Run π_θold for T timesteps in N games, filling `batch` (Algorithm 1, line 3).

    policy(frames) returns what `act` does; after a lost life `Games` presses FIRE instead. Returns
    (t, score, length) of each game that finished at step t = 0, ..., T - 1.
    """
    num_steps, device, episodes = len(batch.rewards), batch.frames.device, []
    for t in range(num_steps):
        batch.frames[t].copy_(games.frames, non_blocking=True)
        batch.actions[t], batch.log_probs[t], batch.values[t] = policy(batch.frames[t])
        batch.policy_mask[t] = torch.from_numpy(~games.press_fire)
        actions = batch.actions[t].cpu().numpy()  # waits for the copy of games.frames, too
        rewards, terminated, truncated, final_obs, finished = games.step(actions)
        batch.rewards[t] = torch.from_numpy(rewards).sign()  # not in the paper: [Mni+15]'s clipping
        batch.terminated[t] = torch.from_numpy(terminated)
        batch.truncated[t] = torch.from_numpy(truncated)
        if truncated.any():  # not in the paper: at a time limit, bootstrap from V
            final_frames = torch.from_numpy(final_obs).permute(0, 2, 3, 1).contiguous()
            batch.final_values[t] = policy(final_frames.to(device))[2].cpu()
        episodes += [(t, *episode) for episode in finished]
    batch.values[num_steps] = policy(games.frames.to(device))[2]
    return episodes


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


def masked_mean(x, mask):
    """Mean of x where the mask, of the same shape, is 1; 0 if it is 0 everywhere."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def standardise(advantages, mask):
    """Shift and scale advantages to mean 0 and std 1 where the mask is 1.

    Not in the paper: Baselines' (--norm-adv none)
    """
    advantages = advantages - masked_mean(advantages, mask)
    return advantages / (masked_mean(advantages.square(), mask).sqrt() + 1e-8)


# -------------------------------------------------------------------------------------- Update


STATS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


def ppo_loss(logits, values, minibatch, clip_eps, vf_coef, ent_coef, norm_adv, clip_value_loss):
    """Minus the objective of Eq. 9 on a minibatch, and the first five of STATS, (5,), detached.

    logits (M, number of actions) and values (M,) are θ's; `minibatch`'s fields, (M, ...), θ_old's.
    Not in the paper: a step at which `Games` pressed FIRE carries no information about π, so it
    counts in L^VF only.
    """
    advantages, mask = minibatch.advantages, minibatch.policy_mask
    if norm_adv == "minibatch":  # not in the paper (--norm-adv none)
        advantages = standardise(advantages, mask)

    log_pi = logits.log_softmax(-1)
    log_prob = log_pi.gather(-1, minibatch.actions.unsqueeze(-1)).squeeze(-1)
    log_ratio = log_prob - minibatch.log_probs  # log π_θ(a|s) - log π_θold(a|s)
    ratio = log_ratio.exp()  # r_t(θ), Eq. 6
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps)
    l_clip = masked_mean(torch.min(ratio * advantages, clipped * advantages), mask)  # Eq. 7
    entropy = masked_mean(-(log_pi.exp() * log_pi).sum(-1), mask)  # S[π_θ]

    value_errors = (values - minibatch.targets).square()
    if clip_value_loss:  # not in the paper: Baselines' (--clip-value-loss)
        clipped_values = minibatch.values + (values - minibatch.values).clamp(-clip_eps, clip_eps)
        value_errors = torch.max(value_errors, (clipped_values - minibatch.targets).square())
    l_vf = value_errors.mean()  # without ½, as in the paper

    l_total = l_clip - vf_coef * l_vf + ent_coef * entropy  # Eq. 9
    # KL(π_θold ‖ π_θ), estimated as k3 of joschu.net/blog/kl-approx
    approx_kl = masked_mean(ratio - 1 - log_ratio, mask)
    clip_fraction = masked_mean(((ratio - 1).abs() > clip_eps).float(), mask)
    return -l_total, torch.stack((-l_clip, l_vf, entropy, approx_kl, clip_fraction)).detach()


def anneal(args, iteration):
    """Table 5's step size and clipping ε in an iteration (from 0), with α falling from 1 to 0."""
    alpha = 1 - iteration / args.num_iterations
    learning_rate = args.learning_rate * (1 if args.anneal == "none" else alpha)
    return learning_rate, args.clip_eps * (alpha if args.anneal == "both" else 1)


def update(loss, net, optimizer, batch, learning_rate, clip_eps, args):
    """K epochs of minibatches on one rollout (Algorithm 1, line 6).

    loss(minibatch, ε) returns what `ppo_loss` does. Returns the scalars to log: STATS averaged over
    minibatches and processes, and this process's explained variance. Raises FloatingPointError if
    one of STATS or the weights' norm is not finite.
    """
    device = batch.frames.device
    names = ("frames", "actions", "log_probs", "policy_mask", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1).to(device) for name in names}  # (T·N, ...)
    samples["values"] = batch.values[:-1].flatten()
    if args.norm_adv == "rollout":  # not in the paper (--norm-adv none)
        samples["advantages"] = standardise(samples["advantages"], samples["policy_mask"])
    optimizer.param_groups[0]["lr"] = learning_rate
    clip_eps = torch.tensor(clip_eps, device=device)  # compiled code then takes any value
    minibatch_stats = []
    for _ in range(args.num_epochs):
        order = torch.randperm(len(samples["targets"]), device=device)
        for indices in order.split(args.minibatch_size // PROCESSES):
            minibatch = {name: x.index_select(0, indices) for name, x in samples.items()}
            optimizer.zero_grad()  # before the loss: CUDA graphs reuse the gradients' memory
            minus_objective, measured = loss(SimpleNamespace(**minibatch), clip_eps)
            minus_objective.backward()
            average([p.grad for p in net.parameters()])  # over torchrun's processes
            # not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)
            grad_norm = nn.utils.clip_grad_norm_(net.parameters(), args.max_grad_norm or inf)
            optimizer.step()
            minibatch_stats.append(torch.cat((measured, grad_norm.view(1))))
    means = torch.stack(minibatch_stats).mean(0)
    average([means])
    stats = dict(zip(STATS, means.tolist(), strict=True))
    stats["weight_norm"] = nn.utils.get_total_norm(list(net.parameters())).item()
    for name, value in stats.items():
        if not isfinite(value):
            raise FloatingPointError(f"{name} is {value}")
    # Â = V^targ − V is what V leaves unexplained
    unexplained = batch.advantages.var(correction=0) / batch.targets.var(correction=0)
    return stats | {"explained_variance": 1 - unexplained.item(), "learning_rate": learning_rate}


# ============ The paper's part ends here. What follows runs the environments and keeps records.

# --------------------------------------------------------------------------------- Environment

FIRE = 1  # its index in every action set with NOOP and FIRE


class Games:
    """N games on C++ threads, preprocessed as in [Mni+15]: an action is repeated for 4 frames, of
    which the last two, by pixelwise maximum, make a grey image of 84 × 84; an observation is the
    last 4 images. A game starts with FIRE and fewer than 30 no-ops. A lost life counts as
    terminated, but the game goes on, and the next action is FIRE, whatever the policy chose, since
    in some games the ball waits for it; a game without FIRE does without. None of this is in the
    PPO paper; it is usual on Atari.

    frames:     (N, 84, 84, 4) uint8, what the agents see now, the newest frame last
    press_fire: (N,) bool, where the next action will be FIRE
    """

    def __init__(self, env_id, num_envs, threads, pin_memory=False, noop_max=30):
        settings = game_settings(env_id)
        names = ("repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        self.envs = AtariVectorEnv(
            settings["game"], num_envs, num_threads=min(threads, num_envs),
            **{name: settings[name] for name in names}, use_fire_reset=True, noop_max=noop_max,
            autoreset_mode=AutoresetMode.SAME_STEP,  # no dummy step between two games
            life_loss_info=True,  # a lost life is `terminated`, and the game goes on
            reward_clipping=False,  # the score needs raw rewards
        )  # fmt: skip
        actions = self.envs.ale.get_action_set()
        self.num_actions = len(actions)
        self.has_fire = actions[FIRE] == ale_py.Action.FIRE
        self.frames = torch.zeros(num_envs, 84, 84, 4, dtype=torch.uint8, pin_memory=pin_memory)

    def reset(self, seed):
        """Start N new games, deterministic given `seed` (an int) and the actions."""
        obs, info = self.envs.reset(seed=seed)
        self._store(obs)
        self.frame_numbers = info["episode_frame_number"]
        self.scores, self.lengths = np.zeros((2, len(obs)), dtype=np.int64)
        self.press_fire = np.zeros(len(obs), dtype=bool)

    def step(self, actions):
        """Step every game with actions (N,); one that ends starts anew within the step.

        Returns (N,) rewards, raw; (N,) terminated, a life lost or the game over; (N,) truncated,
        the frame limit met; (N, 4, 84, 84) final_obs, a game's last frames, valid only where it
        ended; and a list of the finished games' (score, length in steps).
        """
        actions = np.where(self.press_fire, FIRE, actions)
        obs, rewards, terminated, truncated, info = self.envs.step(actions)
        self._store(obs)
        self.scores += rewards
        self.lengths += 1
        game_over = info["episode_frame_number"] <= self.frame_numbers  # rises within a game
        finished = [(int(self.scores[n]), int(self.lengths[n])) for n in np.flatnonzero(game_over)]
        self.scores[game_over] = self.lengths[game_over] = 0
        self.frame_numbers = info["episode_frame_number"]
        self.press_fire = terminated & ~game_over & self.has_fire
        return rewards, terminated, truncated, info.get("final_obs"), finished

    def _store(self, obs):
        # (N, 4, 84, 84) -> (N, 84, 84, 4), for convolutions; nearly twice as fast as copy_(permute)
        np.stack([obs[:, k] for k in range(4)], axis=-1, out=self.frames.numpy())


def game_settings(env_id):
    """Gymnasium's settings of a game: its ROM, its sticky actions, its frame limit."""
    spec = gym.registry.get(env_id)
    if spec is None or not str(spec.entry_point).startswith("ale_py"):
        fail(f"--env-id {env_id}: need an Atari game, like PongNoFrameskip-v4 or ALE/Pong-v5 "
             f"(state vectors: ppo_continuous.py)")  # fmt: skip
    return spec.kwargs


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


# ------------------------------------------------------------------------------------- Records

PUBLISHED_BY = "paper, after 10 million steps"
PUBLISHED_SCORES = {  # Table 6: PPO's mean of the last 100 games
    "BeamRiderNoFrameskip-v4": 1590.0, "BreakoutNoFrameskip-v4": 274.8,
    "PongNoFrameskip-v4": 20.7, "QbertNoFrameskip-v4": 14293.3, "SeaquestNoFrameskip-v4": 1204.5,
    "SpaceInvadersNoFrameskip-v4": 942.5,
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
    """Play whole games with a saved policy. Returns their scores."""
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.manual_seed(args.seed)
    displays = {"DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"}
    if args.render and sys.platform == "linux" and not displays & os.environ.keys():
        fail("--render: no display here; --video records to a file", 1)
    mode = "human" if args.render else "rgb_array" if args.video else None
    try:
        env = make_scalar_env(args.env_id, mode)
        if args.video:
            folder = checkpoint["path"].parent / "videos" / time.strftime("%Y%m%d-%H%M%S")
            env = RecordVideo(env, str(folder), lambda game: True, fps=15, disable_logger=True)
    except Exception as e:  # no display, no room
        fail(f"--{'render' if args.render else 'video' if args.video else 'evaluate'}: {e}", 1)
    meanings = env.unwrapped.get_action_meanings()
    net = ActorCritic(len(meanings), args.network, bf16=args.bf16).to(device)
    [step] = restore(checkpoint, "step", net=net)
    recording = f", recording to {folder}" if args.video else ""
    print(f"playing {checkpoint['path']}{recording}", flush=True)
    scores = []
    for game in range(args.episodes):
        obs, info = env.reset(seed=args.seed if game == 0 else None)
        score, length, lives, done = 0.0, 0, info["lives"], False
        while not done:
            frames = torch.from_numpy(obs).permute(1, 2, 0)[None].contiguous().to(device)
            action = net(frames)[0].argmax() if args.deterministic else act(net, frames)[0]
            if info["lives"] < lives and meanings[FIRE] == "FIRE":  # as in training
                action = FIRE
            lives = info["lives"]
            obs, reward, terminated, truncated, info = env.step(int(action))
            score, length, done = score + reward, length + 1, terminated or truncated
        scores.append(score)
        print(f"game {game + 1}: score {score:g}, {length} steps", flush=True)
    env.close()
    print(f"{args.env_id}: {np.mean(scores):.1f} ± {np.std(scores):.1f} (mean ± std) over "
          f"{len(scores)} games, with the policy of step {step:,}")  # fmt: skip
    return scores


# -------------------------------------------------------------------------------- Command line

SCRIPT = Path(__file__).name
ROWS = {row[0].replace("-", "_"): row for row in SETTINGS if isinstance(row, tuple)}
CHANGEABLE = {  # flags allowed beside --resume or --evaluate
    "resume": {"total_steps", "goal_score", "cuda", "compile", "threads"},
    "evaluate": {"episodes", "deterministic", "render", "video", "seed", "cuda"},
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
    if given.pop("help", False):
        make_parser(settings).print_help()
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
        if job == "evaluate":
            settings["cuda"] = False
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
    gpus, needed = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.cuda and gpus < needed:
        fail(f"--cuda: of {needed} CUDA GPUs torch finds {gpus}; --no-cuda runs on the CPU")
    if job == "resume" and (before := settings.get("processes", 1)) != PROCESSES:
        fail(f"--resume {args.resume}: need torchrun with {before} processes, as before")
    args.processes = PROCESSES
    uneven = args.num_envs % PROCESSES or args.minibatch_size % PROCESSES
    if job != "evaluate" and (uneven or args.minibatch_size < 2 * PROCESSES):
        fail(f"{PROCESSES} processes: need a divisor of N = {args.num_envs} and of M = "
             f"{args.minibatch_size}, at most M / 2")  # fmt: skip
    game_settings(args.env_id)  # fails if it is not a game
    args.checkpoint_every = args.checkpoint_every or max(4, args.num_iterations // 15)
    name = f"{Path(SCRIPT).stem}-{args.env_id.replace('/', '-')}-seed{args.seed}"
    args.run_dir = args.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return args, checkpoint


def choose_compile(args):
    """Whether to compile: by default in runs so long that the minute it takes counts little."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    possible = headers.exists() and shutil.which(os.environ.get("CXX", "g++")) is not None
    needed = "a C++ compiler (g++, or what CXX names) and Python's headers"
    if args.compile and not possible:
        fail(f"--compile: needs {needed}; --no-compile does without")
    if args.compile is None and args.total_steps >= 500_000 and not args.cuda:
        print("compiling, which takes about a minute: --no-compile begins at once" if possible
              else f"not compiling, which may be faster: it needs {needed}")  # fmt: skip
        return possible
    return bool(args.compile)


# torchrun starts several processes. They share out N and M and average their gradients, and each
# standardises the advantages of its own part, as in Baselines.
TOGETHER = dist.is_torchelastic_launched()
RANK = int(os.environ["RANK"]) if TOGETHER else 0
PROCESSES = int(os.environ["WORLD_SIZE"]) if TOGETHER else 1
SCRATCH = tempfile.TemporaryDirectory() if RANK > 0 else None


def join(args):
    """Become one of several processes, of which process 0 keeps the records."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun's, if another process dies
    if args.cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.cuda else "gloo")
    if RANK > 0:
        args.run_dir = f"{SCRATCH.name}/run"  # of records that nobody reads


def together(collective, *args):
    """Call one of torch.distributed's collective functions, if there are several processes."""
    if TOGETHER:
        try:
            collective(*args)
        except RuntimeError as e:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, before the error is told
            raise ConnectionError("another process has ended, or hangs") from e


def average(tensors):
    """Replace tensors by their means over the processes."""
    for x in tensors if TOGETHER else ():
        together(dist.all_reduce, x.div_(PROCESSES))


def gather(episodes):
    """The episodes of all processes, by the step at which they ended."""
    everyone = [episodes] * PROCESSES
    together(dist.all_gather_object, everyone, episodes)
    return sorted(sum(everyone, []), key=lambda episode: episode[0])


def main(argv=None):
    """Train or evaluate; `argv` is the command line."""
    try:
        if RANK > 0:  # only process 0 reports; errors: the first process of each machine
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        if TOGETHER and int(os.environ["LOCAL_RANK"]) > 0:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            sys.excepthook = lambda *error: traceback.print_exception(*error, file=sys.__stderr__)
        args, checkpoint = parse_args(argv)
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
        torch.set_num_threads(args.threads)
        torch.backends.cudnn.deterministic = True  # or a resumed run would not repeat itself
        if torch.cuda.is_available() and not args.cuda:
            print("a GPU is here: --cuda uses it")
        if args.cuda:
            torch.set_float32_matmul_precision("high")  # TF32, as cuDNN's convolutions use anyway
        if args.evaluate is not None:
            return evaluate(args, checkpoint) if RANK == 0 else None
        args.compile = choose_compile(args)
        if TOGETHER:
            join(args)
        train(args, checkpoint)
        if TOGETHER:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as e:
        hint = "; need a new --run-dir, or --resume" if isinstance(e, FileExistsError) else ""
        fail(f"{e.filename or args.run_dir}: {e.strerror or e}{hint}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    main()
