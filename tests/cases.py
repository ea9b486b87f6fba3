"""What gae, ppo_loss, adapt_beta, surrogate, fisher_vector_product, conjugate_gradient and
line_search should give, from the definitions written out plainly. The tests run these cases over
every script; plots/exercise.py grades a student's functions by them.

A case is (what it is, {name: expected number}, a function that computes {name: the script's}).
The cases of a function go from small to whole.
"""

import copy
import itertools
import math
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

KINDS = ["softmax", "normal"]
SPACES = [Discrete(3), Box(-1, 1, (2,))]


def first_failure(name, script, rel=1e-9, caught=()):
    """The first case that a script's function fails, in one sentence, or None.

    rel: the relative error that passes, a tenth of it as an absolute one; caught: the exceptions
    that become a sentence
    """
    for what, expected, compute in CASES[name](script):
        try:
            got = compute()
        except caught as e:
            return f"{what}: {explain(e, script)}"
        for key, right in expected.items():
            if key not in got:
                return f"{what}: {key} is missing"
            if not equal(right, got[key], rel):
                equals = ":" if isinstance(right, str) else " ="
                return f"{what}: expected {key}{equals} {show(right)}, yours {show(got[key])}"
    return None


class Near(float):
    """An expected number whose own rounding error is larger, up to 1e-6."""


def equal(right, got, rel):
    if isinstance(right, str) or isinstance(got, str):
        return right == got
    tolerance = max(rel / 10, 1e-6) if isinstance(right, Near) else rel / 10
    return math.isclose(right, got, rel_tol=rel, abs_tol=tolerance)


def show(x):
    if isinstance(x, str):
        return x
    return "0" if abs(x) < 1e-12 else f"{x:.5g}".replace("-", "−")


def explain(error, script):
    """An exception, and the line of the student's file where it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if Path(frame.filename) == Path(script.__file__)]  # fmt: skip
    first, *_ = str(error).replace(". ", "\n").splitlines() or [""]
    where = f"line {lines[-1]} of your {Path(script.__file__).name} raised" if lines else ""
    return f"{where or 'its result led to'} {type(error).__name__}: {first}"


def entries(name, x, names=None):
    """{name: number} of a tensor's entries, after its shape; names: those of the entries, which may
    stand in another order."""
    if not isinstance(x, torch.Tensor):
        return {name: "None" if x is None else f"of type {type(x).__name__}"}
    shape = f"a tensor of shape {tuple(x.shape)}"
    places = list(np.ndindex(*x.shape))
    if names is None:
        names = {place: f"{name}[{', '.join(map(str, place))}]" for place in places}
    return {name: shape} | {names[i]: x[i].item() for i in names if i in places}


def double(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def number(x):
    """A float, or what else it is."""
    if isinstance(x, torch.Tensor) and x.ndim == 0:
        return x.item()
    return float(x) if isinstance(x, (int, float)) else next(iter(entries("x", x).values()))


# ---------------------------------------------------------------------------------- Advantages


def gae(script):
    """PPO's Eq. 11 and 12, as a sum for each step of each actor."""
    on, over, cut = 0, 1, 2
    every = np.array(list(itertools.product((on, over, cut), repeat=5))).T
    yield gae_case(script, "one step, after which the episode goes on", [[on]])
    yield gae_case(script, "two steps, and no episode ends", [[on]] * 2)
    yield gae_case(script, "five steps, and no episode ends", [[on]] * 5)
    yield gae_case(script, "step 2 was terminal", [[on], [on], [over], [on], [on]])
    yield gae_case(script, "step 3 ended at a time limit", [[on], [on], [on], [cut], [on]])
    yield gae_case(script, "step 0 ended at a time limit, step 2 was terminal",
                   [[cut], [on], [over], [on], [on]])  # fmt: skip
    yield gae_case(script, "two actors, each with its own ends",
                   [[on, cut], [on, on], [over, on], [on, over], [on, on]])  # fmt: skip
    yield gae_case(script, "five steps of 243 actors, one for each pattern of ends", every)


