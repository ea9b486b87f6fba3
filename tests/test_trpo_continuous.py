"""The parts of trpo_continuous.py against independent references: the explicit Fisher matrix,
torch.linalg, torch.distributions, a dense trust region step, and probe tasks with a known answer.
What it shares with ppo_continuous.py is tested in test_ppo_continuous.py, for both."""

import copy
import functools
import math
from types import SimpleNamespace

import cases
import numpy as np
import probes
import pytest
import torch
from cases import KINDS, explicit_fisher, reference, reference_kl, theta_of
from gymnasium.spaces import Box, Discrete

import trpo_continuous
from trpo_continuous import ActorCritic, conjugate_gradient, trust_region_step

TASKS = ["CartPole-v1", "Pendulum-v1"]
MOVED = ("step_fraction", "kl", "improvement", "expected_improvement")  # 0 where nothing has
small_net = functools.partial(cases.small_net, trpo_continuous)


def settings(**own):
    return trpo_continuous.Args(**{"num_envs": 4, "num_steps": 32} | own)


# ------------------------------------------------------------- A small policy, and what to expect


def reference_surrogate(net, theta, batch):
    log_probs = reference(net, theta, batch.obs).log_prob(batch.actions)
    return ((log_probs - batch.log_probs).exp() * batch.advantages).mean()


def random_batch(net, size=40, seed=0):
    """States, the policy's own actions, and advantages that are noise."""
    torch.manual_seed(seed)
    obs, advantages = torch.randn(size, 3).double(), torch.randn(size).double()
    with torch.no_grad():
        pi_old = net.pi_params(obs)
    pi = net.distribution(pi_old)
    actions = pi.sample()
    return SimpleNamespace(obs=obs, actions=actions, pi_old=pi_old, advantages=advantages,
                           log_probs=pi.log_prob(actions))  # fmt: skip


def state(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def changed(before, net):
    """The names of the tensors in which a bit is another."""
    return {name for name, x in net.state_dict().items() if not torch.equal(before[name], x)}


# ------------------------------------------------- Fisher-vector product and conjugate gradient


@pytest.mark.parametrize("name", [
    "surrogate", "fisher_vector_product", "conjugate_gradient", "line_search"])  # fmt: skip
def test_functions_are_those_of_the_paper(name):
    assert cases.first_failure(name, trpo_continuous) is None


def test_conjugate_gradient_ends_early():
    calls, b, diagonal = [], torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 2, 3, 3])

    def product(y):
        calls.append(y)
        return diagonal * y

    x, residual = conjugate_gradient(product, b, 100)  # two eigenvalues: two iterations
    torch.testing.assert_close(x, b / diagonal)
    assert len(calls) == 2 and residual < 1e-5
    for target, tolerance in ((b, 1.0), (torch.zeros(4), 1e-10)):  # a share of bᵀb
        x, residual = conjugate_gradient(product, target, 100, tolerance)
        assert len(calls) == 2 and not x.any() and residual == target.norm()


@pytest.mark.parametrize("diagonal, moves", [
    ([-1.0, -1, -1], False), ([0.0, 0, 0], False), ([math.nan] * 3, False), ([math.inf] * 3, False),
    ([1.0, -3, 2], True), ([6.0, -1, 0], True), ([3.0, -1, 0], False),
])  # fmt: skip
def test_conjugate_gradient_stays_finite_without_a_positive_definite_matrix(diagonal, moves):
    x, _ = conjugate_gradient(lambda y: torch.tensor(diagonal) * y, torch.tensor([1.0, 2, 3]), 10)
    assert x.isfinite().all() and x.any() == moves


# -------------------------------------------------------------------------- Trust region step


