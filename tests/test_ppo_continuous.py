"""The parts of ppo_continuous.py against independent references: torch.distributions, definitions
written out, numpy, sampling, and probe tasks with a known answer."""

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
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import ppo_continuous
from ppo_continuous import (
    ActorCritic,
    Environments,
    Penalty,
    RunningMoments,
    gae,
    make_batch,
    ppo_loss,
    rollout,
    select,
)


def settings(*flags):
    return ppo_continuous.parse_args(list(flags))[0]


# ------------------------------------------------------------------------------------ Settings


def test_defaults_are_table_3():
    args = settings("--env-id", "HalfCheetah-v5")
    assert (args.num_steps, args.learning_rate, args.num_epochs) == (2048, 3e-4, 10)
    assert (args.minibatch_size, args.gamma, args.gae_lambda, args.num_envs) == (64, 0.99, 0.95, 1)
    assert (args.clip_eps, args.ent_coef, args.total_steps) == (0.2, 0, 1_000_000)
    assert (args.objective, args.kl_beta, args.target_kl) == ("clip", 1, None)


@pytest.mark.parametrize("env_id", ppo_continuous.TASKS)
def test_a_task_has_its_settings_and_a_flag_wins(env_id):
    own = ppo_continuous.TASKS[env_id]
    args = vars(settings("--env-id", env_id))
    assert own.keys() <= args.keys() and {name: args[name] for name in own} == own
    args = vars(settings("--env-id", env_id, "--num-steps", "64"))
    assert args["num_steps"] == 64 and args["learning_rate"] == own.get("learning_rate", 3e-4)


def test_the_number_of_iterations_is_that_of_whole_rollouts():
    args = settings("--num-envs", "3", "--num-steps", "256", "--total-steps", "4000")
    assert (args.batch_size, args.num_iterations) == (768, 5)


# --------------------------------------------------------------------------------- Environment


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_environments_play_as_gymnasium(env_id):
    """Same actions: same observations, rewards and ends; actions are clipped on the way alone."""
    envs = Environments(env_id, 2, gamma=0.9)
    envs.reset(seed=4)
    twins = [gym.make(env_id) for _ in range(2)]
    seen = [env.reset(seed=ppo_continuous.derive_seed(4, n))[0] for n, env in enumerate(twins)]
    rng, scores, expected_finished, finished = np.random.default_rng(0), [0.0, 0.0], [], []
    discounted = [0.0, 0.0]
    for _ in range(450):
        np.testing.assert_array_equal(envs.obs, np.stack(seen))
        if env_id == "CartPole-v1":
            actions = rng.integers(0, 2, 2)
        else:
            actions = rng.normal(0, 3, (2, 1)).astype(np.float32)
        rewards, terminated, truncated, final_obs, over = envs.step(actions)
        finished += over
        returns = envs.discounted_returns.tolist()
        for n, env in enumerate(twins):
            action = actions[n] if env_id == "CartPole-v1" else np.clip(actions[n], -2, 2)
            seen[n], reward, terminal, cut, _ = env.step(action)
            assert (reward, terminal, cut) == (rewards[n], terminated[n], truncated[n])
            scores[n] += reward
            discounted[n] = 0.9 * discounted[n] + reward
            assert returns[n] == pytest.approx(discounted[n])
            if cut:
                np.testing.assert_array_equal(dict(final_obs)[n], seen[n])
            if terminal or cut:
                expected_finished.append(scores[n])
                scores[n] = discounted[n] = 0.0
                seen[n], _ = env.reset()
    assert [score for score, _ in finished] == pytest.approx(expected_finished) and finished


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5"])
def test_reset_in_mid_episode_equals_a_new_process(env_id):
    """Exact resume rests on this."""
    traces = []
    for warm_up in (0, 57):
        envs = Environments(env_id, 2, gamma=0.9)
        for seed, steps in ((1, warm_up), (5, 120)):
            envs.reset(seed)
            envs.action_space.seed(3)
            trace = []
            for _ in range(steps):
                actions = np.stack([envs.action_space.sample() for _ in range(2)])
                trace.append((envs.step(actions)[0].tolist(), envs.obs.tolist()))
        traces.append(trace)
    assert traces[0] == traces[1]


