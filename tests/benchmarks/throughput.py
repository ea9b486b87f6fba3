"""Steps per second of ppo_atari.py beside Stable-Baselines3's PPO, and where the time goes.

  pip install -r tests/benchmarks/requirements.txt
  python tests/benchmarks/throughput.py              # everything; --only and --repeats shorten it
  python tests/benchmarks/throughput.py --only ratio # this script and SB3, alternating
  python tests/benchmarks/throughput.py --only scale # 1 to 64 actors
  python tests/benchmarks/throughput.py --only processes  # one process, and several by torchrun
  python tests/benchmarks/throughput.py --cuda       # on a GPU, SB3 too

Every measurement is a process of its own on an otherwise idle machine, A and B in turns; the
tables give medians. The first two iterations of a process are not counted.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from math import inf
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

# SB3's settings for Atari: Nature CNN, 8 actors, 128 steps, 4 epochs, minibatch 256, c1 0.5
SB3_SETTINGS = ["--num-epochs", "4", "--vf-coef", "0.5"]


def clock(script):
    """Measure a script from its third iteration on. Returns {part: seconds}, the times at which
    iterations ended, and timed(part, function), the function with its time added to the part."""
    spent, marks, log = defaultdict(float), [], script.Run.log

    def timed(part, function):
        def wrapped(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if len(marks) >= 2:
                spent[part] += time.perf_counter() - start
            return result

        return wrapped

    def mark(*args):
        stop = log(*args)
        marks.append(time.perf_counter())
        return stop

    script.Run.log = mark
    return spent, marks, timed


def ours(flags, iterations):
    """Train for some iterations; returns steps/s, peak memory and seconds a step by part."""
    import ppo_atari

    spent, marks, timed = clock(ppo_atari)
    ppo_atari.rollout = timed("rollout", ppo_atari.rollout)
    ppo_atari.Games.step = timed("emulator", ppo_atari.Games.step)
    ppo_atari.update = timed("update", ppo_atari.update)
    args, _ = ppo_atari.parse_args(flags)
    batch = args.num_envs * args.num_steps
    with tempfile.TemporaryDirectory() as folder:
        ppo_atari.main([*flags, "--total-steps", str(batch * (iterations + 2)), "--run-dir",
                        f"{folder}/run"])  # fmt: skip
    spent["inference"] = spent.pop("rollout") - spent["emulator"]  # with the storing
    seconds = marks[-1] - marks[1]
    steps = batch * iterations
    return {
        "steps_per_second": steps / seconds,
        "rss_mb": rss_mb(),
        "ms_per_iteration": {part: 1e3 * s / iterations for part, s in spent.items()}
        | {"all": 1e3 * seconds / iterations},
    }


def sb3(cuda, iterations, threads, subprocesses):
    """The same settings in Stable-Baselines3."""
    import ale_py  # noqa: F401  it registers the games
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    torch.set_num_threads(threads)
    marks = []

    class Mark(BaseCallback):
        def _on_rollout_start(self):
            marks.append(time.perf_counter())

        def _on_step(self):
            return True

    kind = {}
    if subprocesses:
        kind = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
    env = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", n_envs=8, seed=1, **kind), 4)
    model = PPO("CnnPolicy", env, n_steps=128, n_epochs=4, batch_size=256, learning_rate=2.5e-4,
                clip_range=0.1, vf_coef=0.5, ent_coef=0.01, seed=1,
                device="cuda" if cuda else "cpu")  # fmt: skip
    model.learn(1024 * (iterations + 3), callback=Mark())
    env.close()
    return {"steps_per_second": 1024 * iterations / (marks[2 + iterations] - marks[2]),
            "rss_mb": rss_mb()}  # fmt: skip


def emulator(num_envs, threads, steps=2000):
    """Steps per second of the emulator alone, with random actions."""
    import numpy as np

    import ppo_atari

    games = ppo_atari.Games("BreakoutNoFrameskip-v4", num_envs, threads)
    games.reset(1)
    rng = np.random.default_rng(0)
    actions = rng.integers(0, games.num_actions, (steps, num_envs))
    for a in actions[:100]:
        games.envs.step(a)
    start = time.perf_counter()
    for a in actions[100:]:
        games.envs.step(a)
    return num_envs * (steps - 100) / (time.perf_counter() - start)


def floating_point(network, bf16, threads):
    """Floor in milliseconds for an iteration's inference and for one epoch of its update: the
    operations of the layers at the rate of a large matrix product or convolution, whichever is
    faster, on the same threads."""
    import torch

    conv = {"paper": [(4, 16, 8, 20), (16, 32, 4, 9)],  # channels in, out, kernel, output side
            "nature": [(4, 32, 8, 20), (32, 64, 4, 9), (64, 64, 3, 7)]}[network]  # fmt: skip
    flat, hidden = {"paper": (2592, 256), "nature": (3136, 512)}[network]
    layers = [2 * c_in * c_out * k * k * side**2 for c_in, c_out, k, side in conv]
    forward = sum(layers) + 2 * flat * hidden + 2 * hidden * 5
    both = 3 * forward - layers[0]  # frames need no gradient

    torch.set_num_threads(threads)
    kind = torch.bfloat16 if bf16 else torch.float32
    matrix = torch.randn(2048, 2048).to(kind)
    images = torch.randn(256, 64, 32, 32).to(kind, memory_format=torch.channels_last)
    kernel = torch.randn(64, 64, 3, 3).to(kind, memory_format=torch.channels_last)
    large = {  # of which the faster one counts: they are of two libraries
        2 * 2048**3: lambda: matrix @ matrix,
        2 * 64 * 64 * 3 * 3 * 256 * 30**2: lambda: torch.conv2d(images, kernel),
    }
    ms_per_operation = inf
    for operations, function in large.items():
        for _ in range(8):
            start = time.perf_counter()
            function()
            ms = 1e3 * (time.perf_counter() - start)
            ms_per_operation = min(ms_per_operation, ms / operations)
    return {"inference": 1024 * forward * ms_per_operation,
            "update": 1024 * both * ms_per_operation}  # fmt: skip


def rss_mb():
    """Peak resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def child(what, module="throughput", **kwargs):
    """Call a function of a module of this folder in a process of its own."""
    code = (f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"import {module}\n"
            f"print('RESULT' + json.dumps({module}.{what}(**{kwargs!r})))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | {"PYTHONWARNINGS": "ignore"})  # fmt: skip
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr}")
    return json.loads(done.stdout.split("RESULT")[1])


