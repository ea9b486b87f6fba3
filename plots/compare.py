"""Compare runs: their learning curves in one picture, a panel for each task, and their scores.

  python plots/compare.py runs/*                       run directories, finished or not
  python plots/compare.py plots/data/figure3           the data of an experiment
  python plots/compare.py runs/a runs/b --keep NAME    copy the runs' data to plots/data/NAME

Runs of the same script and settings, whatever their seed, are one group. A group is named by the
settings in which it differs from the others, and by the script's version (the beginning of its
SHA-256) if that differs. If a run was repeated, the longest of its seed counts, and of equally
long ones the newest.

A curve is the mean return of the last 100 episodes, the measure of the PPO paper, averaged over
the group's seeds. (Of short runs it is the mean of fewer episodes: a tenth of what the shortest
run has, at least 10.) Thin curves are single seeds. With five seeds or more a band, the 95%
bootstrap interval of the mean, takes their place. Horizontal lines are published scores. What
cannot be read as a run is named and left out.
"""

import json
import os
import platform
import re
import sys
import textwrap
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NamedTuple

os.environ["MPLBACKEND"] = "agg"  # draw to files; a notebook's backend may not be here

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy.stats import bootstrap

matplotlib.rcdefaults()  # a user's matplotlibrc may ask for LaTeX, where there is none

DATA = Path(__file__).resolve().parent / "data"
SAME_LEARNING = [  # settings that do not change what is learned
    "env_id", "seed", "threads", "compile", "cuda", "cuda_graphs", "run_dir", "goal_score",
    "resume", "evaluate", "episodes", "eval_every", "render", "video", "checkpoint_every",
]  # fmt: skip

MUJOCO = ("HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5",
          "Reacher-v5", "Swimmer-v5", "Walker2d-v5")  # fmt: skip
SMALL = ("CartPole-v1", "Pendulum-v1", "LunarLander-v3", "LunarLanderContinuous-v3")
GAMES = tuple(f"{name}NoFrameskip-v4" for name in
              ("BeamRider", "Breakout", "Pong", "Qbert", "Seaquest", "SpaceInvaders"))  # fmt: skip


def of_tasks(tasks, **scores):
    return {name: dict(zip(tasks, own, strict=True)) for name, own in scores.items()}


# source: {algorithm: {task: score}}. MuJoCo's tasks were older versions than -v5, LunarLander's -v2
PUBLISHED = {
    # Table 6
    "PPO paper, 10M steps": of_tasks(GAMES, PPO=(1590.0, 274.8, 20.7, 14293.3, 1204.5, 942.5)),
    # 10M steps of its ppo2; CleanRL's table with EnvPool: docs.cleanrl.dev/rl-algorithms/ppo
    "Baselines, run by CleanRL's authors": of_tasks(
        GAMES, PPO=(2835.7, 405.7, 20.5, 15228.3, 1518.3, 1019.8)),
    # 1M steps, of 6 seeds, in its repository: benchmarks_mujoco1M.htm
    "OpenAI's Baselines": of_tasks(
        MUJOCO, PPO=(1668.6, 2316.2, 7102.9, 809.4, -6.71, 111.2, 3425.0),
        TRPO=(1289.7, 1912.9, 6731.6, 905.1, -4.82, 95.0, 2342.6)),
    "PPO paper's Fig. 3, by eye": of_tasks(  # 1M steps, 3 seeds
        MUJOCO, PPO=(1800, 2330, 8000, 1000, -7, 108, 3460),
        TRPO=(0, 2100, 200, 1000, -115, 121, 1100)),
    # 1 run, its mean action evaluated, in the Zoo's benchmark.md; steps may be fewer than here
    "RL Baselines3 Zoo": of_tasks(
        SMALL, PPO=(500.0, -172.2, 242.1, 270.9), TRPO=(500.0, -174.6, 133.2, 262.4)),
}  # fmt: skip

# ---------------------------------------------------------------------------------------- Runs


