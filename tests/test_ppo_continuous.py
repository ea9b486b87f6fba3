"""The parts of ppo_continuous.py against independent references: gymnasium, numpy, equations
written out, sampling, and probe tasks with a known answer. What trpo_continuous.py has, too, is
tested in both."""

import copy
import functools
import math
from types import SimpleNamespace

import cases
import gymnasium as gym
import numpy as np
import probes
import processes
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from processes import events, load, rows, same

import ppo_continuous
import trpo_continuous
from ppo_continuous import adapt_beta, ppo_loss

SCRIPTS = [ppo_continuous, trpo_continuous]
SPACES = [Discrete(3), Box(-1, 1, (2,))]
TASKS = ["CartPole-v1", "Pendulum-v1"]
SMALL = {"num_envs": 2, "num_steps": 32, "minibatch_size": 16}
each_script = pytest.mark.parametrize("script", SCRIPTS)


def settings(script=ppo_continuous, **own):
    return script.Args(**SMALL | own)


def make_net(space=SPACES[0], num_inputs=4, script=ppo_continuous, **own):
    """A network whose policy is not almost uniform."""
    torch.manual_seed(0)
    own = {"orthogonal": False} | own
    obs_space = Box(-np.inf, np.inf, (num_inputs,))
    net = script.ActorCritic(obs_space, space, settings(script, **own))
    if net.log_std is not None:
        net.log_std.data.copy_(torch.linspace(-1, 0.3, len(net.log_std)))
    return net


def begin(script, env_id, **own):
    """The settings, environments, what they show after a reset, and a network."""
    args = settings(script, env_id=env_id, **own)
    torch.manual_seed(0)
    envs = [script.make_env(args) for _ in range(args.num_envs)]
    net = script.ActorCritic(envs[0].observation_space, envs[0].action_space, args)
    return args, envs, np.stack([env.reset(seed=4 + n)[0] for n, env in enumerate(envs)]), net


# --------------------------------------------------------------------------------- Environment


@each_script
@pytest.mark.parametrize("env_id, own", [
    ("CartPole-v1", {}), ("Pendulum-v1", {"norm_obs": False}), ("Probe-v0", {}), ("Ends-v0", {}),
    ("Effort-v0", {}), ("Effort-v0", {"clip_actions": False}),
])  # fmt: skip
def test_rollout_stores_what_happened(env_id, own, script):
    """Two rollouts: gymnasium's own tasks, given the same actions, show the same. Actions are
    clipped on the way alone, and those of a Discrete begin at its start."""
    num_steps = 232
    _, envs, now, net = begin(script, env_id, num_steps=num_steps, orthogonal=False, **own)
    net.obs_moments.add(torch.randn(50, *envs[0].observation_space.shape).double())
    twins = [gym.make(env_id) for _ in range(2)]
    space = twins[0].action_space
    seen = [env.reset(seed=4 + n)[0] for n, env in enumerate(twins)]
    score, length, ends = [0.0, 0.0], [0, 0], []
    for _ in range(2):
        given = now.copy()
        batch, after, episodes = script.rollout(envs, now, net, num_steps)
        assert np.array_equal(now, given)
        now, expected = after, []
        shown, next_obs = np.zeros((2, *batch.raw_obs.shape))
        rewards, *happened = np.zeros((3, num_steps, 2))
        for t, n in np.ndindex(num_steps, 2):
            action = batch.actions[t, n].numpy()
            if isinstance(space, Discrete):
                action = action + space.start
            elif own.get("clip_actions", True):
                action = np.clip(action, space.low, space.high)
            shown[t, n] = seen[n]
            seen[n], rewards[t, n], terminated, truncated, _ = twins[n].step(action)
            next_obs[t, n], happened[0][t, n], happened[1][t, n] = seen[n], terminated, truncated
            score[n], length[n] = score[n] + rewards[t, n], length[n] + 1
            if terminated or truncated:
                expected.append((t, pytest.approx(score[n]), length[n]))
                ends.append((terminated, truncated))
                seen[n], score[n], length[n] = twins[n].reset()[0], 0.0, 0
        assert episodes == expected != []
        np.testing.assert_array_equal(now, seen)
        np.testing.assert_array_equal(batch.raw_obs, shown)
        np.testing.assert_allclose(batch.rewards, rewards, rtol=1e-6)
        np.testing.assert_array_equal([batch.terminated, batch.truncated], happened)
        assert env_id != "Effort-v0" or batch.actions.abs().max() > 1  # the policy's, not clipped
        with torch.no_grad():
            obs, next_obs = (net.normalise(torch.from_numpy(x)) for x in (shown, next_obs))
            torch.testing.assert_close(batch.obs, obs)
            torch.testing.assert_close(batch.pi_old, net.pi_params(obs))
            torch.testing.assert_close(batch.log_probs, net.pi(obs).log_prob(batch.actions))
            torch.testing.assert_close(batch.values, net.critic(obs)[..., 0])
            torch.testing.assert_close(batch.next_values, net.critic(next_obs)[..., 0])
    assert set(ends) == {(0, 1) if env_id in ("Pendulum-v1", "Probe-v0") else (1, 0)}


