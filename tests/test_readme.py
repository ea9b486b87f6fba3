"""The pages (README.md and the others below) say what is so: their pointers, flags, commands,
scores and files. `python -m tests.test_readme` renews the lines that README's guide points at."""

import ast
import importlib
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

PAGES = {name: (ROOT / name).read_text()
         for name in ("README.md", "plots/README.md", "plots/data/README.md",
                      "tests/benchmarks/README.md")}  # fmt: skip
README, RESULTS, RUNS, _ = PAGES.values()
SCRIPTS = (ppo_atari, ppo_continuous, trpo_continuous)


def source_of(script, name):
    """A top-level definition of a script: its first line's number, and its source."""
    text = (ROOT / f"{script}.py").read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        names = [node.name] if hasattr(node, "name") else []
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            return first, "".join(lines[first - 1 : node.end_lineno])
    raise AssertionError(f"{name} is not in {script}.py")


def pointers(text):
    """(place, script, name, line) of the links in rows like
    | Eq. 14 | [`surrogate`](trpo_continuous.py#L350) |."""
    found = []
    for place, cells in re.findall(r"^\| ([^|`]+) \| (.*\.py#L.*) \|$", text, re.M):
        for name, script, line in re.findall(r"\[`(\w+)`\]\((\w+)\.py#L(\d+)\)", cells):
            found.append((place, script, name, int(line)))
    return found


POINTERS = pointers(README)
# TensorBoard's, torchrun's, compare.py's and the benchmarks'
OTHERS = {"--logdir", "--iterations", "--stop", "--subprocesses", "--repeats", "--nproc-per-node",
          "--standalone", "--keep"}  # fmt: skip


def test_the_guide_has_pointers():
    assert len(POINTERS) >= 20 and {script for _, script, _, _ in POINTERS} == {
        script.__name__ for script in SCRIPTS
    }


@pytest.mark.parametrize("place, script, name, line", POINTERS)
def test_pointers_point_at_the_right_place(place, script, name, line):
    """At the definition's first line (`python -m tests.test_readme` mends that), whose source names
    each part of the place ("Sec. 6.4, [Mni+16]")."""
    first, source = source_of(script, name)
    assert line == first
    for part in place.split(", "):
        number = part.removeprefix("Eq. ")
        pattern = rf"Eq\. (\d+, )*{number}\b" if number != part else rf"{re.escape(part)}(?!\w)"
        assert re.search(pattern, " ".join(source.split())), (part, name)


def test_nothing_is_left_to_fill_in():
    assert not any(re.search(r"@[A-Z]|TODO|XXX|#L0", page) for page in PAGES.values())


def script_parser(script):
    return script.make_parser({name: row[1] for name, row in script.ROWS.items()})


def test_flags_exist():
    parsers = [*(script_parser(script) for script in SCRIPTS), reproduce.make_parser()]
    flags = {flag for p in parsers for action in p._actions for flag in action.option_strings}
    assert set(flags_in("".join(PAGES.values()))) - flags - OTHERS == set()


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_flags_stand_beside_a_script_that_has_them(script):
    """In the rows of tables and in the commands that name the script, and nothing else."""
    parser = script_parser(script)
    known = {flag for action in parser._actions for flag in action.option_strings}
    lines = "".join(PAGES.values()).replace("\\\n", " ").splitlines()
    named = [line for line in lines if f"{script.__name__}.py" in line]
    named = [line for line in named if line.startswith(("|", ".venv/bin/python"))]
    assert named
    for line in named:
        assert set(flags_in(line)) <= known, line


