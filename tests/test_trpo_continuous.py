"""The parts of trpo_continuous.py against independent references: the explicit Fisher matrix,
torch.linalg, torch.distributions, a dense trust region step, and probe tasks with a known answer.
What it shares with ppo_continuous.py, letter for letter, is tested with that one."""

import copy
import functools
import math
from types import SimpleNamespace

import numpy as np
import probes
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

import trpo_continuous
from trpo_continuous import (
    ActorCritic,
    Environments,
    conjugate_gradient,
    estimate_advantages,
    fisher_vector_product,
    fit_critic,
    line_search,
    make_batch,
    rollout,
    trust_region_step,
)

KINDS = ["softmax", "normal"]


def settings(*flags):
    return trpo_continuous.parse_args([str(flag) for flag in flags])[0]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in training: more would slow networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------ Settings


def test_defaults_are_the_papers_and_baselines():
    args = settings("--env-id", "HalfCheetah-v5")
    assert (args.max_kl, args.cg_iters, args.gamma, args.fvp_fraction) == (0.01, 10, 0.99, 1)
    assert (args.num_steps, args.num_envs, args.gae_lambda) == (1024, 1, 0.98)
    assert (args.num_epochs, args.minibatch_size, args.learning_rate) == (5, 64, 1e-3)
    assert (args.cg_damping, args.line_search_steps, args.total_steps) == (0.1, 10, 1_000_000)


@pytest.mark.parametrize("env_id", trpo_continuous.TASKS)
def test_a_task_has_its_settings_and_a_flag_wins(env_id):
    own = trpo_continuous.TASKS[env_id]
    args = vars(settings("--env-id", env_id))
    assert own.keys() <= args.keys() and {name: args[name] for name in own} == own
    assert settings("--env-id", env_id, "--num-steps", 400).num_steps == 400


# ------------------------------------------------------------- A small policy, and what to expect


def small_net(kind, seed=0, dtype=torch.float64):
    """An ActorCritic for 3 observed numbers whose policy has 32 weights or so."""
    torch.manual_seed(seed)
    net = ActorCritic(3, Discrete(3) if kind == "softmax" else Box(-1, 1, (2,)), orthogonal=False)
    net.actor = trpo_continuous.mlp(3, 4, 3 if kind == "softmax" else 2)
    if net.log_std is not None:
        net.log_std.data.copy_(torch.tensor([-0.7, 0.4]))
    return net.to(dtype)


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
        return torch.distributions.Categorical(logits=out)
    return torch.distributions.Independent(torch.distributions.Normal(out, log_std.exp()), 1)


def reference_kl(net, theta_old, theta, obs):
    """mean over obs of KL(π_θold ‖ π_θ)"""
    old, new = reference(net, theta_old, obs), reference(net, theta, obs)
    return torch.distributions.kl_divergence(old, new).mean()


def reference_surrogate(net, theta, batch):
    log_probs = reference(net, theta, batch.obs).log_prob(batch.actions)
    return ((log_probs - batch.log_probs).exp() * batch.advantages).mean()


def explicit_fisher(net, obs):
    """The Hessian at θ_old of the mean KL(π_θold ‖ π_θ)."""
    old = theta_of(net)
    return torch.autograd.functional.hessian(lambda theta: reference_kl(net, old, theta, obs), old)


def random_batch(net, size=40, seed=0, scale=1.0):
    """States, the policy's own actions, and advantages that are noise."""
    torch.manual_seed(seed)
    dtype = net.actor[0].weight.dtype
    obs = torch.randn(size, 3, dtype=dtype)
    with torch.no_grad():
        pi = net.pi(obs)
    actions = pi.sample()
    return SimpleNamespace(obs=obs, actions=actions, pi_old=pi, log_probs=pi.log_prob(actions),
                           advantages=scale * torch.randn(size, dtype=dtype))  # fmt: skip


