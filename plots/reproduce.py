"""Run the experiments behind the papers' figures and tables, draw them, print them side by side.

  python plots/reproduce.py figure1                   one term of L^CLIP as a function of the ratio
  python plots/reproduce.py figure2                   the surrogates along the first update, Hopper
  python plots/reproduce.py small-tasks               PPO and TRPO on four small tasks
  python plots/reproduce.py figure3                   PPO and TRPO on seven MuJoCo tasks
  python plots/reproduce.py pendulums                 TRPO on two pendulums: batch, reward scale
  python plots/reproduce.py steps                     PPO with and without what the paper leaves out
  python plots/reproduce.py objectives                PPO's four objectives on HalfCheetah
  python plots/reproduce.py table1                    every objective of PPO on those seven tasks
  python plots/reproduce.py table1-plain              the same without the extras, actions clipped
  python plots/reproduce.py breakout                  Table 5, both networks; Baselines' settings
  python plots/reproduce.py precision                 Breakout in float32 and in bfloat16
  python plots/reproduce.py figure3 --draw-only       what data there are
  python plots/reproduce.py table1 --seeds 1 --only Hopper Swimmer         runs of these names
  python plots/reproduce.py breakout --jobs 1 --cuda --compile --bf16      a script's own flags

The scripts run as a user runs them. A run lives in runs/<experiment>/<variant>/<env-id>/seed<k>,
with its output beside it in seed<k>.log; once it has exited with 0, its episodes are kept in
plots/data/<experiment>/<variant>/<env-id>/seed<k>.csv.gz. It is finished when that file reaches 95%
of its steps: the last episode may be cut short, and data kept by hand may be of a run that was not
over. Started again, this skips what is finished and goes on with what was interrupted.

Flags not listed here go to the scripts as they are. All but --cuda and --[no-]compile, which change
no setting, become part of the variants' names, as in nature-bf16 or ppo-total-steps-20000.
"""

import argparse
import fcntl
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import compare
import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
SAME_SETTINGS = ("--cuda", "--compile", "--no-compile")
PATIENCE = 60  # seconds that the runs get to write their records when all shall stop

sys.path.insert(0, str(ROOT))  # the scripts, imported where they are needed: torch takes seconds

# --------------------------------------------------------------------------------- Experiments

PPO, TRPO, ATARI = "ppo_continuous.py", "trpo_continuous.py", "ppo_atari.py"
SMALL = ("CartPole-v1", "Pendulum-v1", "LunarLander-v3", "LunarLanderContinuous-v3")
MUJOCO = ("HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5",
          "Reacher-v5", "Swimmer-v5", "Walker2d-v5")  # fmt: skip
PENDULUMS = ("InvertedDoublePendulum-v5", "InvertedPendulum-v5")
BREAKOUT = ("BreakoutNoFrameskip-v4",)

TABLE1 = {  # of the PPO paper: a row's average normalised score, and the flags that give the row
    "none": (-0.39, "--objective none"),
    "clip-0.1": (0.76, "--clip-eps 0.1"),
    "clip-0.2": (0.82, ""),
    "clip-0.3": (0.70, "--clip-eps 0.3"),
    "kl-adaptive-0.003": (0.68, "--objective kl-adaptive --kl-target 0.003"),
    "kl-adaptive-0.01": (0.74, "--objective kl-adaptive --kl-target 0.01"),
    "kl-adaptive-0.03": (0.71, "--objective kl-adaptive --kl-target 0.03"),
    "kl-fixed-0.3": (0.62, "--objective kl-fixed --kl-beta 0.3"),
    "kl-fixed-1": (0.71, "--objective kl-fixed --kl-beta 1"),
    "kl-fixed-3": (0.72, "--objective kl-fixed --kl-beta 3"),
    "kl-fixed-10": (0.69, "--objective kl-fixed --kl-beta 10"),
}
PLAIN = (
    " --no-norm-obs --no-norm-reward --norm-adv none --no-orthogonal --anneal none"
    " --max-grad-norm 0 --adam-eps 1e-8"
)
PPO1 = "--norm-adv rollout --no-norm-reward --max-grad-norm 0 --anneal both"  # Baselines' first
PAPER_1E_3 = "--network paper --learning-rate 1e-3"  # the step size of the authors' first code
BASELINES = "--num-epochs 4 --vf-coef 0.25 --clip-value-loss --anneal learning-rate"