def test_rollout_stores_what_happened():
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        torch.manual_seed(0)
        envs, twin = Environments(env_id, 3, 0.9), Environments(env_id, 3, 0.9)
        envs.reset(2), twin.reset(2)
        net = ActorCritic(envs.obs.shape[1], envs.action_space, orthogonal=False)
        net.obs_moments.add(torch.randn(50, envs.obs.shape[1], dtype=torch.float64))
        batch = make_batch(230, envs)
        finished = rollout(envs, net, batch)
        expected, cut = [], {}
        for t in range(230):
            np.testing.assert_array_equal(batch.raw_obs[t].numpy(), twin.obs)
            rewards, terminated, truncated, last, over = twin.step(batch.actions[t].numpy())
            assert batch.rewards[t].tolist() == pytest.approx(rewards.tolist())
            assert batch.terminated[t].tolist() == terminated.tolist()
            assert batch.truncated[t].tolist() == truncated.tolist()
            cut |= {(t, n): obs for n, obs in last}
            expected += [(t, score, length) for score, length in over]
        assert finished == expected != []
        moments = net.obs_moments

        def seen(obs, moments=moments):
            z = (torch.as_tensor(obs) - moments.mean) / (moments.var + 1e-8).sqrt()
            return z.clamp(-10, 10).float()

        with torch.no_grad():
            for t in (0, 100, 229):
                pi, values = net(seen(batch.raw_obs[t]))
                log_probs = pi.log_prob(batch.actions[t])
                torch.testing.assert_close(batch.log_probs.view(230, 3)[t], log_probs)
                torch.testing.assert_close(batch.values[t], values)
            torch.testing.assert_close(batch.values[-1], net(seen(twin.obs))[1])
            for (t, n), obs in cut.items():
                value = net(seen(obs)[None])[1][0]
                torch.testing.assert_close(batch.final_values[t, n], value)
        assert (len(cut) > 0) == (env_id == "Pendulum-v1")


# ------------------------------------------------------------------------------------- Network


def test_running_moments_are_numpys():
    rng = np.random.default_rng(0)
    chunks = [rng.normal(5, 3, (n, 4)) for n in (1, 7, 200, 3)]
    moments = RunningMoments(4)
    for chunk in chunks:
        moments.add(torch.from_numpy(chunk))
    everything = np.concatenate(chunks)
    assert moments.count == 211
    np.testing.assert_allclose(moments.mean.numpy(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var.numpy(), everything.var(0), rtol=1e-12)
    assert {"count", "mean", "var"} == moments.state_dict().keys()


def test_normalise_clips_at_10_and_can_be_off():
    net = ActorCritic(1, Discrete(2))
    net.obs_moments.add(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    obs = torch.tensor([[2.0], [3.0], [1e6], [-1e6]], dtype=torch.float64)
    torch.testing.assert_close(net.normalise(obs)[:, 0], torch.tensor([0.0, 1.0, 10.0, -10.0]))
    net = ActorCritic(1, Discrete(2), norm_obs=False)
    assert torch.equal(net.normalise(obs), obs.float())


def test_network_is_that_of_the_paper():
    net = ActorCritic(17, Box(-1, 1, (6,)))
    weights = 2 * (64 * 18 + 64 * 65) + 6 * 65 + 65 + 6
    assert sum(p.numel() for p in net.parameters()) == weights
    for mlp, head in ((net.actor, 0.01), (net.critic, 1.0)):
        for layer, gain in zip((mlp[0], mlp[2], mlp[4]), (2**0.5, 2**0.5, head), strict=True):
            w = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(w @ w.T, gain**2 * torch.eye(len(w)), rtol=0, atol=1e-4)
            assert not layer.bias.any()
        assert isinstance(mlp[1], torch.nn.Tanh) and len(mlp) == 5
    pi, values = net(torch.randn(3, 17))
    assert pi.mean.shape == (3, 6) and values.shape == (3,) and (pi.stddev == 1).all()


def policies(kind, size=5):
    """Two policies for three actions, or for actions of three components."""
    rng = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, size, 3, dtype=torch.float64, generator=rng)
    if kind == "softmax":
        return Categorical(logits=first), Categorical(logits=second)
    stds = (torch.randn(2, 3, dtype=torch.float64, generator=rng) * 0.5).exp()
    return Independent(Normal(first, stds[0]), 1), Independent(Normal(second, stds[1]), 1)


@pytest.mark.parametrize("action_space", [Discrete(3), Box(-1, 1, (2,))])
def test_pi_is_softmax_or_normal(action_space):
    """Of the actor's outputs and the stds, written out."""
    torch.manual_seed(0)
    net, obs = ActorCritic(4, action_space, orthogonal=False), torch.randn(5, 4)
    with torch.no_grad():
        pi, values = net(obs)
        out = net.actor(obs).double().numpy()
        torch.testing.assert_close(values, net.critic(obs)[:, 0])
    actions = pi.sample()
    if net.log_std is None:
        expected = np.exp(out[range(5), actions]) / np.exp(out).sum(-1)
        assert torch.equal(pi.mode, torch.from_numpy(out.argmax(-1)))
    else:
        net.log_std.data.copy_(torch.tensor([-1.0, 0.3]))
        pi, std = net.pi(obs), np.exp([-1.0, 0.3])
        z = (actions.double().numpy() - out) / std
        expected = (np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi))).prod(-1)
        assert torch.equal(pi.mode, net.actor(obs))
    assert pi.log_prob(actions).exp().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "normal"])