def state(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ----------------------------------------------------------------------- Fisher-vector product


def product_matrix(net, obs):
    """The matrix A that fisher_vector_product multiplies by."""
    product = fisher_vector_product(net, obs, policy_weights(net))
    return torch.stack([product(y) for y in torch.eye(len(theta_of(net)), dtype=obs.dtype)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_fisher_vector_product_is_the_hessian_of_the_kl(kind):
    net, obs = small_net(kind), torch.randn(7, 3, dtype=torch.float64)
    expected = explicit_fisher(net, obs)
    assert len(expected) == (31 if kind == "softmax" else 28) and expected.abs().max() > 0.1
    torch.testing.assert_close(product_matrix(net, obs), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_fisher_vector_product_is_the_mean_outer_product_of_scores(kind):
    """E_s E_a[∇log π(a|s) ∇log π(a|s)ᵀ]: a sum over the actions, or Gauss-Hermite quadrature, which
    is exact for the fourth powers of a normal variable that stand here."""
    net, obs = small_net(kind), torch.randn(7, 3, dtype=torch.float64)
    theta = theta_of(net)
    if kind == "softmax":
        probabilities = reference(net, theta, obs).probs
        cases = [(torch.full((7,), a), probabilities[:, a]) for a in range(3)]
    else:
        nodes, weights = np.polynomial.hermite_e.hermegauss(4)
        weights /= math.sqrt(2 * math.pi)
        normal = reference(net, theta, obs).base_dist
        cases = [
            (normal.mean + normal.stddev * torch.tensor([z1, z2]), torch.tensor([w1 * w2] * 7))
            for z1, w1 in zip(nodes, weights, strict=True)
            for z2, w2 in zip(nodes, weights, strict=True)
        ]
    expected = 0
    for actions, probability in cases:
        scores = torch.autograd.functional.jacobian(
            lambda theta, actions=actions: reference(net, theta, obs).log_prob(actions), theta
        )
        expected = expected + scores.T @ (probability[:, None] * scores) / len(obs)
    torch.testing.assert_close(product_matrix(net, obs), expected, rtol=1e-9, atol=1e-12)


# -------------------------------------------------------------------------- Conjugate gradient


def positive_definite(size, seed):
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, dtype=torch.float64, generator=rng)
    return root @ root.T + 0.5 * torch.eye(size, dtype=torch.float64), torch.randn(
        size, dtype=torch.float64, generator=rng
    )


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_conjugate_gradient_solves_in_as_many_iterations_as_numbers(size):
    for seed in range(5):
        a, b = positive_definite(size, seed)
        kept = b.clone()
        x, residual = conjugate_gradient(a.__matmul__, b, size, tolerance=0)
        torch.testing.assert_close(x, torch.linalg.solve(a, b), rtol=1e-5, atol=1e-7)
        assert residual < 1e-5 and torch.equal(b, kept)


def test_conjugate_gradient_says_what_is_left():
    """After k iterations x is the best of the Krylov space of Ab, ..., A^(k-1)b in A's norm."""
    a, b = positive_definite(8, 0)
    for k in range(8):
        x, residual = conjugate_gradient(a.__matmul__, b, k)
        assert residual == pytest.approx((b - a @ x).norm().item(), rel=1e-6)
        if k:
            basis = torch.stack([torch.linalg.matrix_power(a, i) @ b for i in range(k)], 1)
            basis, _ = torch.linalg.qr(basis)
            best = basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ b)
            torch.testing.assert_close(x, best, rtol=1e-5, atol=1e-7)


def test_conjugate_gradient_ends_early():
    calls, b, diagonal = [], torch.tensor([1.0, 2, 3, 4]), torch.tensor([2.0, 2, 3, 3])

    def product(y):
        calls.append(y)
        return diagonal * y

    x, residual = conjugate_gradient(product, b, 100)  # two eigenvalues: two iterations
    torch.testing.assert_close(x, b / diagonal)
    assert len(calls) == 2 and residual < 1e-5
    x, residual = conjugate_gradient(product, b, 100, tolerance=1.0)  # of bᵀb, which is 30
    assert len(calls) == 2 and not x.any() and residual == pytest.approx(30**0.5)
    x, residual = conjugate_gradient(product, torch.zeros(4), 100)
    assert len(calls) == 2 and not x.any() and residual == 0


@pytest.mark.parametrize("diagonal, moves", [
    ([-1.0, -1, -1], False), ([0.0, 0, 0], False), ([math.nan] * 3, False), ([math.inf] * 3, False),
    ([1.0, -3, 2], True), ([6.0, -1, 0], True), ([3.0, -1, 0], False),
])  # fmt: skip
def test_conjugate_gradient_stays_finite_without_a_positive_definite_matrix(diagonal, moves):
    x, _ = conjugate_gradient(lambda y: torch.tensor(diagonal) * y, torch.tensor([1.0, 2, 3]), 10)
    assert x.isfinite().all() and x.any() == moves


# --------------------------------------------------------------------------------- Line search


class Planted:
    """Weights, a step, and a measure that answers what it is told and keeps what it was asked."""

    def __init__(self, *answers):
        torch.manual_seed(0)
        self.weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 2), (4,))]
        self.old = self.now()
        self.full_step, self.answers, self.seen = torch.randn(10), list(answers), []

    def now(self):
        return parameters_to_vector(self.weights).detach().clone()

    def measure(self):
        self.seen.append(self.now())
        return self.answers[len(self.seen) - 1]

    def search(self, num_tries=5, coef=0.8):
        return line_search(self.measure, self.weights, self.full_step, 0.01, num_tries, coef)