def dense_step(net, batch, args):
    """The whole step with the matrix written out. Returns θ, the fraction of the step, its gain to
    first order, and why each try that failed did."""
    old = theta_of(net)
    theta = old.clone().requires_grad_()
    l_old = reference_surrogate(net, theta, batch)
    (g,) = torch.autograd.grad(l_old, theta)
    a = explicit_fisher(net, batch.obs) + args.cg_damping * torch.eye(len(old)).double()
    s = torch.linalg.solve(a, g)
    beta = math.sqrt(2 * args.max_kl / (s @ a @ s))
    reasons = []
    for k in range(args.line_search_steps):
        fraction = args.backtrack_coef**k
        theta = old + fraction * beta * s
        enough = args.accept_ratio * fraction * beta * (g @ s)
        worse = reference_surrogate(net, theta, batch) - l_old <= enough
        far = reference_kl(net, old, theta, batch.obs) > args.max_kl
        if not worse and not far:
            return theta, fraction, fraction * beta * (g @ s), g, reasons
        reasons.append("worse" * bool(worse) + "far" * bool(far))
    return old, 0.0, 0.0 * g[0], g, reasons


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_kl, tries, coef, ratio", [
    (0.01, 10, 0.8, 0.0), (0.3, 10, 0.8, 0.0), (3.0, 3, 0.7, 0.0), (0.1, 10, 0.8, 0.9),
])  # fmt: skip
def test_the_step_is_the_dense_one(kind, max_kl, tries, coef, ratio, monkeypatch):
    """And it moves the policy alone."""
    exact = functools.partial(conjugate_gradient, tolerance=1e-26)
    monkeypatch.setattr(trpo_continuous, "conjugate_gradient", exact)
    reasons = set()
    for seed in range(6):
        net = small_net(kind, seed)
        batch, old, before = random_batch(net, 20, seed), theta_of(net), state(net)
        args = settings(max_kl=max_kl, accept_ratio=ratio, line_search_steps=tries,
                        backtrack_coef=coef, cg_iters=200,
                        cg_damping=(0.1, 0.001)[seed % 2])  # fmt: skip
        theta, fraction, first_order, g, why = dense_step(net, batch, args)
        gain = reference_surrogate(net, theta, batch) - reference_surrogate(net, old, batch)
        kl = reference_kl(net, old, theta, batch.obs)
        stats = trust_region_step(net, batch, args)
        torch.testing.assert_close(theta_of(net), theta, rtol=1e-6, atol=1e-7)
        assert stats.pop("cg_residual") < 1e-9
        assert stats == pytest.approx({
            "step_fraction": fraction, "kl": kl.item(), "improvement": gain.item(),
            "expected_improvement": first_order.item(), "grad_norm": g.norm().item(),
        }, rel=1e-5, abs=1e-12)  # fmt: skip
        policy = {name for name in before if name.startswith(("actor", "log_std"))}
        assert changed(before, net) == (policy if fraction else set())
        reasons |= {*why, "done" if fraction else "failed"}
    assert "done" in reasons and (max_kl == 0.01 or {"far", "worsefar"} & reasons)
    assert max_kl < 3 or "failed" in reasons
    assert not ratio or "worse" in reasons