@pytest.mark.parametrize("indices", [slice(1, 3), torch.tensor([4, 0])])
def test_select_takes_the_policy_of_some_states(kind, indices):
    old, new = policies(kind)
    some_old, some_new = select(old, indices), select(new, indices)
    torch.testing.assert_close(kl_divergence(some_old, some_new), kl_divergence(old, new)[indices])
    actions = new.sample()
    torch.testing.assert_close(some_old.log_prob(actions[indices]), old.log_prob(actions)[indices])
    assert torch.equal(select(actions, indices), actions[indices])


@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("action_space", [Discrete(3), Box(-1, 1, (2,))])
def test_numpy_policy_samples_pi(action_space, norm_obs):
    torch.manual_seed(0)
    net = ActorCritic(4, action_space, orthogonal=False, norm_obs=norm_obs)
    net.obs_moments.add(3 * torch.randn(50, 4, dtype=torch.float64))
    if net.log_std is not None:
        net.log_std.data.copy_(torch.tensor([-1.0, 0.3]))
    obs = np.random.default_rng(0).normal(0, 3, (2, 4))
    obs[0, 0], obs[1, 3] = 100, -100  # more than 10 standard deviations off
    steps = 20_000
    policy = ppo_continuous.numpy_policy(net, steps, 2)
    actions = torch.as_tensor(np.stack([policy(t, obs) for t in range(steps)]))
    with torch.no_grad():
        pi = net.pi(net.normalise(torch.from_numpy(obs)))
    if net.log_std is None:
        for n in range(2):
            frequencies = torch.bincount(actions[:, n], minlength=3) / steps
            assert (frequencies - pi.probs[n]).abs().max() < 4 * 0.5 / steps**0.5
    else:
        z = (actions - pi.mean) / pi.stddev
        assert z.mean(0).abs().max() < 4 / steps**0.5
        assert (z.var(0) - 1).abs().max() < 4 * (2 / steps) ** 0.5


# ---------------------------------------------------------------------------------- Advantages


def test_gae_is_eq_11_past_no_end():
    rng = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 40, 3, dtype=torch.float64, generator=rng)
    terminated, truncated = (torch.rand(2, 40, 3, generator=rng) < 0.15).double()
    result = gae(rewards, values, next_values, terminated, truncated, 0.9, 0.7)
    for n in range(3):
        for t in range(40):
            advantage = 0.0
            for k in range(t, 40):
                delta = rewards[k, n] - values[k, n]
                delta += 0.9 * next_values[k, n] * (0 if terminated[k, n] else 1)
                advantage += 0.63 ** (k - t) * delta.item()
                if terminated[k, n] or truncated[k, n]:
                    break
            assert result[t, n].item() == pytest.approx(advantage, abs=1e-12)


@pytest.mark.parametrize("env_id, value", [("Probe-v0", 10.0), ("Ends-v0", 6.5132)])
def test_targets_at_a_time_limit_and_at_an_end(env_id, value):
    """Reward 1 a step, γ = 0.9. Cut after 10 steps by a limit, a state is worth 1 / (1 - γ) = 10,
    the critic knows; ended after 10 steps, the first is worth (1 - γ^10) / (1 - γ) = 6.51."""
    envs = Environments(env_id, 2, 0.9)
    envs.reset(1)
    net = ActorCritic(1, envs.action_space)
    net.critic[-1].weight.data.zero_(), net.critic[-1].bias.data.fill_(10)
    batch = make_batch(40, envs)
    finished = rollout(envs, net, batch)
    assert [length for _, _, length in finished] == [10] * 8
    assert batch.truncated.any() == (env_id == "Probe-v0")
    for gae_lambda in (1.0, 0.95):
        ppo_continuous.estimate_advantages(batch, 0.9, gae_lambda)
        if gae_lambda == 1.0 or env_id == "Probe-v0":
            torch.testing.assert_close(batch.targets[0], torch.full((2,), value), rtol=1e-4, atol=0)


