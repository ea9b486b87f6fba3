"""plots/side_by_side.html is what the scripts give, and works in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import side_by_side

PAGE = side_by_side.PAGE.read_text()
ROWS = dict(re.findall(r'<section class="row.*?" id="(.*?)">(.*?)</section>', PAGE, re.S))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


def test_the_page_is_what_the_scripts_give():
    """Else: python plots/side_by_side.py"""
    assert side_by_side.page() == PAGE


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.findall(r"<link|<img|src=|@import|url\(", PAGE)
    addresses = set(re.findall(r'href="(.*?)[#"]', PAGE))
    assert addresses == {
        "https://arxiv.org/abs/1707.06347", "https://arxiv.org/abs/1502.05477",
        "https://arxiv.org/pdf/1707.06347", "https://arxiv.org/pdf/1502.05477",
    }  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_symbol_is_in_the_formula_in_the_code_and_on_a_button(name):
    """And the code has, marked with it, each name that its button says."""
    paper, code = ROWS[name].split('<div class="code">')
    formulas, buttons = paper.split('<ul class="keys">')
    marked = [set(re.findall('data-s="(.*?)"', part)) for part in (formulas, buttons, code)]
    assert marked[0] == marked[1] == marked[2]
    assert marked[0] or name.endswith("-algorithm")
    for symbol, names in re.findall('data-s="(.*?)">.*?<code>(.*?)</code>', buttons):
        shown = re.findall(f'<span[^>]* data-s="{symbol}">(.*?)</span>', code)
        assert {side_by_side.word(html.unescape(text)) for text in shown} == set(names.split(", "))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_what_the_table_of_equations_says(name):
    script = next(script for script in side_by_side.VIEWS if name.startswith(script))
    where, link, formulas, says = side_by_side.EQUATIONS[name.removeprefix(f"{script}-")]
    paper = ROWS[name].split('<ul class="keys">')[0]
    text = html.unescape(re.sub("<.*?>", "", paper))
    assert where in text and says.replace("θ_old", "θold") in text and link in paper
    assert ("of the PPO paper" in text) == (script.startswith("trpo") and "1707.06347" in link)
    assert paper.count("<math") == len(formulas)
    if name.endswith("-algorithm"):
        lines = (ROOT / f"{script}.py").read_text().split("\n\n")[1].splitlines()[1:]
        shown = re.findall("<tr>(.*?)(?=<tr>|</table>)", paper)
        for line, row in zip(lines, shown, strict=True):
            row = html.unescape(re.sub("<.*?>", "", row))
            assert "".join(line.replace("_", "").split()) == "".join(row.replace("_", "").split())


@pytest.mark.parametrize("name", ROWS)
def test_lines_are_those_of_the_script(name):
    script = next(script for script in side_by_side.VIEWS if name.startswith(script))
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    figures = re.findall(r"<figure>(.*?)</figure>", ROWS[name], re.S)
    assert figures
    for figure in figures:
        shown = re.findall(r'<i aria-hidden="true">(\d+)</i>(.*?)\n</span>', figure, re.S)
        for number, line in shown:
            text = html.unescape(re.sub("<.*?>", "", line))
            assert lines[int(number) - 1].strip() == text.strip()
        numbers = [int(number) for number, _ in shown]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        [caption] = re.findall("</code>, (.*?)</figcaption>", figure)
        ends = f"lines {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"line {numbers[0]}"
        assert caption == ends


def test_an_excerpt_is_the_lines_that_it_names():
    def texts(*place):
        return [side_by_side.text_of(side_by_side.tokens("ppo_atari")[n - 1]).strip()
                for n in side_by_side.excerpt("ppo_atari", *place)]  # fmt: skip

    [line] = texts("gae", "deltas =", "deltas =")
    assert line.startswith("deltas = rewards")
    two = texts("estimate_advantages", "batch.advantages = gae", "batch.advantages = gae")
    assert [line.split("(")[0].split(",")[0] for line in two] == [
        "batch.advantages = gae", "batch.truncated"]  # fmt: skip
    [line] = texts("rollout", "for t in range", "for t in range")  # without its body
    assert line == "for t in range(num_steps):"
    table_5 = texts("SETTINGS", '"num-steps"', '"ent-coef"')  # without the rest of the list
    assert [line.split('"')[1] for line in table_5] == [
        "num-steps", "learning-rate", "num-epochs", "minibatch-size", "gamma", "gae-lambda",
        "num-envs", "clip-eps", "vf-coef", "ent-coef"]  # fmt: skip


def test_every_symbol_is_used():
    used = {int(k) for k in re.findall('data-s="s(\\d+)"', PAGE)}
    assert used == set(range(len(side_by_side.SYMBOLS)))
    names = {name for _, names in side_by_side.SYMBOLS for name in names.split()}
    marked = {
        side_by_side.word(html.unescape(text))
        for text in re.findall('<span[^>]* data-s="s\\d+">(.*?)</span>', PAGE)
    }
    assert names == marked


def test_the_difference_has_every_line_of_both_scripts():
    """Folded, those of definitions that both have; blue, those that only one side of it has."""
    view = PAGE[PAGE.index('id="view-difference"') : PAGE.index("</main>")]
    folded = "".join(re.findall("<details>(.*?)</details>", view, re.S))
    sides = re.findall('<section class="both">(.*?)</section>', view, re.S)
    assert len(sides) >= 2 and all(side.count("<figure>") == 2 for side in sides)
    numbers = r'<span class="line(.*?)"><i aria-hidden="true">(\d+)</i>'
    for k, script in enumerate(("ppo_continuous", "trpo_continuous")):
        lines = (ROOT / f"{script}.py").read_text().splitlines()
        end = next(n for n, line in enumerate(lines, 1) if line.startswith("# ====="))
        start = next(n for n, line in enumerate(lines, 1) if line.startswith("def train"))
        own = [re.findall(numbers, side.split("<figure>")[k + 1]) for side in sides]
        both = [re.findall(numbers, side.split("<figure>")[2 - k]) for side in sides]
        shown = {int(n) for part in own for _, n in part}
        hidden = set(range(start, end)) - shown
        same = {lines[n - 1] for n in hidden}
        if k == 0:
            assert {int(n) for _, n in re.findall(numbers, folded)} <= hidden
        text = html.unescape(re.sub("<.*?>", "", folded))
        rest = [line for line in same if line.strip() and not line.startswith("#")]
        assert rest and all(line in text for line in rest)
        other = (ROOT / f"{('trpo', 'ppo')[k]}_continuous.py").read_text().splitlines()
        for part, beside in zip(own, both, strict=True):
            there = {other[int(n) - 1] for _, n in beside}
            for css, n in part:
                assert ("changed" in css) == (lines[int(n) - 1] not in there)


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
    shown = {}
    for part in r",\quad ".join(side_by_side.EQUATIONS[equation][2]).split(r",\quad "):
        symbol, _, value = part.replace(r"\,\alpha", "").partition(" = ")
        if value:
            shown[symbol] = eval(value.replace(r"\times", "*"))
    assert shown == {symbol: module.ROWS[name][1] for symbol, name in names.items()}
    formulas = "".join(side_by_side.EQUATIONS[equation][2])
    adam = re.findall(r"Adam } ([\d.]+) \\cdot 10\^\{-(\d)\}", formulas)
    assert len(adam) == (equation in ("table-3", "table-5"))
    for mantissa, exponent in adam:
        assert float(f"{mantissa}e-{exponent}") == module.ROWS["learning_rate"][1]


def test_what_is_not_in_the_paper_has_an_edge():
    """The whole statement with the comment, or the next one after a line of comment; whole rows."""
    rows = "".join(ROWS[f"ppo_atari-{name}"] for name in ("ppo-algorithm", "epochs", "ratio",
                                                       "standardised"))  # fmt: skip
    shown = re.findall(r'<span class="line( extra)?"><i.*?/i>(.*?)\n</span>', rows)
    edged = [re.sub("<.*?>", "", line).strip() for extra, line in shown if extra]
    assert [line.split("  #")[0].split(" (")[0].split(" = ")[0] for line in edged] == [
        "if run.at_checkpoint:", "games.reset(run.seed)",
        "# not in the paper: Baselines' clipping of the gradient's norm", "grad_norm",
        'if norm_adv == "minibatch":', "advantages",
    ]  # fmt: skip
    assert set(re.findall(r'<section class="row extra" id="(.*?)">', PAGE)) == {
        "ppo_continuous-alpha-mujoco", "trpo_continuous-critic",
        *(f"{script}-standardised" for script in side_by_side.VIEWS),
        *(f"trpo_continuous-{equation}" for equation in ("eq-12", "eq-11", "targets")),
    }  # fmt: skip


@pytest.mark.parametrize("place, said", [
    (("gae", "no such text", "deltas"), "no line holds 'no such text'"),
    (("gae", "deltas", "no such text"), "after 'deltas' no line holds"),
])  # fmt: skip
def test_a_line_that_is_gone_stops_the_drawing(place, said):
    with pytest.raises(ValueError, match=said):
        side_by_side.excerpt("ppo_atari", *place)


TRIAL = """
<div id="told"></div><script>
const told = {errors: []};
addEventListener("error", event => told.errors.push(event.message));
const views = [...document.querySelectorAll("[role=tabpanel]")];
const visible = () => views.filter(view => view.checkVisibility()).map(view => view.id);
const over = e => e.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
const on = () => [...document.querySelectorAll(".on")].map(e =>
    [e.closest("button") ? "button" : e.closest("math") ? "math" : "code", e.textContent.trim()]);
