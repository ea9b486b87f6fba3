"""The parts of ppo_continuous.py against independent references: gymnasium, numpy, equations
written out, sampling, and probe tasks with a known answer."""

import copy
import functools
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from gymnasium.spaces import Box, Discrete

import ppo_continuous
import trpo_continuous
from ppo_continuous import ActorCritic, RunningMoments, estimate_advantages, ppo_loss, rollout

SCRIPTS = [ppo_continuous, trpo_continuous]
SPACES = [Discrete(3), Box(-1, 1, (2,))]
KINDS = ["softmax", "normal"]
TASKS = ["CartPole-v1", "Pendulum-v1"]
SMALL = {"num_envs": 2, "num_steps": 32, "minibatch_size": 16}


def settings(**own):
    return ppo_continuous.Args(**SMALL | own)


def make_net(space=SPACES[0], num_inputs=4, **own):
    """A network whose policy is not almost uniform."""
    torch.manual_seed(0)
    own = {"orthogonal": False} | own
    net = ActorCritic(Box(-np.inf, np.inf, (num_inputs,)), space, settings(**own))
    if net.log_std is not None:
        net.log_std.data.copy_(torch.linspace(-1, 0.3, len(net.log_std)))
    return net


def begin(env_id, **own):
    """The settings, environments that have been reset, a network, and a batch."""
    args = settings(env_id=env_id, **own)
    torch.manual_seed(0)
    envs = ppo_continuous.make_envs(args)
    net = ActorCritic(envs.single_observation_space, envs.single_action_space, args)
    batch = ppo_continuous.make_batch(args.num_steps, envs)
    batch.raw_obs[-1] = torch.from_numpy(envs.reset(seed=4)[0])
    return args, envs, net, batch


# --------------------------------------------------------------------------------- Environment


@pytest.mark.parametrize("env_id, own", [
    ("CartPole-v1", {}), ("Pendulum-v1", {"norm_obs": False}), ("Probe-v0", {}), ("Ends-v0", {}),
    ("Effort-v0", {}), ("Effort-v0", {"clip_actions": False}),
])  # fmt: skip
def test_rollout_stores_what_happened(env_id, own):
    """Two rollouts: gymnasium's own tasks, given the same actions, show the same. Actions are
    clipped on the way alone, and those of a Discrete begin at its start."""
    num_steps = 232
    _, envs, net, batch = begin(env_id, num_steps=num_steps, orthogonal=False, **own)
    net.obs_moments.add(torch.randn(50, *envs.single_observation_space.shape).double())
    twins, space = [gym.make(env_id) for _ in range(2)], envs.single_action_space
    seen = [env.reset(seed=4 + n)[0].copy() for n, env in enumerate(twins)]
    score, length, ends = [0.0, 0.0], [0, 0], []
    for _ in range(2):
        episodes, expected = rollout(envs, net, batch), []
        for t, n in np.ndindex(num_steps, 2):
            np.testing.assert_array_equal(batch.raw_obs[t, n], seen[n])
            action = batch.actions[t, n].numpy()
            if isinstance(space, Discrete):
                action = action + space.start
            elif own.get("clip_actions", True):
                action = np.clip(action, space.low, space.high)
            obs, reward, terminated, truncated, _ = twins[n].step(action)
            np.testing.assert_array_equal(batch.next_obs[t, n], obs)
            seen[n], score[n], length[n] = obs.copy(), score[n] + reward, length[n] + 1
            assert batch.rewards[t, n].item() == pytest.approx(reward)
            happened = batch.terminated[t, n].item(), batch.truncated[t, n].item()
            assert happened == (terminated, truncated)
            if terminated or truncated:
                expected.append((t, pytest.approx(score[n]), length[n]))
                ends.append(happened)
                seen[n], score[n], length[n] = twins[n].reset()[0].copy(), 0.0, 0
        assert episodes == expected != []
        np.testing.assert_array_equal(batch.raw_obs[-1], seen)
        assert env_id != "Effort-v0" or batch.actions.abs().max() > 1  # the policy's, not clipped
        with torch.no_grad():
            obs, next_obs = net.normalise(batch.raw_obs[:-1]), net.normalise(batch.next_obs)
            torch.testing.assert_close(batch.obs, obs)
            torch.testing.assert_close(batch.pi_old, net.pi_params(obs))
            torch.testing.assert_close(batch.log_probs, net.pi(obs).log_prob(batch.actions))
            torch.testing.assert_close(batch.values, net.critic(obs)[..., 0])
            torch.testing.assert_close(batch.next_values, net.critic(next_obs)[..., 0])
    assert set(ends) == {(0, 1) if env_id in ("Pendulum-v1", "Probe-v0") else (1, 0)}


