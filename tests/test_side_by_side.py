"""plots/side_by_side.html: what it shows; the links to lines."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import compare
import numpy as np
import pandas as pd
import pytest
import reproduce
import side_by_side
import torch

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
PAGE = side_by_side.page()
ROWS = dict(re.findall(r'<section class="row[^"]*" id="([^"]*)"(.*?)</section>', PAGE, re.S))
LINE = (r'<span class="line([\w ]*)" style="--i:\d+"(?: data-s="[^"]*")?>'
        r'<i aria-hidden="true">(\d+)</i>(.*?)\n</span>')  # fmt: skip


def plain(text):
    return html.unescape(re.sub("<.*?>", "", text))


def test_the_page_needs_nothing_from_elsewhere():
    assert not re.findall(r"<link|<img|src=|@import|url\(", PAGE)


def test_every_row_and_view_can_be_linked_to_and_is_in_a_list_of_contents():
    ids = re.findall('<(?:section|div)[^>]* id="(.*?)"', PAGE)
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
    rows.pop(f"{script}-derivation", None)
    for name, row in rows.items():
        paper, code = row.split('<div class="code">')
        formulas, _, buttons = paper.partition('<ul class="keys">')
        marked = [set(re.findall('data-s="(.*?)"', part)) for part in (formulas, buttons, code)]
        assert marked[0] == marked[2] and marked[0], name
        assert marked[1] == marked[0] or name.endswith("-algorithm"), name
        for symbol, key, words in re.findall(
            'data-s="(.*?)">(.*?)</button>(.*?)(?=<li>|$)', buttons
        ):
            shown = re.findall(f'<span[^>]* data-s="{re.escape(symbol)}">(.*?)</span>', code)
            assert set(shown) == set(re.findall("<code>(.*?)</code>", key)), name
            assert plain(words).strip(), name
        lines = re.findall(LINE, code, re.S)
        assert lines
        for _, number, line in lines:
            assert (
                source[int(number) - 1].strip().removesuffix("  # fmt: skip") == plain(line).strip()
            )


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


@pytest.mark.parametrize("equation, first, others", [
    ("eq-7", "l_policy", "surrogate ratio advantages clipped ratio clip_eps clip_eps advantages"),
    ("eq-8", "l_policy", "surrogate ratio advantages beta kl kl_divergence pi_old pi"),
    ("cpi", "l_policy", "surrogate ratio advantages"),
])  # fmt: skip
def test_an_objective_is_marked_as_the_code_computes_it(equation, first, others):
    """min(surrogate, clipped · Â); L^CLIP stands on the left alone."""
    row = ROWS[f"ppo_continuous-{equation}"]
    names = {symbol: re.findall("<code>(.*?)</code>", key) for symbol, key in
             re.findall('<button type="button" data-s="(.*?)">(.*?)</button>', row)}  # fmt: skip
    marks = re.findall('data-s="(.*?)"', row[: row.index('<ul class="keys">')])
    found = [name for symbol in marks for name in names[symbol]]
    assert found[0] == first and first not in found[1:]
    assert [name for name in found[1:] if name in others.split()] == others.split()


@pytest.mark.parametrize("script, lines", [
    ("ppo_continuous", {"1": "for iteration", "2": "= rollout(", "3": "= rollout(",
                        "4": "estimate_advantages(", "5": "= rollout(", "6": "= update(",
                        "7": "= rollout(", "8": "for iteration"}),
    ("ppo_atari", {"4": "estimate_advantages(", "6": "= update(", "7": "= rollout("}),
    ("trpo_continuous", {"2": "= rollout(", "3": "estimate_advantages(", "4": "= update(",
                         "": "= update(", "5": "= rollout(", "6": "for iteration"}),
])  # fmt: skip
def test_the_pseudocode_and_the_loop_mark_each_other(script, lines):
    row = next(row for name, row in ROWS.items() if re.fullmatch(f"{script}-.*algorithm", name))
    steps = re.findall(r'data-s="([^"]*)"><i>(\d*)</i>', row)
    loop = re.findall(r'<span class="line[^>]* data-s="(.*?)">(.*?)\n</span>', row, re.S)
    assert len(steps) >= 8
    for key, number in steps:
        marked = "".join(plain(line) for own, line in loop if own == key)
        assert lines.get(number, "") in marked, number


def keep(folder, script, task, seed, score):
    """Data of a run whose episodes all have one return."""
    about = {"script": f"{script}.py", "settings": {"env_id": task, "seed": seed}}
    episodes = pd.DataFrame({"step": [10], "return": [score], "length": [10]})
    compare.keep(compare.Run(folder, about, episodes), folder)


def test_what_a_step_is_worth_is_read_from_the_data(tmp_path, monkeypatch):
    """Of the seeds that have both runs; without data it says nothing."""
    monkeypatch.setattr(compare, "DATA", tmp_path)
    side_by_side.scores.cache_clear()
    assert side_by_side.without("ppo_continuous", "standardised") == ""
    for seed in range(1, 4):
        keep(tmp_path / "small-tasks/ppo", "ppo_continuous", "Pendulum-v1", seed, -100 - seed)
    for seed in range(2, 5):
        keep(tmp_path / "ablations/ppo-norm-adv-none", "ppo_continuous", "Pendulum-v1", seed,
             -200 - 2 * seed)  # fmt: skip
    side_by_side.scores.cache_clear()
    told = plain(side_by_side.without("ppo_continuous", "standardised"))
    assert (
        "--norm-adv none" in told and "−205 ± 1 instead of −102 ± 1" in told and "Seeds: 2," in told
    )
    assert side_by_side.without("trpo_continuous", "standardised") == ""
    assert side_by_side.without("ppo_atari", "standardised") == ""
    side_by_side.scores.cache_clear()


def test_of_many_tasks_it_counts_those_where_every_seed_is_worse(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "DATA", tmp_path)
    scores = {"Hopper-v5": (1, 9), "Swimmer-v5": (11, 12), "Walker2d-v5": (1, 11),
              "Reacher-v5": (30, 40)}  # fmt: skip
    for task, own in scores.items():
        for seed in (1, 2):
            keep(tmp_path / "figure3/ppo", "ppo_continuous", task, seed, 9 + seed)  # 10, 11
            keep(tmp_path / "steps/rollout", "ppo_continuous", task, seed, own[seed - 1])
    side_by_side.scores.cache_clear()
    told = plain(side_by_side.without("ppo_continuous", "standardised"))
    assert "1 of 4" in told and "Walker2d 6.00" in told
    side_by_side.scores.cache_clear()


def test_every_step_that_can_be_left_out_has_a_row_and_an_experiment():
    words = {"--norm-adv rollout", "plain"} & {x.words for x in reproduce.EXPERIMENTS["steps"]}
    words |= {x.words.partition(" ")[2] for x in reproduce.EXPERIMENTS["ablations"]}
    flags = {flag for own in side_by_side.OFF.values() for _, flag in own}
    assert flags <= words
    assert {flag for _, *own in reproduce.ABLATIONS.values() for flag in own} <= flags
    rows = {equation for view in side_by_side.VIEWS.values() for equation, *_ in view}
    assert {*side_by_side.OFF, *side_by_side.PICTURES} <= rows


def test_each_function_is_there_once_and_whole():
    dialogs = re.findall('<dialog data-of="(.*?)"(.*?)</dialog>', PAGE, re.S)
    assert {name for name, _ in dialogs} == set(re.findall('data-whole="(.*?)"', PAGE))
    assert len(dialogs) == len(dict(dialogs)) > 40
    for name, text in dialogs:
        script, _, definition = name.partition(".")
        numbers = [int(number) for _, number, _ in re.findall(LINE, text, re.S)]
        assert numbers == [*side_by_side.definition(script, definition)], name


def test_pictures_are_in_the_page_if_there_are_any(tmp_path, monkeypatch):
    for name in ("pictures.js", "pictures.css", "recorded.json"):
        with monkeypatch.context() as patch:
            patch.setattr(side_by_side, "ASSETS", tmp_path)
            assert side_by_side.inlined(name) == ""
            (tmp_path / name).write_text("{here}")
            assert "{here}" in side_by_side.inlined(name)
    kinds = re.findall('data-picture="(.*?)"', PAGE[: PAGE.index("</main>")])
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "clip": 2, "gae": 3, "update": 2, "trust": 1,
    }  # fmt: skip


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
        buttons, _, figures = ROWS[key].partition('<div class="code">')
        places = re.findall("<figcaption><a[^>]*><code>(.*?)</code>.*?</figcaption>(.*?)</figure>",
                            figures, re.S)  # fmt: skip
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
    assert "<code>update</code>" not in same and '"""' not in plain(view)