NAN = np.full(1, np.nan, np.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_script
@pytest.mark.parametrize("error, what, wrong", [
    (ValueError, "observation", {"returned": np.zeros(2, np.float32), "size": 2}),  # without infos
    (ValueError, "observation", {"reset": np.zeros(1, np.float32), "size": 3}),
    (ValueError, "observation", {"step": np.zeros(1, np.float32), "size": 3}),
    (TypeError, "", {"reward": [1.0, 2.0]}),
    (FloatingPointError, "reward is inf", {"reward": math.inf}),
    (FloatingPointError, "observation is nan", {"reset": NAN}),
    (FloatingPointError, "observation is nan", {"step": NAN}),
])  # fmt: skip
def test_a_task_that_breaks_its_promises_is_refused(error, what, wrong, script, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Wrong-v0", probes.Wrong, kwargs=wrong)
    monkeypatch.setitem(gym.registry, "Wrong-v0", spec)
    with pytest.raises(error, match=what):
        _, envs, obs, net = begin(script, "Wrong-v0")
        script.rollout(envs, obs, net, 32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_script
@pytest.mark.parametrize("kind", ["float32", "?", ">f4", ">f8", "i8", "longdouble"])
@pytest.mark.parametrize("discrete", [True, False])
def test_observations_of_any_kind_are_the_same_numbers(kind, discrete, script, monkeypatch):
    """In rollouts and evaluation. Actions of 16 bits, and those of a Discrete that starts at 3."""
    results = []
    for own_kind in (kind, "float64"):
        own = {"kind": own_kind, "discrete": discrete}
        spec = gym.envs.registration.EnvSpec("Kind-v0", probes.Kind, kwargs=own)
        monkeypatch.setitem(gym.registry, "Kind-v0", spec)
        args, envs, obs, net = begin(script, "Kind-v0", orthogonal=False, episodes=20)
        batch, _, episodes = script.rollout(envs, obs, net, 32)
        checkpoint = {"net": net.state_dict(), "step": 0}
        results.append((batch.actions.tolist(), episodes, script.evaluate(args, checkpoint)))
        expected = [[t % 3 % 2, t % 3 // 2] for t in range(32)]
        assert batch.raw_obs[:, 0].tolist() == batch.raw_obs[:, 1].tolist() == expected
    assert results[0] == results[1] and len(set(results[0][2])) > 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@each_script
def test_a_task_that_changes_its_observation_in_place_is_seen_right(script):
    """At the time limit, too, which a reset follows within the step."""
    _, envs, obs, net = begin(script, "InPlace-v0", norm_obs=False)
    net.critic = torch.nn.Linear(1, 1)
    net.critic.weight.data.fill_(1), net.critic.bias.data.zero_()  # V is what is seen
    batch, *_ = script.rollout(envs, obs, net, 12)
    assert batch.next_values[:10, 0].tolist() == list(range(1, 11))
    assert batch.raw_obs[:, 0].flatten().tolist() == [*range(10), 0, 1]


# ------------------------------------------------------------------------------------- Network


@each_script
def test_running_moments_are_numpys(script):
    rng = np.random.default_rng(0)
    chunks = [rng.normal(5, 3, (n, 4)) for n in (1, 7, 200, 3)]
    moments = script.RunningMoments(4)
    for chunk in chunks:
        moments.add(torch.from_numpy(chunk))
    everything = np.concatenate(chunks)
    assert moments.count == 211
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, everything.var(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std, everything.std(0), rtol=1e-8)


@each_script
def test_normalise_clips_at_10_and_can_be_off(script):
    net = make_net(num_inputs=1, script=script)
    net.obs_moments.add(torch.tensor([[1.0], [3.0]]).double())
    obs = torch.tensor([[2.0], [3.0], [1e6], [-1e6]]).double()
    torch.testing.assert_close(net.normalise(obs)[:, 0], torch.tensor([0.0, 1, 10, -10]))
    assert torch.equal(make_net(script=script, norm_obs=False).normalise(obs), obs.float())


@each_script
@pytest.mark.parametrize("orthogonal", [True, False])
def test_network_is_that_of_the_paper(orthogonal, script):
    args = settings(script, orthogonal=orthogonal)
    net = script.ActorCritic(Box(-1, 1, (17,)), Box(-1, 1, (6,)), args)
    weights = 2 * (64 * 18 + 64 * 65) + 6 * 65 + 65 + 6
    assert sum(p.numel() for p in net.parameters()) == weights and not net.log_std.any()
    for mlp, head in ((net.actor, 0.01), (net.critic, 1.0)):
        assert [type(layer) for layer in mlp[1::2]] == [torch.nn.Tanh] * 2 and len(mlp) == 5
        for layer, gain in zip((mlp[0], mlp[2], mlp[4]), (2**0.5, 2**0.5, head), strict=True):
            w = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            close = torch.allclose(w @ w.T, gain**2 * torch.eye(len(w)), rtol=0, atol=1e-4)
            assert (close and not layer.bias.any()) == orthogonal


@each_script
@pytest.mark.parametrize("space", SPACES)
def test_pi_is_a_softmax_or_a_normal(space, script):
    """Of the actor's outputs and the stds, written out."""
    net, obs = make_net(space, script=script), torch.randn(5, 4)
    with torch.no_grad():
        pi, out = net.pi(obs), net.actor(obs).double().numpy()
        assert torch.equal(net.value(obs), net.critic(obs)[:, 0])
    actions = pi.sample()
    if net.discrete:
        expected = np.exp(out[range(5), actions]) / np.exp(out).sum(-1)
    else:
        std = np.exp([-1.0, 0.3])
        z = (actions.double().numpy() - out) / std
        expected = (np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi))).prod(-1)
    assert pi.log_prob(actions).exp().tolist() == pytest.approx(expected, rel=1e-5)


@each_script
@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("space", SPACES)
@torch.no_grad()
def test_act_samples_pi_and_is_the_same_in_numpy(space, norm_obs, script):
    """Without noise it takes the most probable action."""
    net = make_net(space, script=script, norm_obs=norm_obs)
    net.obs_moments.add(3 * torch.randn(50, 4).double())
    obs = np.random.default_rng(0).normal(0, 3, (2, 4))
    obs[0, 0], obs[1, 3] = 100, -100  # more than 10 standard deviations off
    steps, act_fn = 20_000, script.act_in_numpy(net)
    pi, noise = net.pi(net.normalise(torch.from_numpy(obs))), script.draw_noise(net, steps, 2)
    actions = script.act(net, obs, noise)
    mode = pi.probs.argmax(-1) if net.discrete else pi.mean
    torch.testing.assert_close(script.act(net, obs), mode)
    in_numpy = torch.as_tensor(act_fn(obs, noise.numpy()))
    torch.testing.assert_close(in_numpy, actions, rtol=1e-5, atol=1e-5)
    if net.discrete:
        frequencies = torch.nn.functional.one_hot(actions, 3).double().mean(0)
        assert (frequencies - pi.probs).abs().max() < 4 * 0.5 / steps**0.5
    else:
        z = (actions - pi.mean) / pi.stddev
        assert z.mean(0).abs().max() < 4 / steps**0.5
        assert (z.var(0) - 1).abs().max() < 4 * (2 / steps) ** 0.5


@each_script
@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("change", ["relu", "clip"])
def test_a_network_that_numpy_does_not_follow_is_refused(change, env_id, script, monkeypatch):
    mlp, normalise = script.mlp, script.ActorCritic.normalise

    def with_relu(*sizes):
        return torch.nn.Sequential(*[torch.nn.ReLU() if isinstance(layer, torch.nn.Tanh) else layer
                                     for layer in mlp(*sizes)])  # fmt: skip

    if change == "relu":
        monkeypatch.setattr(script, "mlp", with_relu)
    else:
        clipped = lambda net, raw_obs: normalise(net, raw_obs).clamp(-5, 5)
        monkeypatch.setattr(script.ActorCritic, "normalise", clipped)
    _, envs, obs, net = begin(script, env_id)
    with pytest.raises(RuntimeError, match="act_in_numpy"):
        script.rollout(envs, obs, net, 32)


@each_script
def test_a_network_may_have_another_layer(script, monkeypatch):
    """However many there are, each hidden layer is orthogonal, the head is small, numpy follows."""

    def deep(num_inputs, num_outputs):
        sizes = [(num_inputs, 64), (64, 64), (64, 64)]
        layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.Tanh())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(64, num_outputs))

    monkeypatch.setattr(script, "mlp", deep)
    _, envs, obs, net = begin(script, "CartPole-v1")
    *hidden, head = net.actor[::2]
    for layer, gain in [*((layer, 2**0.5) for layer in hidden[1:]), (head, 0.01)]:
        norms = layer.weight.norm(dim=1)
        torch.testing.assert_close(norms, torch.full_like(norms, gain))
    script.rollout(envs, obs, net, 8)


# ---------------------------------------------------------------------------------- Advantages


@each_script
@pytest.mark.parametrize("env_id, value", [("Probe-v0", 10.0), ("Ends-v0", 6.5132)])
def test_targets_at_a_time_limit_and_at_an_end(env_id, value, script):
    """Reward 1 a step, γ = 0.9. Cut after 10 steps by a limit, a state is worth 1 / (1 - γ) = 10,
    the critic knows; ended after 10 steps, the first is worth (1 - γ^10) / (1 - γ) = 6.51."""
    _, envs, obs, net = begin(script, env_id)
    net.critic[-1].weight.data.zero_(), net.critic[-1].bias.data.fill_(10)
    batch, _, episodes = script.rollout(envs, obs, net, 40)
    assert [length for _, _, length in episodes] == [10] * 8
    for gae_lambda in (1.0, 0.95):
        script.estimate_advantages(batch, 0.9, gae_lambda)
        torch.testing.assert_close(batch.targets - batch.values, batch.advantages)
        if gae_lambda == 1.0 or env_id == "Probe-v0":
            torch.testing.assert_close(batch.targets[0], torch.full((2,), value), rtol=1e-4, atol=0)


@each_script
def test_rewards_are_scaled_by_the_std_of_discounted_returns(script):
    """Of all so far; a rollout goes on with the last one's returns; ±10 is the most."""
    torch.manual_seed(0)
    moments, old, kept = script.RunningMoments(), [[], []], np.zeros(2)
    for largest in (0.0, 1000.0, 0.0):
        terminated, truncated = (torch.rand(2, 200, 2) < 0.15).float()
        rewards = 1 + torch.randn(200, 2)
        rewards[7], rewards[-1], terminated[-1], truncated[-1] = largest, -largest, 0, 0
        batch = SimpleNamespace(rewards=rewards.clone(), terminated=terminated, truncated=truncated)
        kept = script.scale_rewards(batch, kept, moments, 0.5)
        for t, n in np.ndindex(200, 2):
            new_episode = not old[n] or old[n][-1][1]
            discounted = rewards[t, n].item() + (0 if new_episode else 0.5 * old[n][-1][0])
            old[n].append((discounted, bool(terminated[t, n] + truncated[t, n])))
        std = np.std([discounted for rows in old for discounted, _ in rows])
        expected = np.clip(rewards.numpy() / std, -10, 10)
        np.testing.assert_allclose(batch.rewards, expected, rtol=1e-5)
        assert (abs(expected) == 10).sum() == (4 if largest else 0)
    batch.rewards.zero_()
    script.scale_rewards(batch, np.zeros(2), script.RunningMoments(), 0.5)
    assert not batch.rewards.any()  # and not nan


# ---------------------------------------------------------------------------------------- Loss


def test_loss_and_gradient_are_eq_9():
    assert cases.first_failure("ppo_loss", ppo_continuous) is None


# -------------------------------------------------------------------------------------- Update


class Update:
    """Runs `update` on a rollout of 4 × 16 samples, and keeps what each minibatch gave.

    SGD takes Adam's place, so that a step shows the gradient and not its sign alone.
    """

    def __init__(self, env_id="Pendulum-v1", spoil=1.0, rate=0.5, **own):
        own = {"num_envs": 4, "num_steps": 16, "objective": "kl-fixed", "vf_coef": 0.1} | own
        self.args, envs, obs, self.net = begin(ppo_continuous, env_id, orthogonal=False, **own)
        self.batch, *_ = ppo_continuous.rollout(envs, obs, self.net, 16)
        ppo_continuous.estimate_advantages(self.batch, 0.9, 0.9)
        self.batch.targets *= spoil
        self.before, self.indices, self.calls, self.moved = copy.deepcopy(self.net), [], [], []
        optimizer = torch.optim.SGD(self.net.parameters(), 9.0)  # not the step size to be taken

        def backpropagate(net, samples, indices, *rest):
            self.indices.append(indices)
            log_probs = net.pi(samples["obs"]).log_prob(samples["actions"])
            self.moved.append((log_probs - samples["log_probs"]).abs().max().item())
            stats = ppo_continuous.backpropagate(net, samples, indices, *rest)
            self.calls.append({name: x.item() for name, x in stats.items()})
            return stats

        self.stats = ppo_continuous.update(backpropagate, self.net, optimizer, self.batch, rate,
                                           0.15, 0.7, self.args)  # fmt: skip


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
        "kl": kl, "learning_rate": 0.5, "clip_eps": 0.15, "epochs": 2,
        "explained_variance": 1 - unexplained,
    }  # fmt: skip
    assert update.stats == pytest.approx(expected, rel=2e-3, abs=1e-5) and kl > 1e-4
    assert {type(value) for value in update.stats.values()} == {float, int} and len(calls) == 8
    assert max(call["grad_norm"] for call in calls) > args.max_grad_norm