NAN = np.full(1, np.nan, np.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("error, what, wrong", [
    (ValueError, "observation", {"returned": np.zeros(2, np.float32), "size": 2}),  # without infos
    (ValueError, "observation", {"reset": np.zeros(1, np.float32), "size": 3}),
    (ValueError, "observation", {"step": np.zeros(1, np.float32), "size": 3}),
    (ValueError, "reward", {"reward": [1.0, 2.0]}),
    (FloatingPointError, "reward is inf", {"reward": math.inf}),
    (FloatingPointError, "observation is nan", {"reset": NAN}),
    (FloatingPointError, "observation is nan", {"step": NAN}),
])  # fmt: skip
def test_a_task_that_breaks_its_promises_is_refused(error, what, wrong, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Wrong-v0", probes.Wrong, kwargs=wrong)
    monkeypatch.setitem(gym.registry, "Wrong-v0", spec)
    with pytest.raises(error, match=what):
        _, envs, net, batch = begin("Wrong-v0")
        rollout(envs, net, batch)


def test_a_task_of_ones_own_trains(tmp_path):
    """With actions of 16 bits."""
    _, score = train(tmp_path, env_id="Half-v0", num_steps=64, total_steps=128)
    assert score == 10


def test_a_task_that_changes_its_observation_in_place_is_seen_right():
    """At the time limit, too, which a reset follows within the step."""
    _, envs, net, batch = begin("InPlace-v0")
    rollout(envs, net, batch)
    assert batch.next_obs[:10, 0].flatten().tolist() == list(range(1, 11))


# ------------------------------------------------------------------------------------- Network


def test_running_moments_are_numpys():
    rng = np.random.default_rng(0)
    chunks = [rng.normal(5, 3, (n, 4)) for n in (1, 7, 200, 3)]
    moments = RunningMoments(4)
    for chunk in chunks:
        moments.add(torch.from_numpy(chunk))
    everything = np.concatenate(chunks)
    assert moments.count == 211
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std, everything.std(0), rtol=1e-8)


def test_normalise_clips_at_10_and_can_be_off():
    net = make_net(num_inputs=1)
    net.obs_moments.add(torch.tensor([[1.0], [3.0]]).double())
    obs = torch.tensor([[2.0], [3.0], [1e6], [-1e6]]).double()
    torch.testing.assert_close(net.normalise(obs)[:, 0], torch.tensor([0.0, 1, 10, -10]))
    assert torch.equal(make_net(norm_obs=False).normalise(obs), obs.float())


@pytest.mark.parametrize("orthogonal", [True, False])
def test_network_is_that_of_the_paper(orthogonal):
    net = ActorCritic(Box(-1, 1, (17,)), Box(-1, 1, (6,)), settings(orthogonal=orthogonal))
    weights = 2 * (64 * 18 + 64 * 65) + 6 * 65 + 65 + 6
    assert sum(p.numel() for p in net.parameters()) == weights and not net.log_std.any()
    for mlp, head in ((net.actor, 0.01), (net.critic, 1.0)):
        assert [type(layer) for layer in mlp[1::2]] == [torch.nn.Tanh] * 2 and len(mlp) == 5
        for layer, gain in zip((mlp[0], mlp[2], mlp[4]), (2**0.5, 2**0.5, head), strict=True):
            w = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            close = torch.allclose(w @ w.T, gain**2 * torch.eye(len(w)), rtol=0, atol=1e-4)
            assert (close and not layer.bias.any()) == orthogonal


@pytest.mark.parametrize("space", SPACES)
def test_pi_is_a_softmax_or_a_normal(space):
    """Of the actor's outputs and the stds, written out."""
    net, obs = make_net(space), torch.randn(5, 4)
    with torch.no_grad():
        pi, out = net.pi(obs), net.actor(obs).double().numpy()
        assert torch.equal(net.value(obs), net.critic(obs)[:, 0])
    actions = pi.sample()
    if net.discrete:
        expected = np.exp(out[range(5), actions]) / np.exp(out).sum(-1)
        assert torch.equal(pi.mode, torch.from_numpy(out.argmax(-1)))
    else:
        std = np.exp([-1.0, 0.3])
        z = (actions.double().numpy() - out) / std
        expected = (np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi))).prod(-1)
        np.testing.assert_array_equal(pi.mode, out)
    assert pi.log_prob(actions).exp().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_the_numpy_policy_samples_pi(space, norm_obs):
    net = make_net(space, norm_obs=norm_obs)
    net.obs_moments.add(3 * torch.randn(50, 4).double())
    obs = np.random.default_rng(0).normal(0, 3, (2, 4))
    obs[0, 0], obs[1, 3] = 100, -100  # more than 10 standard deviations off
    steps = 20_000
    with torch.no_grad():
        policy = ppo_continuous.make_policy(net, steps, 2)
        pi = net.pi(net.normalise(torch.from_numpy(obs)))
    actions = torch.as_tensor(np.stack([policy(t, obs) for t in range(steps)]))
    if net.discrete:
        frequencies = torch.nn.functional.one_hot(actions, 3).double().mean(0)
        assert (frequencies - pi.probs).abs().max() < 4 * 0.5 / steps**0.5
    else:
        z = (actions - pi.mean) / pi.stddev
        assert z.mean(0).abs().max() < 4 / steps**0.5
        assert (z.var(0) - 1).abs().max() < 4 * (2 / steps) ** 0.5