def test_what_is_not_in_the_paper_has_an_edge():
    """Every line shown with that comment, what the comment is about, and whole rows."""
    lines = re.findall(LINE, PAGE[: PAGE.index("</main>")], re.S)
    said = [
        css for css, _, line in lines if re.search("not in the (PPO )?paper", plain(line), re.I)
    ]
    assert len(said) > 20 and all("extra" in css for css in said)
    rows = set(re.findall(r'<section class="row extra" id="([^"]*)"', PAGE))
    assert {"ppo_continuous-alpha-mujoco", "trpo_continuous-critic", "trpo_continuous-eq-11",
            "ppo_atari-standardised-atari"} <= rows  # fmt: skip
    for name in rows:
        assert all("extra" in css for css, *_ in re.findall(LINE, ROWS[name], re.S)), name
    for name, row in ROWS.items():
        if name not in rows and "derivation" not in name:
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
<pre id="told"></pre><script type="module">
const told = {errors: []}, find = selector => document.querySelector(selector);
const every = selector => [...document.querySelectorAll(selector)];
addEventListener("error", event => told.errors.push(event.message));
const visible = () => every("main > div").filter(e => e.checkVisibility()).map(e => e.id);
const slide = () => every("section").filter(e => e.checkVisibility()).map(e => e.id);
const fits = () => document.documentElement.scrollWidth <= innerWidth && !every("math, pre, button")
  .some(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth);
