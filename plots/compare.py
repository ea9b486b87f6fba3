"""Learning curves of many runs in one picture, grouped by script or variant, a panel a task.

  python plots/compare.py RUN_DIR ...                      runs, finished or not
  python plots/compare.py plots/data/breakout --out NAME   committed data
  python plots/compare.py RUN_DIR ... --keep breakout/nature
                                                           put runs into plots/data

A run's curve at a step is the mean return of its last 100 episodes by then, the measure of the PPO
paper. A group's thick curve is the mean (or the interquartile mean) over its seeds; those that end
before 95% of its longest run do not count and are thin curves. So are the other single seeds, if
they are fewer than five; else a band is the 95% bootstrap interval over seeds. Published numbers
are lines, or, in a picture of several panels, triangles at the right edge; one out of sight is
written at the edge. Writes NAME.png and NAME.svg. Beside kept data, seed<k>.json says what made
them: the script and its SHA-256, the libraries' versions, the settings, the processor.
"""

import argparse
import gzip
import json
import os
import platform
import re
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

DATA = Path(__file__).resolve().parent / "data"

# whose, of which algorithm, on which task; in pictures a line (Baselines' dotted), or a triangle,
# full for the first to have a task and open for the next. MuJoCo's tasks were older versions than
# -v5, LunarLander's were -v2
PUBLISHED = {
    "PPO paper, 10M steps": {  # Table 6
        "PPO": {
            "BeamRiderNoFrameskip-v4": 1590.0, "BreakoutNoFrameskip-v4": 274.8,
            "PongNoFrameskip-v4": 20.7, "QbertNoFrameskip-v4": 14293.3,
            "SeaquestNoFrameskip-v4": 1204.5, "SpaceInvadersNoFrameskip-v4": 942.5,
        },
    },
    # 1M steps, of 6 seeds, in its repository: benchmarks_mujoco1M.htm
    "OpenAI's Baselines": {
        "PPO": {
            "HalfCheetah-v5": 1668.6, "Hopper-v5": 2316.2, "InvertedDoublePendulum-v5": 7102.9,
            "InvertedPendulum-v5": 809.4, "Reacher-v5": -6.71, "Swimmer-v5": 111.2,
            "Walker2d-v5": 3425.0,
        },
        "TRPO": {
            "HalfCheetah-v5": 1289.7, "Hopper-v5": 1912.9, "InvertedDoublePendulum-v5": 6731.6,
            "InvertedPendulum-v5": 905.1, "Reacher-v5": -4.82, "Swimmer-v5": 95.0,
            "Walker2d-v5": 2342.6,
        },
    },
    # 10M steps of its ppo2: docs.cleanrl.dev/rl-algorithms/ppo
    "OpenAI's Baselines, run by CleanRL's authors": {
        "PPO": {"BreakoutNoFrameskip-v4": 405.7, "PongNoFrameskip-v4": 20.5},
    },
    "PPO paper's Fig. 3, by eye": {  # 1M steps, 3 seeds
        "PPO": {
            "HalfCheetah-v5": 1800, "Hopper-v5": 2330, "InvertedDoublePendulum-v5": 8000,
            "InvertedPendulum-v5": 1000, "Reacher-v5": -7, "Swimmer-v5": 108, "Walker2d-v5": 3460,
        },
        "TRPO": {
            "HalfCheetah-v5": 0, "Hopper-v5": 2100, "InvertedDoublePendulum-v5": 200,
            "InvertedPendulum-v5": 1000, "Reacher-v5": -115, "Swimmer-v5": 121,
            "Walker2d-v5": 1100,
        },
    },
    # 1 run, its mean action evaluated, in the Zoo's benchmark.md; steps may be fewer than here
    "RL Baselines3 Zoo, tuned": {
        "PPO": {
            "CartPole-v1": 500.0, "Pendulum-v1": -172.2, "LunarLander-v3": 242.1,
            "LunarLanderContinuous-v3": 270.9,
        },
        "TRPO": {
            "CartPole-v1": 500.0, "Pendulum-v1": -174.6, "LunarLander-v3": 133.2,
            "LunarLanderContinuous-v3": 262.4,
        },
    },
}  # fmt: skip


class Run(NamedTuple):
    group: str
    env_id: str
    seed: int
    table: np.ndarray  # (episodes, 3): step, return, length
    about: dict | None = None  # what made it: config.json without the run's own paths; if kept,
    # the processor, too


# the same data give the same file: no date, and names that are not random
NO_DATE = {".svg": {"Date": None}}
matplotlib.rcParams["svg.hashsalt"] = "compare"