const state = tab => [visible(), location.hash, tab.getAttribute("aria-selected"), tab.tabIndex];
told.first = visible();
told.clicked = tabs.map(tab => { tab.click(); return state(tab) });
const press = key => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  return [...visible(), document.activeElement.id];
};
tabs[0].focus();
told.keys = [press("ArrowRight"), press("ArrowLeft"), press("ArrowLeft")];
told.boxes = [...document.querySelectorAll("[role=region]")].every(box => box.ariaLabel);
location.hash = "#ppo_atari-eq-7";
setTimeout(() => {
  told.address = visible();
  const row = document.getElementById("ppo_atari-eq-7"), nav = document.querySelector("nav");
  told.top = row.getBoundingClientRect().top - Math.max(0, nav.getBoundingClientRect().bottom);
  told.columns = getComputedStyle(row).gridTemplateColumns.split(" ").length;
  over(row.querySelector("math [data-s]"));
  told.formula = on();
  over(document.body);
  told.nothing = on();
  over([...row.querySelectorAll(".code [data-s]")].find(e => e.textContent === "ratio"));
  told.code = on();
  const button = [...row.querySelectorAll("button")].find(b => b.textContent.includes("clip_eps"));
  button.focus();
  told.focus = on();
  told.tint = getComputedStyle(row.querySelector(".code .on")).backgroundColor;
  button.click();
  button.blur();
  over(document.body);
  told.pressed = [on(), button.getAttribute("aria-pressed")];
  over([...row.querySelectorAll(".code [data-s]")].find(e => e.textContent === "ratio"));
  told.both = new Set(on().map(([, text]) => text)).size;
  told.others = document.querySelectorAll("[aria-pressed=true]").length;
  button.click();
  button.blur();
  over(document.body);
  told.released = [on(), button.getAttribute("aria-pressed")];
  const fits = () => document.documentElement.scrollWidth <= innerWidth;
  told.width = tabs.map(tab => { tab.click(); return fits() });
  document.getElementById("told").textContent = JSON.stringify(told);
}, 100);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here")
@pytest.mark.parametrize("width", [1400, 500])
def test_in_a_browser(width, tmp_path):
    (tmp_path / "page.html").write_text(PAGE.replace("</html>", TRIAL))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path}", f"--window-size={width},900", "--virtual-time-budget=2000",
         "--dump-dom", tmp_path / "page.html"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    [told] = re.findall('<div id="told">(.*?)</div>', done.stdout)
    told = json.loads(html.unescape(told))
    views = [f"view-{name}" for name in (*side_by_side.VIEWS, "difference")]
    assert told["errors"] == [] and "CONSOLE" not in done.stderr
    names = [view.removeprefix("view-") for view in views]
    assert told["first"] == views[:1] == told["address"] and told["boxes"]
    assert told["clicked"] == [[[f"view-{name}"], f"#{name}", "true", 0] for name in names]
    assert told["keys"] == [[f"view-{name}", f"tab-{name}"] for name in
                            ("ppo_continuous", "ppo_atari", "difference")]  # fmt: skip
    assert -1 < told["top"] < 40 and told["columns"] == (2 if width > 960 else 1)
    assert told["tint"] not in ("rgba(0, 0, 0, 0)", "")
    assert told["others"] == 1 and told["both"] > len({text for _, text in told["pressed"][0]})
    assert told["formula"] == [["math", "LCLIP"], ["button", "LCLIP l_clip"], ["code", "l_clip"]]
    assert told["nothing"] == [] and {kind for kind, _ in told["code"]} == {
        "math",
        "button",
        "code",
    }
    assert [text for kind, text in told["code"] if kind == "code"] == ["ratio"] * 2
    assert ["code", "clip_eps"] in told["focus"] and ["math", "ϵ"] in told["focus"]
    assert told["pressed"] == [told["focus"], "true"] and told["released"] == [[], "false"]
    assert all(told["width"])