def test_continuous_integration_runs_the_same_test_command():
    [command] = re.findall(r"^python3 -m venv .* -m pytest$", README, re.M)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("experiment, length", [
    ("small-tasks", 8), ("figure3", 14), ("steps", 9), ("table1", 11), ("precision", 3),
])  # fmt: skip
def test_tables_of_results_are_those_of_the_data(experiment, length, tmp_path):
    args = Namespace(data_dir=reproduce.compare.DATA)
    _, scores, _ = reproduce.gather(experiment, args)
    if experiment == "table1":
        text = reproduce.table1(scores, tmp_path / "picture")
        text = text[text.index("| objective") :]
    elif experiment == "steps":
        text = reproduce.rivals(scores)
    else:
        published = {} if experiment in reproduce.SHORT else reproduce.compare.PUBLISHED
        text = reproduce.score_table(scores, published)
    rows = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) == 1 + length
    for row in rows:
        assert row in RESULTS, row


CHEETAH = {  # rows of the table of HalfCheetah-v5's seeds
    "defaults": "table1/none",
    "defaults, `--no-clip-actions`": "table1/none-no-clip-actions",
    "`plain`'s flags": "table1-plain/none",
    "`plain`'s flags, `--no-clip-actions`": "table1-plain/none-no-clip-actions",
    "the same with L^CLIP, ε = 0.2": "table1-plain-parts/clip-0.2-no-clip-actions",
}


def scores_of(place):
    """{task: {seed: score}} of kept data."""
    found = {}
    for run in reproduce.compare.read_runs(reproduce.compare.DATA / place):
        found.setdefault(run.env_id, {})[run.seed] = reproduce.score(run.table)
    return found


def means_of_100(run):
    """The means of each 100 episodes in succession, and the step at which each is reached."""
    means = np.convolve(run.table[:, 1], np.ones(100) / 100, "valid")
    return means, run.table[99:, 0]


def test_falls_and_ranges_on_the_way_are_those_of_the_data():
    read_runs, prose = reproduce.compare.read_runs, " ".join(RESULTS.split())
    place = "table1-plain-parts/clip-0.2-no-clip-actions"
    [means] = [means_of_100(run)[0] for run in read_runs(reproduce.compare.DATA / place)
               if run.seed == 3]  # fmt: skip
    low = means[means.argmax() :].min()
    said = f"from {means.max():,.0f} down to {low:.0f}, below its start ({means[0]:.0f})"
    assert low < means[0] and said.replace("-", "−") in prose
    [pong] = read_runs(reproduce.compare.DATA / "pong/nature")
    means, steps = means_of_100(pong)
    said = f"{means[steps >= 6e6].min():.1f} to {means[-1]:.1f}"
    assert means[-1] == max(means) and f"they averaged {said}." in prose
    assert f"| Table 6, Pong | {said} after 6 to {steps[-1] / 1e6:.1f} million steps," in prose


@pytest.mark.parametrize("name", CHEETAH)
def test_the_seeds_of_halfcheetah_are_those_of_the_data(name):
    found = scores_of(CHEETAH[name])["HalfCheetah-v5"]
    cells = [f"{found[seed]:,.0f}" if seed in found else "–" for seed in (1, 2, 3)]
    assert f"| {name} | {' | '.join(cells)} |" in RESULTS