def test_rewards_are_scaled_by_the_std_of_discounted_returns():
    envs = Environments("Ends-v0", 2, 0.9)
    envs.reset(1)
    net = ActorCritic(1, envs.action_space)
    batch = make_batch(25, envs)
    returns = []
    for _ in range(2):
        rollout(envs, net, batch)
        ppo_continuous.scale_rewards(batch, net.return_moments)
        returns += batch.discounted_returns.flatten().tolist()
        assert batch.rewards.flatten().tolist() == pytest.approx([1 / np.std(returns)] * 50)
    one_episode = [(1 - 0.9**k) / 0.1 for k in range(1, 11)]
    assert returns[::2] == pytest.approx((one_episode * 5)[:50])


# -------------------------------------------------------------------------------------- Update


def random_minibatch(kind, size=12):
    rng = torch.Generator().manual_seed(1)
    old, new = policies(kind, size)
    torch.manual_seed(0)
    values, advantages, targets = torch.randn(3, size, dtype=torch.float64, generator=rng)
    batch = SimpleNamespace(pi_old=old, actions=old.sample())
    batch.advantages, batch.targets = advantages, targets
    batch.log_probs = old.log_prob(batch.actions)
    leaves = [new.logits] if kind == "softmax" else [new.mean, new.stddev[0].log()]
    return batch, leaves, values


def reference_loss(kind, batch, leaves, values, objective, eps, beta, c1, c2, norm_adv):
    """Eq. 6 to 9, one sample after the other."""
    advantages = np.array(batch.advantages.tolist())
    if norm_adv == "minibatch":
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    total = 0.0
    for i in range(len(values)):
        if kind == "softmax":
            unnormalised = np.exp(leaves[0][i].numpy())
            pi = unnormalised / unnormalised.sum()
            old = batch.pi_old.probs[i].numpy()
            probability, entropy = pi[batch.actions[i]], -(pi * np.log(pi)).sum()
            kl = (old * np.log(old / pi)).sum()
        else:
            mean, std = leaves[0][i].numpy(), np.exp(leaves[1].numpy())
            old_mean, old_std = batch.pi_old.mean[i].numpy(), batch.pi_old.stddev[i].numpy()
            z = (batch.actions[i].numpy() - mean) / std
            probability = np.prod(np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi)))
            entropy = (np.log(std * math.sqrt(2 * math.pi * math.e))).sum()
            square = (old_std**2 + (old_mean - mean) ** 2) / (2 * std**2)
            kl = (np.log(std / old_std) + square - 0.5).sum()
        ratio = probability / math.exp(batch.log_probs[i])
        gain = ratio * advantages[i]
        if objective == "clip":
            gain = min(gain, min(max(ratio, 1 - eps), 1 + eps) * advantages[i])
        elif objective != "none":
            gain -= beta * kl
        error = (values[i] - batch.targets[i]).item() ** 2
        total += (gain - c1 * error + c2 * entropy) / len(values)
    return -total


@pytest.mark.parametrize("kind", ["softmax", "normal"])
@pytest.mark.parametrize("objective", ["clip", "kl-adaptive", "kl-fixed", "none"])
@pytest.mark.parametrize("norm_adv, c2", [("minibatch", 0.03), ("rollout", 0.0), ("none", 0.0)])
def test_loss_and_gradient_are_eq_9(kind, objective, norm_adv, c2):
    batch, leaves, values = random_minibatch(kind)
    args = (objective, 0.2, 0.4, 0.7, c2, norm_adv)
    tensors = [*leaves, values]
    for tensor in tensors:
        tensor.requires_grad_()
    if kind == "softmax":
        pi = Categorical(logits=leaves[0])
    else:
        pi = Independent(Normal(leaves[0], leaves[1].exp()), 1)
    loss = ppo_loss(pi, values, batch, *args)
    plain = [tensor.detach().clone() for tensor in tensors]
    expected = reference_loss(kind, batch, plain[:-1], plain[-1], *args)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    h = 1e-6
    for tensor, moved in zip(tensors, plain, strict=True):
        for k in range(moved.numel()):
            ends = []
            for shift in (h, -2 * h):
                moved.view(-1)[k] += shift
                ends.append(reference_loss(kind, batch, plain[:-1], plain[-1], *args))
            moved.view(-1)[k] += h
            slope = (ends[0] - ends[1]) / (2 * h)
            assert tensor.grad.view(-1)[k].item() == pytest.approx(slope, abs=2e-7)