class Run(NamedTuple):
    """A run's data. episodes: columns step, return, length; about: its config.json."""

    path: Path
    about: dict
    episodes: pd.DataFrame
    label: str = ""

    @property
    def env_id(self):
        return self.about["settings"]["env_id"]

    @property
    def seed(self):
        return self.about["settings"]["seed"]

    @property
    def algorithm(self):
        return "TRPO" if self.about["script"].startswith("trpo") else "PPO"

    @property
    def score(self):
        """Mean return of the last 100 episodes."""
        return self.episodes["return"].tail(100).mean()

    @property
    def last_step(self):
        """Where the last episode ended."""
        return max(self.episodes["step"], default=0)


def read_run(path):
    """The run in a run directory, or in a file seed<k>.csv.gz, which has a .json beside it."""
    is_dir = path.is_dir()
    file = path / "config.json" if is_dir else path.with_suffix("").with_suffix(".json")
    about = json.loads(file.read_text())
    if not {"script", "settings"} <= {*about} or not {"env_id", "seed"} <= {*about["settings"]}:
        raise ValueError(f"{file.name} is not that of a run")
    episodes = pd.read_csv(path / "episodes.csv" if is_dir else path).dropna()  # a half line
    episodes[["step", "return", "length"]].astype(float)  # raises an error where it is no number
    return Run(path, about, episodes)


def read_runs(paths):
    """The runs in run directories and folders of data. The newest of equal runs comes last. Says
    what it leaves out."""
    found, runs = [], []
    for path in map(Path, paths):
        own = [*path.rglob("seed*.csv.gz"), *(x.parent for x in path.rglob("config.json"))]
        if not own:
            print(f"{path}: left out, it is neither a run directory nor a folder of data")
        found += own
    for path in sorted(sorted(found), key=os.path.getmtime):
        try:
            runs.append(read_run(path))
        except (OSError, EOFError, ValueError, LookupError, TypeError) as e:  # EOFError: of gzip
            print(f"{path}: left out, it cannot be read as a run ({' '.join(str(e).split()):.120})")
    return runs or sys.exit("there is no run to compare")


def name_groups(runs):
    """Label each run with its script, if there are several, and the settings in which it differs
    (or its script's version) from other runs of the same script and task."""
    settings = [
        {"version": run.about.get("sha256", "")[:6]} | run.about["settings"] for run in runs
    ]
    scripts = [Path(run.about["script"]).stem for run in runs]
    keys = [scripts, [run.env_id for run in runs]]
    table = pd.DataFrame(settings, dtype=object).drop(columns=SAME_LEARNING, errors="ignore")
    several = table.groupby(keys).nunique() > 1
    differs = several.groupby(level=0).any()
    labeled = []
    for run, script, own in zip(runs, scripts, settings, strict=True):
        words = [in_words(name, own[name]) for name in own if differs.get(name, {}).get(script)]
        if len(set(scripts)) > 1 or not words:
            words.insert(0, script)
        labeled.append(run._replace(label=", ".join(words)))
    return labeled


def in_words(name, value):
    """A setting as a group's name has it: clip_eps 0.1, bf16, no norm_obs"""
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


def drop_repeated(runs):
    """The longest run of each group, task and seed, and of equally long ones the last. Says which
    others it leaves out."""
    by_length = sorted(runs, key=lambda run: run.last_step)
    longest = {(run.label, run.env_id, run.seed): run for run in by_length}
    for run in runs:
        kept = longest[run.label, run.env_id, run.seed]
        if kept is not run:
            print(f"{run.path}: left out, {kept.path} repeats it")
    return list(longest.values())


