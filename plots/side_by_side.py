r"""Draw plots/side_by_side.html: each equation of the papers beside the lines that compute it.

  python plots/side_by_side.py             draw it, and renew the line numbers in README.md's links
  python plots/side_by_side.py --check     only say whether one of them is out of date

The page is one file, which needs nothing from elsewhere. EQUATIONS has the papers' formulas in
LaTeX and a sentence on each; VIEWS says which lines of which function of a script belong to each;
SYMBOLS which names in the code are which symbols. A line that is not found stops the drawing, so
the page cannot drift from the scripts. README.md links a definition as [`name`](script.py#L123).
"""

import ast
import difflib
import html
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import latex2mathml.converter
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "plots" / "side_by_side.html", ROOT / "README.md"
PPO, TRPO = "https://arxiv.org/pdf/1707.06347#page=", "https://arxiv.org/pdf/1502.05477#"

# ----------------------------------------------------------------------------------- Equations

OLD, E, A_T = r"\theta_\text{old}", r"\hat{\mathbb{E}}_t", r"\hat{A}_t"
PI, PI_OLD = r"\pi_\theta(\cdot\,|\,s_t)", r"\pi_{\theta_\text{old}}(\cdot\,|\,s_t)"
KL, DKL = rf"\text{{KL}}[{PI_OLD},\ {PI}]", rf"\overline{{D}}_\text{{KL}}({OLD},\theta)"
STATES = r"\mathbb{E}_{s \sim \rho_{" + OLD + "}"