def gae_case(script, what, ends, gamma=0.9, gae_lambda=0.7):
    ends = torch.tensor(ends)
    terminated, truncated = (ends == 1).double(), (ends == 2).double()
    rng = torch.Generator().manual_seed(0)
    rewards, values, after = torch.randn(3, *ends.shape, dtype=torch.float64, generator=rng)
    after[:-1] = torch.where(ends[:-1] == 0, values[1:], after[:-1])  # as in a rollout
    places = reversed(list(np.ndindex(*ends.shape)))  # an error shows first where it began
    alone = ends.shape[1] == 1
    names = {(t, n): f"Â_{t}" if alone else f"Â_{t} of actor {n}" for t, n in places}
    expected = torch.zeros_like(rewards)
    for t, n in names:
        for k in range(t, len(ends)):  # Â_t = Σ_k (γλ)^(k−t) δ_k, up to the end of the episode
            successor = 0.0 if terminated[k, n] else after[k, n].item()
            delta = rewards[k, n].item() + gamma * successor - values[k, n].item()
            expected[t, n] += (gamma * gae_lambda) ** (k - t) * delta
            if ends[k, n]:
                break

    def compute():
        originals = rewards, values, after, terminated, truncated
        given = [x.clone() for x in originals]
        found = entries("the result", script.gae(*given, gamma, gae_lambda), names)
        same = all(map(torch.equal, given, originals))
        return found | {"the arguments afterwards": "unchanged" if same else "changed"}

    expected = entries("the result", expected, names) | {"the arguments afterwards": "unchanged"}
    return what, expected, compute


# ------------------------------------------------------------------------------------ PPO's loss


def ppo_loss(script):
    """PPO's Eq. 6 to 9, one sample after the other; the gradients by differences."""
    atari = not hasattr(script.Args, "objective")
    small = {"norm_adv": "none", "vf_coef": 0.0, "ent_coef": 0.0}
    eq_6 = [] if atari else [{"objective": "none"}]
    for own in [*eq_6, {}]:
        equation = "Eq. 6, L^CPI" if own else "Eq. 7, L^CLIP, with ε = 0.2"
        for ratio, advantage in ((1.1, 2), (1.5, 2), (1.5, -2), (0.5, 2), (0.5, -2)):
            what = f"{equation}: one sample whose ratio is {ratio} and whose Â is {show(advantage)}"
            yield loss_case(script, what, [ratio], [advantage], small | own)
    yield loss_case(script, "Eq. 7 with ε = 0.2: two samples", [1.1, 0.7], [2, -3], small)
    yield loss_case(script, "Eq. 9: the value loss, with c1 = 0.7 and c2 = 0", [1, 1], [1, -1],
                    small | {"vf_coef": 0.7})  # fmt: skip
    yield loss_case(script, "Eq. 9: the entropy bonus, with c1 = 0 and c2 = 0.3", [1, 1], [1, -1],
                    small | {"ent_coef": 0.3})  # fmt: skip
    for kind in [] if atari else KINDS:
        for own in ({"objective": "kl-fixed"}, {"objective": "kl-adaptive"}):
            what = f"Eq. 8, L^KLPEN, with β = 0.4 ({kind} policy, --objective {own['objective']})"
            yield loss_case(script, what, [1.5, 0.7], [2, -3], small | own, kind)
    yield loss_case(script, "--norm-adv minibatch standardises the advantages", [1.1, 1, 0.7],
                    [1, 2, 6], small | {"norm_adv": "minibatch"})  # fmt: skip
    if atari:
        yield loss_case(script, "--clip-value-loss takes the larger error", [1] * 3, [1] * 3,
                        small | {"vf_coef": 0.7, "clip_value_loss": True})  # fmt: skip
    yield loss_case(script, "the statistics of three samples", [1.5, 1.1, 0.5], [2, -3, 1], small,
                    with_stats=True)  # fmt: skip
    whole = {"vf_coef": 0.7, "ent_coef": 0.03}
    kinds, norm_advs = (KINDS[:1] if atari else KINDS), ["minibatch", "none", "rollout"]
    owns = [{"clip_value_loss": x} for x in (False, True)] if atari else [
        {"objective": x} for x in ("clip", "kl-fixed", "none")]  # fmt: skip
    for kind, own, norm_adv in itertools.product(kinds, owns, norm_advs):
        how = ", ".join(f"{name} {x}" for name, x in own.items())
        what = f"a whole minibatch ({kind} policy, {how}, norm_adv {norm_adv})".replace("_", "-")
        yield loss_case(script, what, None, None, whole | own | {"norm_adv": norm_adv}, kind,
                        with_stats=True, with_gradient=True)  # fmt: skip


