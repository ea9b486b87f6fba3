"""Run the experiments behind the papers' figures and tables, draw them, and write their tables.

  python plots/reproduce.py figure3                PPO and TRPO on seven MuJoCo tasks
  python plots/reproduce.py small-tasks            PPO and TRPO on four small tasks
  python plots/reproduce.py steps                  PPO with and without what the paper leaves out
  python plots/reproduce.py ablations              one of these extra steps less at a time
  python plots/reproduce.py double-pendulum        TRPO on InvertedDoublePendulum, four changes
  python plots/reproduce.py table1                 the PPO paper's Table 1, eleven objectives
  python plots/reproduce.py unclipped              PPO without clipping or penalty on HalfCheetah
  python plots/reproduce.py breakout               ppo_atari.py's defaults, and Baselines' settings
  python plots/reproduce.py games                  ppo_atari.py on five more games of Table 6
  python plots/reproduce.py precision              a million steps in float32 and in bfloat16
  python plots/reproduce.py network                ppo_atari.py with Sec. 6.4's network (data only)
  python plots/reproduce.py lessons                the six of plots/lessons.md
  python plots/reproduce.py lesson-clipping --seeds 3 --into my/clipping   in a folder of your own
  python plots/reproduce.py figure2                the PPO paper's Figure 2, the objective's shape
  python plots/reproduce.py figure3 --only Hopper --seeds 1          some of the runs
  python plots/reproduce.py figure3 --draw-only                      draw the data there are

The scripts run as a user runs them, in runs/<experiment>/<variant>/<task>/seed<k>. A finished run's
data go to plots/data/<experiment>/<variant>/<task>. What has data is not run again, and what was
interrupted goes on. Ctrl-C stops the runs, which save themselves. Tables go between markers in
README.md, plots/README.md and plots/lessons.md. With --into FOLDER runs, data and picture go there,
and the table is only printed.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import compare
import numpy as np
import pandas as pd
from compare import GAMES, MUJOCO, SMALL, bounds, confidence, markdown, number, spread
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PLOTS = ROOT / "plots"
PYTHON = sys.executable.removeprefix(f"{os.getcwd()}/")  # as one would type it
sys.path.insert(0, str(ROOT))  # the scripts, imported where they are needed: torch takes seconds

# --------------------------------------------------------------------------------- Experiments

PPO, TRPO, ATARI = "ppo_continuous.py", "trpo_continuous.py", "ppo_atari.py"
CHEETAH, BREAKOUT = ("HalfCheetah-v5",), ("BreakoutNoFrameskip-v4",)
ABLATIONS = {  # the steps that are not in the papers, by the flags that turn them off
    "ppo": (PPO, "--no-norm-obs", "--no-norm-reward", "--norm-adv none", "--no-orthogonal",
            "--anneal none", "--max-grad-norm 0", "--adam-eps 1e-8"),
    "trpo": (TRPO, "--no-norm-obs", "--no-norm-reward", "--norm-adv none", "--no-orthogonal",
             "--cg-damping 0"),
}  # fmt: skip
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
PLAIN = ("--no-norm-obs --no-norm-reward --norm-adv none --no-orthogonal --anneal none "
         "--max-grad-norm 0 --adam-eps 1e-8")  # fmt: skip
PPO1 = "--norm-adv rollout --no-norm-reward --max-grad-norm 0 --anneal both"  # Baselines' first
# OpenAI's ppo2; --bf16 is not part of it, it only saves time
BASELINES = "--num-epochs 4 --vf-coef 0.25 --clip-value-loss --anneal learning-rate --bf16"
MILLION = "--num-epochs 4 --vf-coef 0.5 --total-steps 1000000"  # as speed.py has it


class Variant(NamedTuple):
    """A curve of a picture: a script with some flags on some tasks; `words`: its name there.

    place: its folder of data, <experiment>/<variant>. script None: data only, nothing to run.
    """

    words: str
    place: str
    script: str | None
    tasks: tuple
    flags: str = ""


def folder_name(words):
    """clipped, ε 0.2 -> clipped-eps-0.2"""
    for letter, name in {"ε": "eps", "λ": "lambda", "β": "beta", "δ": "delta"}.items():
        words = words.replace(letter, name)
    return re.sub("[^a-z0-9.]+", "-", words)


EXPERIMENTS = {
    "small-tasks": [
        Variant("PPO", "small-tasks/ppo", PPO, SMALL),
        Variant("TRPO", "small-tasks/trpo", TRPO, SMALL),
    ],
    "figure3": [
        Variant("PPO", "figure3/ppo", PPO, MUJOCO),
        Variant("TRPO", "figure3/trpo", TRPO, MUJOCO),
    ],
    "steps": [
        Variant("defaults", "figure3/ppo", PPO, MUJOCO),
        Variant("--norm-adv rollout", "steps/rollout", PPO, MUJOCO, "--norm-adv rollout"),
        Variant("near ppo1", "steps/ppo1", PPO, MUJOCO, PPO1),
        Variant("plain", "steps/plain", PPO, MUJOCO, PLAIN),
    ],
    "ablations": [
        Variant(f"{name.upper()} {flag or 'defaults'}",
                f"ablations/{folder_name(f'{name} {flag}')}" if flag else f"small-tasks/{name}",
                script, ("CartPole-v1", "Pendulum-v1"), flag)
        for name, (script, *flags) in ABLATIONS.items() for flag in ("", *flags)
    ],
    "double-pendulum": [
        Variant(flag or "defaults",
                f"double-pendulum/{folder_name(flag[2:])}" if flag else "figure3/trpo",
                TRPO, ("InvertedDoublePendulum-v5",), flag)
        for flag in ("", "--num-steps 4096", "--max-kl 0.001", "--learning-rate 3e-4",
                     "--no-norm-reward")
    ],
    "table1": [  # clip-0.2 is Figure 3's PPO
        Variant(row, f"table1/{row}" if flags else "figure3/ppo", PPO, MUJOCO, flags)
        for row, (_, flags) in TABLE1.items()
    ],
    "unclipped": [
        Variant("no clipping or penalty", "table1/none", PPO, CHEETAH, "--objective none"),
        Variant("the same, plain, any action", "unclipped/plain", PPO, CHEETAH,
                f"--objective none {PLAIN} --no-clip-actions"),
    ],
    "breakout": [
        Variant("defaults", "breakout/defaults", ATARI, BREAKOUT),
        Variant("Baselines' settings", "breakout/baselines", ATARI, BREAKOUT, BASELINES),
    ],
    "games": [
        Variant("PPO", "games/ppo", ATARI, tuple(g for g in GAMES if g not in BREAKOUT), "--bf16"),
    ],
    "network": [
        Variant("Sec. 6.4's network", "breakout/older-paper", None, BREAKOUT),
        Variant("the same, step size 1e-3", "breakout/older-paper-1e-3", None, BREAKOUT),
    ],
    "precision": [
        Variant("float32", "precision/float32", ATARI, BREAKOUT, MILLION),
        Variant("float32, 2 processes", "precision/float32-two-processes", None, BREAKOUT),
        Variant("bfloat16", "precision/bfloat16", ATARI, BREAKOUT, f"{MILLION} --bf16"),
    ],
}  # fmt: skip
FAST = "--total-steps 40960 --learning-rate 1e-2 --anneal none"
SLOW = "--total-steps 40960 --learning-rate 1e-3 --anneal none"
LESSONS = {  # of plots/lessons.md: script, task, flags of all variants, {variant: its flags}
    "lesson-clipping": (PPO, "CartPole-v1", "", {
        "clipped, step size 0.001": SLOW, "not clipped, 0.001": f"{SLOW} --objective none",
        "clipped, 0.01": FAST, "not clipped, 0.01": f"{FAST} --objective none",
    }),
    "lesson-epsilon": (PPO, "CartPole-v1", FAST, {
        f"ε {eps}": f"--clip-eps {eps}" for eps in (0.01, 0.05, 0.2, 0.5, 1)
    }),
    "lesson-lambda": (PPO, "Pendulum-v1", "--total-steps 61440 --minibatch-size 256", {
        f"λ {value}": f"--gae-lambda {value}" for value in (0, 0.5, 0.95, 1)
    }),
    "lesson-penalty": (PPO, "CartPole-v1", FAST, {
        **{f"fixed β {b}": f"--objective kl-fixed --kl-beta {b}" for b in (0.01, 1, 100)},
        **{f"adaptive from {b}": f"--objective kl-adaptive --kl-beta {b}" for b in (0.01, 1, 100)},
    }),
    "lesson-delta": (TRPO, "CartPole-v1", "--total-steps 40960", {
        f"δ {delta}": f"--max-kl {delta}" for delta in (0.0001, 0.001, 0.01, 0.1, 1)
    }),
    "lesson-line-search": (TRPO, "CartPole-v1", "--total-steps 40960 --max-kl 0.003", {
        f"tries: {tries}, damping {damping}": f"--cg-damping {damping} --line-search-steps {tries}"
        for damping in (0, 0.1) for tries in (10, 1)
    }),
}  # fmt: skip
for name, (script, task, shared, variants) in LESSONS.items():
    EXPERIMENTS[name] = [
        Variant(words, f"{name}/{folder_name(words)}", script, (task,), f"{shared} {flags}")
        for words, flags in variants.items()
    ]
SHORT = ["precision", "unclipped", *LESSONS]  # no published score is of so few steps, or unclipped
SEEDS = dict.fromkeys(["small-tasks", "figure3", "ablations", *LESSONS], 5)  # others: 3
SEEDS |= {"precision": 4, "games": 1}


class Job(NamedTuple):
    """One run. name: <experiment>/<variant>/<task>/seed<k>"""

    name: str
    command: list
    folder: Path  # the run directory
    data: Path  # where its episodes are kept


def jobs_of(experiment, args):
    """The runs of an experiment that have no data yet; all tasks with seed 1 come first."""
    jobs = []
    for seed in range(1, 1 + (args.seeds or SEEDS.get(experiment, 3))):
        for variant in EXPERIMENTS[experiment]:
            for task in variant.tasks if variant.script else ():
                name = f"{variant.place}/{task}/seed{seed}"
                data = data_folder(args.into) / f"{name}.csv.gz"
                if any(text in name for text in args.only) and not data.exists():
                    command = [variant.script, "--env-id", task, "--seed", str(seed)]
                    command += ["--threads", "1", *variant.flags.split(), *["--cuda"] * args.cuda]
                    folder = (args.into or ROOT) / "runs" / name
                    jobs.append(Job(name, command, folder, data))
    return jobs


def data_folder(into):
    return into / "data" if into else compare.DATA


# ------------------------------------------------------------------------------------- Running


def start(job):
    """The process of a run, new or interrupted. It gets no Ctrl-C from the terminal."""
    command = job.command
    if (job.folder / "checkpoint.pt").exists():
        command = [command[0], "--resume", str(job.folder)]
    else:
        shutil.rmtree(job.folder, ignore_errors=True)  # stopped in its first minute
        command = [*command, "--run-dir", str(job.folder)]
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(job.folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdin=subprocess.DEVNULL,
                                stdout=log, stderr=log, process_group=0)  # fmt: skip


def run_all(jobs, at_once):
    """Make the runs, some at a time, and keep their data. Returns the names of those that failed.

    On Ctrl-C or SIGTERM the runs stop and save themselves, and KeyboardInterrupt is raised.
    """
    active, failed = [], []

    def run(job):
        active.append(process := start(job))
        if (status := process.wait()) == 0:
            done = compare.read_run(job.folder)
            compare.keep(done, job.data.parents[1])
            tqdm.write(f"{job.name}: {number(score_in(job.name.split('/')[0])(done))}")
        elif status != 130:  # it was asked to stop, and saved itself
            failed.append(job.name)
            tqdm.write(f"{job.name}: failed, see {job.folder.with_suffix('.log')}")

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(tqdm(pool.map(run, jobs), total=len(jobs), unit="run"))
        except KeyboardInterrupt:
            tqdm.write("stopping; the runs save themselves")
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active if sys.platform != "win32" else ():  # there Ctrl-C reached them
                process.terminate()  # a run saves itself then
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return failed


# ------------------------------------------------------------------------------------ Tables


def data_of(experiment, into=None):
    """The data of an experiment: runs by variant, task and seed, labelled with their variant."""
    runs = []
    for variant in EXPERIMENTS[experiment]:
        for task in variant.tasks:
            files = (data_folder(into) / variant.place / task).glob("seed*.csv.gz")
            own = [compare.read_run(path)._replace(label=variant.words) for path in files]
            runs += sorted(own, key=lambda run: run.seed)
    return runs


def steps_table(runs):
    """A row for each task, a column for each variant, with seeds, beside the paper's scores."""
    published = compare.PUBLISHED["PPO paper's Fig. 3, by eye"]["PPO"]
    rows = {}
    for (label, task), group in compare.by_group(runs):
        row = rows.setdefault(task, {"task": task, "PPO paper": number(published[task])})
        row[label] = f"{spread([run.score for run in group])} ({len(group)})"
    return pd.DataFrame([rows[task] for task in sorted(rows)]).fillna("–")