# those that tests/benchmarks/throughput.py times, over the first million steps
SB3 = "--num-epochs 4 --vf-coef 0.5 --total-steps 1000000"


class Variant(NamedTuple):
    """A curve of a picture, a row of a table: a script with some flags, on some tasks.

    place: <experiment>/<variant> of its folders; equal settings share one, and run once.
    words: what it is called in pictures
    """

    name: str
    place: str
    script: str | None  # None: random actions
    tasks: tuple
    flags: str = ""
    words: str = ""


def row_of_table1(row, tasks=MUJOCO):
    """clip-0.2 is Figure 3's PPO, and nobody runs it twice."""
    _, flags = TABLE1[row]
    return Variant(row, f"table1/{row}" if flags else "figure3/ppo", PPO, tasks, flags)


RANDOM = Variant("random", "table1/random", None, MUJOCO)

# fmt: off
EXPERIMENTS = {
    "small-tasks": [
        Variant("ppo", "small-tasks/ppo", PPO, SMALL, words="PPO"),
        Variant("trpo", "small-tasks/trpo", TRPO, SMALL, words="TRPO"),
    ],
    "figure3": [
        Variant("ppo", "figure3/ppo", PPO, MUJOCO, words="PPO"),
        Variant("trpo", "figure3/trpo", TRPO, MUJOCO, words="TRPO"),
    ],
    "pendulums": [
        Variant("trpo", "figure3/trpo", TRPO, PENDULUMS, words="TRPO, defaults"),
        Variant("trpo-no-norm-reward", "pendulums/trpo-no-norm-reward", TRPO, PENDULUMS,
                "--no-norm-reward", "rewards not scaled"),
        Variant("trpo-5000", "pendulums/trpo-5000", TRPO, PENDULUMS[1:],
                "--num-steps 5000 --minibatch-size 100", "5,000 steps, not 1,024"),
    ],
    "steps": [
        Variant("minibatch", "figure3/ppo", PPO, MUJOCO, words="minibatch (default)"),
        Variant("rollout", "steps/rollout", PPO, MUJOCO, "--norm-adv rollout"),
        Variant("ppo1", "steps/ppo1", PPO, MUJOCO, PPO1),
        Variant("plain", "table1-plain/clip-0.2", PPO, MUJOCO, PLAIN),
    ],
    "objectives": [
        row_of_table1(row, ("HalfCheetah-v5",))._replace(words=words)
        for row, words in (
            ("none", "neither clipped nor penalised"), ("clip-0.2", "clipped, ε 0.2"),
            ("kl-adaptive-0.01", "adaptive KL penalty, target 0.01"),
            ("kl-fixed-1", "fixed KL penalty, β 1"),
        )
    ],
    "table1": [RANDOM, *map(row_of_table1, TABLE1)],
    "table1-plain": [
        RANDOM,
        *(
            Variant(row, f"table1-plain/{row}", PPO, MUJOCO, flags + PLAIN)
            for row, (_, flags) in TABLE1.items()
        ),
    ],
    "breakout": [
        Variant("nature", "breakout/nature", ATARI, BREAKOUT, words="the defaults"),
        Variant("paper", "breakout/paper", ATARI, BREAKOUT, "--network paper",
                "Sec. 6.4's network"),
        Variant("lr-1e-3-paper", "breakout/lr-1e-3-paper", ATARI, BREAKOUT, PAPER_1E_3,
                "Sec. 6.4's network, step size 1e-3"),
        Variant("baselines", "breakout/baselines", ATARI, BREAKOUT, BASELINES,
                "Baselines' settings"),
    ],
    "precision": [
        Variant("float32", "precision/float32", ATARI, BREAKOUT, SB3),
        Variant("bfloat16", "precision/bfloat16", ATARI, BREAKOUT, SB3 + " --bf16"),
    ],
}
# fmt: on
SEEDS = {"figure2": 1, "small-tasks": 5, "figure3": 5, "precision": 4}  # of the others: 3
SHORT = ("precision",)  # runs of so few steps that no published score is near


class Run(NamedTuple):
    """One command. name: <variant>/<env-id>/seed<k>; folder: the run's; data: its kept episodes."""

    name: str
    place: str
    script: str | None
    env_id: str
    seed: int
    flags: tuple
    steps: int
    folder: Path
    data: Path