def loss_case(script, what, ratios, advantages, own, kind="softmax", with_stats=False,
              with_gradient=False):  # fmt: skip
    """ratios, advantages: those of a small minibatch; None: 12 random ones of both signs."""
    if hasattr(script.Args, "objective"):
        net, batch = linear_policy(script, kind, len(ratios or range(12)))
    else:
        net, batch = random_logits(len(ratios or range(12)))
    if ratios:
        log_pi = np.log([row.probability for row in loss_rows(net, batch)])
        batch["log_probs"] = torch.tensor(log_pi) - double(ratios).log()
        batch["advantages"] = double(advantages)
    eps, beta, args = 0.2, 0.4, loss_settings(script, **own)
    loss, stats = reference_loss(net, batch, args, eps, beta)
    expected = {"the loss": loss}
    if with_stats:
        expected |= roughly({f"the statistic {name}": x for name, x in stats.items()})
    parameters = dict(net.named_parameters())
    if with_gradient:
        assert 0.2 < stats["clip_fraction"] < 1  # some are clipped, and some are not
        expected |= slopes(lambda: reference_loss(net, batch, args, eps, beta)[0], parameters)

    def compute():
        for p in parameters.values():
            p.grad = None
        loss, stats = call_loss(script, net, batch, args, eps, beta)
        found = {"the loss": number(loss)}
        found |= {f"the statistic {name}": number(x) for name, x in stats.items()}
        if with_gradient:
            loss.backward()
            for name, p in parameters.items():
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                found |= entries(f"∂loss/∂{name}", gradient)
        return found

    return what, expected, compute


def call_loss(script, net, batch, args, eps, beta):
    numbers = {"clip_eps": double(eps), "args": args}
    if hasattr(args, "objective"):
        numbers["beta"] = double(beta)
    return script.ppo_loss(net, **batch, **numbers)


def slopes(function, parameters, h=1e-6):
    """The derivative of a function by each number of its parameters, from both sides."""
    found = {}
    for name, p in parameters.items():
        slope, numbers = torch.zeros_like(p), p.data.view(-1)
        for k in range(p.numel()):
            ends, middle = [], numbers[k].item()
            for at in (middle + h, middle - h):
                numbers[k] = at
                ends.append(function())
            numbers[k] = middle
            slope.view(-1)[k] = (ends[0] - ends[1]) / (2 * h)
        found |= roughly(entries(f"∂loss/∂{name}", slope))
    return found


def roughly(expected):
    return {key: x if isinstance(x, str) else Near(x) for key, x in expected.items()}


def loss_settings(script, **own):
    # ε of the arguments is another than that of the settings, as when it is annealed
    return script.Args(num_envs=2, num_steps=32, minibatch_size=16, clip_eps=0.3, **own)


def linear_policy(script, kind, size):
    """A network of linear functions in float64, and a minibatch of another's, near it."""
    torch.manual_seed(0)
    args = loss_settings(script, orthogonal=False)
    net = script.ActorCritic(Box(-np.inf, np.inf, (3,)), SPACES[KINDS.index(kind)], args)
    net.actor, net.critic = torch.nn.Linear(3, net.num_outputs), torch.nn.Linear(3, 1)
    if net.log_std is not None:
        net.log_std.data.copy_(torch.linspace(-1, 0.3, 2))
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


