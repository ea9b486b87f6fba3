"""plots/side_by_side.html: what it shows; the links to lines."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import side_by_side
import torch

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
PAGE = side_by_side.page()
ROWS = dict(re.findall(r'<section class="row.*?" id="(.*?)">(.*?)</section>', PAGE, re.S))
LINE = r'<span class="line([\w ]*)" style="--i:\d+"><i aria-hidden="true">(\d+)</i>(.*?)\n</span>'
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


def plain(text):
    return html.unescape(re.sub("<.*?>", "", text))


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.findall(r"<link|<img|src=|@import|url\(", PAGE)


def test_every_row_and_view_can_be_linked_to_and_is_in_a_list_of_contents():
    ids = re.findall(' id="(.*?)"', PAGE)
    assert len(ids) == len(set(ids)) and set(re.findall('href="#(.*?)"', PAGE)) == set(ids)
    lists = re.findall('<ul class="contents">(.*?)</ul>', PAGE)
    listed = re.findall('href="#(.*?)"', "".join(lists))
    rows = [name for name in ids if name not in (*side_by_side.VIEWS, "difference")]
    assert len(lists) == 4 and listed == rows


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
        for symbol, key, words in re.findall(
            'data-s="(.*?)">(.*?)</button>(.*?)(?=<li>|$)', buttons
        ):
            shown = re.findall(f'<span[^>]* data-s="{re.escape(symbol)}">(.*?)</span>', code)
            assert set(shown) == set(re.findall("<code>(.*?)</code>", key)), name
            assert plain(words).strip(), name
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
    ("ppo_continuous", "act", "net.actor(net.normalise("),
    ("trpo_continuous", "line-search", "kl <= args.max_kl"),
])  # fmt: skip
def test_an_equation_stands_beside_its_code(script, equation, text):
    assert text in plain(ROWS[f"{script}-{equation}"])


def test_equation_7_is_marked_as_the_code_computes_it():
    """min(surrogate, clipped · Â); L^CLIP stands on the left alone."""
    row = ROWS["ppo_continuous-eq-7"]
    names = {symbol: re.findall("<code>(.*?)</code>", key) for symbol, key in
             re.findall('<button type="button" data-s="(.*?)">(.*?)</button>', row)}  # fmt: skip
    marks = re.findall('data-s="(.*?)"', row[: row.index('<ul class="keys">')])
    assert [name for symbol in marks for name in names[symbol]] == [
        "l_policy", "surrogate", "ratio", "advantages",
        "clipped", "ratio", "clip_eps", "clip_eps", "advantages",
    ]  # fmt: skip


def run(script, folder, *variants):
    """Train for one iteration with each of some settings. Returns {(function, name): shape} of
    tensors and arrays, and the lengths that shapes on the page are written with."""
    seen, file = {}, script.__file__

    def trace(frame, event, _):
        if frame.f_code.co_filename != file:
            return None
        frame.f_trace_lines = False
        if event == "return":
            found = dict(frame.f_locals)
            for x in (found.get("batch", {}), found.get("samples", {})):
                found |= x if isinstance(x, dict) else vars(x)
            for name, x in found.items():
                if isinstance(x, torch.Tensor | np.ndarray):
                    seen.setdefault((frame.f_code.co_name, name), tuple(x.shape))
        return trace

    for k, settings in enumerate(variants):
        args = script.Args(num_steps=8, num_envs=3, total_steps=24, minibatch_size=6, num_epochs=1,
                           run_dir=str(folder / str(k)), **settings)  # fmt: skip
        sys.settrace(trace)
        try:
            script.train(args)
        finally:
            sys.settrace(None)
    return seen, {"T": 8, "N": 3, "M": 6, "T·N": 24, "observation size": 4, "parameters": 2}


@pytest.mark.parametrize("script, variants", [
    (ppo_atari, [{"threads": 1}]),
    (ppo_continuous, [{"objective": "clip"}, {"objective": "kl-fixed"}]),
    (trpo_continuous, [{}]),
], ids=side_by_side.VIEWS)  # fmt: skip
def test_shapes_are_those_of_a_run(script, variants, tmp_path):
    seen, lengths = run(script, tmp_path, *variants)
    lengths |= {"84": 84, "4": 4, "actions": 4, "W": seen.get(("trust_region_step", "g"), [0])[0]}
    checked = set()
    for key in (key for key in ROWS if key.startswith(script.__name__)):
        buttons, figures = ROWS[key].split('<div class="code">')
        places = re.findall("<figcaption><code>(.*?)</code>.*?</figcaption>(.*?)</figure>", figures,
                            re.S)  # fmt: skip
        for name, shape in re.findall(r"<code>(\w+)</code> \((.*?)\)", buttons):
            place = next(place for place, code in places if f">{name}<" in code)
            shapes = {seen[of, local] for of, local in seen if local == name and of == place}
            shapes = shapes or {x for (_, local), x in seen.items() if local == name}
            parts = shape.replace(", ", ",").strip(",").split(",")
            if parts[0] == "...":  # of any number of samples
                parts, shapes = parts[1:], {x[1 - len(parts) :] for x in shapes}
            assert shapes == {tuple(lengths[part] for part in parts)}, (key, place, name)
            checked.add(name)
    assert len(checked) > 7


def test_the_difference_is_the_update():
    """Of the loop's code, without comments, only the update and what anneals PPO are marked."""
    view = PAGE[PAGE.index('id="difference"') : PAGE.index("</main>")]
    lines = [(css, plain(line)) for css, _, line in re.findall(LINE, view, re.S)]
    changed = " ".join(line for css, line in lines if "changed" in css)
    assert all(text in changed for text in ("= update(", "anneal(", "adapt_beta("))
    assert not any(text in changed for text in ("rollout(", "scale_rewards(", "run.log("))
    shown = " ".join(line for _, line in lines)
    for text in ("torch.min(", "fisher_vector_product(", "kl <= args.max_kl", "optimizer.step()"):
        assert text in shown
    same = view[view.rindex("The same in both") :]
    assert "<code>gae</code>" in same and "<code>rollout</code>" in same
    assert "<code>update</code>" not in same and '"""' not in plain(PAGE)