@cache
def total_steps(script, env_id, flags):
    """Agent steps of a run with these flags, which the script itself checks and may refuse."""
    module = importlib.import_module(Path(script).stem)
    default, _ = module.parse_args([])
    settings, _ = module.parse_args(["--env-id", env_id, *flags])
    own = {"env_id": env_id, "seed": default.seed, "threads": default.threads, "goal_score": None}
    for name, value in own.items():
        if getattr(settings, name) != value:
            raise ValueError(f"--{name.replace('_', '-')}: not for the runs of an experiment")
    return settings.total_steps


def runs_of(variants, args):
    """The runs that args asks for, a seed of everything before the next seed."""
    added = [flag for flag in args.flags if flag not in SAME_SETTINGS]
    suffix = "".join("-" + flag.removeprefix("--").replace("/", "-") for flag in added)
    runs = []
    for seed in range(1, args.seeds + 1):
        for variant in variants:
            if variant.script is None and seed > 1:
                continue
            more = suffix if variant.script else ""
            flags = (*variant.flags.split(), *args.flags)
            place = variant.place + more
            for env_id in variant.tasks:
                leaf = Path(env_id.replace("/", "-"), f"seed{seed}")
                name = f"{variant.name}{more}/{leaf}"
                if not any(text in name for text in args.only):
                    continue
                runs.append(Run(
                    name, place, variant.script, env_id, seed, flags,
                    total_steps(variant.script, env_id, flags) if variant.script else 0,
                    args.runs_dir / place / leaf,
                    compare.data_file(place, env_id, seed, args.data_dir),
                ))  # fmt: skip
    return runs


def covers(table, steps):
    """Whether a run's episodes are those of the whole run."""
    return len(table) > 0 and table[-1, 0] >= 0.95 * steps


def finished(run):
    return run.data.exists() and covers(compare.read_table(run.data), run.steps)


# ------------------------------------------------------------------------------------- Running


def steps_done(folder):
    """Agent steps by the last episode that a run has recorded."""
    try:  # what follows the last newline is not whole
        last = (folder / "episodes.csv").read_bytes().rsplit(b"\n", 2)[-2]
        return int(last.split(b",")[0])
    except (OSError, ValueError, IndexError):  # no folder, no episode
        return 0


def command(run, args):
    """What starts a run, or goes on with it. A folder that cannot be gone on with is moved aside:
    it has no checkpoint, or is of a run over another number of steps (the script's own changed)."""
    threads = ["--threads", str(args.threads)]
    if (run.folder / "checkpoint.pt").exists():
        settings = json.loads((run.folder / "config.json").read_text())["settings"]
        if settings["total_steps"] == run.steps:
            return [sys.executable, run.script, "--resume", str(run.folder), *threads]
    if run.folder.exists():
        run.folder.rename(f"{run.folder}-aside-{time.strftime('%Y%m%d-%H%M%S')}")
    return [sys.executable, run.script, "--env-id", run.env_id, "--seed", str(run.seed), *threads,
            *run.flags, "--run-dir", str(run.folder)]  # fmt: skip


def lock(run):
    """The run's log, locked; None if another process has it: a script that outlived the one that
    started it, or a second of these. The lock lasts until the script, too, has closed the log."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = open(run.folder.with_name(f"{run.folder.name}.log"), "a")  # noqa: SIM115
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return log
    except BlockingIOError:
        log.close()
        return None


def start(run, log, args):
    """The run's process, outside the terminal's foreground: Ctrl-C is for `stop` to hand on."""
    words = command(run, args)
    print("$", shlex.join(words), file=log, flush=True)
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    return subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log,
                            stderr=subprocess.STDOUT, process_group=0)  # fmt: skip


def outcome(run, process, log, args):
    """Keep the data of a run that is over. Returns what went wrong, or None."""
    if process.returncode == 0:
        try:
            [record] = compare.read_runs(run.folder)
            compare.keep(record, run.place, args.data_dir)
            return None
        except (OSError, ValueError) as e:
            return str(e)
    said = Path(log.name).read_text(errors="replace").strip().splitlines()
    return f"exit status {process.returncode}: {said[-1]} ({log.name})"


def stop(processes, interrupts):
    """Let them write their records; kill them when patience is over, or at the second Ctrl-C."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes) and len(interrupts) < 2:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()