class Logits(torch.nn.Module):
    """In the place of ppo_atari.py's network: what it says of each sample is a parameter."""

    discrete = True

    def __init__(self, logits, values):
        super().__init__()
        self.logits, self.values = torch.nn.Parameter(logits), torch.nn.Parameter(values)

    def forward(self, frames):
        return self.logits, self.values


def random_logits(size, actions=3):
    """Logits, values and a minibatch with ratios from 0.6 to 1.6, advantages of both signs."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(size, actions, dtype=torch.float64, generator=rng)
    values, old, advantages, targets = torch.randn(4, size, dtype=torch.float64, generator=rng)
    chosen = torch.randint(actions, (size,), generator=rng)
    drift = torch.linspace(-0.5, 0.5, size, dtype=torch.float64)
    log_pi = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return Logits(logits, values), {
        "frames": torch.zeros(size, 4, 84, 84, dtype=torch.uint8), "actions": chosen,
        "values": old, "advantages": 1.5 * advantages + 0.4, "targets": targets,
        "log_probs": log_pi - drift[torch.randperm(size, generator=rng)],
    }  # fmt: skip


def loss_rows(net, batch):
    """Of each sample the probability of its action, V, the entropy, and KL(π_θold ‖ π_θ)."""
    parameters = {name: p.detach().double().numpy() for name, p in net.named_parameters()}
    for i, action in enumerate(batch["actions"].numpy()):
        if "logits" in parameters:
            out, value, old = parameters["logits"][i], parameters["values"][i], None
        else:
            obs, old = batch["obs"][i].numpy(), batch["pi_old"][i].numpy()
            out = parameters["actor.weight"] @ obs + parameters["actor.bias"]
            [value] = parameters["critic.weight"] @ obs + parameters["critic.bias"]
        kl = math.nan
        if net.discrete:
            pi = np.exp(out) / np.exp(out).sum()
            probability, entropy = pi[action], -(pi * np.log(pi)).sum()
            if old is not None:
                old = np.exp(old) / np.exp(old).sum()
                kl = (old * np.log(old / pi)).sum()
        else:
            std, old_mean, old_std = np.exp(parameters["log_std"]), old[:2], np.exp(old[2:])
            z = (action - out) / std
            probability = np.prod(np.exp(-(z**2) / 2) / (std * math.sqrt(2 * math.pi)))
            entropy = np.log(std * math.sqrt(2 * math.pi * math.e)).sum()
            square = (old_std**2 + (old_mean - out) ** 2) / (2 * std**2)
            kl = (np.log(std / old_std) + square - 0.5).sum()
        yield SimpleNamespace(probability=probability, value=value, entropy=entropy, kl=kl)


def reference_loss(net, batch, args, eps, beta=None):
    """What `ppo_loss` should return: Eq. 6 to 9, one sample after the other."""
    objective = getattr(args, "objective", "atari")
    advantages = batch["advantages"].tolist()
    if args.norm_adv == "minibatch":
        mean, std = np.mean(advantages), np.std(advantages)
        advantages = [(a - mean) / (std + 1e-8) for a in advantages]
    found = []
    for i, row in enumerate(loss_rows(net, batch)):
        ratio = row.probability / math.exp(batch["log_probs"][i])
        gain = ratio * advantages[i]
        if objective in ("clip", "atari"):
            gain = min(gain, min(max(ratio, 1 - eps), 1 + eps) * advantages[i])
        elif objective != "none":
            gain -= beta * row.kl
        target = batch["targets"][i].item()
        error = (row.value - target) ** 2
        if getattr(args, "clip_value_loss", False):
            old = batch["values"][i].item()
            error = max(error, (old + min(max(row.value - old, -eps), eps) - target) ** 2)
        found.append({"policy_loss": -gain, "value_loss": error, "entropy": row.entropy,
                      "clip_fraction": not 1 - eps <= ratio <= 1 + eps,
                      "approx_kl": ratio - 1 - math.log(ratio)})  # fmt: skip
    names = found[0].keys() - ({"approx_kl"} if objective != "atari" else set())
    stats = {name: float(np.mean([row[name] for row in found])) for name in sorted(names)}
    c1, c2 = args.vf_coef, args.ent_coef
    return stats["policy_loss"] + c1 * stats["value_loss"] - c2 * stats["entropy"], stats


# ---------------------------------------------------------------------------------- Adaptive β


def adapt_beta(script):
    """PPO's Sec. 4, at its borders: a target of 0.015 has them at 0.01 and 0.0225."""
    for kl, factor in BORDERS:
        what = f"β is 3, the KL {kl:g} and its target 0.015"
        compute = lambda kl=kl: {"the new β": number(script.adapt_beta(3.0, kl, 0.015))}
        yield what, {"the new β": 3 * factor}, compute


