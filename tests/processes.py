"""The scripts as a user runs them, and what a run leaves."""

import contextlib
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari
import ppo_continuous
import trpo_continuous

ROOT = Path(__file__).parent.parent
SCRIPTS = [ppo_atari, ppo_continuous, trpo_continuous]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one

# the flags of a short run: iterations of 64 steps
CONTINUOUS = "--num-envs 2 --num-steps 32 --minibatch-size 32 --num-epochs 2 --threads 1"
ATARI = "--network paper --num-envs 2 --num-steps 32 --minibatch-size 32 --num-epochs 1 --threads 1"


def small(script, iterations, *flags):
    """Flags of a run of so many iterations of 64 steps."""
    own = ATARI if script is ppo_atari else CONTINUOUS
    own = f"{own} --no-compile" if script is ppo_continuous else own
    return [*own.split(), "--total-steps", 64 * iterations, *flags]


def main(script, *flags):
    """Run a script in this process."""
    return script.main([str(flag) for flag in flags])


def start(script, *flags, **settings):
    """Run a script in a process of its own."""
    command = [sys.executable, f"{script.__name__}.py", *map(str, flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def run(script, *flags, status=0, **settings):
    """Run a script to its end in a process of its own. Returns (standard output, error)."""
    process = start(script, *flags, **settings)
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, err
    return out, err


def load(path):
    return torch.load(path, weights_only=True)


def rows(run_dir):
    """episodes.csv but for its seconds."""
    with open(run_dir / "episodes.csv") as file:
        return [
            (int(r["step"]), float(r["return"]), int(r["length"])) for r in csv.DictReader(file)
        ]


def events(run_dir):
    """{name: TensorBoard's scalars of this name, each with step and value}.

    The files are joined in the order of writing. TensorBoard goes by their names, in which the
    tenth writer of a process comes before the ninth of the same second.
    """
    files = sorted(Path(run_dir).glob("events.out.*"), key=lambda file: file.stat().st_mtime_ns)
    with TemporaryDirectory() as folder:
        joined = Path(folder) / "events.out.tfevents.joined"
        joined.write_bytes(b"".join(file.read_bytes() for file in files))
        accumulator = EventAccumulator(str(joined))
        accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def same(one, other):
    """Whether plain data are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one and other != other  # nan is nan


def same_training(a, b):
    """Whether two runs have learned the same, bit for bit, from the same episodes."""
    states = []
    for run_dir in (a, b):
        checkpoint = load(run_dir / "checkpoint.pt")
        assert rows(run_dir) == [tuple(row[:3]) for row in checkpoint["episodes"]]
        checkpoint["episodes"] = rows(run_dir)
        for name in ("steps_per_second", "eval_score"):
            checkpoint["stats"].pop(name, None)
        states.append({k: v for k, v in checkpoint.items() if k not in ("settings", "seconds")})
    return same(*states)


@contextlib.contextmanager
def in_update(monkeypatch, script, number, action):
    """Within, `action` is called at the end of the number-th update of a run (from 1)."""
    real, count = script.update, 0

    def update(*args):
        nonlocal count
        result, count = real(*args), count + 1
        if count == number:
            action()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(script, "update", update)
        yield


def send(number):
    """An action that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def shorten_games(monkeypatch):
    """Have Atari's games end after 20 steps, to see many in little time."""
    make = gym.make

    def make_short(env_id, **settings):
        short = {"max_num_frames_per_episode": 80} if "Frameskip" in env_id else {}
        return make(env_id, **settings | short)

    monkeypatch.setattr(gym, "make", make_short)


def means_of_100(run_dir, batch_size):
    """{step: mean of the last 100 episodes} after the iterations in which there were 100."""
    table = rows(run_dir)
    means = {}
    for step in range(batch_size, load(run_dir / "checkpoint.pt")["step"] + 1, batch_size):
        returns = [score for end, score, _ in table if end <= step]
        if len(returns) >= 100:
            means[step] = np.mean(returns[-100:])
    return means