def test_what_is_not_in_the_paper_has_an_edge():
    """Every line shown with that comment, what the comment is about, and whole rows."""
    lines = re.findall(LINE, PAGE, re.S)
    said = [
        css for css, _, line in lines if re.search("not in the (PPO )?paper", plain(line), re.I)
    ]
    assert len(said) > 20 and all("extra" in css for css in said)
    rows = set(re.findall(r'<section class="row extra" id="(.*?)">', PAGE))
    assert {"ppo_continuous-alpha-mujoco", "trpo_continuous-critic", "trpo_continuous-eq-11",
            "ppo_atari-standardised"} <= rows  # fmt: skip
    for name in rows:
        assert all("extra" in css for css, *_ in re.findall(LINE, ROWS[name], re.S)), name
    for name, row in ROWS.items():
        if name not in rows:
            assert not all("extra" in css for css, *_ in re.findall(LINE, row, re.S)), name


@pytest.mark.parametrize("row, edged, plain_line", [
    ("ppo_atari-eq-11", "decay = gamma", "advantages[t] ="),
    ("ppo_atari-epochs", "grad_norm = ", "optimizer.step()"),
    ("ppo_continuous-ppo-algorithm", "= anneal(", "episodes = rollout("),
    ("trpo_continuous-cg", "if not curvature > 0", "x += alpha * p"),
    ("trpo_continuous-line-search", "in range(args.line_search_steps)", "fraction *="),
])  # fmt: skip
def test_the_edge_is_on_the_step_alone(row, edged, plain_line):
    lines = [(css, plain(line)) for css, _, line in re.findall(LINE, ROWS[row], re.S)]
    for text, has in ((edged, True), (plain_line, False)):
        found = [css for css, line in lines if text in line]
        assert found and all(("extra" in css) == has for css in found), text


def test_a_line_that_is_gone_stops_the_drawing():
    for place in (("gae", "gone"), ("gae", "deltas", "gone"), ("gone", "")):
        with pytest.raises(ValueError, match="gone"):
            side_by_side.excerpt("ppo_atari", *place)


def test_links_get_the_lines_of_the_names_in_them():
    lines = (ROOT / "ppo_continuous.py").read_text().splitlines()
    for name, text in (("train", "def train(args, "), ("Run.log", "    def log(self, ")):
        new = side_by_side.renew(f"see [`{name}`](ppo_continuous.py#L1), [1](x.md#L1)")
        [number] = re.findall(r"^see \[.*\]\(ppo_continuous.py#L(\d+)\), \[1\]\(x.md#L1\)$", new)
        assert lines[int(number) - 1].startswith(text)
    with pytest.raises(ValueError, match="gone"):
        side_by_side.renew("[`gone`](ppo_atari.py#L1)")


TRIAL = """
<pre id="told"></pre><script>
const told = {errors: []};
addEventListener("error", event => told.errors.push(event.message));
const visible = () => [...panels].filter(panel => panel.checkVisibility()).map(panel => panel.id);
const fits = () => document.documentElement.scrollWidth <= innerWidth && ![...document
    .querySelectorAll("math, pre, button")].some(e => e.getBoundingClientRect().right > innerWidth);
const on = () => [...document.querySelectorAll(".on")].map(e => e.textContent.trim());
const later = () => new Promise(done => setTimeout(done, 50));
(async () => {
  told.first = visible();
  told.clicked = [];
  for (const tab of tabs) {
    tab.click();
    await later();
    told.clicked.push([...visible(), fits()]);
  }
  location.hash = "#ppo_atari-eq-7";
  await later();
  const row = document.getElementById("ppo_atari-eq-7");
  const top = row.getBoundingClientRect().top, nav = document.querySelector("nav");
  told.row = [...visible(), top > 0 && top < 60, nav.getBoundingClientRect().top === 0];
  const over = e => e.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
  over(row.querySelector(".code [data-s=rt]"));
  told.pointed = on();
  over(document.body);
  told.nothing = on();
  [...row.querySelectorAll("button")].find(e => e.textContent.includes("clip_eps")).focus();
  told.focus = on();
  document.getElementById("told").textContent = JSON.stringify(told);
})();
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome here")
@pytest.mark.parametrize("width", [1400, 500])
def test_in_a_browser(width, tmp_path):
    """500 is the narrowest window that Chromium opens."""
    (tmp_path / "page.html").write_text(PAGE.replace("</html>", TRIAL))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
         f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
         (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    [told] = re.findall('<pre id="told">(.*?)</pre>', done.stdout)
    told = json.loads(html.unescape(told))
    views = [*side_by_side.VIEWS, "difference"]
    assert told["errors"] == [] and told["first"] == views[:1]
    assert told["clicked"] == [[view, True] for view in views]
    assert told["row"] == ["ppo_atari", True, True]
    assert told["pointed"].count("ratio") == 2 and "rt" in told["pointed"]
    assert told["nothing"] == [] and {"clip_eps", "ϵ"} <= set(told["focus"])