@pytest.mark.parametrize("env_id", TASKS)
def test_the_first_minibatch_has_ratio_1_and_every_epoch_every_sample(env_id):
    update = Update(env_id, num_epochs=3)
    assert update.moved[0] < 1e-6 < 1e-2 < update.moved[-1]
    assert update.calls[0]["clip_fraction"] == 0
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
        assert len(update.indices) == 4 * epochs and update.stats["epochs"] == epochs


def test_update_refuses_a_loss_that_is_not_finite():
    with pytest.raises(FloatingPointError, match="is nan"):
        Update(spoil=math.nan)


# -------------------------------------------------------------------------- From one to the next


def test_beta_doubles_and_halves_at_the_borders_of_sec_4():
    assert cases.first_failure("adapt_beta", ppo_continuous) is None


@pytest.mark.parametrize("kl, factor", cases.BORDERS)
def test_the_adaptive_beta_stays_a_number(kl, factor):
    """In float32 above 0, and it can always come back."""
    far = 3.0
    for _ in range(200):
        far = adapt_beta(far, kl, 0.015)
    assert far == {0.5: 1e-12, 1: 3, 2: 1e12}[factor] and 0 < torch.tensor(far) < math.inf
    assert adapt_beta(far, 0.015**2 / max(kl, 1e-9), 0.015) == far / factor