def launch(runs, args):
    """Do the runs, args.jobs at a time. Returns {name: what went wrong} of those that failed, and
    whether Ctrl-C or SIGTERM came in between."""
    waiting, active, failures, over = list(runs), {}, {}, 0
    progress = {run.name: min(steps_done(run.folder), run.steps) for run in runs}
    bar = tqdm(total=sum(run.steps for run in runs), initial=sum(progress.values()),
               unit=" steps", unit_scale=True, smoothing=0, disable=None)  # fmt: skip

    def end(run, log, problem=None):
        nonlocal over
        log.close()
        over, progress[run.name] = over + 1, run.steps
        done = f"{over} of {len(runs)} runs; {run.name}"
        if problem is None:
            bar.write(f"{done}: {number(score(compare.read_table(run.data)))}")
        else:
            failures[run.name] = problem
            bar.write(f"{done} FAILED, {problem}", file=sys.stderr)

    interrupts, said = [], False
    handlers = {which: signal.signal(which, lambda *_: interrupts.append(True))
                for which in (signal.SIGINT, signal.SIGTERM)}  # fmt: skip
    try:
        while (waiting or active) and not interrupts:
            locked = None
            for run in list(waiting):
                if len(active) == args.jobs:
                    break
                log = lock(run)
                if log is None:
                    locked = locked or run
                    continue
                waiting.remove(run)
                if finished(run):  # another process has seen to it
                    end(run, log)
                    continue
                try:
                    active[run] = start(run, log, args), log
                except (OSError, ValueError, KeyError) as e:  # a full disk, a broken config.json
                    end(run, log, repr(e))
            for run, (process, log) in list(active.items()):
                progress[run.name] = min(steps_done(run.folder), run.steps)
                if process.poll() is not None:
                    del active[run]
                    end(run, log, outcome(run, process, log, args))
            if locked and not active and not said:
                said = True
                bar.write(f"{locked.name} is another process's at present: waiting for it")
            bar.n = sum(progress.values())
            bar.set_description(f"{over}/{len(runs)} runs, {len(active)} active")
            time.sleep(0.2)
    finally:
        stop([process for process, _ in active.values()], interrupts)
        bar.close()
        for which, handler in handlers.items():
            signal.signal(which, handler)
    return failures, bool(interrupts)


def play_at_random(env_id, seed, episodes=100):
    """Uniformly random actions; the paper does not say what its random policy is."""
    import gymnasium as gym

    env = gym.make(env_id, disable_env_checker=True)
    env.action_space.seed(seed)
    table, step = [], 0
    for episode in range(episodes):
        env.reset(seed=seed if episode == 0 else None)
        total, length, over = 0.0, 0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, length, over = total + float(reward), length + 1, terminated or truncated
        step += length
        table.append((step, total, length))
    env.close()
    return compare.Run("random", env_id, seed, np.array(table))


# ---------------------------------------------------------------------------------- Statistics


def score(table):
    """A run's, as in the PPO paper: the mean return of its last 100 episodes; table (episodes, 3)
    of step, return, length."""
    return table[-100:, 1].mean() if len(table) else np.nan


def mean(strata):
    """Mean over tasks of the mean over seeds; strata: an array (seeds,) for each task."""
    return np.mean([values.mean() for values in strata])


def interval(strata, resamples=20_000, seed=0):
    """95% stratified bootstrap interval of `mean`: seeds are drawn anew within each task, as in
    rliable (Agarwal et al. 2021). nan where a task has fewer than 3."""
    if min(map(len, strata)) < 3:
        return np.full(2, np.nan)
    rng = np.random.default_rng(seed)
    means = [x[rng.integers(0, len(x), (resamples, len(x)))].mean(-1) for x in strata]
    return np.percentile(np.mean(means, axis=0), [2.5, 97.5])


def normalise(scores, random, best):
    """Table 1's scores: in every task a random policy's is 0 and the best is 1.

    scores {row: {task: (seeds,)}}, random {task: score}; best "run" or "setting": the paper leaves
    open whether its best result is one run's or one row's mean. Tasks that a row or `random` lacks
    are left out for all, and so are a task's seeds beyond the number that every row has: the best
    of few would stand higher than the best of many. Returns {row: {task: (seeds,)}}.
    """
    tasks = [task for task in sorted(random) if all(task in own for own in scores.values())]
    result = {row: {} for row in scores}
    for task in tasks:
        seeds = min(len(own[task]) for own in scores.values())
        best_of = np.max if best == "run" else np.mean
        top = max(best_of(own[task][:seeds]) for own in scores.values())
        for row, own in scores.items():
            result[row][task] = (own[task][:seeds] - random[task]) / (top - random[task])
    return result