@pytest.mark.parametrize("answer", [
    (1.0, 0.0101), (0.0, 0.005), (-1.0, 0.005), (-1.0, 1.0), (1.0, math.nan), (math.nan, 0.005),
    (math.nan, math.nan), (1.0, math.inf), (math.inf, math.inf), (math.inf, 0.005),
    (-math.inf, 0.005),
])  # fmt: skip
def test_line_search_without_success_changes_no_bit(answer):
    planted = Planted(*[answer] * 5)
    assert planted.search() == (0.0, 0.0, 0.0)
    assert torch.equal(planted.now(), planted.old)
    assert len(planted.seen) == 5 and not torch.equal(planted.seen[-1], planted.old)


@pytest.mark.parametrize("answer", [
    (1.0, 0.02), (0.0, 0.005), (-1.0, 0.005), (math.nan, 0.005), (1.0, math.nan),
])  # fmt: skip
def test_line_search_takes_the_first_success(answer):
    planted = Planted(answer, answer, (0.3, 0.01), (9.0, 0.001))
    fraction, improvement, kl = planted.search()
    assert fraction == pytest.approx(0.64) and (improvement, kl) == (0.3, 0.01)
    expected = [planted.old + 0.8**k * planted.full_step for k in range(3)]
    torch.testing.assert_close(planted.seen, expected)
    assert torch.equal(planted.now(), planted.seen[-1])


def test_line_search_takes_the_full_step_if_it_can():
    planted = Planted((1e-9, 0.01))
    assert planted.search() == (1.0, 1e-9, 0.01)
    assert torch.equal(planted.now(), planted.old + planted.full_step)


# -------------------------------------------------------------------------- Trust region step


def dense_step(net, batch, args):
    """The whole step with the matrix written out. Returns θ, the fraction, and why each try that
    failed did."""
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
        worse = reference_surrogate(net, theta, batch) <= l_old
        far = reference_kl(net, old, theta, batch.obs) > args.max_kl
        if not worse and not far:
            return theta, fraction, reasons
        reasons.append("worse" * bool(worse) + "far" * bool(far))
    return old, 0.0, reasons


STEP = {"max_kl": 0.01, "cg_iters": 10, "cg_damping": 0.1, "fvp_fraction": 1.0,
        "line_search_steps": 10, "backtrack_coef": 0.8}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_kl, tries, coef", [(0.01, 10, 0.8), (0.3, 10, 0.8), (3.0, 3, 0.7)])
