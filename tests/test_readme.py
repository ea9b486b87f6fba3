"""README.md says what is so: its pointers, flags, commands and files."""

import ast
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import reproduce

README = (ROOT / "README.md").read_text()
SCRIPTS = (ppo_atari, ppo_continuous, trpo_continuous)


def source_of(script, name):
    """The source of a top-level definition of a script, its comments and docstring too."""
    text = (ROOT / f"{script}.py").read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            return "".join(lines[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"{name} is not in {script}.py")


def pointers(text):
    """(place, script, name) of a table's rows like | Eq. 14 | `trpo_continuous.surrogate` |; a name
    alone is of ppo_atari.py."""
    row = r"^\| ((?:Algorithm|App\.|Eq\.|Sec\.|Table)[^|]*) \| `(?:(\w+)\.)?(\w+)` \|$"
    found = re.findall(row, text, re.M)
    return [(place, script or "ppo_atari", name) for place, script, name in found]


POINTERS = pointers(README)
# TensorBoard's and the benchmarks'
OTHERS = {"--logdir", "--iterations", "--stop", "--subprocesses"}


def test_the_guide_has_pointers():
    assert len(POINTERS) >= 12


def test_a_pointer_can_name_its_script():
    text = "| Eq. 14 | `trpo_continuous.surrogate` |\n| App. C.1 | `gae` |\n| seeds | `5` |"
    assert pointers(text) == [
        ("Eq. 14", "trpo_continuous", "surrogate"),
        ("App. C.1", "ppo_atari", "gae"),
    ]
    assert "Eq. 14" in source_of("trpo_continuous", "surrogate")


@pytest.mark.parametrize("place, script, name", POINTERS)
def test_pointers_point_at_the_right_place(place, script, name):
    """Each part of a pointer ("Sec. 6.4, [Mni+16]") stands in the source that it points at."""
    source = " ".join(source_of(script, name).split())
    for part in place.split(", "):
        number = part.removeprefix("Eq. ")
        pattern = rf"Eq\. (\d+, )*{number}\b" if number != part else rf"{re.escape(part)}(?!\w)"
        assert re.search(pattern, source), (part, name)


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@|TODO|XXX", README)


def script_parser(script):
    return script.make_parser({name: row[1] for name, row in script.ROWS.items()})


def test_flags_exist():
    parsers = [*(script_parser(script) for script in SCRIPTS), reproduce.make_parser()]
    flags = {flag for p in parsers for action in p._actions for flag in action.option_strings}
    assert set(flags_in(README)) - flags - OTHERS == set()


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_flags_stand_beside_a_script_that_has_them(script):
    """In the rows of tables and in the commands that name the script, and nothing else."""
    parser = script_parser(script)
    known = {flag for action in parser._actions for flag in action.option_strings}
    lines = README.replace("\\\n", " ").splitlines()
    named = [line for line in lines if f"{script.__name__}.py" in line]
    named = [line for line in named if line.startswith(("|", ".venv/bin/python"))]
    assert named
    for line in named:
        assert set(flags_in(line)) <= known, line


def test_continuous_integration_runs_the_same_test_command():
    [command] = re.findall(r"^python3 -m venv .* -m pytest$", README, re.M)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("experiment, length", [
    ("small-tasks", 8), ("figure3", 14), ("table1", 11), ("precision", 2),
])  # fmt: skip
def test_tables_of_results_are_those_of_the_data(experiment, length, tmp_path):
    args = Namespace(data_dir=reproduce.compare.DATA)
    _, scores, _ = reproduce.gather(experiment, args)
    if experiment == "table1":
        text = reproduce.table1(scores, tmp_path / "picture")
        text = text[text.index("| objective") :]
    else:
        published = {} if experiment in reproduce.SHORT else reproduce.compare.PUBLISHED
        text = reproduce.score_table(scores, published)
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) == 1 + length
    for row in rows:
        assert row in README, row