# -------------------------------------------------------------------------- Tables and pictures


def number(x):
    return "–" if np.isnan(x) else f"{x:.2f}" if abs(x) < 100 else f"{x:.1f}"


def spread(values):
    """mean ± sample std of (seeds,), or the one value"""
    std = f" ± {number(values.std(ddof=1))}" if len(values) > 1 else ""
    return number(values.mean()) + std


def bounds(strata):
    low, high = interval(strata)
    return "–" if np.isnan(low) else f"{number(low)} to {number(high)}"


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def gather(experiment, args):
    """All data there are of an experiment, of more seeds or with flags added too.

    Returns compare's runs, for the curves, without the unfinished ones if some are finished;
    {variant: {task: (seeds,)}}, the finished runs' scores; and lines on the unfinished runs and on
    the scripts' versions.
    """
    curves, unfinished, scores, notes, versions = [], [], {}, [], Counter()
    for variant in EXPERIMENTS[experiment]:
        base = args.data_dir / variant.place
        added = base.parent.glob(f"{base.name}-*") if variant.script else []
        for place in (base, *sorted(added)):
            name = variant.name + place.name.removeprefix(base.name)
            for path in sorted(place.rglob("seed*.csv.gz")):
                [run] = compare.read_runs(path)
                if run.env_id not in variant.tasks:  # of another experiment that shares the place
                    continue
                if variant.script is None:
                    steps = 0
                elif run.about is None:
                    raise ValueError(f"{compare.about_file(path)} is missing")
                else:
                    steps = run.about["settings"]["total_steps"]
                    versions[f"{run.about['script']} {run.about['sha256'][:8]}"] += 1
                run = run._replace(group=name)
                if covers(run.table, steps):
                    curves.append(run)
                    own = scores.setdefault(name, {})
                    own[run.env_id] = np.append(own.get(run.env_id, []), score(run.table))
                else:
                    unfinished.append(run)
                    last = run.table[-1, 0] if len(run.table) else 0
                    notes.append(
                        f"Not finished: {name}/{run.env_id}/seed{run.seed}, "
                        f"{number(score(run.table))} at step {last:,.0f} of {steps:,}"
                    )
    made = ", ".join(f"{version} × {runs}" for version, runs in sorted(versions.items()))
    notes += [f"Made by (SHA-256, runs): {made}"] if made else []
    return curves or unfinished, scores, notes


def score_table(scores, published=compare.PUBLISHED):
    """A row a variant and task beside the published scores, and how many of those are reached."""
    rows, reached = [], {}
    columns = [whose for whose, numbers in published.items()
               if any(numbers.get(compare.algorithm(variant), {}).keys() & own.keys()
                      for variant, own in scores.items())]  # fmt: skip
    for variant, own in scores.items():
        for task, values in sorted(own.items()):
            cells = []
            for whose in columns:
                value = published[whose].get(compare.algorithm(variant), {}).get(task)
                if value is None:
                    cells.append("–")
                    continue
                reached.setdefault((variant, whose), []).append(values.mean() >= value)
                cells.append(f"{value:g} {'✓' if values.mean() >= value else '✗'}")
            rows.append([variant, task, len(values), spread(values), bounds([values]), *cells])
    header = ["variant", "task", "seeds", "mean ± std", "95% interval", *columns]
    notes = [f"- {variant}: at or above {whose} (✓) on {sum(hits)} of {len(hits)} tasks"
             for (variant, whose), hits in reached.items()]  # fmt: skip
    return "\n".join([markdown(header, rows), "", *notes])