def test_what_is_said_of_table_1():
    """Its rank correlations; and the averages of `none` with flags that its rows do not have,
    scaled by random actions and the best of these rows."""
    _, scores, _ = reproduce.gather("table1", Namespace(data_dir=reproduce.compare.DATA))
    rows = {row: scores[row] for row in reproduce.TABLE1}
    random = {task: values.mean() for task, values in scores["random"].items()}
    paper = [reproduce.TABLE1[row][0] for row in rows]
    correlations, ranges = [], []
    for best in ("run", "setting"):
        scaled = reproduce.normalise(rows, random, best)
        means = [reproduce.mean(list(own.values())) for own in scaled.values()]
        assert paper[0] == min(paper) and means[0] == min(means)
        correlations.append(reproduce.rank_correlation(paper[1:], means[1:]))
        ranges.append(f"{min(means[1:]):.2f} to {max(means):.2f}")
        bounds = {row: reproduce.interval(list(own.values())) for row, own in scaled.items()}
        lowest, _ = bounds["kl-fixed-3"]
        assert means[list(rows).index("kl-fixed-3")] == max(means)
        below = {row for row, (_, high) in bounds.items() if high < lowest}
        assert below == {"none", "kl-fixed-0.3", "kl-fixed-10"}
        assert np.ptp([means[list(rows).index(f"clip-0.{k}")] for k in (1, 2, 3)]) < 0.0035
    said = "the rank correlation is {:.2f} and {:.2f} in the two readings"
    prose = " ".join(RESULTS.split())
    assert said.format(*correlations) in prose
    said = "({} with the best run as 1, {} with the best setting; in the paper 0.62 to 0.82)"
    assert said.format(*ranges) in prose

    def average(place, left_out=()):
        found, count = [], 0
        for task, of_seeds in scores_of(place).items():
            best = max(own[task][:3].max() for own in rows.values())
            values = [x for seed, x in of_seeds.items() if (task, seed) not in left_out]
            found.append((np.mean(values) - random[task]) / (best - random[task]))
            count += len(values)
        return f"{np.mean(found):.2f}".replace("-", "−"), count

    plain, unclipped = CHEETAH["`plain`'s flags"], CHEETAH["`plain`'s flags, `--no-clip-actions`"]
    rest, _ = average(unclipped, [("HalfCheetah-v5", 3)])
    runs = reproduce.compare.read_runs(reproduce.compare.DATA / unclipped / "HalfCheetah-v5")
    early = "{:,.0f}, {:,.0f} and {:,.0f}".format(*(run.table[:100, 1].mean() for run in runs))
    reacher = ", ".join(f"{score:.0f}" for score in scores_of(plain)["Reacher-v5"].values())
    for words in (f"the first 100 episodes average {early}.".replace("-", "−"),
                  " and".join(reacher.rsplit(",", 1)).replace("-", "−") + "; random actions −43",
                  "{} for `none` with `plain`'s flags ({} runs)".format(*average(plain)),
                  "{} with unclipped actions, too ({} runs)".format(*average(unclipped)),
                  f"without which it would be {rest}."):  # fmt: skip
        assert words in prose
    scaled = reproduce.normalise(rows, random, "run")
    others = [own[task].mean() for row, own in scaled.items() if row != "none"
              for task in ("InvertedPendulum-v5", "Reacher-v5")]  # fmt: skip
    assert f"all but `none` are within {1 - min(others):.2f} of the best" in prose


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


def test_means_with_the_older_version_are_those_of_the_data():
    """In the order of Figure 3's table."""
    every = [reproduce.compare.read_runs(reproduce.compare.DATA / place)
             for place in ("figure3/ppo", "older/ppo")]  # fmt: skip
    means = []
    for env_id in reproduce.MUJOCO:
        scores = [reproduce.score(run.table) for run in sum(every, []) if run.env_id == env_id]
        assert len(scores) == 8
        means.append(f"{np.mean(scores):.{0 if max(scores) > 200 else 1}f}")
    said = f"the means of all eight are {', '.join(means[:-1])} and {means[-1]},"
    assert said.replace("-", "−") in " ".join(RUNS.split())


OLDEST = {  # of the tables' scores, where the runs are that replaced those of the oldest versions
    "ppo, Pendulum-v1": "small-tasks",
    "ppo, LunarLander-v3": "small-tasks",
    "ppo, LunarLanderContinuous-v3": "small-tasks",
    "none (Table 1), HalfCheetah-v5": "table1",
    "trpo, HalfCheetah-v5": "figure3",
    "trpo, Hopper-v5": "figure3",
    "trpo, Walker2d-v5": "figure3",
}