@pytest.mark.parametrize("kl, beta", [
    (0.0, 2.0), (0.00999, 2.0), (0.015 / 1.5, 4.0), (0.012, 4.0), (0.015 * 1.5, 4.0),
    (0.02251, 8.0), (9.0, 8.0),
])  # fmt: skip
def test_the_adaptive_beta_at_its_borders(kl, beta):
    """For a target of 0.015; and again from where it has got to."""
    penalty = Penalty(4.0)
    assert penalty.beta.shape == () and not penalty.beta.requires_grad
    for factor in (1, beta / 4):
        penalty.adapt(kl, 0.015)
        assert penalty.beta.item() == beta * factor
    restored = Penalty(1.0)
    restored.load_state_dict(penalty.state_dict())
    assert restored.beta.item() == beta * beta / 4


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (1.0, 0.0)])
def test_adaptive_beta_comes_back_from_far_away(low, high):
    penalty = Penalty(1.0)
    for _ in range(200):
        penalty.adapt(low, 0.01)
    assert 0 < penalty.beta < math.inf
    far = penalty.beta.item()
    penalty.adapt(high, 0.01)
    assert penalty.beta.item() == far * (2 if high else 0.5)


def test_annealing():
    flags = ["--num-envs", "1", "--num-steps", "256", "--total-steps", "256000"]
    both, rate, none = (settings(*flags, "--anneal", a) for a in ("both", "learning-rate", "none"))
    alpha = both.learning_rate
    assert ppo_continuous.anneal(both, 250) == pytest.approx((0.75 * alpha, 0.15))
    assert ppo_continuous.anneal(rate, 250) == pytest.approx((0.75 * alpha, 0.2))
    assert ppo_continuous.anneal(none, 250) == pytest.approx((alpha, 0.2))
    assert ppo_continuous.anneal(both, 0) == (alpha, 0.2)