EQUATIONS = {  # name: (where in the paper, its page, formulas, what they say)
    "ppo-algorithm": ("Algorithm 1", PPO + "5", [],
        "The whole method: collect a rollout, estimate advantages, take many steps on the rollout; "
        "then θ becomes θ_old and it begins anew. The line numbers are ours."),
    "table-5": ("Table 5", PPO + "10", [
        r"T = 128,\quad \text{Adam } 2.5 \cdot 10^{-4}\,\alpha,\quad K = 3,\quad M = 32 \times 8",
        r"\gamma = 0.99,\quad \lambda = 0.95,\quad N = 8",
        r"\epsilon = 0.1\,\alpha,\quad c_1 = 1,\quad c_2 = 0.01"],
        "The settings on Atari, in the order of the table."),
    "table-3": ("Table 3", PPO + "10", [
        r"T = 2048,\quad \text{Adam } 3 \cdot 10^{-4},\quad K = 10,\quad M = 64",
        r"\gamma = 0.99,\quad \lambda = 0.95"],
        "The settings on MuJoCo, in the order of the table. It has no N; here it is 1."),
    "table-1": ("Table 1", PPO + "6", [
        r"\epsilon = 0.2,\quad d_\text{targ} = 0.01,\quad \beta = 1"],
        "The objectives that the paper compares: ε = 0.2 came out best, and 0.01 is the best "
        "target of the adaptive penalty, whose β begins at 1."),
    "alpha": ("Table 5, α", PPO + "10", [r"\alpha = 1 - \frac{i}{I}"],
        "In iteration i of I, counted from 0, α multiplies Adam's step size and ε: it falls "
        "linearly from 1 to 0."),
    "alpha-mujoco": ("not in the paper: α on MuJoCo", "", [r"\alpha = 1 - \frac{i}{I}"],
        "The paper has α on Atari only. Here, in iteration i of I, counted from 0, it multiplies "
        "Adam's step size, and ε too with --anneal both."),
    "atari-network": ("Sec. 6.4", PPO + "8", [r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "Sec. 6.4's network is the first branch (--network paper); the default, the second, is "
        "the larger one of Mnih et al. (2015). Policy and value share the convolutional trunk, "
        "and each has a linear head."),
    "network": ("Sec. 6.1", PPO + "6", [r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "Two layers of 64 tanh units; V, whose size the paper does not give, has as many and "
        "shares none. A Gaussian policy has its mean from the network; its standard deviation does "
        "not depend on the state."),
    "act": ("Algorithm 1, line 3", PPO + "5", [r"a_t ∼ " + PI_OLD],
        "Every actor runs the old policy for T steps. The largest of logits plus Gumbel noise is "
        "a sample of the softmax; mean plus std times normal noise is one of the Gaussian. "
        "Log-probabilities and values are kept for Eq. 6 and 12."),
    "eq-12": ("Eq. 12", PPO + "5", [r"\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)"],
        "The reward and the next state's value, less what was expected. After a terminal state "
        "V counts as 0; at a time limit the next value is that of the episode's last state."),
    "eq-11": ("Eq. 11", PPO + "5", [
        A_T + r" = \delta_t + (\gamma\lambda)\,\delta_{t+1} + \cdots"
        r" + (\gamma\lambda)^{T-t-1}\,\delta_{T-1}",
        A_T + r" = \delta_t + \gamma\lambda\,\hat{A}_{t+1}"],
        "Generalised advantage estimation, summed from the end, by the second line; an episode's "
        "end ends the sum. (The paper prints the last exponent as T−t+1.)"),
    "targets": ("Sec. 5", PPO + "5", [r"V_t^\text{targ} = " + A_T + " + V(s_t)"],
        "The paper does not say what the value's target is; this one, the λ-return, is the usual "
        "choice."),
    "standardised": ("not in the paper: standardised advantages", "", [
        A_T + r" \leftarrow (" + A_T + r" - \text{mean}) / \text{std}"],
        "PPO's over the minibatch, or with --norm-adv rollout over the rollout; TRPO's over the "
        "rollout. On Atari they are then 0 where FIRE was pressed, whatever the policy chose."),
    "ratio": ("Eq. 6", PPO + "3", [
        r"r_t(\theta) = \frac{\pi_\theta(a_t\,|\,s_t)}{\pi_{" + OLD + r"}(a_t\,|\,s_t)}"],
        "How much more probable the action is now than when it was taken: 1 at θ_old. Computed as "
        "the exponential of the difference of log-probabilities."),
    "cpi": ("Eq. 6", PPO + "3", [
        r"L^{\text{CPI}}(\theta) = " + rf"{E}[r_t(\theta)\,{A_T}]"],
        "The surrogate without any constraint; Eq. 7 and 8 change it sample by sample, before the "
        "mean."),
    "eq-7": ("Eq. 7", PPO + "3", [
        r"L^{\text{CLIP}}(\theta) = " + rf"{E}[\min(r_t(\theta)\,{A_T},\ "
        rf"\text{{clip}}(r_t(\theta), 1-\epsilon, 1+\epsilon)\,{A_T})]"],
        "With a positive advantage the term stops growing at a ratio of 1 + ε, with a negative at "
        "1 − ε: beyond, the clipped term is the smaller one, and has no gradient. On the other "
        "side the minimum keeps the unclipped term, so that a step that made things worse can "
        "still be undone."),
    "eq-8": ("Eq. 8", PPO + "4", [
        r"L^{\text{KLPEN}}(\theta) = " + rf"{E}[r_t(\theta)\,{A_T} - \beta\,{KL}]"],
        "The alternative to clipping: a penalty on the distance between the two policies."),
    "sec-4": ("Sec. 4", PPO + "4", [
        rf"d = {E}[{KL}]",
        r"d < d_\text{targ} / 1.5\ \Rightarrow\ \beta \leftarrow \beta / 2",
        r"d > d_\text{targ} \times 1.5\ \Rightarrow\ \beta \leftarrow \beta \times 2"],
        "After each policy update d, the mean KL over the whole rollout, says whether β is "
        "halved, doubled or kept for the next one."),
    "eq-9": ("Eq. 9", PPO + "5", [
        r"L_t^{\text{CLIP+VF+S}}(\theta) = " + E + r"[L_t^{\text{CLIP}}(\theta) - c_1\,"
        r"L_t^{\text{VF}}(\theta) + c_2\,S[\pi_\theta](s_t)]",
        r"L_t^{\text{VF}}(\theta) = (V(s_t) - V_t^\text{targ})^2"],
        "The surrogate, less the value's squared error, plus an entropy bonus. Optimisers "
        "minimise, so the loss is minus this."),
    "epochs": ("Algorithm 1, line 6", PPO + "5", [r"K\ \text{epochs},\quad M \le N\,T"],
        "K passes over the T·N samples, each in another order, in minibatches of M: one step of "
        "Adam for each."),
    "trpo-algorithm": ("Sec. 6", TRPO + "section.6", [],
        "In our words and numbering, as Sec. 6 has no pseudocode: collect a rollout; take one "
        "step, in the direction that a quadratic model of the KL gives and as far as that model "
        "and a line search allow; then fit the critic."),
    "trpo-settings": ("App. E", TRPO + "appendix.E", [r"\delta = 0.01,\quad \gamma = 0.99"],
        "The size of the trust region in nats, and the discount. The paper also makes 10 "
        "iterations of conjugate gradient (App. C.1); the rest is Baselines' or Spinning Up's."),
    "trpo-network": ("App. D", TRPO + "appendix.D", [r"\pi_\theta(a\,|\,s),\quad V(s)"],
        "The paper has a small network for the policy; this is PPO's, with the same separate "
        "log-standard deviations. The critic V is not in the paper."),
    "sec-5-1": ("Sec. 5.1", TRPO + "section.5", [r"q(a\,|\,s) = \pi_{" + OLD + r"}(a\,|\,s)"],
        "\"Single path\": actions are sampled from the old policy, along trajectories. Mean "
        "plus std times normal noise is a sample of the Gaussian; the largest of logits plus "
        "Gumbel noise is one of the softmax."),
    "eq-14": ("Eq. 14", TRPO + "section.5", [
        r"\underset{\theta}{\text{maximise}}\ \ " + STATES + r",\,a \sim q}\left[\frac{"
        r"\pi_\theta(a\,|\,s)}{q(a\,|\,s)}\,Q_{" + OLD + r"}(s,a)\right]"],
        "Here q is the old policy. Advantages stand for Q: subtracting V(s) changes the objective "
        "by a constant."),
    "eq-14-kl": ("Eq. 14", TRPO + "section.5", [
        r"\text{subject to}\ \ " + STATES + r"}[D_\text{KL}(\pi_{" + OLD
        + r"}(\cdot\,|\,s)\,\|\,\pi_\theta(\cdot\,|\,s))] \le \delta"],
        "The trust region: the mean KL over the states, from the old policy to the new."),
    "gradient": ("App. C", TRPO + "appendix.C", [
        r"g = \nabla_\theta L(\theta)\,|_{\theta=" + OLD + "}"],
        "The surrogate's gradient at θ_old, which is the policy gradient."),
    "fisher": ("App. C.1", TRPO + "appendix.C", [
        r"A\,y = \nabla_\theta\,(\nabla_\theta\," + DKL + r" \cdot y)\,|_{\theta=" + OLD + "}"],
        "A is the Hessian of the mean KL at θ_old. The paper multiplies by Jacobians; this is the "
        "generic way that it names as the alternative: differentiate the KL twice. A itself is "
        "never formed."),
    "cg": ("App. C", TRPO + "appendix.C", [r"s \approx A^{-1} g"],
        "The search direction, by conjugate gradient: each iteration costs one product with A. "
        "Not in the paper: the early stop, and 0.1 added to A's diagonal, here and in the next "
        "row."),
    "beta": ("App. C", TRPO + "appendix.C", [r"\beta = \sqrt{2\delta\,/\,(s^T A\,s)}"],
        "The longest step along s within the quadratic model of the KL, ½ β² sᵀA s ≤ δ; with the "
        "damping in A, a little shorter."),
    "line-search": ("App. C", TRPO + "appendix.C", [
        r"\theta = " + OLD + r" + \beta\,s",
        r"L_{" + OLD + r"}(\theta) - \mathcal{X}[" + DKL + r" \le \delta]"],
        "𝒳 is 0 where the condition holds and infinite elsewhere. β begins at its largest value "
        "and shrinks until the surrogate is better than at θ_old and the true KL within δ."),
    "critic": ("not in the paper: a critic", "", [r"(V(s_t) - V_t^\text{targ})^2"],
        "Its regression, after the policy's step, as in Baselines."),
}  # fmt: skip

# --------------------------------------------------------------------------------------- Lines

LOOP = ("train", "for iteration in", "break")
GAE = [
    ("eq-12", ("rollout", "batch.next_values =", "batch.next_values ="),
              ("gae", "deltas =", "deltas =")),
    ("eq-11", ("gae", "decay =", "advantages[t] =")),
    ("targets", ("estimate_advantages", "batch.targets =", "batch.targets =")),
]  # fmt: skip
STANDARDISE = ("standardise", "return", "return")
NETWORK = [("ActorCritic", "self.actor =", "self.log_std ="),
           ("mlp", "return", "return"),
           ("ActorCritic", "out = self.actor", "self.log_std"),
           ("ActorCritic", "if self.discrete:", "return Independent"),
           ("ActorCritic", "self.critic(obs)", "self.critic(obs)")]  # fmt: skip
SAMPLE = [("rollout", "for t in range", "policy(t"),
          ("make_policy", "if net.discrete", "noise = (noise.normal_"),
          ("make_policy", "out = x @", "return out.argmax"),
          ("rollout", "batch.pi_old =", "batch.values =")]  # fmt: skip
MEAN = ("ppo_loss", "l_policy = l_policy.mean", "l_policy = l_policy.mean")
VIEWS = {  # script: (equation, (definition, a text of its first line, of its last), ...)
    "ppo_atari": [
        ("ppo-algorithm", LOOP),
        ("table-5", ("Args", "num_steps:", "anneal:")),
        ("atari-network",
         ("ActorCritic", 'if network == "paper"', "self.value_head ="),
         ("ActorCritic", "x = frames.permute", "return self.policy_head")),
        ("act", ("act", "logits, values =", "log_probs ="),
                ("rollout", "for t in range", "policy(net")),
        *GAE,
        ("standardised", ("update", "not in the paper: where", "(1 - batch.fired"),
                         ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("ratio", ("ppo_loss", "logits, new_values =", " ratio =")),
        ("eq-7", ("ppo_loss", "clipped =", "l_clip =")),
        ("eq-9", ("ppo_loss", "value_errors =", "l_total =")),
        ("alpha", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for _ in range", "optimizer.step()")),
    ],
    "ppo_continuous": [
        ("ppo-algorithm", LOOP),
        ("table-3", ("Args", "num_steps:", "num_envs:")),
        ("table-1", ("Args", "objective:", "kl_beta:")),
        ("network", *NETWORK),
        ("act", *SAMPLE),
        *GAE,
        ("standardised", ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("ratio", ("ppo_loss", "pi, values =", " ratio =")),
        ("cpi", ("ppo_loss", "l_policy = ratio", "l_policy = ratio"), MEAN),
        ("eq-7", ("ppo_loss", 'args.objective == "clip"', "torch.min("), MEAN),
        ("eq-8", ("ppo_loss", "elif args.objective", "- beta * kl"), MEAN),
        ("sec-4", ("mean_kl", "return", "return"),
                  ("train", 'args.objective == "kl-adaptive"', "penalty.adapt"),
                  ("Penalty", "def adapt", "clamp_(")),
        ("eq-9", ("ppo_loss", "l_policy = l_policy.mean", "l_total =")),
        ("alpha-mujoco", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for _ in range(args.num_epochs)", "optimizer.step()"),
                   ("compute_gradients", "minibatch =", "return")),
    ],
    "trpo_continuous": [
        ("trpo-algorithm", LOOP),
        ("trpo-settings", ("Args", "max_kl:", "gamma:")),
        ("trpo-network", *NETWORK),
        ("sec-5-1", *SAMPLE),
        *GAE,
        ("standardised", ("update", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("eq-14", ("surrogate", "ratio =", "return")),
        ("eq-14-kl", ("trust_region_step", "def measure", "kl_divergence"),
                     ("line_search", "if 0 < improvement", "return fraction")),
        ("gradient", ("trust_region_step", "l_old =", " g =")),
        ("fisher", ("fisher_vector_product", "pi = net.pi_params", "return product"),
                   ("trust_region_step", "args.fvp_fraction", "product =")),
        ("cg", ("conjugate_gradient", "def", "return x"),
               ("trust_region_step", "def damped", "s, residual =")),
        ("beta", ("trust_region_step", "s_a_s =", "full_step =")),
        ("line-search", ("line_search", "def", "return 0.0")),
        ("critic", ("fit_critic", "for _ in range", "optimizer.step()")),
    ],
}  # fmt: skip
# not in the paper: whole rows
EXTRA = {"alpha-mujoco", "critic", "standardised"}
EXTRA |= {f"trpo_continuous-{equation}" for equation, *_ in GAE}

SYMBOLS = [  # its LaTeX, the names that it has in the code
    (r"\gamma", "gamma"),
    (r"\lambda", "gae_lambda"),
    (r"\epsilon", "clip_eps"),
    (r"\alpha", "alpha"),
    ("r_t", "ratio"),
    (A_T, "advantage advantages"),
    (r"\delta_t", "deltas"),
    (r"\delta", "max_kl"),
    (r"\beta", "beta kl_beta"),
    (OLD, "theta_old"),
    ("c_1", "vf_coef"),
    ("c_2", "ent_coef"),
    ("T", "num_steps"),
    ("N", "num_envs"),
    ("M", "minibatch_size"),
    ("K", "num_epochs"),
    ("V", "values next_values new_values critic value_head"),
    (r"V_t^\text{targ}", "targets"),
    (r"\pi_\theta", "pi log_pi log_prob policy_head actor"),
    (r"\pi_{" + OLD + "}", "log_probs policy pi_old"),
    ("r_t", "rewards"),
    ("S", "entropy"),
    (r"L^{\text{CLIP}}", "l_clip l_policy"),
    (r"L_t^{\text{CLIP}}", "l_clip l_policy"),
    (r"L^{\text{CPI}}", "l_policy"),
    (r"L^{\text{KLPEN}}", "l_policy"),
    (r"L_t^{\text{VF}}", "l_vf"),
    ("d", "kl"),
    (r"\text{KL}", "kl_divergence"),
    (r"D_\text{KL}", "kl kl_divergence"),
    (r"\overline{D}_\text{KL}", "kl"),
    (r"d_\text{targ}", "kl_target"),
    (r"Q_{" + OLD + "}", "advantages"),
    ("g", "g b"),
    ("A", "product a_p damped"),
    ("y", "y"),
    ("s", "s"),
    ("s", "obs frames"),
]


@cache
def tokens(script):
    """A script's lines, each a list of Pygments' (type, text)."""
    lines = [[]]
    for kind, text in lex((ROOT / f"{script}.py").read_text(), PythonLexer(stripnl=False)):
        for k, part in enumerate(text.split("\n")):
            if k:
                lines.append([])
            if part:
                lines[-1].append((kind, part))
    return lines


def text_of(line):
    return "".join(text for _, text in line)


@cache
def statements(script):
    """All statements, of whatever depth."""
    tree = ast.parse((ROOT / f"{script}.py").read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def statement(script, number):
    """The innermost statement on a line."""
    nodes = [node for node in statements(script) if node.lineno <= number <= node.end_lineno]
    return min(nodes, key=lambda node: node.end_lineno - node.lineno)


def definition(script, name):
    """The numbers of the lines of a function, a class or a constant; Class.method is one, too."""
    outer, _, inner = name.rpartition(".")
    within = definition(script, outer) if outer else range(1, len(tokens(script)) + 1)
    for node in statements(script):
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        named = inner in (getattr(target, key, 0) for key in ("name", "id"))
        if named and node.lineno in within and node.col_offset == 4 * bool(outer):
            return range(node.lineno, node.end_lineno + 1)
    raise ValueError(f"{script}.py has no {name}")


def excerpt(script, name, first, last):
    """The numbers of the lines of a definition from the first that holds one text, with comments
    above it, to the next that holds another, with the rest of its statement unless that has a
    body."""
    lines = [(n, text_of(tokens(script)[n - 1])) for n in definition(script, name)]
    start = next((n for n, text in lines if first in text), None)
    if start is None:
        raise ValueError(f"{script}.{name}: no line holds {first!r}")
    stop = next((n for n, text in lines if n >= start and last in text), None)
    if stop is None:
        raise ValueError(f"{script}.{name}: after {first!r} no line holds {last!r}")
    node = statement(script, stop)
    while text_of(tokens(script)[start - 2]).lstrip().startswith("#"):
        start -= 1
    return range(start, 1 + (stop if hasattr(node, "body") else node.end_lineno))


@cache
def not_in_the_paper(script):
    """The numbers of the lines whose comment says so, with their statements or, below a line that
    is all comment, the next one; of a docstring, to the paragraph's end."""
    found, lines = set(), tokens(script)
    for n, line in enumerate(lines, 1):
        for kind, text in line:
            if not re.search("not in the (PPO )?paper", text, re.I):
                continue
            if kind in String.Doc:
                found.add(n)
                while text_of(lines[n]).strip('" '):
                    n += 1
                    found.add(n)
            elif kind in Comment and text_of(line).lstrip().startswith("#"):
                after = (node for node in statements(script) if node.lineno > n)
                node = min(after, key=lambda node: node.lineno)
                found |= {*range(n, node.end_lineno + 1)}
            elif kind in Comment:
                node = statement(script, n)
                found |= {*range(node.lineno, node.end_lineno + 1)}
    return found


# ---------------------------------------------------------------------------------------- HTML

KINDS = [(Comment, "c"), (String.Doc, "c"), (String, "s"), (Number, "m"), (Keyword, "k"),
         (Operator.Word, "k"), (Name.Function, "f"), (Name.Class, "f")]  # fmt: skip


def formula(latex, symbols, display="block"):
    """MathML; symbols: {what an element holds, as text: the id to mark it with}."""
    ET.register_namespace("", "http://www.w3.org/1998/Math/MathML")
    root = ET.fromstring(latex2mathml.converter.convert(latex, display=display))

    def mark(element):
        for child in element:
            if content(child) in symbols:
                child.set("data-s", symbols[content(child)])
            else:
                mark(child)

    mark(root)
    return ET.tostring(root, encoding="unicode")


def content(element):
    return "".join(element.itertext())


CONTENTS = [content(ET.fromstring(formula(latex, {}))) for latex, _ in SYMBOLS]


def symbols_of(formulas, words):
    """[(a symbol's number, its names)] of those that both formulas and code, its words, have; a
    name belongs to the first of its symbols."""
    marked = "".join(
        formula(latex, dict(zip(CONTENTS, CONTENTS, strict=True))) for latex in formulas
    )
    found = {html.unescape(text) for text in re.findall('data-s="(.*?)"', marked)}
    symbols, free = [], set(words)
    for k, (_, names) in enumerate(SYMBOLS):
        names = free & set(names.split()) if CONTENTS[k] in found else set()
        if names:
            symbols.append((k, names))
            free -= names
    return symbols


def code(script, numbers, symbols=(), common=None, dedent=True):
    """Lines of a script. symbols: {name: id} of those to mark; common: lines that are no change."""
    lines = [tokens(script)[n - 1] for n in numbers]
    texts = [text_of(line) for line in lines]
    margin = min((len(t) - len(t.lstrip()) for t in texts if t.strip()), default=0) * dedent
    shown = []
    for n, line, text in zip(numbers, lines, texts, strict=True):
        parts, skip = [], margin
        for kind, part in line:
            part, skip = part[skip:], max(0, skip - len(part))
            css = next((css for parent, css in KINDS if kind in parent), "")
            same = f' data-s="{symbols[part]}"' if not css and part in symbols else ""
            css = f' class="{css}"' if css else ""
            part = html.escape(part, quote=False)
            parts.append(f"<span{css}{same}>{part}</span>" if css or same else part)
        css = " extra" * (n in not_in_the_paper(script))
        css += " changed" * (common is not None and text not in common)
        number = f'<i aria-hidden="true">{n}</i>'
        shown.append(f'<span class="line{css}">{number}{"".join(parts)}\n</span>')
    return f"<pre><code>{''.join(shown)}</code></pre>"


def prose(text):
    """HTML, with subscripts as in θ_old."""
    return re.sub(r"\b([πθδÂ])_(\w+)", r"\1<sub>\2</sub>", html.escape(text))


def algorithm(script):
    """The algorithm's lines in the script's docstring, as a table."""
    block = (ROOT / f"{script}.py").read_text().split("\n\n")[1].splitlines()
    rows = []
    for line in block[1:]:
        number, rest = line[:2].strip(), line[3:]
        words, *here = re.split("  +", rest.strip())
        indent = (len(rest) - len(rest.lstrip())) / 2
        rows.append(f'<tr><td>{number}<td style="padding-left:{indent}em">{prose(words)}'
                    f"<td><code>{html.escape(''.join(here))}</code>")  # fmt: skip
    return f'<table class="algorithm">{"".join(rows)}</table>'


def row(script, equation, *places):
    """An equation and its lines."""
    where, link, formulas, says = EQUATIONS[equation]
    numbers = [excerpt(script, *place) for place in places]
    words = {text for part in numbers for n in part for _, text in tokens(script)[n - 1]}
    symbols = symbols_of(formulas, words)

    if script.startswith("trpo") and link.startswith(PPO):
        where = f"{where} of the PPO paper"
    title = f'<a href="{link}">{where}</a>' if link else where
    marks = {CONTENTS[k]: f"s{k}" for k, _ in symbols}
    body = "".join(f"<p>{formula(latex, marks)}</p>" for latex in formulas)
    keys = []
    for k, names in symbols:
        symbol = formula(SYMBOLS[k][0], {}, "inline")
        keys.append(f'<li><button type="button" data-s="s{k}">{symbol} '
                    f"<code>{', '.join(sorted(names))}</code></button>")  # fmt: skip
    marks = {name: f"s{k}" for k, names in symbols for name in names}
    figures = []
    for (name, *_), part in zip(places, numbers, strict=True):
        lines = f"line {part[0]}" if len(part) == 1 else f"lines {part[0]} to {part[-1]}"
        caption = f"<figcaption><code>{name}</code>, {lines}</figcaption>"
        figures.append(f"<figure>{caption}{code(script, part, marks)}</figure>")
    extra = " extra" * bool({equation, f"{script}-{equation}"} & EXTRA)
    return f"""<section class="row{extra}" id="{script}-{equation}">
<div class="paper"><h3>{title}</h3>
{algorithm(script) if equation.endswith("algorithm") else body}<p>{prose(says)}</p>
<ul class="keys">{"".join(keys)}</ul></div>
<div class="code">{"".join(figures)}</div></section>
"""


def difference(one, other):
    """The paper's parts of two scripts, side by side; definitions that both have are folded."""
    parts = [papers_part(script) for script in (one, other)]
    texts = [[text for _, _, text in part] for part in parts]
    shown = []
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        spans = (parts[0][a0:a1], parts[1][b0:b1])
        lines = [range(span[0][1][0], span[-1][1][-1] + 1) if span else range(0) for span in spans]
        if tag == "equal":
            names = ", ".join(name for name, _, _ in spans[0])
            shown.append(f"<details><summary>{len(lines[0])} lines are the same: {names}</summary>"
                         f"{code(one, lines[0], dedent=False)}</details>")  # fmt: skip
            continue
        own = [{text_of(tokens(script)[n - 1]) for n in numbers}
               for script, numbers in zip((one, other), lines, strict=True)]  # fmt: skip
        figures = [f"<figure><figcaption>{script}.py</figcaption>"
                   f"{code(script, numbers, common=own[0] & own[1], dedent=False)}</figure>"
                   for script, numbers in zip((one, other), lines, strict=True)]  # fmt: skip
        shown.append(f'<section class="both">{"".join(figures)}</section>')
    return "".join(shown)


def papers_part(script):
    """[(name, numbers of the lines, text)] of the definitions from train to the end of Update."""
    lines = [text_of(line) for line in tokens(script)]
    end = next(n for n, text in enumerate(lines) if text.startswith("# ======"))
    found = []
    for node in statements(script):
        if node.col_offset == 0 and definition(script, "train")[0] <= node.lineno < end:
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            numbers = range(first, node.end_lineno + 1)
            found.append((node.name, numbers, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def page():
    """The whole page, as a string."""
    views = {script: (f"{script}.py", "".join(row(script, *places) for places in rows))
             for script, rows in VIEWS.items()}  # fmt: skip
    words = "The two scripts from train to update. Blue: lines that only one of them has. "
    words += "Definitions that are the same in both are folded."
    folded = difference("ppo_continuous", "trpo_continuous")
    views["difference"] = "PPO ↔ TRPO", f"<p>{prose(words)}</p>{folded}"
    tabs, panels = "", ""
    for key, (name, body) in views.items():
        tab, view = f'id="tab-{key}"', f"view-{key}"
        tabs += f'<button type="button" role="tab" {tab} aria-controls="{view}">{name}</button>'
        panels += f"""<div role="tabpanel" id="{view}" aria-labelledby="tab-{key}">
<h2>{name}</h2>{body}</div>
"""
    return TEMPLATE.replace("@TABS@", tabs).replace("@PANELS@", panels)


TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>PPO and TRPO: paper and code, side by side</title>
<style>
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #fff; --panel: #f6f8fa;
  --rule: #d0d7de; --link: #0550ae; --mark: #ffe58a; --comment: #57606a; --string: #0a5c2b;
  --keyword: #a40e26; --number: #0550ae; --name: #6639ba; --extra: #bc4c00; --changed: #ddf4ff }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9ea7b3; --back: #0d1117;
  --panel: #161b22; --rule: #30363d; --link: #79c0ff; --mark: #6b5300; --comment: #9ea7b3;
  --string: #7ee787; --keyword: #ff7b72; --number: #79c0ff; --name: #d2a8ff; --extra: #ffa657;
  --changed: #0c2d4b } }
body { margin: 0 auto; max-width: 96rem; padding: 1rem 1.5rem 4rem; color: var(--text);
  background: var(--back); font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.2rem } h3 { font-size: 1rem; margin: 0 }
a { color: var(--link) }
nav { position: sticky; top: 0; background: var(--back); padding: .5rem 0; z-index: 1;
  border-bottom: 1px solid var(--rule); display: flex; flex-wrap: wrap; gap: .5rem }
button { font: inherit; color: inherit; background: none; cursor: pointer;
  border: 1px solid var(--rule); border-radius: .4rem; padding: .15rem .6rem }
[role=tab][aria-selected=true] { border-color: var(--link); box-shadow: inset 0 -3px var(--link) }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
.row, .both { display: grid; gap: 1rem 2rem; border-top: 1px solid var(--rule); padding: 1.2rem 0 }
.row { grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); scroll-margin-top: 4rem }
.both { grid-template-columns: repeat(2, minmax(0, 1fr)) }
.paper { overflow-x: auto } .paper p { margin: .6rem 0 }
math { font-size: 1.15em }
.keys { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .4rem; margin: .6rem 0 }
.keys math { font-size: 1em }
figure { margin: 0 0 .8rem } figcaption { color: var(--soft); font-size: .85rem }
pre { margin: .2rem 0; padding: .5rem 0; overflow-x: auto; background: var(--panel);
  border-radius: .4rem; font: .8rem/1.5 ui-monospace, monospace }
.line { display: block; width: max-content; min-width: 100%; box-sizing: border-box;
  padding-right: .8rem; border-left: 3px solid transparent }
.extra { border-left-color: var(--extra) }
.row.extra { border-left: 3px solid var(--extra); padding-left: .8rem }
.changed { background: var(--changed); border-right: 3px solid var(--link) }
.line i { display: inline-block; width: 3em; padding-right: 1em; text-align: right;
  color: var(--soft); font-style: normal; user-select: none; text-indent: 0 }
.both pre { font-size: .7rem; white-space: pre-wrap }
.both .line { width: auto; padding-left: 4em; text-indent: -4em }
.c { color: var(--comment) } .s { color: var(--string) } .k { color: var(--keyword) }
.m { color: var(--number) } .f { color: var(--name) }
[data-s] { border-radius: .2rem } .code [data-s], math [data-s] { cursor: help }
.code [data-s] { text-decoration: underline dotted var(--soft); text-underline-offset: .2em }
.on { background: var(--mark); outline: 2px solid var(--link) }
.algorithm { border-spacing: 0; font-size: .9rem } .algorithm td { padding: 0 .6rem 0 0;
  vertical-align: top } .algorithm code { font-size: .85rem }
details { border-top: 1px solid var(--rule); padding: .6rem 0 } summary { color: var(--soft) }
[hidden] { display: none } main { scroll-margin-top: 4rem }
@media (max-width: 60rem) { body { padding: 1rem } nav { position: static }
  .row, .both { grid-template-columns: minmax(0, 1fr) } .row { scroll-margin-top: 0 } }
@media print { nav { display: none } .row, .both { display: block; break-inside: avoid }
  pre { white-space: pre-wrap; overflow: visible; font-size: .7rem } .line { width: auto }
  .changed, .extra { print-color-adjust: exact } }
</style>
<noscript><style>nav, .keys { display: none }</style></noscript>
<h1>PPO and TRPO: paper and code, side by side</h1>
<p>The equations of <a href="https://arxiv.org/abs/1707.06347">PPO</a> and
<a href="https://arxiv.org/abs/1502.05477">TRPO</a>, and the lines that compute them. Point at a
symbol or a name, or press its button, and both are marked. An orange edge: a step that is not in
the paper.</p>
<nav role="tablist" aria-label="Script">@TABS@</nav>
<main>@PANELS@</main>
<script>
const tabs = [...document.querySelectorAll("[role=tab]")];
function show(tab) {
  for (const t of tabs) {
    t.setAttribute("aria-selected", t === tab);
    t.tabIndex = t === tab ? 0 : -1;
    document.getElementById(t.getAttribute("aria-controls")).hidden = t !== tab;
  }
  for (const box of document.querySelectorAll("pre")) {  // what scrolls is reached by keyboard
    box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
  }
}
function named() {  // by the address: #trpo_continuous, #ppo_atari-eq-7
  const name = location.hash.slice(1), row = document.getElementById(name);
  const view = row && row.closest("[role=tabpanel]").id;
  return tabs.find(t => t.id === "tab-" + name || t.getAttribute("aria-controls") === view);
}
function go() {
  show(named() || tabs[0]);
  const row = document.getElementById(location.hash.slice(1));
  if (row) row.scrollIntoView();
}
for (const tab of tabs) {
  tab.addEventListener("click", () => {
    history.replaceState(null, "", "#" + tab.id.slice(4));
    show(tab);
    document.querySelector("main").scrollIntoView();
  });
  tab.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}
addEventListener("hashchange", go);
go();

let kept = null;  // the button that was pressed
function mark(element) {
  for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
  for (const button of document.querySelectorAll("[aria-pressed]")) {
    button.setAttribute("aria-pressed", button === kept);
  }
  for (const one of new Set([element, kept])) {
    const row = one && one.closest(".row");
    if (!row) continue;
    const both = row.querySelectorAll(`[data-s="${one.dataset.s}"]`);
    for (const same of both) same.classList.add("on");
  }
}
for (const button of document.querySelectorAll(".keys button")) {
  button.setAttribute("aria-pressed", false);
  button.addEventListener("click", () => { kept = kept === button ? null : button; mark(button) });
}
for (const type of ["mouseover", "focusin", "focusout"]) {
  document.addEventListener(type, event => {
    const pointed = type === "mouseover" && event.target.closest("[data-s]");
    mark(pointed || document.activeElement.closest("[data-s]"));
  });
}
for (const box of document.querySelectorAll("pre")) {
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", box.previousElementSibling.textContent);
}
</script>
</html>
"""

# ------------------------------------------------------------------------------- Page and links


def renew(text):
    """README with its links at the first lines of the definitions that they name."""
    return re.sub(r"(\[`([\w.]+)`\]\((\w+)\.py#L)\d+",
                  lambda link: link[1] + str(definition(link[3], link[2])[0]), text)  # fmt: skip


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        sys.exit(__doc__)
    for path, made in ((PAGE, lambda old: page()), (README, renew)):
        old = path.read_text()
        try:
            new = made(old)
        except ValueError as e:
            sys.exit(f"{path.name} names what is not there: {e}")
        if argv and new != old:
            sys.exit(f"{path.name} is out of date; run: python plots/side_by_side.py")
        path.write_text(new)


if __name__ == "__main__":
    main()