@pytest.mark.parametrize("actions, fraction", [([0.0] * 4, 0.8), ([2.0, -2.0] * 2, 1.0)])
def test_the_kl_is_that_of_the_old_policy_to_the_new(actions, fraction):
    """Of actions at the mean the std shrinks by x = √δ in its logarithm, of far ones it grows. With
    σ' = exp(-x) σ the one KL is -x + (exp(2x) - 1) / 2 and the other x + (exp(-2x) - 1) / 2, of
    which just one is within δ, as sinh(2x) > 2x for x > 0."""
    net = small_net("normal")
    net.actor, net.log_std = torch.nn.Linear(3, 1).double(), torch.nn.Parameter(torch.zeros(1))
    for parameter in net.double().actor.parameters():
        parameter.data.zero_()
    batch = random_batch(net, size=4)
    batch.obs[:], batch.advantages[:], batch.actions = 1, 1, torch.tensor(actions).double()[:, None]
    batch.log_probs = net.distribution(batch.pi_old).log_prob(batch.actions)
    stats = trust_region_step(net, batch, settings(cg_damping=0.0))
    assert stats["step_fraction"] == fraction
    x = -net.log_std.item()
    assert x == pytest.approx(0.1 * fraction * (1 if fraction < 1 else -1), rel=1e-6)
    assert stats["kl"] == pytest.approx(-x + math.expm1(2 * x) / 2, rel=1e-6)
    full = 0.1 if fraction < 1 else -0.1
    old_to_new, new_to_old = -full + math.expm1(2 * full) / 2, full + math.expm1(-2 * full) / 2
    assert (old_to_new <= 0.01) == (fraction == 1) != (new_to_old <= 0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_or_room_the_policy_stays(kind):
    for own, advantage in (({}, 0.0), ({"max_kl": 0.0}, 1.0), ({"cg_iters": 0}, 1.0)):
        net = small_net(kind)
        batch, before = random_batch(net), state(net)
        batch.advantages *= advantage
        stats = trust_region_step(net, batch, SimpleNamespace(**vars(settings()) | own))
        assert not changed(before, net) and all(map(math.isfinite, stats.values()))
        assert all(stats[name] == 0 for name in MOVED)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_or_a_matrix_that_is_not_finite_is_refused(value, monkeypatch):
    for what in ("gradient", "curvature"):
        net = small_net("normal")
        batch, before = random_batch(net), state(net)
        if what == "gradient":
            batch.advantages[3] = value
        else:
            product = lambda net, obs, weights: lambda y: value * y
            monkeypatch.setattr(trpo_continuous, "fisher_vector_product", product)
        with pytest.raises(FloatingPointError, match=what):
            trust_region_step(net, batch, settings())
        assert not changed(before, net)


@pytest.mark.parametrize("share, count", [(1.0, 41), (0.1, 5), (0.5, 21), (1e-9, 1)])
def test_fvp_fraction_is_the_share_of_states_for_the_matrix_alone(share, count, monkeypatch):
    net, seen = small_net("normal"), []
    batch, pi_params = random_batch(net, 41), net.pi_params
    monkeypatch.setattr(net, "pi_params", lambda obs: seen.append(obs) or pi_params(obs))
    trust_region_step(net, batch, settings(fvp_fraction=share))
    gradient, matrix, *tries = seen
    assert all(torch.equal(obs, batch.obs) for obs in (gradient, *tries)) and tries
    found = [(batch.obs == row).all(-1).nonzero().item() for row in matrix]
    assert len(set(found)) == len(found) == count
    assert (found == sorted(found)) == (count in (1, 41))


# ------------------------------------------------------------------------------ Critic and update


def test_the_critic_takes_a_step_of_adam_on_each_minibatch():
    """The gradient of the mean square error of that minibatch and of none before it. Every epoch
    sees every sample once, in a new order."""
    torch.manual_seed(0)
    net = ActorCritic(Box(-1, 1, (3,)), Discrete(2), settings(orthogonal=False))
    twin, seen, before, obs = copy.deepcopy(net), [], state(net), torch.randn(48, 3)
    targets = obs.sum(-1).sin()
    numbers = lambda rows: [(obs == row).all(-1).nonzero().item() for row in rows]
    hook = net.critic.register_forward_pre_hook(lambda _, x: seen.append(numbers(x[0])))
    args = settings(num_envs=2, num_steps=24, num_epochs=3, minibatch_size=16)
    optimizer = torch.optim.Adam(net.critic.parameters(), 0.01)
    trpo_continuous.fit_critic(net, optimizer, obs, targets, args)
    hook.remove()
    critic = list(twin.critic.parameters())
    optimizer = torch.optim.Adam(critic, 0.01)
    for indices in seen:
        loss = torch.nn.functional.mse_loss(twin.value(obs[indices]), targets[indices])
        for parameter, gradient in zip(critic, torch.autograd.grad(loss, critic), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for one, other in zip(twin.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert changed(before, net) == {name for name in before if name.startswith("critic")}
    epochs = [sum(seen[3 * k : 3 * k + 3], []) for k in range(3)]
    assert [len(indices) for indices in seen] == [16] * 9
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert list(range(48)) != epochs[0] != epochs[1] != epochs[2]


class Iteration:
    """A task, a network and a batch; `collect` makes a new one, as `train` does."""

    def __init__(self, env_id, **own):
        self.args = settings(env_id=env_id, **own)
        torch.manual_seed(0)
        self.envs = [trpo_continuous.make_env(self.args) for _ in range(4)]
        spaces = self.envs[0].observation_space, self.envs[0].action_space
        self.net = ActorCritic(*spaces, self.args)
        self.optimizer = torch.optim.Adam(self.net.critic.parameters(), self.args.learning_rate)
        self.obs = np.stack([env.reset(seed=1 + n)[0] for n, env in enumerate(self.envs)])
        self.collect()

    def collect(self):
        self.batch, self.obs, _ = trpo_continuous.rollout(self.envs, self.obs, self.net, 32)
        trpo_continuous.estimate_advantages(self.batch, self.args.gamma, self.args.gae_lambda)

    def update(self):
        return trpo_continuous.update(self.net, self.optimizer, self.batch, self.args)


@pytest.mark.parametrize("env_id", TASKS)
def test_no_update_of_many_leaves_the_trust_region(env_id):
    """In float32, as in training, one after the other."""
    run, moved = Iteration(env_id, num_epochs=1), 0
    for _ in range(30):
        old, net, batch, before = theta_of(run.net), run.net, run.batch, state(run.net)
        stats = run.update()
        kl = reference_kl(net, old, theta_of(net), batch.obs).item()
        assert stats["kl"] <= 0.01 and stats["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
        policy = {name for name in changed(before, net) if not name.startswith("critic")}
        assert bool(policy) == (stats["step_fraction"] > 0) == (stats["improvement"] > 0)
        moved += stats["step_fraction"] > 0
        run.collect()
    assert moved > 24


@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("norm_adv", ["rollout", "none"])
def test_update_says_what_happened(env_id, norm_adv, monkeypatch):
    """From θ before and after and torch.distributions."""
    fit_critic, given = trpo_continuous.fit_critic, []
    watched = lambda *args: given.extend(args) or fit_critic(*args)
    monkeypatch.setattr(trpo_continuous, "fit_critic", watched)
    run = Iteration(env_id, norm_adv=norm_adv, max_kl=0.05)
    net, names = run.net, ("obs", "actions", "log_probs", "advantages", "targets")
    batch = SimpleNamespace(**{name: getattr(run.batch, name).flatten(0, 1) for name in names})
    a, unexplained = batch.advantages, batch.advantages.var() / batch.targets.var()
    assert a.mean().abs() > 1 and a.std() > 2
    if norm_adv == "rollout":
        batch.advantages = (a - a.mean()) / a.std(correction=0)
    surrogate = functools.partial(reference_surrogate, net, batch=batch)
    error = lambda: torch.nn.functional.mse_loss(net.critic(batch.obs)[:, 0], batch.targets).item()
    old, error_before = theta_of(net), error()
    g = torch.func.grad(surrogate)(old)
    stats, new = run.update(), theta_of(net)
    assert torch.equal(given[2], batch.obs) and torch.equal(given[3], batch.targets)
    assert all(type(value) is float for value in stats.values())
    assert 0 <= stats.pop("cg_residual") < 0.1 * g.norm() and stats.pop("step_fraction") > 0
    assert stats == pytest.approx({
        "kl": reference_kl(net, old, new, batch.obs).item(),
        "improvement": (surrogate(new) - surrogate(old)).item(),
        "expected_improvement": (g @ (new - old)).item(),
        "grad_norm": g.norm().item(),
        "entropy": reference(net, new, batch.obs).entropy().mean().item(),
        "value_loss": error(),
        "explained_variance": 1 - unexplained.item(),
    }, rel=5e-3, abs=1e-5)  # fmt: skip
    assert 0.01 < stats["kl"] <= 0.05 and stats["value_loss"] < error_before


def test_update_refuses_what_is_not_finite():
    """An advantage, and then nothing changes; or the critic's loss."""
    run = Iteration("CartPole-v1")
    before, run.batch.advantages[20, 2] = state(run.net), math.nan
    with pytest.raises(FloatingPointError, match="policy_gradient is nan"):
        run.update()
    assert not changed(before, run.net) and not run.optimizer.state
    with pytest.raises(FloatingPointError, match="value_loss"):
        Iteration("CartPole-v1", learning_rate=1e30).update()


# --------------------------------------------------------------------------------------- Probes

train = functools.partial(probes.train, trpo_continuous)
PROBE = {"num_steps": 128, "num_envs": 2}


def test_probe_the_value_under_a_time_limit_is_10(tmp_path):
    net, score = train(tmp_path, env_id="Blind-v0", **PROBE, total_steps=9000, gamma=0.9,
                       norm_reward=False, learning_rate=3e-3)  # fmt: skip
    value = net.value(net.normalise(torch.zeros(1, 1).double())).item()
    assert score == 10 and value == pytest.approx(10, abs=0.3)


def test_probe_bandit(tmp_path):
    own = {"total_steps": 2560, "max_kl": 0.05, "fvp_fraction": 0.1}
    assert train(tmp_path, env_id="Bandit-v0", **PROBE, **own)[1] > 0.9


def test_probe_continuous_bandit(tmp_path):
    own = {"total_steps": 5120, "max_kl": 0.05}
    net, score = train(tmp_path, env_id="ContinuousBandit-v0", **PROBE, **own)
    pi = net.pi(net.normalise(torch.zeros(1, 1).double()))
    assert pi.mean[0].tolist() == pytest.approx([0.5, -0.3], abs=0.1)
    assert score > -0.1 and (pi.stddev.log() < -0.5).all()


def test_cartpole_is_learned(tmp_path):
    """Less than half of its default length is enough for balancing most of the time."""
    own = trpo_continuous.TASKS["CartPole-v1"] | {"total_steps": 45_000, "goal_score": 250}
    assert train(tmp_path, **own)[1] >= 200