BORDERS = [(0.0, 0.5), (9.0, 2), (0.015, 1), (0.00999, 0.5), (0.01, 1), (0.01001, 1),
           (0.02249, 1), (0.0225, 1), (0.02251, 2)]  # fmt: skip


# ----------------------------------------------------------------------------- TRPO's surrogate


def surrogate(script):
    """TRPO's Eq. 14, and its gradient: that of log π(a) by the logits is 1[a] − π."""
    for ratio, advantage in ((1.5, 2), (0.5, 2), (1.5, -2)):
        what = f"one sample whose ratio is {ratio} and whose Â is {show(advantage)}"
        yield surrogate_case(script, what, [ratio], [advantage])
    yield surrogate_case(script, "two samples", [1.5, 0.7], [2, -3])
    rng = np.random.default_rng(0)
    ratios, advantages = rng.uniform(0.5, 1.5, 20).tolist(), rng.normal(size=20).tolist()
    yield surrogate_case(script, "20 samples", ratios, advantages)


def surrogate_case(script, what, ratios, advantages):
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(len(ratios), 3, dtype=torch.float64, generator=rng)
    actions = torch.randint(3, (len(ratios),), generator=rng)
    value, gradient, old = 0.0, torch.zeros_like(logits), []
    for i, (ratio, advantage) in enumerate(zip(ratios, advantages, strict=True)):
        pi = np.exp(logits[i].numpy()) / np.exp(logits[i].numpy()).sum()
        old.append(math.log(pi[actions[i]] / ratio))
        value += ratio * advantage / len(ratios)
        for a in range(3):
            slope = (a == actions[i].item()) - pi[a]
            gradient[i, a] = ratio * advantage * slope / len(ratios)
    samples = SimpleNamespace(actions=actions, log_probs=double(old),
                              advantages=double(advantages))  # fmt: skip

    def compute():
        leaf = logits.clone().requires_grad_()
        result = script.surrogate(Categorical(logits=leaf), samples)
        return {"L": number(result)} | entries("∂L/∂logits", *torch.autograd.grad(result, leaf))

    return what, {"L": value} | entries("∂L/∂logits", gradient), compute


# ------------------------------------------------------------------------ Fisher-vector product


def fisher_vector_product(script):
    """The Fisher matrix of a normal policy by hand, then the Hessian of the mean KL."""
    for states in ([2.0], [2.0, -1.0]):
        net = small_net(script, "normal")
        net.actor = torch.nn.Linear(1, 1).double()
        net.log_std = torch.nn.Parameter(double([math.log(0.5)]))
        expected = torch.zeros(3, 3).double()  # of the weight, the bias and log σ, with σ = 0.5
        for s in states:
            expected += torch.tensor([[4 * s * s, 4 * s, 0], [4 * s, 4, 0], [0, 0, 2]])
        shown = " and ".join(f"s = {show(s)}" for s in states)
        what = f"a normal policy of mean w·s + b and σ = 0.5, {shown}"
        obs = double(states)[:, None]
        yield fisher_case(script, what, net, obs, expected / len(states))
    for kind in KINDS:
        net, obs = small_net(script, kind), torch.randn(7, 3).double()
        what = f"a {kind} policy of two layers, 7 states"
        yield fisher_case(script, what, net, obs, explicit_fisher(net, obs))