def ablation_table(runs):
    """A row for each step that is left out, a column for each algorithm and task."""
    rows = {}
    for (label, task), group in compare.by_group(runs):
        algorithm, _, flag = label.partition(" ")
        row = rows.setdefault(flag, {"": flag if flag == "defaults" else f"`{flag}`"})
        row[f"{algorithm}, {task}"] = spread([run.score for run in group])
    return pd.DataFrame(list(rows.values())).fillna("–")


def breakout_table(runs, millions=(0.5, 1, 2.5, 5, 7.5)):
    """A row for each run: its score on the way and at the end."""
    rows = []
    for run in runs:
        on_the_way = compare.curve(run.episodes, 1e6 * np.array(millions))
        row = {"": run.label, "seed": run.seed}
        row |= {f"{m}M steps": number(x) for m, x in zip(millions, on_the_way, strict=True)}
        rows.append(row | {"end": f"{number(run.score)} at {run.last_step / 1e6:.1f}M"})
    return pd.DataFrame(rows)


def random_scores(episodes=100):
    """Mean returns of uniformly random actions, the zero of Table 1's scores; kept as data."""
    path = compare.DATA / "table1" / "random.json"
    if not path.exists():
        path.write_text(json.dumps({task: play_at_random(task, episodes) for task in MUJOCO}))
    return json.loads(path.read_text())