def fail(message):
    print(f"compare.py: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read_table(path):
    """Columns step, return, length of an episodes.csv or a seed<k>.csv.gz; (episodes, 3).

    ValueError if it is damaged. A last line that is cut short, as in a run going on, is left out.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        names, *rows = text[: text.rfind("\n") + 1].splitlines()
        columns = [names.split(",").index(name) for name in ("step", "return", "length")]
        if not rows:  # np.loadtxt would warn
            return np.zeros((0, 3))
        table = np.loadtxt(rows, delimiter=",", usecols=columns, ndmin=2)
        if not np.isfinite(table).all():
            raise ValueError("a number is missing")
        return table
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as e:
        raise ValueError(f"{path} is damaged: {e!r}") from e


def read_runs(path):
    """The runs that a path holds: a run's folder, or kept data at any level.

    OSError or ValueError if it holds none or one cannot be read.
    """
    path = Path(path)
    if (path / "config.json").exists():
        try:
            about = json.loads((path / "config.json").read_text())
            settings = about["settings"]
            group, env_id, seed = Path(about["script"]).stem, settings["env_id"], settings["seed"]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path / 'config.json'} is damaged: {e!r}") from e
        about["settings"] = {k: v for k, v in settings.items() if k not in ("run_dir", "resume")}
        return [Run(group, env_id, seed, read_table(path / "episodes.csv"), about)]
    files = [path] if path.name.endswith(".csv.gz") else sorted(path.rglob("seed*.csv.gz"))
    if not files or not path.exists():
        wanted = "a run's folder (config.json, episodes.csv) or kept data is wanted"
        raise ValueError(f"{path}: {wanted}")
    runs = []
    for file in files:  # .../<variant>/<env-id>/seed<k>.csv.gz
        env_id = file.parent.name.replace("ALE-", "ALE/")
        beside = about_file(file)
        try:
            seed = int(file.name.removeprefix("seed").removesuffix(".csv.gz"))
            about = json.loads(beside.read_text()) if beside.exists() else None
        except ValueError as e:
            raise ValueError(f"{file}: its name or {beside.name} is damaged: {e!r}") from e
        runs.append(Run(file.parent.parent.name, env_id, seed, read_table(file), about))
    return runs


def data_file(place, env_id, seed, data=None):
    """Where a run is kept; `place` is <experiment>/<variant>."""
    return (data or DATA) / place / env_id.replace("/", "-") / f"seed{seed}.csv.gz"


def about_file(path):
    """Beside a seed<k>.csv.gz, what made it."""
    return path.with_name(path.name.removesuffix(".csv.gz") + ".json")


def replace(path, contents):
    """Write a file whole or not at all, though another process does the same."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(contents)
    beside.replace(path)


def processor():
    """This machine's, and which of the instructions it has that decide its speed (on Linux)."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    named = re.search(r"^model name\s*: (.*)", info, re.M)
    name = named[1] if named else platform.processor() or platform.machine()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return ", ".join([name, *(flag for flag in wanted if flag in info.split())])


def keep(run, place, data=None):
    """Put a run of this machine where `data_file` says; returns the path. ValueError if a longer
    one is there."""
    path = data_file(place, run.env_id, run.seed, data)
    if path.exists():
        there = read_table(path)[-1:, 0]
        if len(there) and (not len(run.table) or run.table[-1, 0] < there):
            raise ValueError(f"{path} goes on to step {there.item():,.0f}, further than this run")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{int(s)},{r:.10g},{int(n)}" for s, r, n in run.table]
    text = "\n".join(["step,return,length", *lines, ""])
    if run.about is not None:
        about = run.about | {"processor": processor()}
        replace(about_file(path), (json.dumps(about, indent=1) + "\n").encode())
    replace(path, gzip.compress(text.encode(), 9, mtime=0))
    return path


def algorithm(group):
    """A group's, by its name: every group that is not called trpo is PPO with some settings."""
    return "TRPO" if group.startswith("trpo") else "PPO"


def curve(table, grid, window=100):
    """Mean return of the last `window` episodes finished by each step of the grid; nan before the
    first and after the last episode."""
    sums = np.concatenate(([0.0], np.cumsum(table[:, 1])))
    end = np.searchsorted(table[:, 0], grid, side="right")
    start = np.maximum(end - window, 0)
    means = (sums[end] - sums[start]) / np.maximum(end - start, 1)
    outside = (end == 0) | (grid > table[-1, 0]) if len(table) else np.ones(len(grid), bool)
    return np.where(outside, np.nan, means)


def interquartile_mean(values):
    """Mean of the middle half of the last axis, the outer values counted in part (rliable's)."""
    ordered = np.sort(values, axis=-1)
    n = ordered.shape[-1]
    weights = np.clip(np.minimum(np.arange(1, n + 1), np.arange(n, 0, -1)) - n / 4, 0, 1)
    return ordered @ (weights / weights.sum())


def average(values, statistic):
    return interquartile_mean(values) if statistic == "iqm" else values.mean(axis=-1)


def interval(values, statistic, resamples=2000, seed=0):
    """95% bootstrap interval over seeds; values (points, seeds) -> low, high (points,)."""
    n = values.shape[-1]
    picks = np.random.default_rng(seed).integers(0, n, (resamples, n))
    means = np.stack([average(values[:, pick], statistic) for pick in picks])
    return np.percentile(means, [2.5, 97.5], axis=0)


def published_scores(env_id, groups, published):
    """[(score, whose, color, which)] of the algorithms in a picture, which = 0, 1, ... of those
    that have the task; a group that is alone in its algorithm shares its color."""
    colors = {}
    for k, group in enumerate(groups):
        colors.setdefault(algorithm(group), []).append(f"C{k}")
    both, scores = len(colors) > 1, []
    for name, own in colors.items():
        color = own[0] if both and len(own) == 1 else "gray"
        known = [(whose, numbers[name][env_id]) for whose, numbers in published.items()
                 if env_id in numbers.get(name, {})]  # fmt: skip
        for which, (whose, score) in enumerate(known):
            scores.append((score, whose + f", {name}" * both, color, which))
    return scores


def draw(runs, out, statistic="mean", published=PUBLISHED, words=None):
    """A panel a task; returns the figure, saved as out.png and out.svg.

    words: {group: what its curve is called}, the group itself where it is missing.
    """
    tasks = sorted({run.env_id for run in runs})
    groups = list(dict.fromkeys(run.group for run in runs))
    whole = {group: Counter() for group in groups}  # numbers of runs by task
    shorter = dict.fromkeys(groups, 0)  # and of all tasks
    columns = {1: 1, 2: 2, 3: 3, 4: 2}.get(len(tasks), 4)
    rows = -(-len(tasks) // columns)
    height = {1: 5, 2: 3.6, 3: 3}.get(columns, 2.4)
    figure = Figure(figsize=(9, 0.8 + height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    lines, entries = {}, {}  # for the legend
    for axes, env_id in zip(panels, tasks, strict=False):
        shown = []
        for k, group in enumerate(groups):
            members = [run for run in runs if (run.env_id, run.group) == (env_id, group)]
            members = [run for run in members if len(run.table)]
            if members:
                width = 2.6 - 1.2 * k / max(1, len(groups) - 1)  # where curves meet, all are seen
                ends = np.array([run.table[-1, 0] for run in members])
                long = ends >= 0.95 * ends.max()
                whole[group][env_id] = int(long.sum())
                shorter[group] += int((~long).sum())
                lines[group], curves = draw_curves(axes, members, long, statistic, f"C{k}", width)
                shown.append(curves[20:])  # not the untrained policy
        scores = published_scores(env_id, groups, published)
        entries |= draw_published(axes, scores, shown, triangles=len(tasks) > 1)
        axes.set_title(env_id, fontsize=10 if columns < 4 else 8.5)
        axes.tick_params(labelsize=9 if columns < 4 else 8)
        axes.set_xlim(left=0)
    handles, names = [*lines.values(), *entries.values()], []
    for group in lines:
        few, many = min(whole[group].values()), max(whole[group].values())
        number = f"{few} to {many}" if few < many else many
        names.append(f"{(words or {}).get(group, group)}, {number} seed{'s' * (many > 1)}"
                     + f", {shorter[group]} shorter" * (shorter[group] > 0))  # fmt: skip
    names += entries
    if len(panels) > len(tasks):
        legend = panels[-1].legend(handles, names, fontsize=7.5, loc="center left",
                                   bbox_to_anchor=(-0.2, 0.5), frameon=False)  # fmt: skip
        legend.set_in_layout(False)  # else its panel's column would be the widest
    else:
        figure.legend(handles, names, fontsize=9, loc="outside upper center",
                      ncols=3 if len(tasks) > 1 else 2)  # fmt: skip
    for axes in panels[len(tasks) :]:
        axes.axis("off")
    numbers = {number for counts in whole.values() for number in counts.values()}
    statistic = {"mean": "mean", "iqm": "interquartile mean"}[statistic]
    thin = any([*shorter.values(), *(1 < n < 5 for n in numbers)])
    mean = f"{'thick' if thin else 'curve'}: {statistic} over seeds"
    notes = [mean * any(n > 1 for n in numbers),
             "thin: single seeds" * thin,
             "band: 95% bootstrap interval over seeds" * any(n >= 5 for n in numbers)]  # fmt: skip
    figure.supxlabel(f"million agent steps\n{'; '.join(filter(None, notes))}", fontsize=9)
    figure.supylabel("return, mean of the last 100 episodes", fontsize=9)
    save(figure, out)
    return figure


def draw_curves(axes, runs, whole, statistic, color, width):
    """A group's curves on one task; whole: (runs,), which are those that the thick curve is of.
    Returns that one and those of single runs, (400, runs)."""
    grid = np.linspace(0, max(run.table[-1, 0] for run in runs), 400)
    curves, millions = np.stack([curve(run.table, grid) for run in runs], axis=-1), grid / 1e6
    everyone, count = ~np.isnan(curves[:, whole]).any(axis=-1), whole.sum()
    single = np.ones_like(whole) if 1 < count < 5 else ~whole
    axes.plot(millions, curves[:, single], color=color, lw=0.7, alpha=0.6)
    if count >= 5:
        low, high = interval(curves[everyone][:, whole], statistic)
        axes.fill_between(millions[everyone], low, high, color=color, alpha=0.2, lw=0)
    means = average(curves[everyone][:, whole], statistic)
    [line] = axes.plot(millions[everyone], means, color=color, lw=width)
    return line, curves


def draw_published(axes, scores, shown, triangles):
    """Fit the panel's height to the curves `shown`, the first published number of each algorithm
    and others near them; draw those in sight, and write the others at the edge. Returns {label:
    line or triangle}."""
    shown = [*shown, *(np.array(score) for score, _, _, which in scores if which == 0)]
    if not shown:
        return {}
    low, high = (f([f(x) for x in shown]) for f in (np.nanmin, np.nanmax))
    reach = 0.25 * (high - low)  # a number far off would squeeze the curves
    near = [score for score, *_ in scores if low - reach < score < high + reach]
    low, high = min([low, *near]), max([high, *near])
    margin = 0.05 * (high - low) or 1
    axes.set_ylim(low - margin, high + margin)
    entries = {}
    for score, whose, color, which in scores:
        if not low <= score <= high:
            text = f"{'◀◁'[min(which, 1)]} {score:g}" if triangles else f"{whose}: {score:g}"
            edge = 0.02 + 0.06 * len(axes.texts)  # one above the other
            text, y = (f"{text} ↓", edge) if score < low else (f"{text} ↑", 1 - edge)
            axes.text(0.98, y, text, color=color, fontsize=8, ha="right",
                      va="bottom" if score < low else "top",
                      transform=axes.transAxes)  # fmt: skip
        elif not triangles:
            style = ":" if whose.startswith("OpenAI's Baselines") else "--"
            entries[f"{whose}: {score:g}"] = axes.axhline(score, ls=style, color=color, lw=1.2)
        else:  # of different sizes, so that all are seen where they coincide
            size = (4 if color == "C1" else 6) + 3 * (which > 0)
            [entries[whose]] = axes.plot(
                1, score, "<", color=color, mfc="none" if which else color, ls="none", ms=size,
                transform=axes.get_yaxis_transform(), clip_on=False, zorder=3,
            )  # fmt: skip
    return entries


def save(figure, out):
    for suffix in (".png", ".svg"):
        figure.savefig(str(out) + suffix, dpi=160, metadata=NO_DATE.get(suffix))


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("paths", nargs="+", metavar="RUN_DIR", help="or kept data")
    parser.add_argument("--out", default="compare", help="name of the pictures")
    parser.add_argument("--statistic", choices=("mean", "iqm"), default="mean")
    parser.add_argument("--keep", metavar="EXPERIMENT/VARIANT", help="put the runs into plots/data")
    args = parser.parse_args(argv)
    try:
        runs = [run for path in args.paths for run in read_runs(path)]
        if args.keep:  # they become one variant
            runs = [run._replace(group=args.keep) for run in runs]
        names = [run[:3] for run in runs]
        for name in names:
            if names.count(name) > 1:
                fail("two runs of {}, {}, seed {}: name only one of their folders"
                     .format(*name))  # fmt: skip
        if args.keep:
            for run in runs:
                print(keep(run, args.keep))
            return
    except (OSError, ValueError) as e:
        fail(e)
    draw(runs, args.out, args.statistic)
    for group, env_id, seed, table, _ in sorted(runs, key=lambda run: run[:3]):
        score = f"{table[-100:, 1].mean():.1f} at step {table[-1, 0]:,.0f}" if len(table) else "-"
        print(f"{env_id}, {group}, seed {seed}: last 100 episodes {score}")
    print(f"{args.out}.png, {args.out}.svg")


if __name__ == "__main__":
    main()