class UpdateLog:
    """Runs `update` on a rollout of CartPole or Pendulum and keeps what each minibatch gave.

    grad_norms: of ppo_loss on each minibatch, at the network as it was then
    """

    def __init__(self, *flags, env_id="Pendulum-v1", spoil=None, rate=1e-3, clip_eps=0.2, beta=1.0):
        self.args = args = settings(
            "--env-id", env_id, "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "16",
            *(["--objective", "kl-fixed"] if "--objective" not in flags else []), *flags,
        )  # fmt: skip
        torch.manual_seed(0)
        envs = Environments(env_id, 4, args.gamma)
        envs.reset(1)
        self.net = ActorCritic(envs.obs.shape[1], envs.action_space, orthogonal=False)
        # the step size that Adam begins with is not the one to be taken
        self.optimizer = torch.optim.Adam(self.net.parameters(), 9.0, fused=True)
        self.batch = batch = make_batch(16, envs)
        rollout(envs, self.net, batch)
        batch.targets = targets = torch.randn(16, 4)
        batch.advantages = targets - batch.values[:-1]
        self.targets, self.seen, self.ratios, self.kls = targets.flatten(), [], [], []
        self.grad_norms, self.advantages = [], []

        def backward(net, minibatch, clip_eps, beta, args):
            twin = copy.deepcopy(net)
            pi, values = twin(minibatch.obs)
            ppo_loss(pi, values, minibatch, args.objective, clip_eps, beta, args.vf_coef,
                     args.ent_coef, args.norm_adv).backward()  # fmt: skip
            squares = [p.grad.square().sum().item() for p in twin.parameters()]
            self.grad_norms.append(math.sqrt(sum(squares)))
            with torch.no_grad():
                pi = net.pi(minibatch.obs)
            self.seen.append(minibatch.targets)
            self.advantages.append(minibatch.advantages)
            if args.objective.startswith("kl"):
                self.kls.append(kl_divergence(minibatch.pi_old, pi).mean().item())
            self.ratios.append((pi.log_prob(minibatch.actions) - minibatch.log_probs).exp())
            if spoil:
                minibatch.targets = minibatch.targets * spoil
            return ppo_continuous.compute_gradients(net, minibatch, clip_eps, beta, args)

        self.old = batch.pi_old
        self.stats = ppo_continuous.update(backward, self.net, self.optimizer, batch, rate,
                                           clip_eps, torch.tensor(beta), args)  # fmt: skip
        with torch.no_grad():
            self.new, self.values = self.net(batch.obs)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("objective, norm_adv", [
    ("clip", "minibatch"), ("clip", "rollout"), ("clip", "none"), ("kl-adaptive", "minibatch"),
    ("kl-fixed", "minibatch"), ("none", "minibatch"),
])  # fmt: skip
def test_update_says_what_happened(env_id, objective, norm_adv):
    """Every number it returns, after torch.distributions and numpy, sample by sample."""
    log = UpdateLog("--objective", objective, "--num-epochs", "2", "--max-grad-norm", "0.3",
                    "--norm-adv", norm_adv, env_id=env_id, rate=2e-2, clip_eps=0.15,
                    beta=0.7)  # fmt: skip
    batch = log.batch
    actions = batch.actions.flatten(0, 1)
    old, new = log.old, log.new
    ratios = (new.log_prob(actions) - old.log_prob(actions)).exp().tolist()
    kls = kl_divergence(old, new).tolist()
    advantages, targets = batch.advantages.flatten().tolist(), log.targets.tolist()
    gains, outside = [], {"below": 0, "above": 0}
    used = np.array(advantages)
    if norm_adv != "none":
        used = (used - used.mean()) / used.std()
    for ratio, kl, advantage in zip(ratios, kls, used.tolist(), strict=True):
        gain = ratio * advantage
        if objective == "clip":
            gain = min(gain, min(max(ratio, 0.85), 1.15) * advantage)
        elif objective != "none":
            gain -= 0.7 * kl
        gains.append(gain)
        outside["below"] += ratio < 0.85
        outside["above"] += ratio > 1.15
    errors = [(v - target) ** 2 for v, target in zip(log.values.tolist(), targets, strict=True)]
    weights = torch.cat([p.detach().flatten() for p in log.net.parameters()])
    expected = {
        "kl": np.mean(kls),
        "clip_fraction": sum(outside.values()) / 64,
        "policy_loss": -np.mean(gains),
        "value_loss": np.mean(errors),
        "entropy": new.entropy().mean().item(),
        "grad_norm": np.mean(log.grad_norms),  # before it is clipped
        "weight_norm": weights.double().square().sum().sqrt().item(),
        "explained_variance": 1 - np.var(advantages) / np.var(targets),
        "learning_rate": 2e-2,
    } | ({"beta": 0.7} if objective.startswith("kl") else {})
    assert log.stats.keys() == expected.keys()
    for name, value in expected.items():
        assert type(log.stats[name]) is float, name
        assert log.stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert min(outside.values()) > 0 and sum(outside.values()) < 64
    assert len(log.grad_norms) == 8 and min(log.grad_norms) > 0.3


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_update_takes_steps_of_the_size_that_it_is_given(rate):
    """Adam moves no weight by much more than its step size, and with none it moves nothing."""
    log, still = UpdateLog("--num-epochs", "1", rate=rate), UpdateLog("--num-epochs", "1", rate=0.0)
    pairs = zip(log.net.parameters(), still.net.parameters(), strict=True)
    moved = max((one - other).abs().max().item() for one, other in pairs)
    assert log.optimizer.param_groups[0]["lr"] == rate
    assert (moved > rate) == (rate > 0) and moved <= 4.01 * rate


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_first_minibatch_has_ratio_one_and_kl_is_measured_at_the_end(env_id):
    log = UpdateLog(env_id=env_id)
    torch.testing.assert_close(log.ratios[0], torch.ones(16))
    assert abs(log.kls[0]) < 1e-6 < log.kls[-1]
    assert log.stats["kl"] == pytest.approx(kl_divergence(log.old, log.new).mean().item(), rel=1e-5)
    if env_id == "Pendulum-v1":  # the old std is a copy
        assert (log.old.stddev == 1).all() and log.net.log_std.any()


def test_every_epoch_sees_every_sample_once_in_a_new_order():
    log = UpdateLog("--num-epochs", "3")
    epochs = [torch.cat(log.seen[4 * k : 4 * k + 4]) for k in range(3)]
    assert len(log.seen) == 12
    for epoch in epochs:
        assert torch.equal(epoch.sort().values, log.targets.sort().values)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], log.targets)