def play_at_random(task, episodes):
    import gymnasium as gym

    env = gym.wrappers.RecordEpisodeStatistics(gym.make(task), buffer_length=episodes)
    env.action_space.seed(1)
    env.reset(seed=1)
    while len(env.return_queue) < episodes:
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return float(np.mean(env.return_queue))


def normalised(runs, random, best):
    """Table 1's scores: in every task random actions have 0, the best 1. Returns
    {row: [(seeds,) for each task]}, of the tasks that all rows have and as many seeds as all have.

    best: "run" or "setting"; the paper does not say whether its best is a run's or a mean's.
    """
    scores = {}
    for run in runs:
        scores.setdefault(run.label, {}).setdefault(run.env_id, []).append(run.score)
    tasks = set.intersection(*(set(own) for own in scores.values()))
    result = {row: [] for row in scores}
    for task in sorted(tasks):
        seeds = min(len(own[task]) for own in scores.values())
        values = {row: np.array(own[task][:seeds]) for row, own in scores.items()}
        top = max(x.max() if best == "run" else x.mean() for x in values.values())
        for row, x in values.items():
            result[row].append((x - random[task]) / (top - random[task]))
    return result


def mean_of_tasks(*tasks, axis=-1):
    """Mean over tasks of the mean over seeds."""
    return np.mean([task.mean(axis=axis) for task in tasks], axis=0)