# ---------------------------------------------------------------------------------- Advantages


@pytest.mark.parametrize("env_id, value", [("Probe-v0", 10.0), ("Ends-v0", 6.5132)])
def test_targets_at_a_time_limit_and_at_an_end(env_id, value):
    """Reward 1 a step, γ = 0.9. Cut after 10 steps by a limit, a state is worth 1 / (1 - γ) = 10,
    the critic knows; ended after 10 steps, the first is worth (1 - γ^10) / (1 - γ) = 6.51."""
    _, envs, net, batch = begin(env_id, num_steps=40, minibatch_size=20)
    net.critic[-1].weight.data.zero_(), net.critic[-1].bias.data.fill_(10)
    assert [length for _, _, length in rollout(envs, net, batch)] == [10] * 8
    for gae_lambda in (1.0, 0.95):
        estimate_advantages(batch, 0.9, gae_lambda)
        torch.testing.assert_close(batch.targets - batch.values, batch.advantages)
        if gae_lambda == 1.0 or env_id == "Probe-v0":
            torch.testing.assert_close(batch.targets[0], torch.full((2,), value), rtol=1e-4, atol=0)


def test_rewards_are_scaled_by_the_std_of_discounted_returns():
    """Of all so far; a rollout goes on with the last one's returns; ±10 is the most."""
    torch.manual_seed(0)
    moments, old, kept = RunningMoments(), [[], []], np.zeros(2)
    for largest in (0.0, 1000.0, 0.0):
        terminated, truncated = (torch.rand(2, 200, 2) < 0.15).float()
        rewards = 1 + torch.randn(200, 2)
        rewards[7], rewards[-1], terminated[-1], truncated[-1] = largest, -largest, 0, 0
        batch = SimpleNamespace(rewards=rewards.clone(), terminated=terminated, truncated=truncated,
                                discounted_return=kept)  # fmt: skip
        ppo_continuous.scale_rewards(batch, moments, 0.5)
        for t, n in np.ndindex(200, 2):
            new_episode = not old[n] or old[n][-1][1]
            discounted = rewards[t, n].item() + (0 if new_episode else 0.5 * old[n][-1][0])
            old[n].append((discounted, bool(terminated[t, n] + truncated[t, n])))
        std = np.std([discounted for rows in old for discounted, _ in rows])
        expected = np.clip(rewards.numpy() / std, -10, 10)
        np.testing.assert_allclose(batch.rewards, expected, rtol=1e-5)
        assert (abs(expected) == 10).sum() == (4 if largest else 0)
        kept = batch.discounted_return
    batch.rewards.zero_()
    ppo_continuous.scale_rewards(batch, RunningMoments(), 0.5)
    assert not batch.rewards.any()  # and not nan