def rivals(scores, whose="PPO paper's Fig. 3, by eye"):
    """A row a task, a column a variant, and how many of the published scores each one reaches."""
    published, rows, seeds = compare.PUBLISHED[whose]["PPO"], [], []
    for task in sorted({task for own in scores.values() for task in own}):
        cells = []
        for own in scores.values():
            values = own.get(task, np.array([np.nan]))
            cells.append(f"{spread(values)} {'✓' if values.mean() >= published[task] else '✗'}")
        rows.append([task, f"{published[task]:g}", *cells])
    for own in scores.values():
        few, many = min(map(len, own.values())), max(map(len, own.values()))
        seeds.append(f"{few} to {many}" if few < many else few)
    reached = [f"{sum(cell.endswith('✓') for cell in column)} of {len(rows)}"
               for column in list(zip(*rows, strict=True))[2:]]  # fmt: skip
    rows += [["at or above", "", *reached], ["seeds", "", *seeds]]
    return markdown(["task", whose, *scores], rows)


def table1(scores, out):
    """The scores of every task; then Table 1 beside the paper's, and its picture."""
    rows = {row: scores[row] for row in TABLE1 if row in scores}
    random = {task: values.mean() for task, values in scores.get("random", {}).items()}
    every = sorted({task for own in scores.values() for task in own})
    raw = [[row, *(spread(own[task]) if task in own else "–" for task in every)]
           for row, own in scores.items()]  # fmt: skip
    text = [markdown(["mean return", *every], raw), ""]
    tasks = sorted(set(random).intersection(*rows.values())) if rows else []
    if not tasks:
        return "\n".join([*text, "No task has data of every row and of random actions yet."])
    readings = {best: normalise(rows, random, best) for best in ("run", "setting")}
    paper = [TABLE1[row][0] for row in rows]
    lines = []
    for row in rows:
        cells = []
        for reading in readings.values():
            strata = list(reading[row].values())
            cells += [number(mean(strata)), bounds(strata)]
        lines.append([row, number(TABLE1[row][0]), *cells, sum(map(len, strata))])
    header = ["objective", "paper", "best run = 1", "95% interval", "best setting = 1",
              "95% interval", "runs"]  # fmt: skip
    text += [markdown(header, lines), "", f"Averaged over {', '.join(tasks)}."]
    text += [f"Rank correlation with the paper's column, best {best} = 1: "
             + number(spearmanr(paper, [mean(list(x.values())) for x in own.values()]).statistic)
             for best, own in readings.items() if len(rows) > 1]  # fmt: skip
    if len(tasks) < len(every):
        left_out = ", ".join(task for task in every if task not in tasks)
        text.append(f"Left out, since a row here or the random policy has no data: {left_out}.")
    draw_table1(readings, tasks, out)
    return "\n".join(text)


def draw_table1(readings, tasks, out):
    """A line a row, in the order of the paper's scores: its score in both readings, with intervals,
    and the paper's as a tick. What is below 0.5 has a narrower panel, on the left."""
    rows = sorted(readings["run"], key=lambda row: TABLE1[row][0])
    if all(len(x) == 1 for own in readings["run"].values() for x in own.values()):
        readings = {"run or setting": readings["run"]}  # of one seed they are the same
    figure = Figure(figsize=(9, 1.5 + 0.4 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2))
    for axes in panels:
        for k, (best, reading) in enumerate(readings.items()):
            strata = [list(reading[row].values()) for row in rows]
            heights = np.arange(len(rows)) - 0.24 * k + 0.12 * (len(readings) - 1)
            low, high = np.array([interval(x) for x in strata]).T
            means, label = [mean(x) for x in strata], f"best {best} = 1"
            axes.plot(means, heights, "o", color=f"C{k}", label=label)
            axes.hlines(heights, low, high, color=f"C{k}")
        paper = [TABLE1[row][0] for row in rows]
        axes.plot(paper, range(len(rows)), "k|", ms=18, mew=1.5, label="PPO paper, Table 1")
        axes.grid(axis="x", alpha=0.3)
    left, right = panels
    left.set_xlim(right=0.5)
    right.set_xlim(left=0.5)
    left.set_yticks(range(len(rows)), rows)
    figure.supxlabel("normalised score, mean over tasks; random actions = 0; "
                     "95% bootstrap interval over seeds", fontsize=9)  # fmt: skip
    runs = sum(map(len, strata[0]))  # as many in every row
    figure.legend(*right.get_legend_handles_labels(), fontsize=9, loc="outside upper center",
                  ncols=3, title=f"{len(tasks)} tasks, {runs} runs a row")  # fmt: skip
    compare.save(figure, out)