def processor(cuda):
    """This machine's processor, its family and model (on AMD, only they tell Zen 4 from Zen 5) and
    its instructions for matrices (on Linux); cuda: and its GPU."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)", info, re.M))
    words = [found.pop("model name", platform.machine()), *map(" ".join, sorted(found.items()))]
    words += [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if x in info.split()]
    if cuda:
        import torch  # which takes seconds

        words += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(words)


def keep(run, folder):
    """Write a run's data to folder/<task>/seed<k>.csv.gz and .json."""
    path = folder / run.env_id.replace("/", "-") / f"seed{run.seed}.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in run.about["settings"].items() if k not in ("run_dir", "resume")}
    about = run.about | {"settings": settings, "processor": processor(settings.get("cuda"))}
    if len(seconds := run.episodes.get("seconds", [])):  # of the whole run
        about["seconds"] = float(seconds.iloc[-1])
    path.with_name(f"seed{run.seed}.json").write_text(json.dumps(about, indent=1) + "\n")
    compression = {"method": "gzip", "mtime": 0}  # the same data give the same file
    run.episodes[["step", "return", "length"]].to_csv(path, index=False, compression=compression)
    return path


# ------------------------------------------------------------------------------------- Scores


def number(x):
    """A score, rounded to about three digits."""
    if pd.isna(x):
        return "–"
    digits = 0 if abs(x) >= 100 or isinstance(x, int) else 1 if abs(x) >= 10 else 2
    return f"{x:.{digits}f}"


def spread(values):
    """mean ± sample standard deviation, the latter if there are several values"""
    mean = number(np.mean(values))
    if len(values) < 2:
        return mean
    digits = len(mean.partition(".")[2])
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def markdown(table):
    """A DataFrame as a table in Markdown, without its index."""
    rows = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def score_table(runs, score=lambda run: run.score, interval=False):
    """A row for each group and task: its runs' scores beside the published ones."""
    rows = []
    for (label, env_id), group in by_group(runs):
        scores = np.array([score(run) for run in group])
        row = {"": label, "task": env_id, "seeds": len(group), "score": spread(scores)}
        if interval:
            row["95% interval"] = bounds([scores])
        published = published_scores(env_id, group[0].algorithm)
        rows.append(row | {source: number(score) for source, score in published.items()})
    return pd.DataFrame(rows).fillna("–")


def by_group(runs):
    """((label, task), its runs), in the order of the labels, then the tasks."""
    labels = list(dict.fromkeys(run.label for run in runs))
    keys = sorted({(labels.index(run.label), run.env_id) for run in runs})
    return [((labels[k], env_id), [r for r in runs if (r.label, r.env_id) == (labels[k], env_id)])
            for k, env_id in keys]  # fmt: skip


def published_scores(env_id, algorithm):
    """{source: score} for a task"""
    return {source: scores[algorithm][env_id] for source, scores in PUBLISHED.items()
            if env_id in scores.get(algorithm, {})}  # fmt: skip


def confidence(samples, statistic=np.mean, resamples=9999):
    """95% bootstrap interval (percentiles) of a statistic of independent samples, each (..., n);
    nan for fewer than three values."""
    if np.shape(samples[0])[-1] < 3:
        return np.nan, np.nan
    return bootstrap(samples, statistic, n_resamples=resamples, method="percentile", axis=-1,
                     vectorized=True, rng=np.random.default_rng(0)).confidence_interval  # fmt: skip


def bounds(samples, statistic=np.mean):
    """The interval of a statistic in words; a dash if there is none."""
    low, high = confidence(samples, statistic)
    return "–" if np.isnan(low) else f"{number(low)} to {number(high)}"


# ------------------------------------------------------------------------------------- Picture

COLORS = [matplotlib.color_sequences["petroff10"][k] for k in (0, 6, 4, 2, 5, 8, 1, 3, 9, 7)]
MAXIMUM = {"CartPole-v1": 500}  # the best return there can be


def curve(episodes, steps, window=100):
    """Mean return of the last `window` episodes finished by each of the steps (n,); (n,), nan
    before the first episode and where one more should have finished after the last."""
    means = episodes.set_index("step")["return"].rolling(window, min_periods=1).mean()
    gaps = np.diff(means.index, prepend=0)  # of several actors, some episodes end at one step
    return means.asof(steps).where(steps <= means.index.max() + gaps.max()).to_numpy()