def table1(runs):
    """Table 1 beside the paper's, and the two readings of it, for the picture."""
    readings = {best: normalised(runs, random_scores(), best) for best in ("run", "setting")}
    rows = []
    for row in readings["run"]:
        cells = {"objective": row, "paper": number(TABLE1[row][0])}
        for best, own in readings.items():
            cells[f"best {best} = 1"] = number(mean_of_tasks(*own[row]))
            cells["95% interval" + " " * (best == "setting")] = bounds(own[row], mean_of_tasks)
        rows.append(cells | {"runs": sum(map(len, readings["run"][row]))})
    return pd.DataFrame(rows), readings


def draw_table1(readings, path):
    """The rows in the order of the paper's scores, in both readings, with intervals."""
    rows = sorted(readings["run"], key=lambda row: TABLE1[row][0])
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for k, (best, own) in enumerate(readings.items()):
        means = np.array([mean_of_tasks(*own[row]) for row in rows])
        limits = np.array([confidence(own[row], mean_of_tasks) for row in rows]).T
        axes.errorbar(means, np.arange(len(rows)) - 0.2 * k, xerr=np.abs(limits - means),
                      fmt="os"[k], label=f"best {best} = 1")  # fmt: skip
    paper = [TABLE1[row][0] for row in rows]
    axes.plot(paper, range(len(rows)), "k|", ms=16, mew=1.5, label="PPO paper, Table 1")
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("mean normalised score of seven tasks, random actions = 0; 95% intervals")
    axes.legend()
    figure.savefig(path, dpi=140)