def words_for(experiment, group):
    """What a group's curve is called: its variant's words, and the flags added to it."""
    names = {variant.name: variant.words for variant in EXPERIMENTS[experiment]}
    name = max((name for name in names if f"{group}-".startswith(f"{name}-")), key=len)
    added = group.removeprefix(name)
    for flag, meaning in (("-bf16", ", bfloat16"), ("-two-processes", ", two processes"),
                          ("-no-clip-actions", ", actions unclipped")):  # fmt: skip
        added = added.replace(flag, meaning)
    return (names[name] or name) + added


def report(experiment, args):
    """Draw an experiment's picture and print its table, of what data there are."""
    curves, scores, notes = gather(experiment, args)
    out = args.out / experiment
    published = {} if experiment in SHORT else compare.PUBLISHED
    if not scores:
        print("No run is finished.")
    elif experiment.startswith("table1"):
        print(table1(scores, out))
    elif experiment == "steps":
        print(rivals(scores))
    else:
        print(score_table(scores, published))
    if curves and not experiment.startswith("table1"):
        words = {run.group: words_for(experiment, run.group) for run in curves}
        compare.draw(curves, out, published=published, words=words)
    print("\n".join(notes))


# ------------------------------------------------------------------------------ Figures 1 and 2


def figure1(args, eps=0.2):
    """One term of L^CLIP as a function of the ratio r, for advantages 1 and -1."""
    ratios = np.linspace(0, 2, 401)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, advantage in zip(figure.subplots(1, 2), (1, -1), strict=True):
        terms = np.minimum(ratios * advantage, ratios.clip(1 - eps, 1 + eps) * advantage)  # Eq. 7
        axes.plot(ratios, terms, color="k")
        axes.plot(1, advantage, "o", color="r")
        axes.annotate("$θ_{old}$", (1, advantage), (-6, 6 * advantage),
                      textcoords="offset points", ha="right", va="center", color="r")  # fmt: skip
        edge = 1 + advantage * eps
        axes.vlines(edge, 0, advantage * edge, ls=":", color="k", lw=1)
        axes.axhline(0, color="k", lw=0.8)
        axes.set_xticks([0, 1, edge], ["0", "1", "1+ε" if advantage > 0 else "1−ε"])
        axes.set_yticks([0, advantage], ["0", "A"])
        axes.set(title=f"A {'><'[advantage < 0]} 0", xlabel="r", ylabel="$L^{CLIP}$", xlim=(0, 2))
    compare.save(figure, args.out / "figure1")
    return figure


def first_update(seed):
    """The first update of `ppo_continuous.py --env-id Hopper-v5`: the settings, the rollout, the
    network, and θ before and after as vectors."""
    from torch.nn.utils import parameters_to_vector

    import ppo_continuous as ppo

    update, found = ppo.update, []

    def watched(gradients, net, optimizer, batch, *others):
        old = parameters_to_vector(net.parameters()).detach()
        stats = update(gradients, net, optimizer, batch, *others)
        found.extend([others[-1], batch, net, old, parameters_to_vector(net.parameters()).detach()])
        return stats

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ppo, "update", watched):
        flags = f"--env-id Hopper-v5 --seed {seed} --total-steps 2048 --run-dir {folder}/run"
        ppo.main(flags.split())
    return found


def surrogates(args, batch, net, old, new, factors):
    """Means over a rollout at θ = old + factor (new - old); {label: (len(factors),)}."""
    import torch
    from torch.distributions import kl_divergence
    from torch.nn.utils import vector_to_parameters

    from ppo_continuous import standardise

    advantages = standardise(batch.advantages)  # as ppo_loss does with a minibatch's
    means = {"E[KL]": [], "$L^{CPI}$ = E[r A]": [], "E[clip(r, 1−ε, 1+ε) A]": [],
             "$L^{CLIP}$ = E[min(r A, clip(r, 1−ε, 1+ε) A)]": []}  # fmt: skip
    with torch.no_grad():
        for factor in factors:
            vector_to_parameters(old + factor * (new - old), net.parameters())
            pi = net.pi(batch.obs)
            ratio = (pi.log_prob(batch.actions) - batch.log_probs).exp()
            kl = kl_divergence(net.distribution(batch.pi_old), pi)
            l_cpi = ratio * advantages  # Eq. 6
            clipped = ratio.clip(1 - args.clip_eps, 1 + args.clip_eps) * advantages
            terms = kl, l_cpi, clipped, torch.min(l_cpi, clipped)  # the last: Eq. 7
            for values, of_samples in zip(means.values(), terms, strict=True):
                values.append(of_samples.mean().item())
    return {label: np.array(values) for label, values in means.items()}