@pytest.mark.parametrize("norm_adv", ["rollout", "none"])
def test_advantages_are_standardised_once_a_rollout(norm_adv):
    log = UpdateLog("--norm-adv", norm_adv, "--num-epochs", "1")
    expected = log.batch.advantages.flatten()
    if norm_adv == "rollout":
        expected = (expected - expected.mean()) / expected.std(correction=0)
    given = torch.cat(log.advantages)
    torch.testing.assert_close(given.sort().values, expected.sort().values, rtol=1e-4, atol=1e-5)


def test_target_kl_ends_the_epochs():
    """Where the KL after one is just above 1.5 times the target, and not just below."""
    kl = UpdateLog("--num-epochs", "1").stats["kl"]
    for share, epochs in ((0.99, 1), (1.01, 2)):
        log = UpdateLog("--num-epochs", "2", "--target-kl", str(share * kl / 1.5))
        assert len(log.seen) == 4 * epochs


def test_gradient_norm_is_clipped():
    for flag, clipped in (("1e-3", True), ("0", False)):
        net = UpdateLog("--num-epochs", "1", "--max-grad-norm", flag).net
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in net.parameters()))
        assert (norm <= 1.001e-3) == clipped


def test_update_refuses_a_loss_that_is_not_finite():
    with pytest.raises(FloatingPointError, match="is nan"):
        UpdateLog(spoil=math.nan)


# --------------------------------------------------------------------------------------- Probes


train = functools.partial(probes.train, ppo_continuous)
PROBE = ["--num-steps", 128, "--num-envs", 2, "--learning-rate", 3e-3, "--anneal", "none"]


def test_probe_the_value_under_a_time_limit_is_10(tmp_path):
    net, score = train(
        tmp_path, "--env-id", "Blind-v0", *PROBE, "--total-steps", 9000, "--gamma", 0.9,
        "--no-norm-reward",
    )  # fmt: skip
    with torch.no_grad():
        value = net(net.normalise(torch.zeros(1, 1, dtype=torch.float64)))[1].item()
    assert score == 10 and value == pytest.approx(10, abs=0.3)


@pytest.mark.parametrize("objective", ["clip", "kl-adaptive", "kl-fixed", "none"])
def test_probe_bandit(objective, tmp_path):
    net, score = train(
        tmp_path, "--env-id", "Bandit-v0", *PROBE, "--total-steps", 3000, "--objective", objective,
    )  # fmt: skip
    assert score > 0.9


def test_probe_continuous_bandit(tmp_path):
    net, score = train(
        tmp_path, "--env-id", "ContinuousBandit-v0", *PROBE, "--total-steps", 8000,
    )  # fmt: skip
    with torch.no_grad():
        pi = net.pi(net.normalise(torch.zeros(1, 1, dtype=torch.float64)))
    assert pi.mean[0].tolist() == pytest.approx([0.5, -0.3], abs=0.15)
    assert score > -0.3 and (pi.stddev.log() < -0.5).all()


def test_cartpole_is_learned(tmp_path):
    """A third of its default length is enough for balancing most of the time."""
    _, score = train(tmp_path, "--total-steps", 35_000, "--goal-score", 250)
    assert score >= 200


COMPILED = ["--num-steps", 64, "--num-envs", 2, "--minibatch-size", 32, "--num-epochs", 2,
            "--total-steps", 384, "--anneal", "both", "--kl-target", 1e-5,
            "--checkpoint-every", 99]  # fmt: skip