ATARI = {
    "Breakout, `--bf16`": "breakout/nature-bf16",
    "Breakout, `--network paper --learning-rate 1e-3 --bf16`": "breakout/lr-1e-3-paper-bf16",
    "Breakout, `--network paper`": "breakout/paper",
    "Breakout, `--network paper --bf16`": "breakout/paper-bf16",
    "Breakout, `--network paper`, in Stable-Baselines3": "breakout-parts/paper-sb3-table5",
    "Breakout, Baselines' settings, `--bf16`": "breakout/baselines-bf16",
    "Pong, `--network paper`": "pong/paper",
    "nothing": "breakout/paper-bf16",
    "the network, to the default": "breakout/nature-bf16",
    "`--learning-rate 1e-3`": "breakout/lr-1e-3-paper-bf16",
    "`--num-epochs 4`": "breakout-parts/paper-num-epochs-4-bf16",
    "`--vf-coef 0.25`": "breakout-parts/paper-vf-coef-0.25-bf16",
    "`--max-grad-norm 0`": "breakout-parts/paper-max-grad-norm-0-bf16",
    "`--no-orthogonal`": "breakout-parts/paper-no-orthogonal-bf16",
    "not alone: all of Baselines' settings": "breakout/baselines-bf16",
}


@pytest.mark.parametrize("name", ATARI)
def test_scores_of_atari_are_those_of_the_data(name):
    """Rows | name | seed | scores by a step ... | last score | published |, of every seed there is,
    or | name | scores by a step |, of seed 1."""
    rows = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", README, re.M)
    whole = name.startswith(("Breakout", "Pong"))
    runs = reproduce.compare.read_runs(reproduce.compare.DATA / ATARI[name])
    assert len(rows) == (len(runs) if whole else 1)
    for row, run in zip(rows, runs, strict=False):
        assert run.seed == 1 or whole
        steps = [5e5, 1e6, 2.5e6, 5e6, 7.5e6] if whole else [2e5, 4e5, 6e5]
        means = reproduce.compare.curve(run.table, np.array(steps))
        cells = ["–" if np.isnan(mean) else f"{mean:.1f}" for mean in means]
        if whole:
            last = f"{run.table[-100:, 1].mean():.1f} at {run.table[-1, 0] / 1e6:.2f}M"
            cells = [str(run.seed), *cells, last]
        assert (row + " |").startswith(" | ".join(cells).replace("-", "−") + " |")


@pytest.mark.parametrize("flags, place, seeds", [
    ("`--bf16`", "breakout/nature-bf16", [1]),
    ("`--bf16 --network paper`", "breakout/paper-bf16", [1]),
    ("`--bf16 --network paper --learning-rate 1e-3`", "breakout/lr-1e-3-paper-bf16", [1, 2, 3]),
])  # fmt: skip
def test_scores_at_the_top_are_those_of_every_whole_run(flags, place, seeds):
    runs = [
        run
        for run in reproduce.compare.read_runs(reproduce.compare.DATA / place)
        if reproduce.covers(run.table, run.about["settings"]["total_steps"])
    ]
    assert [run.seed for run in runs] == seeds
    [scores] = re.findall(rf"^\| {re.escape(flags)} \| ([\d., ]+) \|", README, re.M)
    assert scores == ", ".join(f"{reproduce.score(run.table):.1f}" for run in runs)


def test_means_of_three_seeds_are_those_of_the_data():
    read_runs, curve = reproduce.compare.read_runs, reproduce.compare.curve
    larger, nature = (
        read_runs(reproduce.compare.DATA / "breakout" / variant)
        for variant in ("lr-1e-3-paper-bf16", "nature-bf16")
    )
    scores = [reproduce.score(run.table) for run in larger]
    mean, prose = f"{np.mean(scores):.1f}", " ".join(README.split())
    assert f"(mean {mean} ± {np.std(scores, ddof=1):.1f}, " in prose
    for script in SCRIPTS:  # a score there would have to be checked, too
        assert not re.search(r"\b\d{2,3}\.\d\b", script.__doc__)
    steps = np.array([2.5e6, 5e6, 7.5e6])
    means = np.mean([curve(run.table, steps) for run in larger], axis=0)
    one, two, three = (
        f"{a:.0f} and {b:.0f}" for a, b in zip(means, curve(nature[0].table, steps), strict=True)
    )
    assert f"({one} after 2.5 million steps, {two} after 5, {three} after 7.5;" in prose


def test_files_exist():
    for name in re.findall(r"\]\(((?!http|#)[^)]+)\)", README) + re.findall(
        r"\bplots/(?:\w+\.py|data/[\w/-]+\w)", README
    ):
        assert (ROOT / name).exists(), name


def test_defaults_named_in_readme():
    args, _ = ppo_atari.parse_args([])
    assert f"| epochs K | {args.num_epochs} | 4 |" in README
    assert f"norm clipped at {args.max_grad_norm}" in README
    assert f"Adam's ε {args.adam_eps:.0e}".replace("e-05", "e-5") in README