def figure2(args):
    """The surrogates as θ goes from θ_old along the first update on Hopper, a panel a seed."""
    factors = np.linspace(-1, 3, 401)
    figure = Figure(figsize=(max(9, 4.5 * args.seeds), 5), layout="constrained")
    rows = [["PPO paper, Hopper-v1", "about 0.02", "1"]]
    for k, axes in enumerate(figure.subplots(1, args.seeds, squeeze=False).flat):
        means = surrogates(*first_update(k + 1), factors)
        for label, values in means.items():
            axes.plot(factors, values, label=label)
        kl, *_, l_clip = means.values()
        rows.append([f"seed {k + 1}", f"{kl[np.isclose(factors, 1)].item():.4f}",
                     f"{factors[l_clip.argmax()]:.2f}"])  # fmt: skip
        axes.set(title=f"Hopper-v5, seed {k + 1}", xlabel="linear interpolation factor",
                 ylabel="mean over the rollout")  # fmt: skip
        axes.set_xticks([0, 1], ["0: $θ_{old}$", "1: after the update"])
        axes.legend(fontsize=9)
    compare.save(figure, args.out / "figure2")
    print(markdown(["", "KL at factor 1", "factor where L^CLIP is greatest"], rows))


FIGURES = {"figure1": figure1, "figure2": figure2}

# ---------------------------------------------------------------------------------------- main


def make_parser():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add, cores = parser.add_argument, len(os.sched_getaffinity(0))
    add("experiment", choices=(*FIGURES, *EXPERIMENTS))
    add("--seeds", type=int, help="1 to this (default: the experiment's own, 1 to 5)")
    add("--jobs", type=int, default=cores, help="runs at a time")
    add("--threads", type=int, default=1, help="of each run")
    add("--only", nargs="+", metavar="TEXT", default=[""],
        help="do the runs whose <variant>/<env-id>/seed<k> contains one of these")  # fmt: skip
    add("--draw-only", action="store_true", help="run nothing; draw and print what data there are")
    add("--runs-dir", type=Path, default=ROOT / "runs", help="for the runs' folders")
    add("--data-dir", type=Path, default=compare.DATA, help="for what is kept")
    add("--out", type=Path, default=ROOT / "plots", help="for the pictures")
    return parser


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    args, args.flags = parser.parse_known_args(argv)
    args.seeds = args.seeds or SEEDS.get(args.experiment, 3)
    for name in ("runs_dir", "data_dir", "out"):
        setattr(args, name, getattr(args, name).resolve())
    if min(args.seeds, args.jobs, args.threads) < 1:
        parser.error("--seeds, --jobs and --threads are at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.experiment in FIGURES:
        if args.flags:
            parser.error(f"unrecognized arguments: {' '.join(args.flags)}")
        FIGURES[args.experiment](args)
        return

    try:
        failures = {} if args.draw_only else make(parser, args, argv)
        for name, problem in failures.items():
            print(f"FAILED {name}: {problem}", file=sys.stderr)
        report(args.experiment, args)
    except ValueError as e:  # a damaged file; delete it, and its run is made again
        parser.error(str(e))
    if failures:
        raise SystemExit(1)


def make(parser, args, argv):
    """Do an experiment's runs that are not finished. Returns {name: what went wrong}."""
    runs = runs_of(EXPERIMENTS[args.experiment], args)
    if not runs:
        parser.error(f"--only: no run's name contains {' or '.join(args.only)}")
    todo = [run for run in runs if not finished(run)]
    print(f"{args.experiment}: {len(runs) - len(todo)} of {len(runs)} runs are finished; "
          f"{args.jobs} at a time", flush=True)  # fmt: skip
    for run in todo:
        if run.script is None:
            compare.keep(play_at_random(run.env_id, run.seed), run.place, args.data_dir)
    failures, interrupted = launch([run for run in todo if run.script], args)
    if interrupted:
        print(f"stopped; go on with: python plots/reproduce.py {shlex.join(argv)}",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(130)
    return failures


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
