"""The parts of trpo_continuous.py against independent references: the explicit Fisher matrix,
torch.linalg, torch.distributions, a dense trust region step, and probe tasks with a known answer.
What it shares with ppo_continuous.py is tested in test_ppo_continuous.py, for both."""

import copy
import functools
import math
from types import SimpleNamespace

import numpy as np
import probes
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

import trpo_continuous
from trpo_continuous import ActorCritic, conjugate_gradient, line_search, trust_region_step

KINDS, TASKS = ["softmax", "normal"], ["CartPole-v1", "Pendulum-v1"]
MOVED = ("step_fraction", "kl", "improvement", "expected_improvement")  # 0 where nothing has


def settings(**own):
    return trpo_continuous.Args(**{"num_envs": 4, "num_steps": 32} | own)


# ------------------------------------------------------------- A small policy, and what to expect


def small_net(kind, seed=0):
    """An ActorCritic in float64, for 3 observed numbers, whose policy has about 30 weights."""
    torch.manual_seed(seed)
    space = Discrete(3) if kind == "softmax" else Box(-1, 1, (2,))
    net = ActorCritic(Box(-1, 1, (3,)), space, settings(orthogonal=False))
    hidden, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, net.num_outputs)
    net.actor = torch.nn.Sequential(hidden, torch.nn.Tanh(), head)
    if net.log_std is not None:
        net.log_std.data.copy_(torch.tensor([-0.7, 0.4]))
    return net.double()


def policy_weights(net):
    return [*net.actor.parameters(), *([] if net.log_std is None else [net.log_std])]


def theta_of(net):
    return parameters_to_vector(policy_weights(net)).detach().clone()


def reference(net, theta, obs):
    """π_θ of torch.distributions, for θ in one vector."""
    named = dict(net.actor.named_parameters())
    sizes = [parameter.numel() for parameter in named.values()]
    *parts, log_std = theta.split([*sizes, len(theta) - sum(sizes)])
    parts = {name: x.view_as(p) for x, (name, p) in zip(parts, named.items(), strict=True)}
    out = functional_call(net.actor, parts, (obs,))
    if net.log_std is None:
        return Categorical(logits=out)
    return Independent(Normal(out, log_std.exp()), 1)


def reference_kl(net, old, theta, obs):
    """mean over obs of KL(π_θold ‖ π_θ)"""
    return kl_divergence(reference(net, old, obs), reference(net, theta, obs)).mean()


def reference_surrogate(net, theta, batch):
    log_probs = reference(net, theta, batch.obs).log_prob(batch.actions)
    return ((log_probs - batch.log_probs).exp() * batch.advantages).mean()


def explicit_fisher(net, obs):
    """The Hessian at θ_old of the mean KL(π_θold ‖ π_θ)."""
    old = theta_of(net)
    return torch.autograd.functional.hessian(lambda theta: reference_kl(net, old, theta, obs), old)


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


@pytest.mark.parametrize("kind", KINDS)
def test_fisher_vector_product_is_the_hessian_of_the_kl(kind):
    net, obs = small_net(kind), torch.randn(7, 3).double()
    expected = explicit_fisher(net, obs)
    assert len(expected) == (31 if kind == "softmax" else 28) and expected.abs().max() > 0.1
    product = trpo_continuous.fisher_vector_product(net, obs, policy_weights(net))
    matrix = torch.stack([product(y) for y in torch.eye(len(expected)).double()], 1)
    torch.testing.assert_close(matrix, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_conjugate_gradient_solves_in_as_many_iterations_as_numbers(size):
    """After k of them x is the best of the span of b, Ab, ..., A^(k-1) b in the norm of A."""
    torch.manual_seed(size)
    root, b = torch.randn(size, size).double(), torch.randn(size).double()
    a, kept = root @ root.T + 0.5 * torch.eye(size), b.clone()
    for k in range(size + 1):
        x, residual = conjugate_gradient(a.__matmul__, b, k, tolerance=0)
        assert residual == pytest.approx((b - a @ x).norm().item(), rel=1e-6, abs=1e-6)
        if k:
            basis = torch.stack([torch.linalg.matrix_power(a, i) @ b for i in range(k)], 1)
            basis, _ = torch.linalg.qr(basis)
            best = basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ b)
            torch.testing.assert_close(x, best, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-5, atol=1e-7)
    assert torch.equal(b, kept)


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


# --------------------------------------------------------------------------------- Line search


class Planted:
    """A line search along a step, whose measure answers what it is told; what it was asked at."""

    def __init__(self, *answers, expected=2.0, **own):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,))]
        now = lambda: parameters_to_vector(weights).detach().clone()
        self.old, self.step, self.seen = now(), torch.randn(10), []

        def measure():
            self.seen.append(now())
            return answers[len(self.seen) - 1]

        args = settings(max_kl=0.01, line_search_steps=5, backtrack_coef=0.8, **own)
        self.result = line_search(measure, weights, self.step, expected, args)
        self.new = now()


@pytest.mark.parametrize("improvement, kl", [
    (1.0, 0.0101), (0.0, 0.005), (-1.0, 0.005), (1.0, math.nan), (math.nan, 0.005), (1.0, math.inf),
    (math.inf, 0.005), (-math.inf, 0.005), (math.nan, math.nan),
])  # fmt: skip
def test_line_search_takes_the_first_success_or_changes_no_bit(improvement, kl):
    bad = (improvement, kl)
    failed = Planted(*[bad] * 5)
    assert failed.result == (0.0, 0.0, 0.0) and torch.equal(failed.new, failed.old)
    assert len(failed.seen) == 5 and not torch.equal(failed.seen[-1], failed.old)
    third = Planted(bad, bad, (0.3, 0.01), (9.0, 0.001))
    assert third.result == (pytest.approx(0.64), 0.3, 0.01)
    torch.testing.assert_close(third.seen, [third.old + 0.8**k * third.step for k in range(3)])
    assert torch.equal(third.new, third.seen[-1])
    assert Planted((1e-9, 0.01)).result == (1.0, 1e-9, 0.01)


def test_accept_ratio_is_the_least_share_of_the_expected_improvement():
    """A tenth of 2 is 0.2, of 0.8 of the step 0.16, of 0.64 of it 0.128."""
    answers = [(0.2, 0.01), (0.159, 0.01), (0.13, 0.01)]
    assert Planted(*answers, accept_ratio=0.1).result == (pytest.approx(0.64), 0.13, 0.01)
    assert Planted((0.201, 0.01), accept_ratio=0.1).result == (1.0, 0.201, 0.01)
    assert Planted(*[(9.0, 0.01)] * 5, expected=math.inf, accept_ratio=0.1).result[0] == 0


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
