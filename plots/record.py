"""Record plots/page/recorded.json, which the moving pictures show: python plots/record.py"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_continuous as ppo
import trpo_continuous as trpo

THETA = [3.0, -1.5]  # weights of the pole's angle and angular velocity; the second's sign is wrong
EDGES = (*np.linspace(0, 2, 46), np.inf)  # of the histogram; 1 is in a bin's middle, 1 ± 0.2 edges


def start(script, args):
    """The environments, their first observations and the network, as in the script's `train`."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    envs = [script.make_env(args) for _ in range(args.num_envs)]
    net = script.ActorCritic(envs[0].observation_space, envs[0].action_space, args)
    return envs, np.stack([env.reset(seed=args.seed + n)[0] for n, env in enumerate(envs)]), net


def trust_region(args):
    """θ_old, and a rollout's samples: angle, angular velocity (normalised), action, Â."""
    envs, obs, net = start(trpo, args)
    net.actor = torch.nn.Sequential(torch.nn.Linear(4, 2)).requires_grad_(False)
    weights = torch.tensor([0.0] * 6 + THETA + [0.0] * 2)  # logits: 0, θ1 angle + θ2 velocity
    torch.nn.utils.vector_to_parameters(weights, net.actor.parameters())
    optimizer = torch.optim.Adam(net.critic.parameters(), args.learning_rate, fused=True)
    for k in range(6):  # in five rollouts the critic learns this policy's values; the last is kept
        batch, obs, _ = trpo.rollout(envs, obs, net, args.num_steps)
        trpo.estimate_advantages(batch, args.gamma, args.gae_lambda)
        trpo.fit_critic(net, optimizer, batch.obs.flatten(0, 1), batch.targets.flatten(), args)
        if k == 0:
            net.obs_moments.add(batch.raw_obs.flatten(0, 1))
    columns = *batch.obs[..., 2:].unbind(-1), batch.actions, trpo.standardise(batch.advantages)
    rows = torch.stack([column.flatten() for column in columns], 1).tolist()
    return {"theta": THETA, "samples": [[float(f"{x:.4g}") for x in row] for row in rows]}


@torch.no_grad()
def measure(net, batch, eps):
    """A rollout's histogram of ratios, L^CLIP (Eq. 7), KL and clip fraction."""
    ratio = (net.pi(batch.obs).log_prob(batch.actions) - batch.log_probs).exp()
    advantages = ppo.standardise(batch.advantages)
    l_clip = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages).mean()
    numbers = l_clip.item(), ppo.mean_kl(net, batch), ((ratio - 1).abs() > eps).double().mean()
    return [np.histogram(ratio, EDGES)[0].tolist(), *(float(f"{x:.4g}") for x in numbers)]


def one_update(args):
    """`measure` after epochs 0, ..., K of the first update."""
    envs, obs, net = start(ppo, args)
    batch, *_ = ppo.rollout(envs, obs, net, args.num_steps)
    ppo.scale_rewards(batch, np.zeros(args.num_envs), net.return_moments, args.gamma)
    ppo.estimate_advantages(batch, args.gamma, args.gae_lambda)
    optimizer = torch.optim.Adam(net.parameters(), eps=args.adam_eps, fused=True)
    found, numbers = [measure(net, batch, args.clip_eps)], (args.learning_rate, args.clip_eps, 0.0)
    for _ in range(args.num_epochs):
        ppo.update(ppo.backpropagate, net, optimizer, batch, *numbers, replace(args, num_epochs=1))
        found.append(measure(net, batch, args.clip_eps))
    return found


if __name__ == "__main__":
    args = ppo.Args(env_id="HalfCheetah-v5")
    update = {name: one_update(replace(args, objective=name)) for name in ("clip", "none")}
    trust = trust_region(trpo.Args(seed=2, num_steps=300, total_steps=300, minibatch_size=50))
    recorded = json.dumps({"trust": trust, "update": update}, separators=(",", ":"))
    Path(__file__).with_name("page").joinpath("recorded.json").write_text(recorded)
