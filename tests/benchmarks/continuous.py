"""Steps per second of ppo_continuous.py and trpo_continuous.py on HalfCheetah-v5, beside the PPO of
Stable-Baselines3 and the TRPO of sb3-contrib, and where the time goes.

  pip install -r tests/benchmarks/requirements.txt
  python tests/benchmarks/continuous.py              # both, about 5 minutes
  python tests/benchmarks/continuous.py --only ppo

Every measurement is a process of its own with one thread, on an otherwise idle machine, in turns;
the tables give medians. Both sides have equal settings: SB3's defaults, for PPO the paper's Table
3. The first two iterations of a process, in which PPO's --compile compiles, are not counted.
"""

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict

from throughput import child, clock, median, rss_mb, times

# sb3-contrib's defaults in our words: 15 iterations of conjugate gradient, 10 critic passes
TRPO_SETTINGS = ["--num-steps", "2048", "--minibatch-size", "128", "--num-epochs", "10",
                 "--cg-iters", "15", "--gae-lambda", "0.95"]  # fmt: skip
VARIANTS = {
    "ppo": {
        "SB3's PPO": None,
        "ppo_continuous.py": [],
        "ppo_continuous.py --compile": ["--compile"],
    },
    "trpo": {
        "sb3-contrib's TRPO": None,
        "trpo_continuous.py, its settings": TRPO_SETTINGS,
    },
}
STEPS = 2048  # of an iteration


def ours(algorithm, flags, iterations):
    """Train for some iterations; returns steps/s, peak memory and milliseconds by part."""
    script = importlib.import_module(f"{algorithm}_continuous")
    spent, marks, timed = clock(script)
    make_policy = script.make_policy
    script.SyncVectorEnv.step = timed("simulator", script.SyncVectorEnv.step)
    script.make_policy = lambda *args: timed("policy", make_policy(*args))
    for part in ("update", "trust_region_step"):
        if hasattr(script, part):
            setattr(script, part, timed(part, getattr(script, part)))
    with tempfile.TemporaryDirectory() as folder:
        script.main([*flags, "--env-id", "HalfCheetah-v5", "--run-dir", f"{folder}/run",
                     "--total-steps", str(STEPS * (iterations + 2))])  # fmt: skip
    seconds = marks[-1] - marks[1]
    return {
        "steps_per_second": STEPS * iterations / seconds,
        "rss_mb": rss_mb(),
        "ms_per_iteration": {part: 1e3 * s / iterations for part, s in spent.items()}
        | {"all": 1e3 * seconds / iterations},
    }


def sb3(algorithm, iterations):
    """The same task in Stable-Baselines3 or sb3-contrib, at its defaults."""
    import torch
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    package = {"ppo": "stable_baselines3", "trpo": "sb3_contrib"}[algorithm]
    marks = []

    class Mark(BaseCallback):
        def _on_rollout_start(self):
            marks.append(time.perf_counter())

        def _on_step(self):
            return True

    Model = getattr(importlib.import_module(package), algorithm.upper())
    model = Model("MlpPolicy", "HalfCheetah-v5", seed=1, device="cpu")
    model.learn(STEPS * (iterations + 3), callback=Mark())
    seconds = marks[2 + iterations] - marks[2]
    return {"steps_per_second": STEPS * iterations / seconds, "rss_mb": rss_mb()}


def simulator(steps=10 * STEPS):
    """Milliseconds that the simulator alone takes for an iteration, with random actions."""
    import gymnasium as gym

    env = gym.make("HalfCheetah-v5", disable_env_checker=True)
    env.reset(seed=1)
    actions = [env.action_space.sample() for _ in range(100)]
    start = time.perf_counter()
    for t in range(steps):
        if env.step(actions[t % 100])[3]:
            env.reset()
    return 1e3 * STEPS / steps * (time.perf_counter() - start)


def compare(algorithm, args):
    results = defaultdict(list)
    for turn in range(args.repeats):
        for name, flags in VARIANTS[algorithm].items():
            what = {"algorithm": algorithm, "iterations": args.iterations}
            if flags is None:
                result = child("sb3", "continuous", **what)
            else:
                result = child("ours", "continuous", flags=flags, **what)
            results[name].append(result)
            print(f"turn {turn + 1}: {name}: {result['steps_per_second']:.0f}", file=sys.stderr)
    base = next(iter(results.values()))
    print("\n| | steps/s, median | of all turns | times SB3 | peak memory |\n|---|---|---|---|---|")
    for name, r in results.items():
        speeds = ", ".join(f"{x['steps_per_second']:.0f}" for x in r)
        print(f"| {name} | {median(r):.0f} | {speeds} | {times(r, base)} | "
              f"{median(r, 'rss_mb'):.0f} MB |")  # fmt: skip
    alone = child("simulator", "continuous")
    parts = ["simulator", "policy", "update"] + ["trust_region_step"] * (algorithm == "trpo")
    print(f"\n| ms an iteration of {STEPS:,} steps | {' | '.join(parts)} | all |")
    print("|---" * (len(parts) + 2) + "|")
    for name, r in results.items():
        if VARIANTS[algorithm][name] is not None:
            ms = [statistics.median(x["ms_per_iteration"][p] for x in r) for p in [*parts, "all"]]
            print(f"| {name} | {' | '.join(f'{x:.0f}' for x in ms)} |")
    print(f"| the simulator alone | {alone:.0f} {'| ' * (len(parts) + 1)}|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each")
    parser.add_argument("--iterations", type=int, default=15, help="of 2,048 steps, a turn")
    args = parser.parse_args()
    for algorithm in VARIANTS:
        if args.only in (None, algorithm):
            compare(algorithm, args)


if __name__ == "__main__":
    main()