@pytest.mark.parametrize("name", OLDEST)
def test_means_of_the_oldest_versions_are_those_of_the_data(name):
    variant, env_id = name.replace(" (Table 1)", "").split(", ")
    older, newer = (scores_of(f"{place}/{variant}")[env_id] for place in ("older", OLDEST[name]))
    first, *_, last = *sorted(older), max(older)
    seeds = {1: f"{first}", 2: f"{first} and {last}"}.get(len(older), f"{first} to {last}")
    digits = 1 if name.startswith("ppo") else 0
    means = [f"{np.mean([found[seed] for seed in older]):.{digits}f}" for found in (older, newer)]
    assert f"| {name} | {seeds} | {' | '.join(means).replace('-', '−')} |" in RUNS
    if name == "trpo, Hopper-v5":
        every = f"{np.mean([*older.values(), *newer.values()]):.0f}"
        assert f"the mean of all seven is {every}, above Baselines'" in RUNS


TOP = {  # what README's first table says, by task and command: an experiment and its variant
    ("Breakout", "ppo_atari.py"): ("breakout", "nature-bf16", "nature"),
    ("Breakout", "ppo_atari.py --network paper"): ("breakout", "paper-bf16", "paper"),
    ("Breakout", "ppo_atari.py --bf16 --network paper --learning-rate 1e-3"): (
        "breakout", "lr-1e-3-paper-bf16",
    ),
    ("CartPole-v1", "ppo_continuous.py"): ("small-tasks", "ppo"),
    **{(task, f"{script}_continuous.py --env-id {task}"): ("figure3", script)
       for script, tasks in {
           "ppo": ("HalfCheetah-v5", "Walker2d-v5", "InvertedDoublePendulum-v5"),
           "trpo": ("HalfCheetah-v5", "Walker2d-v5"),
       }.items() for task in tasks},
}  # fmt: skip


def test_the_first_table_is_of_every_whole_run_there_is():
    """Beside the paper's scores, of Table 6 or of Figure 3, and those that Baselines has with its
    own settings, so not with Sec. 6.4's network."""
    cells = r"([\w-]+) \| `(.*?)` \| ([\d.]+)M \| (\d+) \| (.*?) \| ([\d.]+|–) \| ([\d.]+|–)"
    rows = re.findall(rf"^\| {cells} \|$", README, re.M)
    assert [row[:2] for row in rows] == list(TOP)
    for task, command, steps, seeds, said, *published in rows:
        experiment, *variants = TOP[task, command]
        _, scores, _ = reproduce.gather(experiment, Namespace(data_dir=reproduce.compare.DATA))
        env_id = reproduce.BREAKOUT[0] if task == "Breakout" else task
        values = np.concatenate([scores[variant][env_id] for variant in variants])
        assert (int(seeds), said) == (len(values), reproduce.spread(values)), (task, command)
        script, *flags = command.split()
        args, _ = importlib.import_module(Path(script).stem).parse_args(flags)
        assert (args.total_steps, args.env_id) == (float(steps) * 1e6, env_id)
        algorithm = reproduce.compare.algorithm(script)
        paper, baselines = (
            {task: f"{score:g}" for name in names
             for task, score in reproduce.compare.PUBLISHED[name].get(algorithm, {}).items()}
            for names in (("PPO paper, 10M steps", "PPO paper's Fig. 3, by eye"),
                          ("OpenAI's Baselines", "OpenAI's Baselines, run by CleanRL's authors"))
        )  # fmt: skip
        if "--network" in flags:
            baselines = {}
        assert published == [numbers.get(env_id, "–") for numbers in (paper, baselines)]