TOP = [  # README's table of results: task, command, data
    ("Breakout", "ppo_atari.py", "breakout/defaults/BreakoutNoFrameskip-v4"),
    ("Breakout", f"ppo_atari.py {BASELINES}", "breakout/baselines/BreakoutNoFrameskip-v4"),
    *((g.removesuffix("NoFrameskip-v4"), f"ppo_atari.py --env-id {g} --bf16", f"games/ppo/{g}")
      for g in GAMES if g not in BREAKOUT),
    ("CartPole", "ppo_continuous.py", "small-tasks/ppo/CartPole-v1"),
    *((task, f"{name}_continuous.py --env-id {task}", f"figure3/{name}/{task}")
      for task in ("HalfCheetah-v5", "Walker2d-v5") for name in ("ppo", "trpo")),
]  # fmt: skip


def top_table():
    rows = []
    for task, command, folder in TOP:
        runs = compare.read_runs([compare.DATA / folder])
        published = compare.published_scores(runs[0].env_id, runs[0].algorithm)
        rows.append({
            "task": task, "score": spread([run.score for run in runs]),
            **{"PPO paper" if "paper" in source else "Baselines": number(score)
               for source, score in published.items() if "Zoo" not in source},
            "steps": f"{runs[0].about['settings']['total_steps'] / 1e6:g}M",
            "seeds": len(runs), "command": f"`{command}`",
        })  # fmt: skip
    return pd.DataFrame(rows).fillna("–")


def score_in(experiment):
    """What a run's score is in an experiment's table: in a lesson the mean return of the episodes
    that ended in the last tenth of its steps."""

    def last_tenth(run):
        late = run.episodes["step"] > 0.9 * run.about["settings"]["total_steps"]
        return run.episodes["return"][late].mean()

    return last_tenth if experiment in LESSONS else lambda run: run.score


def tables(experiment, runs):
    """{name of a marker: its table} of an experiment's runs."""
    if experiment == "table1":
        table, readings = table1(runs)
        rows = [row for row in readings["run"] if row != "none"]
        paper = [TABLE1[row][0] for row in rows]
        ranks = [spearmanr(paper, [mean_of_tasks(*own[row]) for row in rows]).statistic
                 for own in readings.values()]  # fmt: skip
        note = "Rank correlation with the paper's column, without `none`: {:.2f} and {:.2f}."
        return {experiment: f"{markdown(table)}\n\n{note.format(*ranks)}"}
    own = {"steps": steps_table, "ablations": ablation_table, "breakout": breakout_table,
           "network": breakout_table}.get(experiment)  # fmt: skip
    table = own(runs) if own else compare.score_table(runs, score_in(experiment), interval=True)
    return {experiment: markdown(table.iloc[:, :5] if experiment in SHORT else table)}