def median(results, key="steps_per_second"):
    return statistics.median(r[key] for r in results)


def times(results, base):
    """Median of the turns' ratios, and their range."""
    pairs = zip(results, base, strict=True)
    ratios = sorted(a["steps_per_second"] / b["steps_per_second"] for a, b in pairs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.1f} to {ratios[-1]:.1f})"


def ratio(args):
    """SB3 and this script at SB3's settings, and this script at the paper's, in turns."""
    machine = ["--threads", str(args.threads)] + ["--cuda"] * args.cuda
    variants = {
        "SB3, its settings": None,
        "ppo_atari.py, SB3's settings": SB3_SETTINGS,
        "ppo_atari.py, SB3's settings, --compile": [*SB3_SETTINGS, "--compile"],
        "ppo_atari.py, defaults, --compile": ["--compile"],
    }
    if args.bf16:
        for name in list(variants)[2:]:
            variants[f"{name} --bf16"] = [*variants[name], "--bf16"]
    results = defaultdict(list)
    for turn in range(args.repeats):
        for name, flags in variants.items():
            if flags is None:
                result = child("sb3", cuda=args.cuda, iterations=args.iterations,
                               threads=args.threads, subprocesses=args.subprocesses)  # fmt: skip
            else:
                result = child("ours", flags=[*flags, *machine], iterations=args.iterations)
            results[name].append(result)
            print(f"turn {turn + 1}: {name}: {result['steps_per_second']:.0f}", file=sys.stderr)
    base = results["SB3, its settings"]
    print("\n| | steps/s, median | of all turns | times SB3 | peak memory |\n|---|---|---|---|---|")
    for name, r in results.items():
        speeds = ", ".join(f"{x['steps_per_second']:.0f}" for x in r)
        print(f"| {name} | {median(r):.0f} | {speeds} | {times(r, base)} | "
              f"{median(r, 'rss_mb'):.0f} MB |")  # fmt: skip
    if args.cuda:
        return
    print("\n| ms an iteration of 1,024 steps | emulator | its floor | inference | its floor | "
          "update | its floor | all |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    alone = 1e3 * 1024 / child("emulator", num_envs=8, threads=args.threads)
    for name, r in results.items():
        if variants[name] is None:
            continue
        ms = {part: statistics.median(x["ms_per_iteration"][part] for x in r)
              for part in ("emulator", "inference", "update", "all")}  # fmt: skip
        epochs = 4 if "--num-epochs" in variants[name] else 3
        floor = child("floating_point", network="nature", bf16="--bf16" in variants[name],
                      threads=args.threads)  # fmt: skip
        floor["update"] *= epochs
        cells = [f"{ms['emulator']:.0f} ({ms['emulator'] / ms['all']:.0%})", f"{alone:.0f}"]
        for part in ("inference", "update"):
            cells += [f"{ms[part]:.0f} ({ms[part] / ms['all']:.0%})", f"{floor[part]:.0f}"]
        print(f"| {name} | {' | '.join(cells)} | {ms['all']:.0f} |")


def scale(args):
    """Steps per second of the defaults, and of the emulator alone, from 1 to 64 actors."""
    print("\n| actors | steps/s | emulator alone | peak memory |\n|---|---|---|---|")
    for num_envs in (1, 2, 4, 8, 16, 32, 64):
        flags = ["--num-envs", str(num_envs), "--minibatch-size", str(32 * num_envs), "--threads",
                 str(args.threads)] + ["--cuda", "--compile"] * args.cuda  # fmt: skip
        iterations = max(2, args.iterations * 8 // num_envs)
        results = [child("ours", flags=flags, iterations=iterations) for _ in range(3)]
        alone = child("emulator", num_envs=num_envs, threads=args.threads,
                      steps=max(300, 8000 // num_envs))  # fmt: skip
        print(f"| {num_envs} | {median(results):.0f} | {alone:.0f} | "
              f"{median(results, 'rss_mb'):.0f} MB |", flush=True)  # fmt: skip


def processes(args):
    """Steps per second of one process with all threads and of as many processes with one each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    several = ["-m", "torch.distributed.run", "--nproc-per-node", str(args.threads)]
    ways = {
        "one process": ["ppo_atari.py", "--threads", str(args.threads)],
        f"torchrun, {args.threads} processes": [*several, "ppo_atari.py", "--threads", "1"],
    }
    results, steps = defaultdict(list), str(1024 * (args.iterations + 2))
    for turn in range(args.repeats):
        for settings, flags in (("SB3's settings", SB3_SETTINGS), ("defaults", [])):
            for way, command in ways.items():
                with tempfile.TemporaryDirectory() as folder:
                    own = ["--total-steps", steps, "--run-dir", f"{folder}/run", "--no-compile"]
                    subprocess.run([sys.executable, *command, *flags, *own], cwd=ROOT, check=True,
                                   capture_output=True)  # fmt: skip
                    events = EventAccumulator(f"{folder}/run").Reload()
                    speeds = [event.value for event in events.Scalars("steps_per_second")[2:]]
                speed = len(speeds) / sum(1 / x for x in speeds)
                results[f"{settings}, {way}"].append({"steps_per_second": speed})
                print(f"turn {turn + 1}: {settings}, {way}: {speed:.0f}", file=sys.stderr)
    print("\n| | steps/s, median | of all turns |\n|---|---|---|")
    for name, r in results.items():
        speeds = ", ".join(f"{x['steps_per_second']:.0f}" for x in r)
        print(f"| {name} | {median(r):.0f} | {speeds} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--only", choices=("ratio", "scale", "processes"))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--iterations", type=int, default=20, help="of 1,024 steps, a turn")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="the compiled rows with bfloat16 too")
    parser.add_argument("--subprocesses", action="store_true", help="SB3's SubprocVecEnv")
    args = parser.parse_args()
    for experiment in (ratio, scale, processes):
        if args.only in (None, experiment.__name__):
            experiment(args)


if __name__ == "__main__":
    main()