def test_means_of_three_seeds_are_those_of_the_data():
    read_runs, curve = reproduce.compare.read_runs, reproduce.compare.curve
    larger, bfloat16, float32 = (
        read_runs(reproduce.compare.DATA / "breakout" / variant)
        for variant in ("lr-1e-3-paper-bf16", "nature-bf16", "nature")
    )
    nature = [*bfloat16, *(run for run in float32 if run.seed == 3)]  # seed 2 is not whole
    smaller = [run for variant in ("paper-bf16", "paper")  # but for two that are not whole
               for run in read_runs(reproduce.compare.DATA / "breakout" / variant)
               if run.table[-1, 0] > 9.9e6]  # fmt: skip
    prose = " ".join(RESULTS.split())
    for runs, after in ((larger, ", of three seeds"), (smaller, "),")):
        scores = [reproduce.score(run.table) for run in runs]
        assert len(scores) == 3
        assert f"(mean {np.mean(scores):.1f} ± {np.std(scores, ddof=1):.1f}{after}" in prose
    assert f"; {np.mean(scores):.1f} with both of the paper's |" in prose
    assert f"the mean is {np.mean([reproduce.score(run.table) for run in nature]):.1f}." in prose
    for script in SCRIPTS:  # a score there would have to be checked, too
        assert not re.search(r"\b\d{2,3}\.\d\b", script.__doc__)
    steps = np.array([2.5e6, 5e6, 7.5e6])
    means = (np.mean([curve(run.table, steps) for run in runs], 0) for runs in (larger, nature))
    one, two, three = (f"{a:.0f} and {b:.0f}" for a, b in zip(*means, strict=True))
    assert f"({one} after 2.5 million steps, {two} after 5, {three} after 7.5)." in prose


def test_the_smaller_network_s_ranges_are_those_of_the_data():
    """Over every run at Table 5's step size, partial ones among them."""
    read_runs, prose = reproduce.compare.read_runs, " ".join(RESULTS.split())
    places = ("breakout/paper", "breakout/paper-bf16",
              "breakout-parts/paper-seed2-part", "breakout-parts/paper-seed3-part")  # fmt: skip
    runs = [run for place in places for run in read_runs(reproduce.compare.DATA / place)]
    assert len(runs) == 7
    means = np.array([reproduce.compare.curve(run.table, np.array([6e5, 1e6])) for run in runs])
    (low, early), (high, late) = means.min(0), means.max(0)
    assert f"(two or three of each seed) {low:.1f} to {high:.1f}." in prose
    assert f"the seven runs here {early:.1f} to {late:.1f})" in prose
    *_, part = runs
    [whole] = [run for run in runs if run.seed == 3 and run is not part]
    last, score = part.table[-1, 0], reproduce.score(part.table)
    [meanwhile] = reproduce.compare.curve(whole.table, np.array([last]))
    said = f"where it had {score:.1f} (the table's run {meanwhile:.1f})"
    assert f"to {last / 1e6:.2f} million steps, {said}" in " ".join(RUNS.split())


def test_the_steps_of_all_runs_are_counted():
    every, atari = 0, 0
    for run in reproduce.compare.read_runs(reproduce.compare.DATA):
        every += run.table[-1, 0]
        atari += run.table[-1, 0] * ("NoFrameskip" in run.env_id)
    said = f"{every / 1e6:.0f} million steps, {atari / 1e6:.0f} million of them Atari's"
    assert said in " ".join(RESULTS.split())


def test_files_exist():
    for name, page in PAGES.items():
        links = re.findall(r"\]\(((?!http|#)[^)#]+)", page)
        for path in [*((ROOT / name).parent / link for link in links), *(
            ROOT / path for path in re.findall(r"\bplots/(?:\w+\.py|data/[\w/-]+\w)", page)
        )]:  # fmt: skip
            assert path.exists(), path


def test_defaults_named_in_readme():
    args, _ = ppo_atari.parse_args([])
    assert f"in K (4, here {args.num_epochs}), the value loss (0.5 · ½" in " ".join(README.split())
    assert f"norm clipped at {args.max_grad_norm}, Adam's ε 1e-5" in README
    assert args.adam_eps == 1e-5


def renew(text):
    """README with the links of its guide at the definitions' first lines."""
    return re.sub(
        r"(\[`(\w+)`\]\((\w+)\.py#L)\d+",
        lambda link: f"{link[1]}{source_of(link[3], link[2])[0]}",
        text,
    )


def test_renewing_mends_links_alone():
    assert renew(README) == README == renew(re.sub(r"#L\d+", "#L1", README))


if __name__ == "__main__":
    (ROOT / "README.md").write_text(renew(README))