def write_tables(found, files=(ROOT / "README.md", PLOTS / "README.md", PLOTS / "lessons.md")):
    """Put each table between the markers of its name, wherever they stand."""
    for file in files:
        old = file.read_text("utf-8")
        new = re.sub(r"(<!-- ([\w-]+) -->\n).*?(<!-- end -->)",
                     lambda m: f"{m[1]}{found[m[2]]}\n{m[3]}" if m[2] in found else m[0],
                     old, flags=re.S)  # fmt: skip
        if new != old:
            file.write_text(new, "utf-8", newline="\n")
            print(f"new tables in {file}")


def report(experiment, into=None):
    """Draw an experiment's picture and write its table, of what data there are."""
    runs = data_of(experiment, into)
    if not runs:
        return print("no run is finished")
    found = tables(experiment, runs)
    print(*found.values(), sep="\n")
    path = (into or PLOTS) / f"{experiment}.png"
    if not into:
        write_tables(found | {"results": markdown(top_table())})
    if experiment == "table1":
        draw_table1(table1(runs)[1], path)
    elif experiment != "ablations":
        window = 10 if experiment in LESSONS else 100
        scale = ("symlog", {"linthresh": 100}) if experiment == "unclipped" else ("linear", {})
        compare.draw(runs, path, experiment not in SHORT, window, scale)
        print(f"\nlearning curves: {path}")


# ------------------------------------------------------------------------------------ Figure 2


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


def figure2(folder):
    """The surrogates as θ goes from θ_old along the first update on Hopper."""
    factors = np.linspace(-1, 3, 401)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    means = surrogates(*first_update(1), factors)
    for (label, values), look in zip(means.items(), compare.looks_of(means).values(), strict=True):
        axes.plot(factors, values, **look, lw=2, label=label)
    axes.set(title="Hopper-v5, seed 1", xlabel="linear interpolation factor",
             ylabel="mean over the rollout")  # fmt: skip
    axes.set_xticks([0, 1], ["0: $θ_{old}$", "1: after the update"])
    axes.legend(fontsize=9)
    figure.savefig(folder / "figure2.png", dpi=140)
    kl, *_, l_clip = means.values()
    print(f"KL at factor 1: {kl[np.isclose(factors, 1)].item():.4f} (paper: about 0.02)")
    print(f"L^CLIP is greatest at factor {factors[l_clip.argmax()]:.2f} (paper: 1)")


# ---------------------------------------------------------------------------------------- main


def main(argv=None):
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add, cores = parser.add_argument, os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # on Linux: those that this process may use
        cores = len(os.sched_getaffinity(0))
    names = (*EXPERIMENTS, "lessons", "figure2")
    add("experiments", nargs="+", choices=names, metavar="experiment")
    add("--seeds", type=int, help="seeds 1 to this (default: the experiment's own, 3 to 5)")
    add("--jobs", type=int, default=cores, help=f"runs at a time, of one thread each; {cores}")
    add("--only", nargs="+", metavar="TEXT", default=[""],
        help="only runs with one of these in <experiment>/<variant>/<task>/seed<k>")  # fmt: skip
    add("--cuda", action="store_true", help="train on a GPU (ppo_atari.py)")
    add("--into", type=Path, metavar="FOLDER", help="make, keep and draw the runs in this folder")
    add("--draw-only", action="store_true", help="run nothing; draw and write what there is")
    args = parser.parse_args(argv)
    if args.into:
        args.into = args.into.resolve()
        args.into.mkdir(parents=True, exist_ok=True)
    lessons = LESSONS if "lessons" in args.experiments else []
    failed = []
    for experiment in [*(name for name in args.experiments if name != "lessons"), *lessons]:
        if experiment == "figure2":
            figure2(args.into or PLOTS)
            continue
        try:
            if not args.draw_only:
                failed += run_all(jobs_of(experiment, args), args.jobs)
        except KeyboardInterrupt:
            print(f"go on:  {shlex.join([PYTHON, *(sys.argv if argv is None else argv)])}")
            sys.exit(130)
        report(experiment, args.into)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(errors="replace")  # one that cannot show ε shows ?
    main()
