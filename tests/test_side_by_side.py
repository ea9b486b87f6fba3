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
    paper, code = ROWS[name].split('<div class="code">')
    formulas, buttons = paper.split('<ul class="keys">')
    marked = [set(re.findall('data-s="(.*?)"', part)) for part in (formulas, buttons, code)]
    assert marked[0] == marked[1] == marked[2]
    assert marked[0] or name.endswith("-algorithm")


@pytest.mark.parametrize("name", ROWS)
def test_lines_are_those_of_the_script(name):
    script = next(script for script in side_by_side.VIEWS if name.startswith(script))
    lines = (ROOT / f"{script}.py").read_text().splitlines()
    shown = re.findall(r'<i aria-hidden="true">(\d+)</i>(.*?)\n</span>', ROWS[name], re.S)
    assert shown
    for number, line in shown:
        text = html.unescape(re.sub("<.*?>", "", line))
        assert lines[int(number) - 1].strip() == text.strip()


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
    """A statement with the comment, or a comment and the statement that follows; whole rows."""
    shown = re.findall(
        r'<span class="line( extra)?"><i.*?/i>(.*?)\n</span>',
        "".join(ROWS[f"ppo_atari-{name}"] for name in ("ppo-algorithm", "epochs")),
    )
    edged = [re.sub("<.*?>", "", line).strip() for extra, line in shown if extra]
    assert [line.split("  #")[0].split(" =")[0] for line in edged] == [
        "if run.at_checkpoint:",
        "# not in the paper: Baselines' clipping of the gradient's norm (--max-grad-norm 0)",
        "grad_norm",
    ]
    assert set(re.findall(r'<section class="row extra" id="(.*?)">', PAGE)) == {
        "ppo_continuous-alpha-mujoco", "trpo_continuous-critic",
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
<pre id="told"></pre><script>
const told = {errors: []};
addEventListener("error", event => told.errors.push(event.message));
const views = [...document.querySelectorAll("[role=tabpanel]")];
const visible = () => views.filter(view => view.checkVisibility()).map(view => view.id);
const over = e => e.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
const on = () => [...document.querySelectorAll(".on")].map(e =>
    [e.closest("button") ? "button" : e.closest("math") ? "math" : "code", e.textContent.trim()]);
told.first = visible();
told.clicked = tabs.map(tab => { tab.click(); return visible() });
tabs[1].focus();
tabs[1].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
told.key = [visible(), document.activeElement.id];
location.hash = "#ppo_atari-eq-7";
setTimeout(() => {
  told.address = visible();
  const row = document.getElementById("ppo_atari-eq-7");
  over(row.querySelector("math [data-s]"));
  told.formula = on();
  over(document.body);
  told.nothing = on();
  over([...row.querySelectorAll(".code [data-s]")].find(e => e.textContent === "ratio"));
  told.code = on();
  const button = [...row.querySelectorAll("button")].find(b => b.textContent.includes("clip_eps"));
  button.focus();
  told.focus = on();
  button.click();
  over(document.body);
  told.pressed = [on(), button.getAttribute("aria-pressed")];
  button.click();
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
    [told] = re.findall('<pre id="told">(.*?)</pre>', done.stdout)
    told = json.loads(html.unescape(told))
    views = [f"view-{name}" for name in (*side_by_side.VIEWS, "difference")]
    assert told["errors"] == [] and "CONSOLE" not in done.stderr
    assert told["first"] == views[:1] and told["clicked"] == [[view] for view in views]
    assert told["key"] == [views[2:3], "tab-trpo_continuous"] and told["address"] == views[:1]
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