def test_defaults_are_those_of_table_3_and_sec_6_1():
    args = ppo_continuous.Args()
    assert (args.num_steps, args.learning_rate, args.num_epochs) == (2048, 3e-4, 10)
    assert (args.minibatch_size, args.gamma, args.gae_lambda) == (64, 0.99, 0.95)
    assert (args.clip_eps, args.kl_target, args.kl_beta) == (0.2, 0.01, 1.0)
    args = trpo_continuous.Args()
    assert (args.max_kl, args.gamma, args.accept_ratio) == (0.01, 0.99, 0)


def test_annealing():
    args = {"num_envs": 1, "num_steps": 256, "total_steps": 256_000, "learning_rate": 1e-3}
    expected = {"both": (7.5e-4, 0.15), "learning-rate": (7.5e-4, 0.2), "none": (1e-3, 0.2)}
    for how, rate_and_eps in expected.items():
        own = settings(**args, anneal=how)
        assert ppo_continuous.anneal(own, 250) == pytest.approx(rate_and_eps)
        assert ppo_continuous.anneal(own, 0) == (1e-3, 0.2)


@each_script
@pytest.mark.parametrize("no", ["", "norm_obs", "norm_reward"])
def test_train_hands_each_iteration_what_it_needs(no, script, tmp_path, monkeypatch):
    """Rewards are scaled before advantages are estimated; the moments of the observations stay
    until π has been updated; a KL far below its target halves an adaptive β. Three iterations, and
    a fourth that resumes: it begins new episodes, and goes on with all else."""
    seen = {name: [] for name in ("rollout", "scale_rewards", "estimate_advantages", "update")}

    def watch(name, before=lambda *given: None):
        function = getattr(script, name)

        def call(*given):
            noted = before(*given)
            seen[name].append((given, noted, result := function(*given)))
            return result

        monkeypatch.setattr(script, name, call)

    def before_update(*given):
        net, optimizer, batch, *rest, _ = given if script is trpo_continuous else given[1:]
        assert torch.equal(net.normalise(batch.raw_obs), batch.obs)
        [group] = optimizer.param_groups
        moments = net.obs_moments.count.item(), net.return_moments.count.item()
        return moments, rest or (group["lr"],), group["eps"]

    watch("rollout"), watch("scale_rewards")
    watch("estimate_advantages", lambda batch, *rest: bool((batch.rewards == 1).all()))
    watch("update", before_update)
    objective = "kl-fixed" if no == "norm_obs" else "kl-adaptive"
    own = {"total_steps": 192, "gamma": 0.9, "gae_lambda": 0.5, "learning_rate": 0.03}
    own |= {no: False} if no else {}
    if script is ppo_continuous:
        own |= {"anneal": "both", "objective": objective, "kl_target": 1e9, "kl_beta": 2.0,
                "adam_eps": 1e-7}  # fmt: skip
    for steps in (192, 256):
        own |= {"total_steps": steps, "run_dir": str(tmp_path / "run")}
        path = tmp_path / "run" / "checkpoint.pt"
        script.train(settings(script, **own), load(path) if path.exists() else None)
        seed = script.derive_seed(1, 0 if steps == 192 else 3)
        assert torch.initial_seed() == seed  # of the actions and minibatches
        starts = [gym.make("CartPole-v1").reset(seed=seed + n)[0] for n in range(2)]
        (_, given, *_), *_ = seen["rollout"][0 if steps == 192 else 3]
        np.testing.assert_array_equal(given, starts)
    obs = [(given[1], after) for given, _, (_, after, _) in seen["rollout"]]
    assert all(np.array_equal(obs[k][0], obs[k - 1][1]) for k in (1, 2))
    advantages = [(*given[1:], ones) for given, ones, _ in seen["estimate_advantages"]]
    assert advantages == [(0.9, 0.5, no == "norm_reward")] * 4
    returns = [(given[1], after) for given, _, after in seen["scale_rewards"]]
    assert len(returns) == (0 if no == "norm_reward" else 4)
    for k, (given, _) in enumerate(returns):
        assert np.array_equal(given, returns[k - 1][1] if k in (1, 2) else np.zeros(2))
    moments, rest, adam_eps = zip(*(noted for _, noted, _ in seen["update"]), strict=True)
    assert list(moments) == [(64 * k * (no != "norm_obs"), 64 * (k + 1) * (no != "norm_reward"))
                             for k in range(4)]  # fmt: skip
    if script is trpo_continuous:
        assert rest == ((0.03,),) * 4
        return
    rates, clips, betas = zip(*rest, strict=True)
    assert rates == pytest.approx((0.03, 0.02, 0.01, 0.0075)) and adam_eps == (1e-7,) * 4
    assert clips == pytest.approx((0.2, 0.4 / 3, 0.2 / 3, 0.05))
    assert betas == ((2, 2, 2, 2) if objective == "kl-fixed" else (2, 1, 0.5, 0.25))
    logged = [event.value for event in events(tmp_path / "run").get("beta", [])]
    assert logged == ([] if objective == "kl-fixed" else [1, 0.5, 0.25, 0.125])