def fisher_case(script, what, net, obs, expected):
    weights, size = policy_weights(net), len(expected)

    def compute():
        product = script.fisher_vector_product(net, obs, weights)
        columns = [product(y) for y in torch.eye(size).double()]
        shape = next(iter(entries("A y", columns[0]).values()))
        if shape != f"a tensor of shape ({size},)":
            return {"A y": shape}
        return {"A y": shape} | entries("A", torch.stack(columns, 1))

    shape = f"a tensor of shape ({size},)"
    return what, {"A y": shape} | entries("A", expected), compute


def small_net(script, kind, seed=0):
    """An ActorCritic in float64, for 3 observed numbers, whose policy has about 30 weights."""
    torch.manual_seed(seed)
    space = SPACES[KINDS.index(kind)]
    args = script.Args(num_envs=4, num_steps=32, orthogonal=False)
    net = script.ActorCritic(Box(-1, 1, (3,)), space, args)
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


def explicit_fisher(net, obs):
    """The Hessian at θ_old of the mean KL(π_θold ‖ π_θ)."""
    old = theta_of(net)
    return torch.autograd.functional.hessian(lambda theta: reference_kl(net, old, theta, obs), old)


# --------------------------------------------------------------------------- Conjugate gradient


def conjugate_gradient(script):
    """A x = b by torch.linalg.solve; after k iterations x is the best of the span of b, Ab, ...,
    A^(k-1) b in the norm of A."""
    eye, b = torch.eye(2).double(), double([1.0, 2.0])
    yield cg_case(script, "A is the identity, one iteration", eye, b, 1)
    diagonal = double([[1.0, 0], [0, 4]])
    yield cg_case(script, "A = diag(1, 4), b = (1, 2), one iteration", diagonal, b, 1)
    yield cg_case(script, "A = diag(1, 4), b = (1, 2), two iterations", diagonal, b, 2)
    for size in (1, 2, 5, 9):
        rng = torch.Generator().manual_seed(size)
        root = torch.randn(size, size, dtype=torch.float64, generator=rng)
        b = torch.randn(size, dtype=torch.float64, generator=rng)
        a = root @ root.T + 0.5 * torch.eye(size)
        for k in range(size + 1):
            what = f"A is a random matrix of size {size} × {size}, {k} of {size} iterations"
            yield cg_case(script, what, a, b, k)
    a, b = torch.diag(torch.tensor([2.0, 2, 3, 3])).double(), double([1.0, 2, 3, 4])
    yield cg_case(script, "x is found after 2 of 100 iterations", a, b, 100, tolerance=1e-10)
    zero = torch.zeros(4).double()
    yield cg_case(script, "b is 0", a, zero, 100, tolerance=1e-10)
    yield cg_case(script, "x = 0 is close enough, the tolerance is 1", a, b, 100, tolerance=1.0)


def cg_case(script, what, a, b, iterations, tolerance=0.0):
    x = torch.zeros_like(b)
    if iterations and tolerance < 1 and b.any():
        powers = [torch.linalg.matrix_power(a, i) @ b for i in range(min(iterations, len(b)))]
        basis, _ = torch.linalg.qr(torch.stack(powers, 1))
        x = basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ b)
        if iterations >= len(b):
            x = torch.linalg.solve(a, b)

    def compute():
        given = b.clone()
        result = script.conjugate_gradient(a.__matmul__, given, iterations, tolerance)
        if not isinstance(result, tuple):
            return {"x": "not in a pair, x and the norm of r"}
        x, residual = result
        found = entries("x", x) | {"the norm returned": number(residual)}
        return found | entries("b afterwards", given)

    expected = entries("x", x) | {"the norm returned": (b - a @ x).norm().item()}
    return what, roughly(expected | entries("b afterwards", b)), compute


# ---------------------------------------------------------------------------------- Line search