def test_the_step_is_the_dense_one(kind, max_kl, tries, coef, monkeypatch):
    exact = functools.partial(conjugate_gradient, tolerance=1e-26)
    monkeypatch.setattr(trpo_continuous, "conjugate_gradient", exact)
    reasons = set()
    for seed in range(6):
        net = small_net(kind, seed)
        batch = random_batch(net, 20, seed)
        args = SimpleNamespace(**STEP | {
            "max_kl": max_kl, "cg_iters": 200, "cg_damping": (0.1, 0.001)[seed % 2],
            "line_search_steps": tries, "backtrack_coef": coef,
        })  # fmt: skip
        old = theta_of(net)
        expected, fraction, why = dense_step(net, batch, args)
        expected_kl = reference_kl(net, old, expected, batch.obs).item()
        gain = reference_surrogate(net, expected, batch) - reference_surrogate(net, old, batch)
        surrogate = functools.partial(reference_surrogate, net, batch=batch)
        to_first_order = torch.func.grad(surrogate)(old) @ (expected - old)
        stats = trust_region_step(net, batch, args)
        torch.testing.assert_close(theta_of(net), expected, rtol=1e-6, atol=1e-7)
        assert stats["step_fraction"] == pytest.approx(fraction)
        assert stats["kl"] == pytest.approx(expected_kl, rel=1e-5, abs=1e-12)
        assert stats["improvement"] == pytest.approx(gain.item(), rel=1e-5)
        assert stats["expected_improvement"] == pytest.approx(to_first_order.item(), rel=1e-5)
        assert stats["cg_residual"] < 1e-9
        reasons |= {*why, "failed" if fraction == 0 else "done"}
    assert "done" in reasons and (max_kl == 0.01 or "far" in reasons)
    assert max_kl < 3 or {"worsefar", "failed"} <= reasons


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_step_reaches_the_border_and_what_was_expected(kind):
    """To second order β s has a KL of δ, and to first order it improves by gᵀ β s."""
    net = small_net(kind)
    batch = random_batch(net, size=200)
    old = theta_of(net)
    args = SimpleNamespace(**STEP | {"max_kl": 1e-8, "cg_iters": 3, "cg_damping": 1e-6})
    stats = trust_region_step(net, batch, args)
    new, fraction = theta_of(net), stats["step_fraction"]
    assert fraction in (1.0, 0.8)  # the full step may be a hair too long
    kl = reference_kl(net, old, new, batch.obs).item()
    assert kl == pytest.approx(fraction**2 * 1e-8, rel=1e-2) == stats["kl"]
    gain = reference_surrogate(net, new, batch) - reference_surrogate(net, old, batch)
    assert gain.item() == pytest.approx(stats["expected_improvement"], rel=1e-2)
    assert stats["improvement"] == pytest.approx(gain.item()) and gain > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_the_same_for_advantages_of_any_scale(kind):
    ends = []
    for scale in (1.0, 2.0**-40, 2.0**40):
        net = small_net(kind)
        batch = random_batch(net, scale=scale)
        assert trust_region_step(net, batch, SimpleNamespace(**STEP))["step_fraction"] > 0
        ends.append(theta_of(net))
    torch.testing.assert_close(ends[1:], ends[:1] * 2, rtol=1e-9, atol=1e-12)


def normal_batch(actions):
    """A policy whose mean is 0 and whose std is 1 in every state, which took these actions."""
    net = small_net("normal")
    net.actor = trpo_continuous.mlp(3, 1).double()
    for parameter in net.actor.parameters():
        parameter.data.zero_()
    net.log_std = torch.nn.Parameter(torch.zeros(1).double())
    batch = random_batch(net, size=len(actions))
    batch.obs[:] = 1
    batch.actions = torch.tensor(actions).double()[:, None]
    batch.log_probs = batch.pi_old.log_prob(batch.actions)
    batch.advantages = torch.ones(len(actions)).double()
    return net, batch


