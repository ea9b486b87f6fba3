"""Tasks with a known answer, known to gymnasium once this is imported, and training on them."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete


class Probe(gym.Env):
    """Reward 1 a step, for ever; what it shows is the number of steps since the reset."""

    observation_space = Box(-np.inf, np.inf, (1,))
    action_space = Discrete(2, start=3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([0.0]), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return np.array([float(self.t)]), 1.0, False, False, {}


class Ends(Probe):
    """As Probe, but the tenth step is terminal."""

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, self.t == 10, truncated, info


class Blind(Probe):
    """As Probe, but one state looks like the other, so that the value is one number."""

    def step(self, action):
        return np.array([0.0]), *super().step(action)[1:]


class Bandit(Probe):
    """One step, one right action: the reward is 1 for the third of three, else 0."""

    action_space = Discrete(3)

    def step(self, action):
        return np.array([0.0]), float(action == 2), True, False, {}


class ContinuousBandit(Probe):
    """One step; the nearer the action is to (0.5, -0.3), the better. Its bounds are tight."""

    action_space = Box(-1, 1, (2,))

    def step(self, action):
        assert self.action_space.contains(action), action
        distance = np.square(action - np.array([0.5, -0.3])).sum()
        return np.array([0.0]), -float(distance), True, False, {}


class Effort(Probe):
    """One step; minus the size of the action that arrives, whose bounds are tight."""

    action_space = Box(-0.1, 0.1, (1,))

    def step(self, action):
        return np.array([0.0]), -float(abs(action[0])), True, False, {}


class NanReset(Probe):
    """What it shows after its second reset is not a number."""

    resets = 0

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.resets += 1
        return obs * (math.nan if self.resets == 2 else 1), info


gym.register("Probe-v0", Probe, max_episode_steps=10)
gym.register("Ends-v0", Ends)
gym.register("Blind-v0", Blind, max_episode_steps=10)
gym.register("Bandit-v0", Bandit)
gym.register("ContinuousBandit-v0", ContinuousBandit)
gym.register("Effort-v0", Effort)
gym.register("NanReset-v0", NanReset, max_episode_steps=3)


def train(script, tmp_path, *flags):
    """The network of a run at its end, and its score; `script` is the module."""
    flags = [*map(str, flags), "--run-dir", str(tmp_path / "run")]
    assert script.main(flags) is None
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    args = SimpleNamespace(**checkpoint["settings"])
    env = gym.make(args.env_id)
    size = env.observation_space.shape[0]
    net = script.ActorCritic(size, env.action_space, norm_obs=args.norm_obs)
    net.load_state_dict(checkpoint["net"])
    returns = (tmp_path / "run" / "episodes.csv").read_text().splitlines()[1:]
    return net, np.mean([float(row.split(",")[1]) for row in returns[-100:]] or np.nan)


def what_train_hands_on(script, tmp_path, monkeypatch):
    """Of a run with flags that no default equals: what its network was told, what its advantages
    were estimated with, and the first of the rewards (all 1 as the task gives them) by then."""
    network, estimate, told, seen = script.ActorCritic, script.estimate_advantages, [], []

    def made(obs_size, action_space, *settings):
        told.append(settings)
        return network(obs_size, action_space, *settings)

    def estimated(batch, *settings):
        seen.append((*settings, batch.rewards[0, 0].item()))
        estimate(batch, *settings)

    monkeypatch.setattr(script, "ActorCritic", made)
    monkeypatch.setattr(script, "estimate_advantages", estimated)
    flags = "--gamma 0.9 --gae-lambda 0.5 --no-orthogonal --no-norm-obs --num-steps 64"
    script.main(["--env-id", "Blind-v0", "--total-steps", "64", *flags.split(),
                 "--run-dir", str(tmp_path / "run")])  # fmt: skip
    [network_settings], [(gamma, gae_lambda, reward)] = told, seen
    return network_settings, (gamma, gae_lambda), reward