const marked = selector => every(selector).map(e => e.textContent.trim());
const later = () => new Promise(done => setTimeout(done, 50));
const goTo = async hash => { location.hash = hash; await later(); };
const over = (e, type = "mouse") => e.dispatchEvent(
  new PointerEvent("pointerover", {bubbles: true, pointerType: type}));
const press = async (key, on = document.body) => {
  on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  await later();
};
const seen = e => {  // whether a part of the header is in view and not covered
  const {x, y, width, height} = e.getBoundingClientRect();
  return e.contains(document.elementFromPoint(x + width / 2, y + height / 4));
};

const trials = {
  async tabs() {
    const first = visible(), clicked = [];
    for (const tab of every("nav a")) {
      tab.click();
      await later();
      clicked.push([...visible(), fits(), seen(find("h1")), seen(find("#legend"))]);
    }
    return [first, clicked];
  },
  async link() {
    await goTo("#ppo_atari-eq-7");
    const top = find("#ppo_atari-eq-7").getBoundingClientRect().top;
    const header = find("header").getBoundingClientRect();
    return [...visible(), Math.abs(top - header.bottom) < 10, header.top === 0];
  },
  async marks() {
    const row = find("#ppo_atari-eq-7"), name = row.querySelector(".code [data-s=rt]"), found = {};
    over(name);
    found.pointed = marked(".on");
    over(document.body);
    found.left = marked(".on, .kept");
    name.click();
    over(document.body);
    found.clicked = marked(".kept");
    found.pressed = every(".keys [aria-pressed=true]").length;
    over(row.querySelector(".code [data-s='ϵ']"));
    found.both = [marked(".on").includes("clip_eps"), marked(".kept").includes("ratio")];
    name.click();
    over(name, "touch");
    found.again = marked(".on, .kept");
    name.click();
    await press("Escape");
    found.escaped = [marked(".on, .kept"), every("[aria-pressed=true]").length];
    [...row.querySelectorAll("button")].find(e => e.textContent.includes("clip_eps")).focus();
    found.focus = marked(".on");
    document.activeElement.blur();
    over(find("#ppo_atari-ppo-algorithm .algorithm button"));
    found.step = marked(".line.on");
    await goTo("#difference");
    const side = find("#difference-0 .code");
    over([...side.querySelectorAll("[data-s]")].find(e => e.textContent === "rollout"));
    found.columns = every("#difference-0 .code").map(e => e.querySelectorAll(".on").length);
    over(document.body);
    return found;
  },
  async slides() {
    const found = [];
    const note = () => found.push([...slide(), find("#count").textContent, location.hash]);
    await goTo("#trpo_continuous");
    await press("s");
    note();
    for (const key of ["ArrowRight", "PageDown", " ", "ArrowLeft", "PageUp", "End", "ArrowRight",
                       "ArrowLeft", "Home"]) {
      await press(key);
      note();
    }
    find("#next").click();
    await later();
    note();
    const input = document.body.appendChild(document.createElement("input"));
    await press("ArrowRight", input);
    input.remove();
    note();
    await press("Escape");
    return [found, find("body").className, location.hash, slide().length];
  },
  async fit() {  // letters of code, whether all is inside of the screen, equation left of code
    const found = {};
    for (const id of ["ppo_continuous-network", "ppo_continuous-eq-7", "ppo_continuous-derivation",
                      "trpo_continuous-cg", "difference-4"]) {
      await goTo(`#slide-${id}`);
      const now = find(".now"), [left, right] = [...now.children].slice(-2)
        .map(e => e.getBoundingClientRect());
      found[id] = [parseFloat(now.style.getPropertyValue("--code")),
                   now.getBoundingClientRect().bottom <= innerHeight + 1 && fits(),
                   now.matches(".derived") || left.right <= right.left];
    }
    await press("s");
    return found;
  },
  async narrow() {  // a tall window: equation above code, and the letters shrink until all fits
    await goTo("#slide-trpo_continuous-cg");
    const now = find(".now"), found = [now.scrollHeight <= now.clientHeight + 1];
    await press("s");
    return found;
  },
  async pictures() {  // a slide of its own; once a slider is let go, keys turn slides; h hides code
    await goTo("#slide-trpo_continuous-line-search");
    await press("ArrowRight");
    const input = find(".now .moving input");
    const found = [location.hash, input.checkVisibility(), find(".now pre").checkVisibility()];
    input.focus();
    input.dispatchEvent(new PointerEvent("pointerup", {bubbles: true}));
    found.push(document.activeElement === input);
    await press("ArrowLeft");
    found.push(location.hash);
    await press("h");
    found.push(getComputedStyle(find(".now pre")).visibility);
    await press("h");
    await press("s");
    return found;
  },
  async whole() {
    await goTo("#ppo_continuous-eq-7");
    const button = find("#ppo_continuous-eq-7 [data-whole]"), dialog = find("dialog[data-of='"
      + button.dataset.whole + "']");
    button.click();
    const opened = [dialog.open, marked("dialog[open] .shown").length, visible().length];
    await press("s");  // no slides while it is open
    dialog.querySelector("button").click();
    await later();
    return [...opened, dialog.open, find("body").className];
  },
};
(async () => {
  for (const name of WANTED) told[name] = await trials[name]();
  find("#told").textContent = JSON.stringify(told);
})();
</script>
"""


def browse(folder, width, height, wanted):
    """What some of the trials find in a window."""
    trial = TRIAL.replace("WANTED", json.dumps(wanted))
    (folder / "page.html").write_text(PAGE.replace("</html>", trial))
    done = subprocess.run(
        [side_by_side.BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={folder}", f"--window-size={width},{height}",
         "--virtual-time-budget=20000", "--dump-dom", (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    told = re.findall('<pre id="told">(.*?)</pre>', done.stdout)[-1]
    told = json.loads(html.unescape(told))
    assert told["errors"] == []
    return told


browser = pytest.mark.skipif(side_by_side.BROWSER is None, reason="no Chromium or Chrome here")
TABS = [*side_by_side.VIEWS, "difference"]


@browser
def test_a_lecture_in_a_browser(tmp_path):
    told = browse(tmp_path, 1920, 1080, ["tabs", "link", "marks", "slides", "fit", "whole",
                                          "pictures"])  # fmt: skip
    assert told["tabs"] == [TABS[:1], [[view, True, True, True] for view in TABS]]
    assert told["link"] == ["ppo_atari", True, True]
    marks = told["marks"]
    assert marks["pointed"].count("ratio") == 2 and "rt" in marks["pointed"]
    assert marks["left"] == [] == marks["again"] and marks["clicked"] == marks["pointed"]
    assert marks["pressed"] == 1 and marks["both"] == [True, True]
    assert marks["escaped"] == [[], 0] and {"clip_eps", "ϵ"} <= set(marks["focus"])
    assert len(marks["step"]) == 1 and "for iteration in" in marks["step"][0]
    assert marks["columns"] == [1, 1]

    rows = [f"trpo_continuous-{equation}" for equation, *_ in side_by_side.VIEWS["trpo_continuous"]]
    shown, body, address, others = told["slides"]
    order = [0, 1, 2, 3, 2, 1, len(rows) - 1, -1, len(rows) - 1, 0, 1, 1]
    expected = [[rows[k], f"{k + 1} / {len(rows)}"] for k in order]
    expected[7] = ["difference-0", f"1 / {len(side_by_side.LESSON)}"]  # the next tab
    assert [one[:2] for one in shown] == expected
    assert all(one[2] == f"#slide-{one[0]}" for one in shown)
    assert (body, address) == ("", f"#{rows[1]}") and others == len(rows)
    assert all(size >= 16 and inside and beside for size, inside, beside in told["fit"].values())
    assert told["whole"] == [True, 1, 1, False, ""]
    slide = "#slide-trpo_continuous-line-search"
    assert told["pictures"] == [slide + "-picture", True, False, False, slide, "hidden"]


@browser
@pytest.mark.slow
def test_a_smaller_screen(tmp_path):
    assert browse(tmp_path, 900, 1600, ["narrow"])["narrow"] == [True]
    told = browse(tmp_path, 1280, 720, ["tabs", "link", "fit"])
    assert told["tabs"] == [TABS[:1], [[view, True, True, True] for view in TABS]]
    assert told["link"] == ["ppo_atari", True, True]
    assert all(size >= 13 and all(inside) for size, *inside in told["fit"].values())


PHONE = """<!DOCTYPE html><iframe width="320" height="640"></iframe><pre id="told"></pre><script>
const frame = document.querySelector("iframe");
frame.srcdoc = PAGE_HERE;  // in a frame: no window is so narrow
frame.onload = async () => {
  const found = [], page = frame.contentDocument;
  for (const tab of page.querySelectorAll("nav a")) {
    tab.click();
    await new Promise(done => setTimeout(done, 100));
    const past = [...page.querySelectorAll("body *")].filter(
      e => e.checkVisibility() && e.getBoundingClientRect().right > 321);
    found.push([page.documentElement.scrollWidth, past.length]);
  }
  document.querySelector("#told").textContent = JSON.stringify(found);
};
</script>"""


@browser
def test_nothing_is_past_the_edge_of_a_phone(tmp_path):
    (tmp_path / "phone.html").write_text(
        PHONE.replace("PAGE_HERE", json.dumps(PAGE).replace("</", "<\\/"))
    )
    done = subprocess.run(
        [side_by_side.BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom",
         (tmp_path / "phone.html").as_uri()], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    [told] = re.findall('<pre id="told">(.*?)</pre>', done.stdout)
    assert [(width <= 320, past) for width, past in json.loads(told)] == [(True, 0)] * 4


@browser
def test_a_printed_page_has_one_row(tmp_path):
    """As many pages as rows: none is split, and none shares its page."""
    (tmp_path / "page.html").write_text(PAGE)
    subprocess.run(
        [side_by_side.BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path}", "--no-pdf-header-footer",
         f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri()],
        capture_output=True, timeout=120,
    )  # fmt: skip
    pages = re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())
    assert len(pages) == PAGE.count("<section ")