def train_compiled(folder, *flags):
    """The network after a run of a new process, of which torch has compiled one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.distributions.kl._KL_MEMOIZE.clear()
    net, _ = train(folder, *COMPILED, *flags, "--compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return net


def test_the_gradient_is_compiled_as_one_graph(tmp_path, monkeypatch):
    """Loss, gradient and clipping; here without the C++ that the graph becomes."""
    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(ppo_continuous.torch, "compile", compile)
    train_compiled(tmp_path, "--env-id", "Pendulum-v1", "--objective", "kl-adaptive")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["clip", "kl-adaptive"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_compile_gives_the_same_parameters(env_id, objective, tmp_path):
    """Up to rounding, after three iterations in which ε and β change."""
    flags = ["--env-id", env_id, "--objective", objective]
    compiled = train_compiled(tmp_path / "compiled", *flags)
    eager, _ = train(tmp_path / "eager", *COMPILED, *flags)
    for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


# ----------------------------------------------------------- What a missing line would change


def test_a_truncated_step_bootstraps_from_what_was_seen_last():
    """And not from what is seen after the reset, though that stands in the next row."""
    batch = SimpleNamespace(
        rewards=torch.tensor([[1.0], [2.0]]), values=torch.tensor([[10.0], [20.0], [30.0]]),
        final_values=torch.tensor([[400.0], [0.0]]), truncated=torch.tensor([[1.0], [0.0]]),
        terminated=torch.zeros(2, 1),
    )  # fmt: skip
    ppo_continuous.estimate_advantages(batch, 0.5, 0.9)
    assert batch.targets.flatten().tolist() == pytest.approx([1 + 0.5 * 400, 2 + 0.5 * 30])


def test_every_gradient_step_begins_without_a_gradient(monkeypatch):
    begins, compute_gradients = [], ppo_continuous.compute_gradients

    def watched(net, *rest):
        begins.append(any(p.grad is not None and p.grad.any() for p in net.parameters()))
        return compute_gradients(net, *rest)

    monkeypatch.setattr(ppo_continuous, "compute_gradients", watched)
    UpdateLog("--num-epochs", "2")
    assert begins == [False] * 8


def test_scaled_rewards_are_clipped_at_10():
    batch = SimpleNamespace(rewards=torch.tensor([[1e6, -1e6, 0.5]]),
                            discounted_returns=torch.tensor([[1.0, -1.0, 0.0]]))  # fmt: skip
    ppo_continuous.scale_rewards(batch, RunningMoments())
    std = math.sqrt(2 / 3)
    assert batch.rewards.flatten().tolist() == pytest.approx([10, -10, 0.5 / std], rel=1e-6)


def test_rewards_that_are_always_0_stay_0():
    batch = SimpleNamespace(rewards=torch.zeros(3, 2), discounted_returns=torch.zeros(3, 2))
    ppo_continuous.scale_rewards(batch, RunningMoments())
    assert torch.equal(batch.rewards, torch.zeros(3, 2))


@pytest.mark.parametrize("no, counts, objective, beta", [
    ([], [256, 256], "kl-adaptive", 0.25), (["obs"], [0, 256], "kl-fixed", 1),
    (["reward"], [256, 0], "kl-adaptive", 0.25),
])  # fmt: skip
def test_a_run_takes_in_every_observation_and_return_and_adapts_beta(no, counts, objective, beta,
                                                                     tmp_path):  # fmt: skip
    """A KL far below its target halves an adaptive β at each of two iterations."""
    net, _ = train(tmp_path, *PROBE[4:], "--env-id", "Bandit-v0", "--num-steps", 64, "--num-envs",
                   2, "--total-steps", 256, "--objective", objective, "--kl-target", 1e9,
                   *(f"--no-norm-{what}" for what in no))  # fmt: skip
    assert [net.obs_moments.count, net.return_moments.count] == counts
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert checkpoint["penalty"]["beta"] == beta


def test_train_hands_its_settings_on_and_scales_rewards_first(tmp_path, monkeypatch):
    network, estimate, reward = probes.what_train_hands_on(ppo_continuous, tmp_path, monkeypatch)
    assert network == (False, False) and estimate == (0.9, 0.5) and reward != 1


def test_what_a_reset_shows_is_checked():
    envs = Environments("NanReset-v0", 1, 0.9)
    envs.reset(1)
    with pytest.raises(FloatingPointError, match="nan"):
        for _ in range(3):
            envs.step(np.array([0]))


@pytest.mark.parametrize("anneal, share", [("learning-rate", 0.5), ("none", 1.0)])
def test_adam_takes_the_annealed_step_size(anneal, share, tmp_path):
    train(tmp_path, "--env-id", "Bandit-v0", "--num-steps", 64, "--num-envs", 2, "--total-steps",
          256, "--learning-rate", 1e-3, "--anneal", anneal)  # fmt: skip
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert float(checkpoint["optimizer"]["param_groups"][0]["lr"]) == pytest.approx(1e-3 * share)


def test_help_ends_with_each_default():
    """Of 0 too, and of a switch that is on."""
    defaults = {name: row[1] for name, row in ppo_continuous.ROWS.items()}
    helps = {action.dest: action.help for action in ppo_continuous.make_parser(defaults)._actions}
    for name, (_, default, *_) in ppo_continuous.ROWS.items():
        if default is not None and default is not False:
            said = f"{default:_}" if type(default) is int else str(default)
            assert helps[name].rstrip(")]").split()[-1].lstrip("([") == said
    assert helps["ent_coef"].rstrip(")]").endswith("0.0")