def draw(runs, path, published=True, window=None, scale=("linear", {})):
    """Draw a panel for each task, a look for each label; returns the figure, saved at `path`.

    published: whether to draw the published scores; window: how many episodes are averaged
    scale: of the returns, Matplotlib's name and options
    """
    tasks = sorted({run.env_id for run in runs})
    looks = looks_of(list(dict.fromkeys(run.label for run in runs)))
    window = window or int(np.clip(min(len(run.episodes) for run in runs) // 10, 10, 100))
    columns = min(len(tasks), 3 if len(tasks) > 4 else 2)
    rows = -(-len(tasks) // columns)
    size = {1: (6.4, 4.2), 2: (8, 0.4 + 3 * rows)}.get(columns, (10, 0.4 + 2.8 * rows))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, env_id in zip(panels, tasks, strict=False):
        own = [run for run in runs if run.env_id == env_id]
        ends = {}
        for (label, _), group in by_group(own):
            ends[label] = draw_group(axes, group, looks[label], label, window)
        axes.set_yscale(scale[0], **scale[1])
        fit_height(axes)
        if published:
            draw_published(axes, env_id, own, looks)
        elif env_id in MAXIMUM:
            axes.axhline(MAXIMUM[env_id], color="black", lw=1, zorder=1, label="the best possible")
        axes.set(title=env_id, xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 1M
        axes.grid(alpha=0.3)
        if len(tasks) == 1 and in_order(looks):
            write_values(axes, ends, looks)
    for axes in panels[len(tasks) :]:
        axes.axis("off")
    entries = {}
    for axes in panels:
        entries |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = list(dict.fromkeys([*looks, *entries]))  # the groups first
    width = int(11 * figure.get_figwidth())  # of a line, in letters, 6 of them for the sample
    labels = [textwrap.fill(name, width - 6) for name in names]
    across = int(np.clip(width // (6 + max(map(len, names))), 1, 2 if columns == 1 else 3))
    lines = "\n".join(labels).count("\n") + 1
    figure.set_figheight(figure.get_figheight() + 0.2 * (lines // across))
    figure.legend([entries[k] for k in names], labels, loc="outside upper center", ncols=across)
    sizes = {len(group) for _, group in by_group(runs)}
    says = ["thick: mean of the seeds"] * (max(sizes) > 1)
    says += ["thin: one seed"] * bool({2, 3, 4} & sizes)
    says += ["band: 95% interval of the mean"] * (max(sizes) >= 5)
    figure.supxlabel("\n".join(["agent steps", "; ".join(says)]).strip(), size="medium")
    figure.supylabel(f"return, mean of the last {window} episodes", size="medium")
    figure.savefig(path, dpi=150)
    return figure


def in_order(labels):
    """Whether labels differ in a number alone, as ε 0.1, ε 0.2, ε 0.3 do; these numbers."""
    parts = [label.rpartition(" ") for label in labels]
    try:
        values = [float(value) for *_, value in parts]
    except ValueError:
        return []
    return values if len(values) > 2 and len({words for words, *_ in parts}) == 1 else []


def looks_of(labels):
    """{label: its colour and line style}. They differ in both, so that one is seen below another,
    on grey paper and by the colour-blind. Numbers in order get a range of colours."""
    styles = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 3)), (0, (1, 3)))
    colors, order = COLORS, labels
    if values := in_order(labels):
        colors = matplotlib.colormaps["inferno"](np.linspace(0, 0.85, len(values)))
        order = np.array(labels)[np.argsort(values)]
    return {label: {"color": colors[k % len(colors)], "ls": styles[k % 7]}
            for k, label in enumerate(order)}  # fmt: skip


def draw_group(axes, runs, style, label, window):
    """The mean curve of a group on one task, to where its shortest run ends; single seeds thin, or
    a band from five seeds on. Returns the mean curve's last value."""
    grid = np.linspace(0, max(run.last_step for run in runs), 300)
    curves = np.stack([curve(run.episodes, grid, window) for run in runs])
    whole = ~np.isnan(curves).any(axis=0)
    if len(runs) >= 5 and whole.any():
        low, high = confidence([curves[:, whole].T], resamples=1000)
        axes.fill_between(grid[whole], low, high, color=style["color"], alpha=0.2, lw=0)
    elif len(runs) > 1:
        axes.plot(grid, curves.T, color=style["color"], lw=0.7, alpha=0.6)
    mean = curves[:, whole].mean(0)
    axes.plot(grid[whole], mean, **style, lw=2, label=label)
    return mean[-1] if len(mean) else np.nan


def write_values(axes, ends, looks):
    """Write each curve's number at its end, none above another."""
    low, high = axes.get_ylim()
    place = -np.inf
    for label, end in sorted(ends.items(), key=lambda item: item[1]):
        place = max(end, place + 0.05 * (high - low))
        axes.annotate(label.rpartition(" ")[2], (1, place), (4, 0), ("axes fraction", "data"),
                      "offset points", color=looks[label]["color"], va="center")  # fmt: skip


def fit_height(axes):
    """Leave the untrained policy's returns, the first twentieth, out of the panel's height."""
    points = [line.get_xydata() for line in axes.get_lines()]
    points += [path.vertices for band in axes.collections for path in band.get_paths()]
    x, y = np.concatenate(points).T
    y = y[(x > 0.05 * x.max()) & ~np.isnan(y)]
    margin = 0.05 * np.ptp(y) or 1
    axes.set_ylim(y.min() - margin, y.max() + margin)


def draw_published(axes, env_id, runs, looks):
    """Published scores as horizontal lines, where they are not far from the curves."""
    styles = dict(zip(PUBLISHED, ("--", "-.", ":", "--", "-."), strict=True))
    algorithms = {run.algorithm: run.label for run in runs}
    for algorithm, label in algorithms.items():
        color = looks[label]["color"] if len(algorithms) > 1 else "black"
        for source, score in published_scores(env_id, algorithm).items():
            low, high = axes.get_ylim()
            if low - 0.6 * (high - low) <= score <= high + 0.6 * (high - low):
                name = source if len(algorithms) == 1 else f"{source}, {algorithm}"
                axes.axhline(score, ls=styles[source], lw=1.2, color=color, label=name)
                axes.set_ylim(min(low, score - 0.02 * (high - low)),
                              max(high, score + 0.02 * (high - low)))  # fmt: skip


def main(argv=None):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="RUN_DIR", help="or a folder of data")
    parser.add_argument("--out", default="compare.png", help="name of the picture")
    parser.add_argument("--keep", metavar="NAME", help="copy the runs' data to plots/data/NAME")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if not args.keep and not out.parent.is_dir():
        sys.exit(f"--out {out}: there is no folder {out.parent}")
    if not args.keep and out.suffix[1:] not in ("", *Figure().canvas.get_supported_filetypes()):
        sys.exit(f"--out {out}: need a picture's name, such as compare.png")
    runs = drop_repeated(name_groups(read_runs(args.paths)))
    runs.sort(key=lambda run: run.label)
    for run in runs:
        own = run.about["settings"]
        wanted = own.get("total_steps", 0)
        wanted -= wanted % (own.get("num_steps", 1) * own.get("num_envs", 1))  # whole rollouts
        if run.last_step < 0.9 * wanted:
            print(f"{run.path}: its data end at step {run.last_step:,} of {wanted:,}")
        if run.episodes.empty:
            print(f"{run.path}: left out, no episode is finished")
    runs = [run for run in runs if len(run.episodes)] or sys.exit("no episode is finished")
    if args.keep:
        if len({(run.env_id, run.seed) for run in runs}) < len(runs):
            sys.exit("--keep: two runs have the same task and seed; keep each group by itself")
        for run in runs:
            print(keep(run, DATA / args.keep))
        return
    draw(runs, args.out)
    print(markdown(score_table(runs)))
    print(f"\nscore: mean return of the last 100 episodes, ± std over seeds; curves: {args.out}")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(errors="replace")  # one that cannot show ε shows ?
    main()