# ---------------------------------------------------------------------------------------- Loss


def linear_policy(kind, size=20):
    """A network of linear functions in float64, and a minibatch of another's, near it."""
    net = make_net(SPACES[KINDS.index(kind)], 3)
    net.actor, net.critic = torch.nn.Linear(3, net.num_outputs), torch.nn.Linear(3, 1)
    old = copy.deepcopy(net.double())
    obs, (advantages, targets) = torch.randn(size, 3).double(), torch.randn(2, size).double()
    with torch.no_grad():
        for p in old.parameters():
            p += 0.3 * torch.randn_like(p)
        pi_old = old.pi_params(obs)
        pi = old.distribution(pi_old)
        actions = pi.sample()
        batch = {"obs": obs, "actions": actions, "pi_old": pi_old, "advantages": advantages,
                 "log_probs": pi.log_prob(actions), "targets": targets}  # fmt: skip
    return net, batch


def reference_loss(net, batch, args, eps, beta):
    """Eq. 6 to 9, one sample after the other. Returns what `ppo_loss` should."""
    parameters = {name: p.detach().numpy() for name, p in net.named_parameters()}
    b = {name: x.numpy() for name, x in batch.items()}
    advantages, size = b["advantages"], len(b["obs"])
    if args.norm_adv == "minibatch":
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    rows = []
    for i in range(size):
        out = parameters["actor.weight"] @ b["obs"][i] + parameters["actor.bias"]
        value = parameters["critic.weight"] @ b["obs"][i] + parameters["critic.bias"]
        action, old = b["actions"][i], b["pi_old"][i]
        if net.discrete:
            pi, old = np.exp(out) / np.exp(out).sum(), np.exp(old) / np.exp(old).sum()
            probability, entropy = pi[action], -(pi * np.log(pi)).sum()
            kl = (old * np.log(old / pi)).sum()
        else:
            std, old_mean, old_std = np.exp(parameters["log_std"]), old[:2], np.exp(old[2:])
            z = (action - out) / std
            probability = np.prod(np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi)))
            entropy = np.log(std * math.sqrt(2 * math.pi * math.e)).sum()
            square = (old_std**2 + (old_mean - out) ** 2) / (2 * std**2)
            kl = (np.log(std / old_std) + square - 0.5).sum()
        ratio = probability / math.exp(b["log_probs"][i])
        gain = ratio * advantages[i]
        if args.objective == "clip":
            gain = min(gain, min(max(ratio, 1 - eps), 1 + eps) * advantages[i])
        elif args.objective != "none":
            gain -= beta * kl
        rows.append((-gain, (value[0] - b["targets"][i]) ** 2, entropy,
                     ratio - 1 - math.log(ratio), not 1 - eps <= ratio <= 1 + eps))  # fmt: skip
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    stats = dict(zip(names, np.mean(rows, 0), strict=True))
    c1, c2 = args.vf_coef, args.ent_coef
    return stats["policy_loss"] + c1 * stats["value_loss"] - c2 * stats["entropy"], stats


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective", ["clip", "kl-adaptive", "kl-fixed", "none"])
@pytest.mark.parametrize("norm_adv, c2", [("minibatch", 0.03), ("none", 0.0)])
def test_loss_and_gradient_are_eq_9(kind, objective, norm_adv, c2):
    args = settings(objective=objective, norm_adv=norm_adv, vf_coef=0.7, ent_coef=c2)
    net, batch = linear_policy(kind)
    loss, stats = ppo_loss(net, **batch, clip_eps=0.15, beta=0.4, args=args)
    expected, expected_stats = reference_loss(net, batch, args, 0.15, 0.4)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: x.item() for name, x in stats.items()} == pytest.approx(expected_stats, rel=1e-7)
    assert 0.2 < stats["clip_fraction"] < 1
    loss.backward()
    for p in net.parameters():
        for k in range(p.numel()):
            ends = []
            for shift in (1e-6, -2e-6):
                p.data.view(-1)[k] += shift
                ends.append(reference_loss(net, batch, args, 0.15, 0.4)[0])
            p.data.view(-1)[k] += 1e-6
            slope = (ends[0] - ends[1]) / 2e-6
            assert p.grad.view(-1)[k].item() == pytest.approx(slope, abs=2e-7)


