"""plots/side_by_side.html: what it shows; the links to lines."""

import html
import re
import sys
from pathlib import Path

import pytest

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import side_by_side

PAGE = side_by_side.page()
ROWS = dict(re.findall(r'<section class="row.*?" id="(.*?)">(.*?)</section>', PAGE, re.S))
LINE = r'<span class="line([\w ]*)"><i aria-hidden="true">(\d+)</i>(.*?)\n</span>'


def plain(text):
    return html.unescape(re.sub("<.*?>", "", text))


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.findall(r"<link|<img|src=|@import|url\(", PAGE)


@pytest.mark.parametrize("script", side_by_side.VIEWS)
def test_each_row_shows_the_lines_of_its_equation(script):
    """Every symbol is in the formula, in the code and on a button, which has its names."""
    source = (ROOT / f"{script}.py").read_text().splitlines()
    rows = {name: row for name, row in ROWS.items() if name.startswith(script)}
    assert len(rows) == len(side_by_side.VIEWS[script]) > 10
    for name, row in rows.items():
        paper, code = row.split('<div class="code">')
        formulas, buttons = paper.split('<ul class="keys">')
        marked = [set(re.findall('data-s="(.*?)"', part)) for part in (formulas, buttons, code)]
        assert marked[0] == marked[1] == marked[2], name
        assert marked[0] or name.endswith("-algorithm"), name
        for symbol, names in re.findall('data-s="(.*?)">.*?<code>(.*?)</code>', buttons):
            shown = re.findall(f'<span[^>]* data-s="{symbol}">(.*?)</span>', code)
            assert set(shown) == set(names.split(", ")), name
        lines = re.findall(LINE, code, re.S)
        assert lines
        for _, number, line in lines:
            assert source[int(number) - 1].strip() == plain(line).strip()


@pytest.mark.parametrize("script, equation, text", [
    ("ppo_atari", "eq-7", "clamp(1 - clip_eps, 1 + clip_eps)"),
    ("ppo_continuous", "cpi", "ratio * advantages"),
    ("ppo_continuous", "eq-7", "torch.min("),
    ("ppo_continuous", "eq-8", "- beta * kl"),
    ("ppo_continuous", "sec-4", "kl_target / 1.5"),
    ("trpo_continuous", "line-search", "kl <= max_kl"),
])  # fmt: skip
def test_an_equation_stands_beside_its_code(script, equation, text):
    assert text in plain(ROWS[f"{script}-{equation}"])


def test_the_difference_has_every_line_of_the_papers_part_or_folds_it():
    view = PAGE[PAGE.index('id="view-difference"') : PAGE.index("</main>")]
    folded = plain("".join(re.findall("<details>(.*?)</details>", view, re.S)))
    sides = re.findall('<section class="both">(.*?)</section>', view, re.S)
    for k, script in enumerate(("ppo_continuous", "trpo_continuous")):
        text = (ROOT / f"{script}.py").read_text()
        lines = text[text.index("\ndef train") : text.index("# =====")].splitlines()
        own = "".join(plain(side.split("<figure>")[k + 1]) for side in sides)
        shown = (own + folded).replace(" ", "")
        assert all(line.replace(" ", "") in shown for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("module, equation, names", [
    (ppo_atari, "table-5", {"T": "num_steps", "K": "num_epochs", "M": "minibatch_size",
                            "N": "num_envs", r"\gamma": "gamma", r"\lambda": "gae_lambda",
                            r"\epsilon": "clip_eps", "c_1": "vf_coef", "c_2": "ent_coef"}),
    (ppo_continuous, "table-3", {"T": "num_steps", "K": "num_epochs", "M": "minibatch_size",
                                 r"\gamma": "gamma", r"\lambda": "gae_lambda"}),
    (ppo_continuous, "table-1", {r"\epsilon": "clip_eps", r"d_\text{targ}": "kl_target",
                                 r"\beta": "kl_beta"}),
    (trpo_continuous, "trpo-settings", {r"\delta": "max_kl", r"\gamma": "gamma"}),
])  # fmt: skip
def test_the_papers_settings_are_the_defaults(module, equation, names):
    shown, defaults = {}, module.Args()
    for part in r",\quad ".join(side_by_side.EQUATIONS[equation][2]).split(r",\quad "):
        symbol, _, value = part.replace(r"\,\alpha", "").partition(" = ")
        if value:
            shown[symbol] = eval(value.replace(r"\times", "*"))
        elif adam := re.search(r"Adam } ([\d.]+) \\cdot 10\^\{-(\d)\}", part):
            assert float(f"{adam[1]}e-{adam[2]}") == defaults.learning_rate
    assert shown == {symbol: getattr(defaults, name) for symbol, name in names.items()}


def test_what_is_not_in_the_paper_has_an_edge():
    """Every line shown with that comment, and what the comment is about; whole rows."""
    lines = [line for row in ROWS.values() for line in re.findall(LINE, row, re.S)]
    said = [(css, plain(line)) for css, _, line in lines if "not in the paper" in plain(line)]
    assert len(said) > 10 and all("extra" in css for css, _ in said)
    edged = {plain(line).split(" = ")[0].strip() for css, _, line in lines if "extra" in css}
    assert "grad_norm" in edged and "l_vf" not in edged
    rows = set(re.findall(r'<section class="row extra" id="(.*?)">', PAGE))
    assert {"ppo_continuous-alpha-mujoco", "trpo_continuous-critic", "trpo_continuous-eq-11",
            "ppo_atari-standardised"} <= rows  # fmt: skip


@pytest.mark.parametrize("place, said", [
    (("gae", "no such text", "deltas"), "no line holds 'no such text'"),
    (("gae", "deltas", "no such text"), "after 'deltas' no line holds"),
    (("no_such_name", "", ""), "ppo_atari.py has no no_such_name"),
])  # fmt: skip
def test_a_line_that_is_gone_stops_the_drawing(place, said):
    with pytest.raises(ValueError, match=said):
        side_by_side.excerpt("ppo_atari", *place)


def test_links_get_the_lines_of_the_names_in_them():
    lines = (ROOT / "ppo_continuous.py").read_text().splitlines()
    for name, text in (("train", "def train(args, "), ("Penalty.adapt", "    def adapt(self, ")):
        new = side_by_side.renew(f"see [`{name}`](ppo_continuous.py#L1), [1](x.md#L1)")
        [number] = re.findall(r"^see \[.*\]\(ppo_continuous.py#L(\d+)\), \[1\]\(x.md#L1\)$", new)
        assert lines[int(number) - 1].startswith(text)
    with pytest.raises(ValueError, match="ppo_atari.py has no gone"):
        side_by_side.renew("[`gone`](ppo_atari.py#L1)")