@pytest.mark.parametrize("script", processes.SCRIPTS)
def test_a_resumed_run_knows_its_step_its_seed_and_the_best_score(script, tmp_path):
    """Only a better one replaces best.pt."""
    net = torch.nn.Linear(1, 1)
    start = {"net": net.state_dict(), "step": 192, "best": 5.0, "seconds": 9.0,
             "settings": {"run_dir": str(tmp_path)},
             "episodes": [(k, 4.0, 1, 0.1) for k in range(1, 101)]}  # fmt: skip
    args = script.Args(**SMALL, run_dir=str(tmp_path))
    (tmp_path / "checkpoint.pt").touch()
    run, saved = script.Run(args, start, net=net), tmp_path / "best.pt"
    assert (run.iteration, run.seed) == (3, script.derive_seed(1, 3))
    run.log([], {})
    assert not saved.exists()
    run.log([(0, 200.0, 1)], {})
    run.close()
    best = load(saved)
    assert best["best"] == run.best == 5.96 and best["step"] == run.step == 320


@pytest.mark.parametrize("env_id", TASKS)
@each_script
def test_eval_every_logs_a_score_and_changes_no_bit(env_id, script, tmp_path):
    """That of the most probable actions, in the iteration that meets each multiple of 100."""
    for name, every in (("a", 0), ("b", 100)):
        own = {"env_id": env_id, "total_steps": 448, "eval_every": every, "episodes": 2}
        run = script.train(settings(script, **own, run_dir=str(tmp_path / name)))
    one, other = (load(tmp_path / name / "checkpoint.pt") for name in "ab")
    assert all(same(one[part], other[part]) for part in ("net", "optimizer"))
    assert rows(tmp_path / "a") == rows(tmp_path / "b") != []
    net, env, scores = run.learned["net"], gym.make(env_id), []
    for k in range(2):
        (obs, _), done = env.reset(seed=1 if k == 0 else None), False
        scores.append(0.0)
        while not done:
            out = net.actor(net.normalise(torch.from_numpy(obs))).detach().numpy()
            action = out.argmax() if net.discrete else out.clip(-2, 2)
            obs, reward, terminated, truncated, _ = env.step(action)
            scores[-1] += reward
            done = terminated or truncated
    assert "eval_score" not in events(tmp_path / "a")
    logged = events(tmp_path / "b")["eval_score"]
    assert [event.step for event in logged] == [128, 256, 320, 448]
    assert logged[-1].value == pytest.approx(np.mean(scores), rel=1e-5)


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
    monkeypatch.setattr(ppo_continuous, "choose_compile", lambda args: args.compile)
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