# -------------------------------------------------------------------------------------- Update


class Update:
    """Runs `update` on a rollout of 4 × 16 samples, and keeps what each minibatch gave.

    SGD takes Adam's place, so that a step shows the gradient and not its sign alone.
    """

    def __init__(self, env_id="Pendulum-v1", spoil=1.0, rate=0.5, **own):
        own = {"num_envs": 4, "num_steps": 16, "objective": "kl-fixed", "vf_coef": 0.1} | own
        self.args, envs, self.net, self.batch = begin(env_id, orthogonal=False, **own)
        rollout(envs, self.net, self.batch)
        estimate_advantages(self.batch, 0.9, 0.9)
        self.batch.targets *= spoil
        self.before, self.indices, self.calls = copy.deepcopy(self.net), [], []
        optimizer = torch.optim.SGD(self.net.parameters(), 9.0)  # not the step size to be taken

        def gradients(net, samples, indices, clip_eps, beta, args):
            self.indices.append(indices)
            stats = ppo_continuous.compute_gradients(net, samples, indices, clip_eps, beta, args)
            self.calls.append({name: x.item() for name, x in stats.items()})
            return stats

        self.stats = ppo_continuous.update(gradients, self.net, optimizer, self.batch, rate, 0.15,
                                           torch.tensor(0.7), self.args)  # fmt: skip


@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("own", [
    {"objective": "clip", "max_grad_norm": 0.1}, {"objective": "clip", "max_grad_norm": 0.0},
    {"objective": "clip", "norm_adv": "rollout"}, {"norm_adv": "none"},
])  # fmt: skip
def test_update_descends_each_minibatch_and_says_what_happened(env_id, own):
    """θ after it: the gradient of each minibatch, clipped, times the step size that was given."""
    update = Update(env_id, num_epochs=2, **own)
    net, batch, args, calls = update.before, update.batch, update.args, []
    names = ("obs", "actions", "pi_old", "log_probs", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1) for name in names}
    if args.norm_adv == "rollout":
        a = samples["advantages"]
        samples["advantages"] = (a - a.mean()) / a.std(correction=0)
    for indices in update.indices:
        minibatch = {name: x[indices] for name, x in samples.items()}
        loss, stats = ppo_loss(net, **minibatch, clip_eps=0.15, beta=0.7, args=args)
        parameters = list(net.parameters())
        gradient = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradient))
        shorter = min(1, args.max_grad_norm / norm) if args.max_grad_norm else 1
        for p, g in zip(parameters, gradient, strict=True):
            p.data -= 0.5 * shorter * g
        calls.append({name: x.item() for name, x in stats.items()} | {"grad_norm": norm})
    for one, other in zip(net.parameters(), update.net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        old, new = net.distribution(batch.pi_old), net.pi(batch.obs)
        kl = torch.distributions.kl_divergence(old, new).mean().item()
    unexplained = np.var(batch.advantages.numpy()) / np.var(batch.targets.numpy())
    expected = {name: np.mean([call[name] for call in calls]) for name in calls[0]} | {
        "kl": kl, "learning_rate": 0.5, "beta": 0.7, "explained_variance": 1 - unexplained,
    }  # fmt: skip
    assert update.stats == pytest.approx(expected, rel=2e-3, abs=1e-5) and kl > 1e-4
    assert all(type(value) is float for value in update.stats.values()) and len(calls) == 8
    assert max(call["grad_norm"] for call in calls) > args.max_grad_norm


@pytest.mark.parametrize("env_id", TASKS)
def test_the_first_minibatch_has_ratio_1_and_every_epoch_every_sample(env_id):
    update = Update(env_id, num_epochs=3)
    first, *_, last = update.calls
    assert abs(first["approx_kl"]) < 1e-6 < last["approx_kl"] and first["clip_fraction"] == 0
    if env_id == "Pendulum-v1":  # the old std is a copy
        assert not update.batch.pi_old[..., 1:].any() and update.net.log_std.any()
    epochs = [torch.cat(update.indices[4 * k : 4 * k + 4]).tolist() for k in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(64))] * 3
    assert list(range(64)) != epochs[0] != epochs[1] != epochs[2] and len(update.indices) == 12


