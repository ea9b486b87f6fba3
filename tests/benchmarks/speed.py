"""Steps per second of the scripts beside Stable-Baselines3 (SB3), and where the time goes.

  pip install -r tests/benchmarks/requirements.txt
  python tests/benchmarks/speed.py                          both tasks
  python tests/benchmarks/speed.py halfcheetah --only trpo  only rows whose name contains "trpo"
  python tests/benchmarks/speed.py breakout --cuda          on the GPU, SB3 as well

Run it on an idle machine. Each measurement is a process of its own, and the rows take turns. The
first iterations of a process, in which it compiles, are not counted.
"""

import argparse
import importlib
import os
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

PEERS = {  # name: package, class
    "SB3's PPO": ("stable_baselines3", "PPO"),
    "sb3-contrib's TRPO": ("sb3_contrib", "TRPO"),
}
# HalfCheetah-v5 at the peers' defaults; those of SB3's PPO are ours, the paper's Table 3
TRPO = ("trpo_continuous.py --num-steps 2048 --minibatch-size 128 --num-epochs 10 --cg-iters 15 "
        "--gae-lambda 0.95")  # fmt: skip
# Breakout at the settings of SB3's Zoo
SB3_ATARI = {"n_steps": 128, "n_epochs": 4, "batch_size": 256, "learning_rate": 2.5e-4,
             "clip_range": 0.1, "vf_coef": 0.5, "ent_coef": 0.01}  # fmt: skip
ATARI = "ppo_atari.py --num-epochs 4 --vf-coef 0.5"
TASKS = {  # task: Gymnasium's id, number of actors, their steps, {peer: commands beside it}
    "halfcheetah": ("HalfCheetah-v5", 1, 2048, {
        "SB3's PPO": ["ppo_continuous.py --no-compile", "ppo_continuous.py --compile"],
        "sb3-contrib's TRPO": [TRPO],
    }),
    "breakout": ("BreakoutNoFrameskip-v4", 8, 128, {
        "SB3's PPO": [ATARI, f"{ATARI} --no-cuda-graphs", f"{ATARI} --bf16"],
        None: ["ppo_atari.py", "ppo_atari.py --bf16"],  # our own settings
    }),
}  # fmt: skip
ALONE = "the simulator alone"  # with random actions: no script can be faster
PARTS = ("simulator", "policy", "update", "all")  # of an iteration
WARM_UP = 2  # iterations that are not counted

# ------------------------------------------------------------- Measurements, each in a new process


