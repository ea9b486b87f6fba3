r"""Draw plots/side_by_side.html: each equation of the papers beside the lines that compute it.

  python plots/side_by_side.py             draw it, and renew the line numbers in README.md's links
  python plots/side_by_side.py --check     only say whether one of them is out of date

The page is one file, which needs nothing from elsewhere; its looks and its behaviour are those of
plots/page. EQUATIONS has the papers' formulas in LaTeX and what is to be said of each; VIEWS says
which lines of which function of a script belong to each; SYMBOLS which names in the code are which
symbols. A line that is not found stops the drawing, so the page cannot drift from the scripts.
What a step is worth is read from plots/data. README.md links a definition as
[`name`](script.py#L123). plots/side_by_side.png, two of the rows, needs Chromium or Chrome.
"""

import ast
import html
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import latex2mathml.converter
import numpy as np
import reproduce
from compare import spread
from matplotlib.image import imread, imsave
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

ROOT = Path(__file__).resolve().parent.parent
PAGE, README = ROOT / "plots" / "side_by_side.html", ROOT / "README.md"
ASSETS = ROOT / "plots" / "page"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
PPO, TRPO = "https://arxiv.org/pdf/1707.06347#page=", "https://arxiv.org/pdf/1502.05477#"

# ----------------------------------------------------------------------------------- Equations


def link_to(place):
    """ "PPO 3": page 3 of that paper; "TRPO appendix.C": that part."""
    paper, _, where = (place or "").partition(" ")
    return {"PPO": PPO, "TRPO": TRPO, "": ""}[paper] + where


TABLE = tomllib.loads((ASSETS / "equations.toml").read_text("utf-8"))
MACROS = TABLE.pop("macros")  # of LaTeX, as \\newcommand defines them
SYMBOLS = TABLE.pop("symbols")
# key: (where in the paper and what; a link there, or "" if the paper lacks it; formulas; words)
EQUATIONS = {key: (one["title"], link_to(one.get("paper")), one.get("formulas", []), one["says"])
             for key, one in TABLE.items()}  # fmt: skip

# --------------------------------------------------------------------------------------- Lines

LOOP = ("train", "for iteration in", "break")
GAE = [
    ("eq-12", ("gae", "deltas ="), ("rollout", "batch.values", "batch.next_values =")),
    ("eq-11", ("gae", "decay =", "advantages[t] =")),
    ("targets", ("estimate_advantages", "batch.targets =")),
]  # fmt: skip
STANDARDISE, CRITIC = ("standardise", "return"), ("ActorCritic", "self.critic(obs)")
NETWORK = [("ActorCritic", "self.actor =", "self.log_std ="), ("mlp", "return"),
           ("ActorCritic", "if args.orthogonal", "layer_init(head"),
           ("ActorCritic", "out = self.actor", "self.log_std"),
           ("ActorCritic", "if self.discrete:", "return Independent"), CRITIC]  # fmt: skip
SAMPLE = [("rollout", "noise = draw_noise", "actions[t] ="), ("draw_noise", "noise =", "log_std"),
          ("act", "out =", "return"), ("rollout", "batch.obs =", "batch.values =")]  # fmt: skip
NORMALISED = ("normalised", ("ActorCritic", "if self.norm_obs", "clamp(-10, 10)"),
              ("scale_rewards", "rewards, returns =", "clamp_(-10, 10)"),
              ("train", "if args.norm_obs", "obs_moments.add"),
              ("make_env", "if args.clip_actions", "action.clip"))  # fmt: skip
