"""README.md and the other pages: their files exist, their tables are those of plots/data."""

import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import compare
import reproduce
import side_by_side

PAGES = {name: (ROOT / name).read_text()
         for name in ("README.md", "plots/README.md", "plots/data/README.md",
                      "tests/benchmarks/README.md")}  # fmt: skip
README, RESULTS, *_ = PAGES.values()


@pytest.mark.parametrize("name", PAGES)
def test_files_exist(name):
    links = re.findall(r'(?:\]\(|src=")((?!http|#)[^)"#]+)', PAGES[name])
    named = re.findall(r"\bplots/(?:\w+\.py|data/[\w/-]+\w)", PAGES[name])
    for path in [*((ROOT / name).parent / link for link in links), *map(ROOT.joinpath, named)]:
        assert path.exists(), path


def test_the_page_and_the_links_to_lines_are_up_to_date():
    """Else: .venv/bin/python plots/side_by_side.py"""
    side_by_side.main(["--check"])


@pytest.mark.parametrize("experiment", ["small-tasks", "figure3", "steps", "table1", "precision"])
def test_tables_of_results_are_those_of_the_data(experiment, tmp_path):
    _, scores, _ = reproduce.gather(experiment, Namespace(data_dir=compare.DATA))
    if experiment == "table1":
        text = reproduce.table1(scores, tmp_path / "picture")
        text = text[text.index("| objective") :]
    elif experiment == "steps":
        text = reproduce.rivals(scores)
    else:
        published = {} if experiment in reproduce.SHORT else compare.PUBLISHED
        text = reproduce.score_table(scores, published)
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) > 3 and [row for row in rows if row not in RESULTS] == []


TOP = {  # what README's first table says, by task and command: an experiment and its variants
    ("Breakout", "ppo_atari.py"): ("breakout", "nature-bf16", "nature"),
    ("Breakout", "ppo_atari.py --network paper"): ("breakout", "paper-bf16", "paper"),
    ("Breakout", "ppo_atari.py --bf16 --network paper --learning-rate 1e-3"): (
        "breakout", "lr-1e-3-paper-bf16",
    ),
    ("CartPole-v1", "ppo_continuous.py"): ("small-tasks", "ppo"),
    **{(task, f"{script}_continuous.py --env-id {task}"): ("figure3", script)
       for script in ("ppo", "trpo") for task in reproduce.MUJOCO},
}  # fmt: skip


def test_the_first_table_is_of_every_whole_run_there_is():
    rows = re.findall(r"^\| ([\w-]+) \| `(.*?)` \| ([\d.]+)M \| (\d+) \| (.*?) \|", README, re.M)
    assert len(rows) > 3
    for task, command, steps, seeds, said in rows:
        experiment, *variants = TOP[task, command]
        _, scores, _ = reproduce.gather(experiment, Namespace(data_dir=compare.DATA))
        env_id = reproduce.BREAKOUT[0] if task == "Breakout" else task
        values = np.concatenate([scores[variant][env_id] for variant in variants])
        assert (int(seeds), said) == (len(values), reproduce.spread(values)), (task, command)
        script, *flags = command.split()
        args, _ = importlib.import_module(Path(script).stem).parse_args(flags)
        assert (args.total_steps, args.env_id) == (float(steps) * 1e6, env_id)


CHEETAH = {  # rows of the table of HalfCheetah-v5's seeds
    "defaults": "table1/none",
    "defaults, `--no-clip-actions`": "table1/none-no-clip-actions",
    "`plain`'s flags": "table1-plain/none",
    "`plain`'s flags, `--no-clip-actions`": "table1-plain/none-no-clip-actions",
    "the same with L^CLIP, ε = 0.2": "table1-plain-parts/clip-0.2-no-clip-actions",
}


def test_the_seeds_of_halfcheetah_are_those_of_the_data():
    for name, place in CHEETAH.items():
        runs = compare.read_runs(compare.DATA / place / "HalfCheetah-v5")
        found = {run.seed: f"{reproduce.score(run.table):,.0f}" for run in runs}
        cells = [found.get(seed, "–") for seed in (1, 2, 3)]
        assert f"| {name} | {' | '.join(cells)} |" in RESULTS


ATARI = {
    "Breakout": "breakout/nature",
    "Breakout, `--bf16`": "breakout/nature-bf16",
    "Breakout, `--network paper --learning-rate 1e-3 --bf16`": "breakout/lr-1e-3-paper-bf16",
    "Breakout, `--network paper`": "breakout/paper",
    "Breakout, `--network paper --bf16`": "breakout/paper-bf16",
    "Breakout, `--network paper`, in Stable-Baselines3": "breakout-parts/paper-sb3-table5",
    "Breakout, Baselines' settings, `--bf16`": "breakout/baselines-bf16",
    "Pong": "pong/nature",
    "Pong, `--bf16`": "pong/nature-bf16",
    "Pong, `--network paper`": "pong/paper",
    "nothing": "breakout/paper-bf16",
    "the network, to the default": "breakout/nature-bf16",
    "`--learning-rate 1e-3`": "breakout/lr-1e-3-paper-bf16",
    "`--num-epochs 4`": "breakout-parts/paper-num-epochs-4-bf16",
    "`--vf-coef 0.25`": "breakout-parts/paper-vf-coef-0.25-bf16",
    "`--max-grad-norm 0`": "breakout-parts/paper-max-grad-norm-0-bf16",
    "`--no-orthogonal`": "breakout-parts/paper-no-orthogonal-bf16",
}


@pytest.mark.parametrize("name", ATARI)
def test_scores_of_atari_are_those_of_the_data(name):
    """Rows | name | seed | scores by a step ... | last score | published |, of every seed there is,
    or | name | scores by a step |, of seed 1."""
    rows = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", RESULTS, re.M)
    whole = name.startswith(("Breakout", "Pong"))
    runs = compare.read_runs(compare.DATA / ATARI[name])
    assert len(rows) == (len(runs) if whole else 1)
    for row, run in zip(rows, runs, strict=False):
        steps = [5e5, 1e6, 2.5e6, 5e6, 7.5e6] if whole else [2e5, 4e5, 6e5]
        means = compare.curve(run.table, np.array(steps))
        cells = ["–" if np.isnan(mean) else f"{mean:.1f}" for mean in means]
        if whole:
            last = f"{run.table[-100:, 1].mean():.1f} at {run.table[-1, 0] / 1e6:.2f}M"
            cells = [str(run.seed), *cells, last]
        assert (row + " |").startswith(" | ".join(cells).replace("-", "−") + " |")