def test_target_kl_ends_the_epochs():
    """Where the KL after one is just above 1.5 times the target, and not just below."""
    kl = Update(num_epochs=1).stats["kl"]
    for share, epochs in ((0.99, 1), (1.01, 2)):
        update = Update(num_epochs=2, target_kl=share * kl / 1.5)
        assert len(update.indices) == 4 * epochs


def test_update_refuses_a_loss_that_is_not_finite():
    with pytest.raises(FloatingPointError, match="is nan"):
        Update(spoil=math.nan)


# -------------------------------------------------------------------------- From one to the next


@pytest.mark.parametrize("kl, beta", [
    (0.0, 2.0), (0.00999, 2.0), (0.01001, 4.0), (0.012, 4.0), (0.02249, 4.0), (0.02251, 8.0),
    (9.0, 8.0),
])  # fmt: skip
def test_the_adaptive_beta_at_its_borders(kl, beta):
    """For a target of 0.015; and again from where it has got to. It can always come back."""
    penalty = ppo_continuous.Penalty(4)
    for factor in (1, beta / 4):
        penalty.adapt(kl, 0.015)
        assert penalty.beta.item() == beta * factor
    assert list(penalty.state_dict()) == ["beta"] and not penalty.beta.requires_grad
    for _ in range(200):
        penalty.adapt(kl, 0.015)
    far = penalty.beta.item()
    penalty.adapt(0.015**2 / max(kl, 1e-9), 0.015)
    assert penalty.beta.item() == far * (1 if beta == 4 else 4 / beta) and 0 < far < math.inf


def test_defaults_are_those_of_table_3_and_sec_6_1():
    args = ppo_continuous.Args()
    assert (args.num_steps, args.learning_rate, args.num_epochs) == (2048, 3e-4, 10)
    assert (args.minibatch_size, args.gamma, args.gae_lambda) == (64, 0.99, 0.95)
    assert (args.clip_eps, args.kl_target, args.kl_beta) == (0.2, 0.01, 1.0)
    args = trpo_continuous.Args()
    assert (args.max_kl, args.gamma) == (0.01, 0.99)


def test_annealing():
    args = {"num_envs": 1, "num_steps": 256, "total_steps": 256_000, "learning_rate": 1e-3}
    expected = {"both": (7.5e-4, 0.15), "learning-rate": (7.5e-4, 0.2), "none": (1e-3, 0.2)}
    for how, rate_and_eps in expected.items():
        own = settings(**args, anneal=how)
        assert ppo_continuous.anneal(own, 250) == pytest.approx(rate_and_eps)
        assert ppo_continuous.anneal(own, 0) == (1e-3, 0.2)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("no", ["", "norm_obs", "norm_reward"])