ADAM = ("train", "optimizer = torch.optim.Adam")
SURROGATE_LINE = ("ppo_loss", "surrogate =")
VIEWS = {  # script: (equation, (definition, a text of its first line, of its last), ...)
    "ppo_continuous": [
        ("ppo-algorithm", ("", "Algorithm 1", "8  end for"), LOOP),
        ("table-3", ("Args", "num_steps:", "num_envs:")),
        ("table-1", ("Args", "objective:", "kl_beta:")),
        ("network", *NETWORK),
        ("act", *SAMPLE),
        NORMALISED,
        *GAE,
        ("standardised", ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("derivation",),
        ("ratio", ("ppo_loss", "pi, values =", " ratio =")),
        ("cpi", SURROGATE_LINE, ("ppo_loss", 'objective == "none"', "l_policy =")),
        ("eq-7", SURROGATE_LINE, ("ppo_loss", 'objective == "clip"', "torch.min(")),
        ("eq-8", SURROGATE_LINE, ("ppo_loss", "elif args.objective in", "l_policy =")),
        ("sec-4", ("mean_kl", "return"),
                  ("train", "# Sec. 4", "adapt_beta("),
                  ("adapt_beta", "if kl <", "return")),
        ("eq-9", ("ppo_loss", "l_vf =", "l_total =")),
        ("alpha-mujoco", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for epoch in range", "optimizer.step()"),
                   ("backpropagate", "minibatch =", "return"), ADAM),
    ],
    "ppo_atari": [
        ("ppo-algorithm", ("", "Algorithm 1", "8  end for"), LOOP),
        ("table-5", ("Args", "num_steps:", "anneal:")),
        ("atari-network", ("ActorCritic", 'if network == "paper"', "gain=1.0"),
                          ("ActorCritic", "x = frames.to", "return self.policy_head")),
        ("act", ("rollout", "for t in range", "act_fn(net"),
                ("act", "logits, values =", "log_probs =")),
        ("eq-12", ("gae", "deltas ="), ("rollout", "frames = games", "batch.next_values =")),
        *GAE[1:],
        ("standardised-atari", ("estimate_advantages", "(1 - batch.fired"),
                         ("ppo_loss", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("derivation",),
        ("ratio", ("ppo_loss", "logits, new_values =", " ratio =")),
        ("eq-7", ("ppo_loss", "clipped =", "l_clip =")),
        ("eq-9", ("ppo_loss", "value_errors =", "l_total =")),
        ("alpha", ("anneal", "alpha =", "return")),
        ("epochs", ("update", "for _ in range", "optimizer.step()"), ADAM),
    ],
    "trpo_continuous": [
        ("trpo-algorithm", ("", "The practical", "6  end for"), LOOP),
        ("trpo-settings", ("Args", "max_kl:", "gamma:")),
        ("trpo-network", *NETWORK),
        ("sec-5-1", *SAMPLE),
        NORMALISED,
        *GAE,
        ("standardised", ("update", "args.norm_adv ==", "standardise("), STANDARDISE),
        ("eq-14", ("surrogate", "ratio =", "return")),
        ("eq-14-kl", ("trust_region_step", "def measure", "kl_divergence"),
                     ("line_search", "if enough <", "return fraction")),
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
LESSON = [  # how PPO becomes TRPO: (name, what to see, PPO's lines, TRPO's lines)
    ("The loop", "Both collect a rollout, estimate advantages and update. What differs is blue: "
     "another `update`, and PPO's settings that change from one iteration to the next.",
     [LOOP], [LOOP]),
    ("The update", "PPO takes many small steps: K passes over the samples, in minibatches. TRPO "
     "takes one step on the whole rollout, as large as allowed; then it fits its critic.",
     [("update", "for epoch in range", "optimizer.step()")],
     [("update", "stats = trust_region_step", "fit_critic(")]),
    ("The objective", "Both begin with the ratio times the advantage. PPO changes it so that going "
     "too far does not pay. TRPO leaves it as it is.",
     [("ppo_loss", " ratio =", "l_policy = (surr")], [("surrogate", "ratio =", "ret")]),
    ("The direction", "PPO follows the gradient; Adam scales it. TRPO turns the gradient g into "
     "A⁻¹g, the direction that gains most for a given change of the policy, not of its weights.",
     [("backpropagate", "minibatch =", "loss.backward")],
     [("trust_region_step", "l_old =", " g ="), ("trust_region_step", "product =", "s, residual")]),
    ("How far", "PPO only takes away the reward for going further: a sample past 1 + ε (if A > 0) "
     "or 1 − ε (if A < 0) has no gradient. TRPO measures the KL and shortens the step until it is "
     "at most δ.",
     [("ppo_loss", "clipped =", "torch.min(")],
     [("trust_region_step", "s_a_s =", "full_step ="), ("line_search", "theta_old =", "ret")]),
    ("The value function", "PPO trains it in the same loss. TRPO's step is for the policy alone; "
     "the critic, which its paper does not have, is fitted afterwards.",
     [("ppo_loss", "l_vf =", "l_total =")], [("fit_critic", "for _", "optimizer.step()")]),
]  # fmt: skip
# steps that are not in the paper, beside those whose comment or docstring says so
EXTRA = {
    "ppo_atari": [("gae", "decay ="), ("ActorCritic", "else:", "nn.Linear(64 * 7 * 7")],
    "ppo_continuous": [("gae", "decay ="), ("train", "learning_rate, clip_eps =", "anneal(")],
    "trpo_continuous": [
        ("gae", "deltas =", "return"), ("estimate_advantages", "batch.advantages =", "V^targ"),
        ("rollout", "batch.values =", "batch.next_values ="), ("ActorCritic", "self.critic ="),
        CRITIC, ("conjugate_gradient", "enough ="), ("trust_region_step", "s_a_s ="),
        ("line_search", "enough ="), ("line_search", "parameters(theta_old, w", "return 0.0"),
        ("update", "fit_critic(")],
}  # fmt: skip

PICTURES = {"eq-7": "clip", "eq-11": "gae", "line-search": "trust", "epochs": "update"}
OFF = {  # a row of steps that are not in the paper: (in words, the flag that leaves one out)
    "standardised": [("Without it", "--norm-adv none"), ("Once a rollout", "--norm-adv rollout")],
    "network": [("Without orthogonal weights", "--no-orthogonal")],
    "normalised": [("Observations as they are", "--no-norm-obs"),
                   ("Rewards as they are", "--no-norm-reward"),
                   ("Without nearly all that is not in the paper", "plain")],
    "alpha-mujoco": [("Without it", "--anneal none")],
    "epochs": [("Gradient not clipped", "--max-grad-norm 0"), ("Adam's own ε", "--adam-eps 1e-8")],
    "cg": [("Without damping", "--cg-damping 0")],
}  # fmt: skip
OFF["trpo-network"] = OFF["network"]

SAMPLES = {  # @ in the shape of a symbol: of the samples in a function
    "gae": "T,N", "rollout": "T,N", "scale_rewards": "T,N", "estimate_advantages": "T,N",
    "mean_kl": "T,N", "act": "N", "ppo_loss": "M", "standardise": "M", "update": "T·N",
    "surrogate": "T·N", "trust_region_step": "T·N", "fit_critic": "T·N", "rollout.obs": "...",
    "rollout.frames": "...",
}  # the last two: of one step, and of all in the batch  # fmt: skip


@cache
def tokens(script):
    """A script's lines, each a list of Pygments' (type, text)."""
    source, lines = (ROOT / f"{script}.py").read_text("utf-8"), [[]]
    source = re.sub("  # fmt: skip$", "", source, flags=re.M)
    for kind, text in lex(source, PythonLexer(stripnl=False)):
        first, *rest = text.split("\n")
        lines[-1].append((kind, first))
        lines += [[(kind, part)] for part in rest]
    return lines


def text_of(line, comments=True):
    return "".join(text for kind, text in line if comments or kind not in Comment).rstrip()


@cache
def statements(script):
    """All statements, of whatever depth."""
    tree = ast.parse((ROOT / f"{script}.py").read_text("utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def statement(script, number):
    """The innermost statement on a line."""
    nodes = [node for node in statements(script) if node.lineno <= number <= node.end_lineno]
    return min(nodes, key=lambda node: node.end_lineno - node.lineno)


def definition(script, name):
    """The numbers of the lines of a function, class or Class.method; of the file: ""."""
    if not name:
        return range(1, len(tokens(script)) + 1)
    outer, _, inner = name.rpartition(".")
    within = definition(script, outer)
    for node in statements(script):
        named = getattr(node, "name", "") == inner and node.col_offset == 4 * bool(outer)
        if named and node.lineno in within:
            return range(node.lineno, node.end_lineno + 1)
    raise ValueError(f"{script}.py has no {name}")


def excerpt(script, name, first, last=None):
    """The numbers of the lines of a definition, less docstrings, from the first that has one text,
    with comments above it, to the next that has another, or the end of its simple statement."""
    text = [text_of(line) for line in ["", *tokens(script)]]

    def find(part, after):
        for n in definition(script, name):
            if n >= after and part in text[n]:
                return n
        raise ValueError(f"{script}.{name} has no line with {part!r}")

    start = find(first, 0)
    stop = find(last or first, start)
    node = statement(script, stop)
    stop = stop if hasattr(node, "body") or not name else node.end_lineno
    while text[start - 1].lstrip().startswith("#"):
        start -= 1
    docs = [node.body[0] for node in statements(script)
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]  # fmt: skip
    doc = {n for node in docs for n in range(node.lineno, node.end_lineno + 1)}
    return [n for n in range(start, stop + 1) if n not in doc]


@cache
def not_in_the_paper(script):
    """The numbers of the lines of steps that are not in the paper: those of EXTRA, functions whose
    docstring says so, statements with such a comment or below it (of a loop: the first line)."""
    found = {n for place in EXTRA[script] for n in excerpt(script, *place)}
    says = re.compile("not in the (PPO )?paper", re.I).search
    for node in statements(script):
        if isinstance(node, ast.FunctionDef) and says(ast.get_docstring(node) or ""):
            found |= {*range(node.lineno, node.end_lineno + 1)}
    code = [text_of(line, comments=False).strip() for line in tokens(script)]
    for n, line in enumerate(tokens(script), 1):
        if any(kind in Comment and says(text) for kind, text in line):
            node = statement(script, n + next(k for k, text in enumerate(code[n - 1 :]) if text))
            loop = isinstance(node, (ast.For, ast.While))
            found |= {*range(min(n, node.lineno), 1 + (node.lineno if loop else node.end_lineno))}
    return found


# ---------------------------------------------------------------------------------------- HTML

KINDS = [(Comment, "c"), (String.Doc, "d"), (String, "s"), (Number, "m"), (Keyword, "k"),
         (Operator.Word, "k"), (Name.Function, "f"), (Name.Class, "f")]  # fmt: skip


def formula(latex, symbols=()):
    """MathML, in parts at each \\\\; symbols: what the elements to be marked hold, as text. One
    may be part of another in braces, as r_t is of r_t(θ) Â_t."""
    ET.register_namespace("", "http://www.w3.org/1998/Math/MathML")
    while (longer := re.sub(r"\\([A-Za-z]+)", lambda m: MACROS.get(m[1], m[0]), latex)) != latex:
        latex = longer

    def mark(element):
        for child in element:
            if (text := "".join(child.itertext())) in symbols:
                child.set("data-s", text)
            if text not in symbols or child.tag.endswith("mrow"):
                mark(child)

    parts = []
    for part in latex.split(r" \\ "):
        root = ET.fromstring(latex2mathml.converter.convert(part))
        root.set("displaystyle", "true")
        mark(root)
        parts.append(ET.tostring(root, encoding="unicode"))
    return "<wbr>".join(parts)


CONTENTS = ["".join(ET.fromstring(formula(latex)).itertext()) for latex, *_ in SYMBOLS]


def symbols_of(formulas, words):
    """[(a symbol's number, its names)] of those that both formulas and code, its words, have; a
    name belongs to the first of its symbols."""
    marked = "".join(formula(latex, CONTENTS) for latex in formulas)
    found = {html.unescape(text) for text in re.findall('data-s="(.*?)"', marked)}
    symbols, free = [], set(words)
    for k, (_, names, _) in enumerate(SYMBOLS):
        names = [name for name in names.split() if name.split(":")[0] in free]
        if names and CONTENTS[k] in found:
            symbols.append((k, names))
            free -= {name.split(":")[0] for name in names}
    return symbols


def code(script, numbers, symbols=(), common=None, steps=()):
    """Lines of a script. symbols: {name: symbol} to mark; common: lines that are no change;
    steps: {number: step} of the lines to be marked whole."""
    lines = [tokens(script)[n - 1] for n in numbers]
    texts = [text_of(line) for line in lines]
    margin = min(len(t) - len(t.lstrip()) for t in texts if t.strip())
    shown = []
    for n, line, text in zip(numbers, lines, texts, strict=True):
        indent = max(0, len(text) - len(text.lstrip()) - margin)
        parts, skip = [f"<b>{' ' * indent}</b>"] * bool(indent), margin + indent
        for kind, part in line:
            part, skip = part[skip:], max(0, skip - len(part))
            css = next((css for parent, css in KINDS if kind in parent), "")
            same = f' data-s="{symbols[part]}"' if not css and part in symbols else ""
            css = f' class="{css}"' if css else ""
            part = html.escape(part, quote=False)
            parts.append(f"<span{css}{same}>{part}</span>" if css or same else part)
        css = " extra" * (n in not_in_the_paper(script))
        css += " changed" * (common is not None and text_of(line, comments=False) not in common)
        same = f' data-s="{steps[n]}"' if n in steps else ""
        shown.append(f'<span class="line{css}" style="--i:{indent}"{same}>'
                     f'<i aria-hidden="true">{n}</i>{"".join(parts)}\n</span>')  # fmt: skip
    return f"<pre><code>{''.join(shown)}</code></pre>"


def figures(script, places, *marks):
    """The lines of some places, each below a link to them, and a button for the whole function."""
    shown = []
    for name, *place in places:
        part = excerpt(script, name, *place)
        shown.append(f"<figure><figcaption>{link(script, name, part)} "
                     f'<button type="button" data-whole="{script}.{name}">whole '
                     f'{"class" if name[0].isupper() else "function"}</button></figcaption>'
                     f"{code(script, part, *marks)}</figure>")  # fmt: skip
    return "".join(shown)


def link(script, name, numbers):
    """A caption: a definition, and its lines in the file."""
    first, last = numbers[0], numbers[-1]
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    anchor = f"L{first}" if first == last else f"L{first}-L{last}"
    return f'<a href="../{script}.py#{anchor}"><code>{name}</code>, {lines}</a>'


def dialogs():
    """Each definition of which the page shows lines, whole; hidden until its button is pressed."""
    places = [
        (script, place[0])
        for script, view in VIEWS.items()
        for _, *rest in view
        for place in rest
        if place[0]
    ]
    places += [(script, place[0]) for *_, ppo, trpo in LESSON
               for script, own in (("ppo_continuous", ppo), ("trpo_continuous", trpo))
               for place in own]  # fmt: skip
    return "".join(
        f'<dialog data-of="{script}.{name}" aria-label="{name}" closedby="any">'
        f'<form method="dialog"><button>Close</button></form>'
        f"<p>{link(script, name, (lines := definition(script, name)))} of {script}.py</p>"
        f"{code(script, lines)}</dialog>\n"
        for script, name in dict.fromkeys(places)
    )


def pseudocode(script, place):
    """The pseudocode in a script's docstring, and {a line of the loop: the step to be marked}."""
    text, steps, keys = {n: text_of(tokens(script)[n - 1]) for n in definition(script, "")}, {}, {}
    for n in excerpt(script, *LOOP):
        if said := re.search(r"# lines? (\d[\d, ]*)", text[n]):
            node, key = statement(script, n), said[1].strip()
            last = n if hasattr(node, "body") else node.end_lineno
            steps |= dict.fromkeys(range(node.lineno, last + 1), f"line {key}")
            keys |= dict.fromkeys(key.split(", "), f"line {key}")
    opened, number, shown = {}, "", ""
    for n in excerpt(script, *place)[1:]:
        own, indent, words, here = re.match(r"(\d*)( *)(.*?)(?:  +(.*))?$", text[n]).groups()
        number, called = own or number, f"{(here or '-').split()[0]}("
        opened[indent] = keys.get(number) if words.endswith(" do") else opened.get(indent)
        key = (keys.get(number) or words == "end for" and opened[indent]
               or next(step for k, step in steps.items() if called in text[k]))  # fmt: skip
        here = f"`{here}`" if here and " " not in here else here or ""
        shown += f'<li style="--i:{len(own + indent) - 3}"><button type="button" data-s="{key}">'
        shown += f"<i>{own}</i><span>{prose(words)}</span><small>{prose(here)}</small></button>"
    return f'<ol class="algorithm">{shown}</ol>', steps


@cache
def scores():
    """{(algorithm, flag): {task: {seed: score}}}, of the data there are of single steps."""
    found = {}
    for run in (*reproduce.data_of("ablations"), *reproduce.data_of("steps")):
        key = run.algorithm, run.label.removeprefix(f"{run.algorithm} ")
        found.setdefault(key, {}).setdefault(run.env_id, {})[run.seed] = run.score
    return found


def without(script, equation):
    """What happens without the steps of a row, where there are data."""
    algorithm, shown = {"ppo_continuous": "PPO", "trpo_continuous": "TRPO"}.get(script), ""
    for words, flag in OFF.get(equation, ()):
        pairs = {}  # {task: scores of the same seeds without and with the step}
        for task, own in scores().get((algorithm, flag), {}).items():
            usual = scores().get((algorithm, "defaults"), {}).get(task, {})
            if seeds := sorted(own.keys() & usual.keys()):
                pairs[task] = [[x[seed] for seed in seeds] for x in (own, usual)]
        if not pairs:
            continue
        flags = f"<code>{reproduce.PLAIN if flag == 'plain' else flag}</code>"
        counts = [len(own) for own, _ in pairs.values()]
        seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
        means = "; ".join(f"{task.rpartition('-')[0]} {spread(own)} instead of {spread(usual)}"
                          for task, (own, usual) in sorted(pairs.items()))  # fmt: skip
        means = f"{means}. Seeds: {seeds}, the same for both.".replace(" -", " −")
        lower = sum(max(own) < min(usual) for own, usual in pairs.values()) or "none"
        shown += (f"<p>{words} ({flags}): {means}</p>" if len(pairs) < 4 else
                  f"<details><summary>{words}: every seed is below every seed of the defaults on "
                  f"{lower} of {len(pairs)} tasks</summary>{flags}: {means}</details>")  # fmt: skip
    return f'<div class="without">{shown}</div>' if shown else ""


def prose(text):
    """HTML, with subscripts as in θ_old, and `code`."""
    text = re.sub(r"\b([πθδÂdr])_(\w+)", r"\1<sub>\2</sub>", html.escape(text, quote=False))
    text = re.sub("(?<=1) ([−+]) (?=ε)", "\u00a0\\1\u00a0", text)
    return re.sub("`(.*?)`", r"<code>\1</code>", text)


def row(script, equation, *places):
    """An equation and its lines."""
    title, extra = title_of(script, equation)
    name, lines = f"{script}-{equation}", height(script, places) + 14 * (equation in PICTURES)
    _, paper, formulas, says = EQUATIONS[equation]
    top = (f' id="{name}" data-place="{script}.py" style="--lines:{lines}">\n'
           f'<h3><a href="#{name}">{title}</a></h3>')  # fmt: skip
    page = f' <a href="{paper}">In&nbsp;the&nbsp;paper</a>' if paper else ""
    if not places:
        lines = zip(formulas, says.split("\n"), strict=True)
        items = "".join(f'<li><p class="formula">{formula(latex)}</p><p>{prose(line)}</p>'
                        for latex, line in lines)  # fmt: skip
        return f'<section class="row derived"{top}<ol class="derivation">{items}</ol></section>\n'
    body, steps = "", {}
    if not places[0][0]:
        body, steps = pseudocode(script, places[0])
        places = places[1:]
    words = [{text for n in excerpt(script, *place) for _, text in tokens(script)[n - 1]}
             for place in places]  # fmt: skip
    symbols = symbols_of(formulas, set().union(*words))
    keys, marks = "", {}
    for k, names in symbols:
        shown = []
        for name, _, shape in (name.partition(":") for name in names):
            place = next(p[0] for p, part in zip(places, words, strict=True) if name in part)
            samples = SAMPLES.get(f"{place}.{name}") or SAMPLES.get(place, "...")
            shape = shape.replace("@", samples).replace("_", " ")
            shape = f" ({shape.replace(',', ', ')}{',' * (',' not in shape)})" if shape else ""
            shown.append(f"<code>{name}</code>{shape}")
            marks[name] = CONTENTS[k]
        keys += (f'<li><button type="button" data-s="{CONTENTS[k]}">{formula(SYMBOLS[k][0])} '
                 f"{', '.join(shown)}</button> {prose(SYMBOLS[k][2])}")  # fmt: skip
    body += "".join(f'<p class="formula">{formula(x, marks.values())}</p>' for x in formulas)
    keys = f'<ul class="keys">{keys}</ul>' if keys else ""
    picture = ""
    if equation in PICTURES:
        still = inlined("figure1.html") if equation == "eq-7" else ""
        picture = f'<div class="moving" data-picture="{PICTURES[equation]}">{still}</div>'
    return f"""<section class="row{extra}"{top.replace("<h3>", '<div class="paper"><h3>')}
{body}<p>{prose(says)}{page}</p>{without(script, equation)}{keys}</div>
<div class="code">{figures(script, places, marks, None, steps)}{picture}</div>
</section>
"""


def height(script, places, width=68):
    """The height of a row's code when it is printed, in lines."""
    parts = [[text_of(tokens(script)[n - 1]) for n in excerpt(script, *p)] for p in places if p[0]]
    return sum(3 + sum(1 + len(text.strip()) // width for text in part) for part in parts)


def title_of(script, equation):
    """A row's title, and its class, if the paper of the script does not have it."""
    title, link, *_ = EQUATIONS[equation]
    if not link:
        return f"{title} (not in the paper)", " extra"
    if script.startswith("trpo") and link.startswith(PPO):
        return title.replace(",", " of the PPO paper,", 1), " extra"
    return title, ""


def lesson():
    """PPO beside TRPO, and the names of the definitions that are the same in both."""
    scripts, shown = {"PPO": "ppo_continuous", "TRPO": "trpo_continuous"}, ""
    lines = [{text_of(line, comments=False) for line in tokens(s)} for s in scripts.values()]
    for k, (name, words, *places) in enumerate(LESSON):
        common = None if k else lines[0] & lines[1]
        pairs = list(zip(scripts.values(), places, strict=True))
        names = [{text for place in own for n in excerpt(script, *place)
                  for kind, text in tokens(script)[n - 1] if kind is Name}
                 for script, own in pairs]  # fmt: skip
        marks = {text: text for text in names[0] & names[1]}
        sides = "".join(
            f'<div class="code"><h4>{paper}</h4>{figures(*pair, marks, common)}</div>'
            for paper, pair in zip(scripts, pairs, strict=True)
        )
        shown += f"""<section class="both" id="difference-{k}" data-place="PPO ↔ TRPO"
style="--lines:{4 + max(height(*pair, 55) for pair in pairs)}">
<h3><a href="#difference-{k}">{name}</a></h3><p>{prose(words)}</p>{sides}</section>
"""
    sources = [{node.name: ast.unparse(node) for node in statements(s)
                if hasattr(node, "name") and node.lineno < definition(s, "update")[-1]
                and not node.col_offset} for s in scripts.values()]  # fmt: skip
    same = [f"<code>{k}</code>" for k, v in sources[0].items() if v == sources[1].get(k)]
    return f'{shown}<p class="same">The same in both scripts: {", ".join(same)}.</p>'


def page():
    """The whole page, as a string."""
    tabs = panels = ""
    names = ["PPO", "PPO on Atari", "TRPO", "PPO ↔ TRPO"]
    for name, view in zip(names, [*VIEWS, "difference"], strict=True):
        tabs += f'<a href="#{view}">{name}</a>'
        rows = [(key, *title_of(view, key)) for key, *_ in VIEWS.get(view, [])]
        rows = rows or [(k, part[0], "") for k, part in enumerate(LESSON)]
        body = "".join(row(view, *places) for places in VIEWS.get(view, [])) or lesson()
        contents = "".join(f'<li class="{extra}"><a href="#{view}-{key}">{title}</a>'
                           for key, title, extra in rows)  # fmt: skip
        panels += f"""<div id="{view}">
<h2>{f"{view}.py" if view in VIEWS else "One loop, two updates"}</h2>
<ul class="contents">{contents}</ul>{body}</div>
"""
    parts = {"TABS": tabs, "PANELS": panels, "DIALOGS": dialogs()}
    return re.sub(r"@([\w.]+)@", lambda m: parts.get(m[1]) or inlined(m[1]),
                  (ASSETS / "page.html").read_text("utf-8"))  # fmt: skip


def inlined(name):
    """A file of plots/page, as the page has it; nothing, if there is no such file."""
    path = ASSETS / name
    text = path.read_text("utf-8") if path.exists() else ""
    around = {
        "pictures.js": "<script>\n{}</script>\n",
        "recorded.json": '<script type="application/json" id="recorded">{}</script>\n',
    }
    return around.get(name, "{}").replace("{}", text) if text else ""


# ------------------------------------------------------------------------------- Page and links


def renew(text):
    """README with its links at the first lines of the definitions that they name."""
    return re.sub(r"(\[`([\w.]+)`\]\((\w+)\.py#L)\d+",
                  lambda link: link[1] + str(definition(link[3], link[2])[0]), text)  # fmt: skip


def draw_picture(text):
    """Two rows of the page as README shows them."""
    path = PAGE.with_suffix(".png")
    if not BROWSER:
        return print(f"{path.name}: not drawn, there is no Chromium or Chrome here")
    rows = ":is(#ppo_continuous-ratio, #ppo_continuous-eq-7)"
    only = f"""<style>header, #about, h2, .contents, section:not({rows}), figcaption button
{{ display: none }} body section {{ grid-template-columns: 4fr 6fr }} body {{ --code: .8rem }}
.keys {{ font-size: 0 }} .keys li {{ display: inline }} .keys button {{ font-size: .9rem }}
</style><script type="module">for (const name of document.querySelectorAll("{rows} [data-s=rt]"))
name.classList.add("on")</script></html>"""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(text.replace("</html>", only), "utf-8")
        subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu",
             f"--user-data-dir={folder}", "--window-size=940,1400", f"--screenshot={path}",
             "--force-device-scale-factor=2", "--virtual-time-budget=3000",
             (Path(folder) / "page.html").as_uri()], check=True, capture_output=True,
        )  # fmt: skip
    image = imread(path)
    used = np.flatnonzero((image != image[-1, -1]).any((1, 2)))
    imsave(path, image[: used[-1] + 30])


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv not in ([], ["--check"]):
        sys.exit(__doc__)
    for path, made in ((PAGE, lambda old: page()), (README, renew)):
        old = path.read_text("utf-8")
        new = made(old)
        if argv and new != old:
            sys.exit(f"{path.name} is out of date; run: .venv/bin/python plots/side_by_side.py")
        if new != old:
            path.write_text(new, "utf-8", newline="\n")
    if not argv:
        draw_picture(page())


if __name__ == "__main__":
    main()
