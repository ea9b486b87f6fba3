"""Tasks with a known answer, known to gymnasium once this is imported, and training on them."""

from dataclasses import asdict

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

torch.set_num_threads(1)  # as in training: more would slow networks this small


class Probe(gym.Env):
    """Reward 1 a step, for ever; what it shows is the number of steps since the reset."""

    observation_space = Box(-np.inf, np.inf, (1,))
    action_space = Discrete(2, start=3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return np.array([self.t], np.float32), 1.0, False, False, {}


class Ends(Probe):
    """As Probe, but the tenth step is terminal."""

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, self.t == 10, truncated, info


class Blind(Probe):
    """As Probe, but one state looks like the other, so that the value is one number."""

    def step(self, action):
        return np.zeros(1, np.float32), *super().step(action)[1:]


class Bandit(Probe):
    """One step, one right action: the reward is 1 for the third of three, else 0."""

    action_space = Discrete(3)

    def step(self, action):
        return np.zeros(1, np.float32), float(action == 2), True, False, {}


class ContinuousBandit(Probe):
    """One step; the nearer the action is to (0.5, -0.3), the better. Its bounds are tight."""

    action_space = Box(-1, 1, (2,))

    def step(self, action):
        assert self.action_space.contains(action), action
        distance = np.square(action - np.array([0.5, -0.3])).sum()
        return np.zeros(1, np.float32), -float(distance), True, False, {}


class Effort(Probe):
    """One step; minus the size of the action that arrives, whose bounds are tight."""

    action_space = Box(-0.1, 0.1, (1,))

    def step(self, action):
        return np.zeros(1, np.float32), -float(abs(action[0])), True, False, {}


class Half(Probe):
    """As Probe, with actions of 16 bits."""

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-1, 1, (1,), np.float16)

    def step(self, action):
        return np.zeros(1, np.float32), *super().step(action)[1:]


class Kind(Probe):
    """Three steps; shows the bits of their number in arrays of a kind of its own. The reward is
    the action that arrives, a number from 3 on or one of 16 bits."""

    observation_space = Box(0, 1, (2,))

    def __init__(self, kind="float64", discrete=True):
        self.kind, self.action_space = kind, Probe.action_space if discrete else Half.action_space

    def obs(self):
        return np.array([self.t % 2, self.t // 2], self.kind)

    def reset(self, seed=None, options=None):
        _, info = super().reset(seed=seed)
        return self.obs(), info

    def step(self, action):
        super().step(action)
        return self.obs(), float(np.sum(action)), self.t == 3, False, {}


class InPlace(Probe):
    """As Probe, but it always shows the same array, which it changes."""

    def __init__(self):
        self.obs = np.zeros(1, np.float32)

    def reset(self, seed=None, options=None):
        self.obs[:] = super().reset(seed=seed)[0]
        return self.obs, {}

    def step(self, action):
        self.obs[:], *result = super().step(action)
        return self.obs, *result


class Wrong(Probe):
    """Five steps, of which one thing is what it is told: what the reset returns, what it shows at
    the reset or after a step, or the reward."""

    def __init__(self, size=1, **wrong):
        self.observation_space = Box(-np.inf, np.inf, (size,))
        self.right, self.wrong = np.zeros(size, np.float32), wrong

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.wrong.get("returned", (self.wrong.get("reset", self.right), {}))

    def step(self, action):
        self.t += 1
        wrong = self.wrong
        return wrong.get("step", self.right), wrong.get("reward", 0.0), self.t == 5, False, {}


gym.register("Probe-v0", Probe, max_episode_steps=10)
gym.register("Ends-v0", Ends)
gym.register("Blind-v0", Blind, max_episode_steps=10)
gym.register("Half-v0", Half, max_episode_steps=10)
gym.register("Kind-v0", Kind)
gym.register("InPlace-v0", InPlace, max_episode_steps=10)
gym.register("Bandit-v0", Bandit)
gym.register("ContinuousBandit-v0", ContinuousBandit)
gym.register("Effort-v0", Effort)


def train(script, folder, **settings):
    """The network of a run at its end, and its score; `script` is the module."""
    args = script.Args(run_dir=str(folder / "run"), **settings)
    before = asdict(args)
    run = script.train(args)
    assert asdict(args) == before
    return run.learned["net"], np.mean([row[1] for row in run.episodes[-100:]] or np.nan)