def line_search(script):
    """TRPO's App. C: the first θ_old + 0.8^k · step with an improvement and a KL within δ."""
    good, far, worse = (0.3, 0.005), (0.3, 0.0101), (-0.3, 0.005)
    yield search_case(script, "the first try improves L and has a KL below δ", [good])
    yield search_case(script, "the first try's KL is exactly δ", [(0.3, 0.01)])
    yield search_case(script, "the first try improves L by very little", [(1e-9, 0.005)])
    yield search_case(script, "the first try's KL is above δ", [far, good])
    yield search_case(script, "the first try makes L worse", [worse, good])
    yield search_case(script, "the first try leaves L as it was", [(0.0, 0.005), good])
    yield search_case(script, "the first two tries' KLs are above δ", [far, far, good])
    yield search_case(script, "the last try is the first good one", [far] * 4 + [good])
    yield search_case(script, "every try's KL is above δ", [far] * 5, fails=True)
    yield search_case(script, "every try makes L worse", [worse] * 5, fails=True)
    yield search_case(script, "every try leaves L as it was", [(0.0, 0.005)] * 5, fails=True)
    for x, kl in ((0.3, math.nan), (math.nan, 0.005), (0.3, math.inf), (math.inf, 0.005),
                  (-math.inf, 0.005), (math.nan, math.nan)):  # fmt: skip
        what = f"the first two tries give an improvement of {x} and a KL of {kl}"
        yield search_case(script, what, [(x, kl)] * 2 + [good])
        yield search_case(script, what.replace("the first two", "all"), [(x, kl)] * 5, fails=True)
    yield search_case(script, "--accept-ratio 0.1: too little of the expected improvement, twice",
                      [(0.2, 0.01), (0.159, 0.01), (0.13, 0.01)], 0.1)  # fmt: skip
    yield search_case(script, "--accept-ratio 0.1: just enough of the expected improvement",
                      [(0.201, 0.01)], 0.1)  # fmt: skip
    yield search_case(script, "--accept-ratio 0.1: infinitely much is expected", [(9.0, 0.01)] * 5,
                      0.1, fails=True, gain=math.inf)  # fmt: skip


def search_case(script, what, answers, accept_ratio=0.0, fails=False, gain=2.0):
    """A line search whose measure gives these (improvement, KL), one after the other. The last of
    them is good, unless the search fails. gain: the expected improvement by the full step"""
    rng = torch.Generator().manual_seed(0)
    old = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((3, 2), (4,))]
    start, step = parameters_to_vector(old), torch.randn(10, generator=rng, dtype=torch.float64)
    args = script.Args(max_kl=0.01, line_search_steps=5, backtrack_coef=0.8,
                       accept_ratio=accept_ratio)  # fmt: skip
    expected = {"the number of tries": len(answers)}
    for k in range(len(answers)):
        expected |= theta_at(k + 1, start + 0.8**k * step)
    fraction = 0.0 if fails else 0.8 ** (len(answers) - 1)
    improvement, kl = (0.0, 0.0) if fails else answers[-1]
    expected |= {"the fraction returned": fraction, "the improvement returned": improvement,
                 "the KL returned": kl}  # fmt: skip
    expected |= {"θ afterwards": OLD} if fails else entries("θ afterwards", start + fraction * step)

    def compute():
        weights, seen = [torch.nn.Parameter(x.clone()) for x in old], []
        now = lambda: parameters_to_vector(weights).detach().clone()

        def measure():
            seen.append(now())
            return answers[min(len(seen), len(answers)) - 1]

        fraction, improvement, kl = script.line_search(measure, weights, step.clone(), gain, args)
        found = {"the number of tries": len(seen), "the fraction returned": number(fraction),
                 "the improvement returned": number(improvement),
                 "the KL returned": number(kl)}  # fmt: skip
        for k, theta in enumerate(seen, 1):
            found |= theta_at(k, theta)
        same = OLD if torch.equal(now(), start) else "another θ"
        return found | ({"θ afterwards": same} if fails else entries("θ afterwards", now()))

    return what, expected, compute


def theta_at(k, theta):
    return {f"θ[{i}] at try {k}": x for i, x in enumerate(theta.tolist())}


OLD = "θ_old"
CASES = {f.__name__: f for f in (ppo_loss, adapt_beta, gae, surrogate, fisher_vector_product,
                                 conjugate_gradient, line_search)}  # fmt: skip