def test_train_hands_each_iteration_what_it_needs(no, script, tmp_path, monkeypatch):
    """Rewards are scaled before advantages are estimated; the moments of the observations stay
    until π has been updated; a KL far below its target halves an adaptive β."""
    estimated, updated, objective = [], [], "kl-fixed" if no == "norm_obs" else "kl-adaptive"
    estimate, update = script.estimate_advantages, script.update

    def watched_estimate(batch, *rest):
        estimated.append((*rest, bool((batch.rewards == 1).all())))
        estimate(batch, *rest)

    def watched_update(*given):
        net, optimizer, batch, *rest, _ = given if script is trpo_continuous else given[1:]
        assert torch.equal(net.normalise(batch.raw_obs[:-1]), batch.obs)
        moments = [net.obs_moments.count.item(), net.return_moments.count.item()]
        group = optimizer.param_groups[0]
        rest = map(float, rest or (group["lr"], 0, 0))
        updated.append((moments, batch.raw_obs[[0, -1], 0].tolist(), group["eps"], *rest))
        return update(*given)

    monkeypatch.setattr(script, "estimate_advantages", watched_estimate)
    monkeypatch.setattr(script, "update", watched_update)
    own = SMALL | {"total_steps": 192, "gamma": 0.9, "gae_lambda": 0.5, "learning_rate": 0.03}
    own |= {no: False} if no else {}
    if script is ppo_continuous:
        own |= {"anneal": "both", "objective": objective, "kl_target": 1e9, "kl_beta": 2.0,
                "adam_eps": 1e-7}  # fmt: skip
    probes.train(script, tmp_path, **own)
    assert torch.initial_seed() == script.derive_seed(1, 0)  # of the actions and minibatches
    assert estimated == [(0.9, 0.5, no == "norm_reward")] * 3
    moments, ends, adam_eps, *rest = zip(*updated, strict=True)
    assert list(moments) == [[64 * k * (no != "norm_obs"), 64 * (k + 1) * (no != "norm_reward")]
                             for k in range(3)]  # fmt: skip
    obs, _ = gym.make("CartPole-v1").reset(seed=script.derive_seed(1, 0))
    assert ends[0][0] == obs.tolist() and ends[1][0] == ends[0][1] and ends[2][0] == ends[1][1]
    if script is ppo_continuous:
        rates, clips, betas = rest
        assert rates == pytest.approx((0.03, 0.02, 0.01)) and adam_eps == (1e-7,) * 3
        assert clips == pytest.approx((0.2, 0.4 / 3, 0.2 / 3))
        assert betas == ((2, 2, 2) if objective == "kl-fixed" else (2, 1, 0.5))
    else:
        assert rest[0] == (0.03,) * 3


# --------------------------------------------------------------------------------------- Probes

PROBE = {"num_steps": 128, "num_envs": 2, "learning_rate": 3e-3, "anneal": "none"}
train = functools.partial(probes.train, ppo_continuous)


def test_probe_the_value_under_a_time_limit_is_10(tmp_path):
    net, score = train(tmp_path, env_id="Blind-v0", **PROBE, total_steps=9000, gamma=0.9,
                       norm_reward=False)  # fmt: skip
    value = net.value(net.normalise(torch.zeros(1, 1).double())).item()
    assert score == 10 and value == pytest.approx(10, abs=0.3)


@pytest.mark.parametrize("objective", ["kl-adaptive", "kl-fixed", "none"])
def test_probe_bandit(objective, tmp_path):
    own = {"env_id": "Bandit-v0", "total_steps": 3000, "objective": objective}
    assert train(tmp_path, **PROBE, **own)[1] > 0.9


def test_probe_continuous_bandit(tmp_path):
    net, score = train(tmp_path, env_id="ContinuousBandit-v0", **PROBE, total_steps=8000)
    pi = net.pi(net.normalise(torch.zeros(1, 1).double()))
    assert pi.mean[0].tolist() == pytest.approx([0.5, -0.3], abs=0.15)
    assert score > -0.3 and (pi.stddev.log() < -0.5).all()


def test_cartpole_is_learned(tmp_path):
    """A third of its default length is enough for balancing most of the time."""
    own = ppo_continuous.TASKS["CartPole-v1"] | {"total_steps": 35_000, "goal_score": 250}
    assert train(tmp_path, **own)[1] >= 200


@pytest.mark.parametrize("objective, env_id, backend", [
    ("kl-adaptive", "Pendulum-v1", "aot_eager"),  # without the C++ that the graph becomes
    *(pytest.param(objective, env_id, "inductor", marks=pytest.mark.slow)
      for objective in ("clip", "kl-adaptive") for env_id in TASKS),
])  # fmt: skip
def test_compiled_gradients_are_one_graph_and_the_same(objective, env_id, backend, tmp_path,
                                                       monkeypatch):  # fmt: skip
    """As a new process has it. Up to rounding, after three iterations in which ε and β change."""
    compile = functools.partial(torch.compile, backend=backend)
    monkeypatch.setattr(ppo_continuous.torch, "compile", compile)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.distributions.kl._KL_MEMOIZE.clear()
    own = {"env_id": env_id, "objective": objective, "total_steps": 192, "num_epochs": 2,
           "anneal": "both", "kl_target": 1e-5}  # fmt: skip
    compiled, _ = train(tmp_path / "compiled", **SMALL, **own, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager, _ = train(tmp_path / "eager", **SMALL, **own)
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