@pytest.mark.parametrize("actions, fraction", [([0.0] * 4, 0.8), ([2.0, -2.0] * 2, 1.0)])
def test_the_kl_is_that_of_the_old_policy_to_the_new(actions, fraction):
    """Of actions at the mean the std shrinks by x = √δ in its logarithm, of far ones it grows. With
    σ' = exp(-x) σ the one KL is -x + (exp(2x) - 1) / 2 and the other x + (exp(-2x) - 1) / 2, of
    which just one is within δ, as sinh(2x) > 2x for x > 0."""
    net, batch = normal_batch(actions)
    stats = trust_region_step(net, batch, SimpleNamespace(**STEP | {"cg_damping": 0.0}))
    assert stats["step_fraction"] == fraction
    x = -net.log_std.item()
    assert x == pytest.approx(0.1 * fraction * (1 if fraction < 1 else -1), rel=1e-6)
    assert stats["kl"] == pytest.approx(-x + (math.exp(2 * x) - 1) / 2, rel=1e-6)
    full = 0.1 if fraction < 1 else -0.1
    old_to_new, new_to_old = -full + math.expm1(2 * full) / 2, full + math.expm1(-2 * full) / 2
    assert (old_to_new <= 0.01) == (fraction == 1) != (new_to_old <= 0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_kl, damping", [(0.01, 0.1), (0.1, 0.001), (1.0, 0.01)])
def test_no_step_of_many_leaves_the_trust_region(kind, max_kl, damping):
    """In float32, as in training, one step after the other."""
    net = small_net(kind, seed=1, dtype=torch.float32)
    args = SimpleNamespace(**STEP | {"max_kl": max_kl, "cg_damping": damping})
    fractions, nearest = set(), 0.0
    for seed in range(40):
        batch = random_batch(net, 64, seed)
        old, before = theta_of(net), state(net)
        stats = trust_region_step(net, batch, args)
        fractions.add(stats["step_fraction"])
        if not within(net, old, before, batch, stats, max_kl):
            assert stats["step_fraction"] == 0
        nearest = max(nearest, stats["kl"] / max_kl)
    assert len(fractions) > 1 or max_kl == 0.01
    assert nearest > 0.8 or damping == 0.1


def within(net, old, before, batch, stats, max_kl):
    """Whether the policy moved; if so it improved, within δ, else no bit of it is another."""
    if same(before, state(net)):
        names = ("step_fraction", "kl", "improvement", "expected_improvement")
        assert all(stats[name] == 0 for name in names)
        return False
    new = theta_of(net)
    kl = reference_kl(net, old, new, batch.obs).item()
    gain = reference_surrogate(net, new, batch) - reference_surrogate(net, old, batch)
    assert stats["kl"] <= max_kl and kl <= max_kl * (1 + 1e-5) + 1e-7
    assert stats["kl"] == pytest.approx(kl, rel=1e-3, abs=1e-6)
    assert stats["improvement"] > 0 and gain.item() == pytest.approx(
        stats["improvement"], rel=1e-3, abs=1e-5
    )
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_or_room_the_policy_stays(kind):
    for change, advantage in (({}, 0.0), ({"max_kl": 0.0}, 1.0), ({"cg_iters": 0}, 1.0)):
        net = small_net(kind, dtype=torch.float32)
        batch, before = random_batch(net, scale=advantage), state(net)
        stats = trust_region_step(net, batch, SimpleNamespace(**STEP | change))
        assert same(before, state(net)) and all(map(math.isfinite, stats.values()))
        names = ("step_fraction", "kl", "improvement", "expected_improvement")
        assert all(stats[name] == 0 for name in names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused(kind, value):
    net = small_net(kind)
    batch, before = random_batch(net), state(net)
    batch.advantages[3] = value
    with pytest.raises(FloatingPointError, match="gradient is"):
        trust_region_step(net, batch, SimpleNamespace(**STEP))
    assert same(before, state(net))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_refused(value, monkeypatch):
    net = small_net("normal")
    batch, before = random_batch(net), state(net)
    monkeypatch.setattr(
        trpo_continuous, "fisher_vector_product", lambda net, obs, weights: lambda y: value * y
    )
    with pytest.raises(FloatingPointError, match="sᵀAs is"):
        trust_region_step(net, batch, SimpleNamespace(**STEP))
    assert same(before, state(net))


@pytest.mark.parametrize("share, count", [(1.0, 41), (0.1, 5), (0.5, 21), (1e-9, 1)])
def test_fvp_fraction_is_the_share_of_states_for_the_matrix_alone(share, count, monkeypatch):
    net = small_net("normal")
    batch = random_batch(net, 41)
    seen, pi = [], net.pi
    monkeypatch.setattr(net, "pi", lambda obs: seen.append(obs) or pi(obs))

    trust_region_step(net, batch, SimpleNamespace(**STEP | {"fvp_fraction": share}))
    gradient, old, matrix, *tries = seen
    assert all(torch.equal(obs, batch.obs) for obs in (gradient, *tries)) and tries
    assert torch.equal(old, matrix) and len(matrix) == count
    found = [(batch.obs == row).all(-1).nonzero().item() for row in matrix]
    assert len(set(found)) == count and (found == sorted(found)) == (count in (1, 41))


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_moves_the_policy_alone(kind):
    net = small_net(kind)
    batch, before = random_batch(net), state(net)
    assert trust_region_step(net, batch, SimpleNamespace(**STEP))["step_fraction"] > 0
    after = state(net)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {n for n in after if n.startswith("actor")} | {"log_std"} & after.keys()
    assert all(parameter.grad is None for parameter in net.parameters())


# ------------------------------------------------------------------------------ Critic and update


def fit(epochs=3, num_steps=24, minibatch_size=16):
    """Fits the critic to a curve, of the rollout of two actors. Returns the networks before and
    after, the rollout, and the samples' numbers in each minibatch."""
    torch.manual_seed(0)
    net = ActorCritic(3, Discrete(2), orthogonal=False)
    before, seen = copy.deepcopy(net), []
    batch = SimpleNamespace(obs=torch.randn(num_steps * 2, 3))
    batch.targets = batch.obs.sum(-1).sin().view(num_steps, 2)

    def watch(critic, arguments):
        seen.append([(batch.obs == row).all(-1).nonzero().item() for row in arguments[0]])

    hook = net.critic.register_forward_pre_hook(watch)
    optimizer = torch.optim.Adam(net.critic.parameters(), 0.01)
    args = SimpleNamespace(num_epochs=epochs, minibatch_size=minibatch_size)
    assert fit_critic(net, optimizer, batch, args) is None
    hook.remove()
    return before, net, batch, seen


def test_the_critic_takes_a_step_of_adam_on_each_minibatch():
    """The gradient of the mean square error of that minibatch and of none before it."""
    expected, net, batch, seen = fit()
    optimizer = torch.optim.Adam(expected.critic.parameters(), 0.01)
    critic = list(expected.critic.parameters())
    targets = batch.obs.sum(-1).sin()
    for numbers in seen:
        loss = torch.nn.functional.mse_loss(expected(batch.obs[numbers])[1], targets[numbers])
        for parameter, gradient in zip(critic, torch.autograd.grad(loss, critic), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for one, other in zip(expected.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_critic_sees_every_sample_once_an_epoch_in_a_new_order():
    seen = fit()[-1]
    epochs = [sum(seen[3 * k : 3 * k + 3], []) for k in range(3)]
    assert [len(numbers) for numbers in seen] == [16] * 9
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(48))


def test_fitting_the_critic_lowers_its_loss_and_leaves_the_policy():
    before, net, batch, _ = fit(epochs=30)
    targets = batch.targets.flatten()
    losses = [(n(batch.obs)[1] - targets).square().mean().item() for n in (before, net)]
    assert losses[1] < 0.5 * losses[0]
    old, new = state(before), state(net)
    moved = {name for name in new if not torch.equal(old[name], new[name])}
    assert moved == {name for name in new if name.startswith("critic")}


class Iteration:
    """A rollout of a task with all that an update needs, then the update, as `train` does it."""

    def __init__(self, env_id, *flags):
        self.args = settings("--env-id", env_id, "--num-envs", 4, "--num-steps", 32, *flags)
        torch.manual_seed(0)
        self.envs = Environments(env_id, 4, self.args.gamma)
        self.envs.reset(1)
        self.net = ActorCritic(self.envs.obs.shape[1], self.envs.action_space)
        self.optimizer = torch.optim.Adam(self.net.critic.parameters(), self.args.learning_rate)
        self.batch = make_batch(32, self.envs)

    def collect(self):
        rollout(self.envs, self.net, self.batch)
        estimate_advantages(self.batch, self.args.gamma, self.args.gae_lambda)

    def update(self):
        return trpo_continuous.update(self.net, self.optimizer, self.batch, self.args)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_no_update_of_many_leaves_the_trust_region(env_id, monkeypatch):
    """On what a task gives, whole updates one after the other."""
    run, moved = Iteration(env_id, "--num-epochs", 1), []

    def step(net, batch, args):
        old, before = theta_of(net), state(net)
        stats = trust_region_step(net, batch, args)
        moved.append(within(net, old, before, batch, stats, args.max_kl))
        return stats

    monkeypatch.setattr(trpo_continuous, "trust_region_step", step)
    for _ in range(50):
        run.collect()
        run.update()
    assert len(moved) == 50 and sum(moved) > 40


@pytest.mark.parametrize("norm_adv", ["rollout", "none"])
def test_advantages_are_normalised_over_the_rollout(norm_adv, monkeypatch):
    run, seen = Iteration("Pendulum-v1", "--norm-adv", norm_adv), []
    monkeypatch.setattr(
        trpo_continuous, "trust_region_step", lambda net, batch, args: seen.append(batch) or {}
    )
    run.collect()
    raw = run.batch.advantages.flatten().clone()
    run.update()
    expected = (raw - raw.mean()) / raw.std(correction=0) if norm_adv == "rollout" else raw
    torch.testing.assert_close(seen[0].advantages, expected, rtol=1e-4, atol=1e-5)
    assert abs(raw.mean()) > 1 and raw.std() > 2


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("norm_adv", ["rollout", "none"])
def test_update_says_what_happened(env_id, norm_adv, monkeypatch):
    """Every number it returns, from θ before and after and torch.distributions."""
    run, searches, solutions = Iteration(env_id, "--norm-adv", norm_adv, "--max-kl", 0.05), [], []

    def search(measure, weights, full_step, *rest):
        searches.append(full_step.clone())
        return line_search(measure, weights, full_step, *rest)

    def solve(product, b, *rest):
        result = conjugate_gradient(product, b, *rest)
        solutions.append((b - product(result[0])).norm().item())
        return result

    monkeypatch.setattr(trpo_continuous, "line_search", search)
    monkeypatch.setattr(trpo_continuous, "conjugate_gradient", solve)
    run.collect()
    batch, net, old = run.batch, run.net, theta_of(run.net)
    targets, values = batch.targets.flatten(), batch.values[:-1].flatten()
    before = (values - targets).square().mean().item()
    advantages = batch.advantages.flatten()
    if norm_adv == "rollout":
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    samples = SimpleNamespace(obs=batch.obs, actions=batch.actions.flatten(0, 1),
                              log_probs=batch.log_probs, advantages=advantages)  # fmt: skip
    surrogate = functools.partial(reference_surrogate, net, batch=samples)
    g = torch.func.grad(surrogate)(old)

    stats = run.update()
    new = theta_of(net)
    fraction = ((new - old) @ searches[0] / (searches[0] @ searches[0])).item()
    with torch.no_grad():
        values = net.critic(batch.obs).squeeze(-1)
        expected = {
            "kl": reference_kl(net, old, new, batch.obs).item(),
            "improvement": (surrogate(new) - surrogate(old)).item(),
            "expected_improvement": (g @ (new - old)).item(),
            "step_fraction": fraction,
            "cg_residual": solutions[0],
            "grad_norm": g.norm().item(),
            "entropy": reference(net, new, batch.obs).entropy().mean().item(),
            "value_loss": torch.nn.functional.mse_loss(values, targets).item(),
            "weight_norm": parameters_to_vector(net.parameters()).norm().item(),
            "explained_variance": 1 - (before_var(batch) / targets.var()).item(),
        }
    assert stats.keys() == expected.keys()
    for name, value in expected.items():
        assert type(stats[name]) is float, name
        assert stats[name] == pytest.approx(value, rel=5e-3, abs=1e-5), name
    assert 0.01 < stats["kl"] <= 0.05 and stats["value_loss"] < before
    assert stats["improvement"] > 0 and stats["improvement"] != stats["expected_improvement"]


def before_var(batch):
    """The variance of what the values of θ_old miss of the targets."""
    return (batch.targets - batch.values[:-1]).var()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("norm_adv", ["rollout", "none"])
def test_a_reward_that_is_not_finite_leaves_everything_as_it_was(env_id, norm_adv):
    for value in (math.nan, math.inf):
        run = Iteration(env_id, "--norm-adv", norm_adv)
        run.collect()
        run.batch.rewards[20, 2] = value
        estimate_advantages(run.batch, 0.99, 0.98)
        before = state(run.net)
        with pytest.raises(FloatingPointError):
            run.update()
        assert same(before, state(run.net)) and not run.optimizer.state


def test_update_refuses_a_loss_that_is_not_finite():
    run = Iteration("CartPole-v1", "--learning-rate", 1e30)
    run.collect()
    with pytest.raises(FloatingPointError, match="value_loss is|weight_norm is"):
        run.update()


# --------------------------------------------------------------------------------------- Probes

train = functools.partial(probes.train, trpo_continuous)
PROBE = ["--num-steps", 128, "--num-envs", 2, "--checkpoint-every", 99]


@pytest.mark.parametrize("no, counts", [([], [512, 512]), (["obs"], [0, 512]),
                                        (["reward"], [512, 0])])  # fmt: skip
def test_a_run_takes_in_every_observation_and_return(no, counts, tmp_path):
    flags = [f"--no-norm-{what}" for what in no]
    net, _ = train(tmp_path, *PROBE, "--env-id", "Bandit-v0", "--total-steps", 512, *flags)
    assert [net.obs_moments.count, net.return_moments.count] == counts


def test_train_hands_its_settings_on_and_scales_rewards_first(tmp_path, monkeypatch):
    network, estimate, reward = probes.what_train_hands_on(trpo_continuous, tmp_path, monkeypatch)
    assert network == (False, False) and estimate == (0.9, 0.5) and reward != 1


def test_probe_the_value_under_a_time_limit_is_10(tmp_path):
    net, score = train(
        tmp_path, "--env-id", "Blind-v0", *PROBE, "--total-steps", 9000, "--gamma", 0.9,
        "--no-norm-reward", "--learning-rate", 3e-3,
    )  # fmt: skip
    with torch.no_grad():
        value = net(net.normalise(torch.zeros(1, 1, dtype=torch.float64)))[1].item()
    assert score == 10 and value == pytest.approx(10, abs=0.3)


@pytest.mark.parametrize("fraction", [1, 0.1])
def test_probe_bandit(fraction, tmp_path):
    flags = ["--max-kl", 0.05, "--fvp-fraction", fraction]
    _, score = train(
        tmp_path, "--env-id", "Bandit-v0", *PROBE, "--total-steps", 2560, *flags
    )  # fmt: skip
    assert score > 0.9


def test_probe_continuous_bandit(tmp_path):
    net, score = train(
        tmp_path, "--env-id", "ContinuousBandit-v0", *PROBE, "--total-steps", 5120, "--max-kl", 0.05
    )  # fmt: skip
    with torch.no_grad():
        pi = net.pi(net.normalise(torch.zeros(1, 1, dtype=torch.float64)))
    assert pi.mean[0].tolist() == pytest.approx([0.5, -0.3], abs=0.1)
    assert score > -0.1 and (pi.stddev.log() < -0.5).all()


def test_cartpole_is_learned(tmp_path):
    """Less than half of its default length is enough for balancing most of the time."""
    _, score = train(tmp_path, "--total-steps", 45_000, "--goal-score", 250,
                     "--checkpoint-every", 99)  # fmt: skip
    assert score >= 200