def clock(functions, learn):
    """Seconds by part, and "all", of learn()'s counted iterations. functions: {name: object}, what
    collects a rollout, what steps the simulator, and what updates and so ends an iteration."""
    rollout, step, update = functions
    seconds, ends = defaultdict(float), []

    def timed(name, function):
        def wrapped(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += (time.perf_counter() - start) * (len(ends) >= WARM_UP)
            if name == update:
                ends.append(time.perf_counter())
            return result

        return wrapped

    for name, owner in functions.items():
        setattr(owner, name, timed(name, getattr(owner, name)))
    learn()
    times = (seconds[step], seconds[rollout] - seconds[step], seconds[update])
    return dict(zip(PARTS, (*times, ends[-1] - ends[WARM_UP - 1]), strict=True))


def ours(command, env_id, args):
    """Run one of the three scripts."""
    name, *flags = command.split()
    script = importlib.import_module(Path(name).stem)
    flags += ["--env-id", env_id, "--threads", str(args.threads), "--total-steps", str(args.steps)]
    flags += ["--cuda"] * args.cuda
    # what `rollout` steps: all games at once, or one environment, here its outermost wrapper
    games = name == "ppo_atari.py"
    simulator = script.Games if games else script.wrappers.RecordEpisodeStatistics
    parts = {"rollout": script, "step": simulator, "update": script}
    with tempfile.TemporaryDirectory() as folder:
        return clock(parts, lambda: script.main([*flags, "--run-dir", f"{folder}/run"]))


def peer(name, env_id, args):
    """Run one of the PEERS."""
    import ale_py  # noqa: F401  it registers the games
    import torch
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    torch.set_num_threads(args.threads)
    package, algorithm = PEERS[name]
    Model = getattr(importlib.import_module(package), algorithm)
    if env_id == "BreakoutNoFrameskip-v4":
        env = VecFrameStack(make_atari_env(env_id, args.num_envs), 4)
        device = "cuda" if args.cuda else "cpu"
        model = Model("CnnPolicy", env, seed=1, device=device, **SB3_ATARI)
    else:
        model = Model("MlpPolicy", env_id, seed=1, device="cpu")
    parts = {"collect_rollouts": model, "step": model.env, "train": model}
    return clock(parts, lambda: model.learn(args.steps))


def alone(name, env_id, args):
    """Run the simulator alone, as our scripts use it."""
    if games := env_id == "BreakoutNoFrameskip-v4":
        from ppo_atari import Games

        envs = [Games(env_id, args.num_envs, args.threads).envs]
    else:
        from ppo_continuous import Args, make_env

        envs = [make_env(Args(env_id=env_id)) for _ in range(args.num_envs)]
    for env in envs:
        env.reset(seed=1)
    actions = [envs[0].action_space.sample() for _ in range(100)]
    start = time.perf_counter()
    for t in range(args.iterations * args.num_steps):
        for env in envs:
            _, _, terminated, truncated, _ = env.step(actions[t % 100])
            if not games and (terminated or truncated):  # the games start anew by themselves
                env.reset()
    seconds = time.perf_counter() - start
    return dict(zip(PARTS, (seconds, 0, 0, seconds), strict=True))


def measure(row, env_id, args):
    """A row's steps per second, milliseconds an iteration by part, and peak memory in MB."""
    run = alone if row == ALONE else peer if row in PEERS else ours
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        seconds = run(row, env_id, args)
    return {part: 1e3 * s / args.iterations for part, s in seconds.items()} | {
        "speed": args.iterations * args.num_envs * args.num_steps / seconds["all"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


# --------------------------------------------------------------------------------------- The table


def compare(task, args):
    """Measure all rows of a task in turns and print their table."""
    env_id, args.num_envs, args.num_steps, groups = TASKS[task]
    batch = args.num_envs * args.num_steps
    args.steps = batch * (WARM_UP + args.iterations)
    args.threads = args.threads or (1 if task == "halfcheetah" else os.cpu_count())
    peers = {row: name for name, commands in groups.items() for row in (name, *commands) if row}
    rows = [row for row in peers if args.only in row.lower()
            and (args.bf16 or "bf16" not in row) and (args.cuda or "cuda" not in row)]  # fmt: skip
    results = defaultdict(list)
    for turn in range(args.turns):
        for row in [*rows, ALONE]:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                results[row].append(process.submit(measure, row, env_id, args).result())
            print(f"turn {turn + 1}: {row}: {results[row][-1]['speed']:.0f}", file=sys.stderr)

    print(f"\n{env_id} on {machine()}. Threads: {args.threads}; turns: {args.turns}, each of "
          f"{args.iterations} iterations of {batch:,} steps\n")  # fmt: skip
    print("| | steps/s, median | of all turns | times the peer | peak memory | "
          f"ms an iteration: simulator | policy | update | all |\n{'|---' * 9}|")  # fmt: skip
    for row, found in results.items():
        speeds, base = [x["speed"] for x in found], results.get(peers.get(row), [])
        times = sorted(a / b["speed"] for a, b in zip(speeds, base, strict=False))
        cells = [
            f"`{row}`" if ".py" in row else row,
            f"{median(speeds):.0f}",
            ", ".join(f"{speed:.0f}" for speed in speeds),
            f"{median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})" if times else "–",
            f"{median(x['memory'] for x in found):.0f} MB",
            *(f"{median(x[part] for x in found):.0f}" for part in PARTS),
        ]
        print(f"| {' | '.join(cells)} |")


def machine():
    """The processor (on Linux), its instructions for bfloat16, and the versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = re.findall(r"model name\s*: (.*)", info)[:1] + re.findall(r"a\w+_bf16", info)
    versions = [f"{name} {version(name)}" for name in ("torch", "stable-baselines3")]
    return ", ".join([*dict.fromkeys(names), f"{os.cpu_count()} cores", *versions])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", choices=TASKS, default=TASKS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=10, help="counted in each measurement")
    parser.add_argument("--threads", type=int, help="default: halfcheetah 1, breakout all cores")
    parser.add_argument("--cuda", action="store_true", help="breakout on the GPU, SB3 as well")
    parser.add_argument("--bf16", action="store_true", help="the rows with --bf16 as well")
    parser.add_argument("--only", default="", type=str.lower, help="only rows with this text")
    args = parser.parse_args()
    os.environ |= {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}  # of the measured processes
    for task in args.tasks:
        compare(task, argparse.Namespace(**vars(args)))


if __name__ == "__main__":
    main()
