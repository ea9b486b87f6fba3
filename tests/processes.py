"""A script as a user runs it: processes, what they print, and what they leave."""

import contextlib
import csv
import functools
import os
import re
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

ROOT = Path(__file__).parent.parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored


def iterations_in(path):
    """The number of iterations that a checkpoint stands after."""
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint["step"] // checkpoint["settings"]["batch_size"]


def told_how_to_go_on(line, run_dir):
    """Whether a line names where a run was interrupted, and the checkpoint it can go on from."""
    saved = torch.load(Path(run_dir) / "checkpoint.pt", weights_only=True)["step"]
    words = r"interrupted at step ([\d,]+); --resume (.*) goes on from step ([\d,]+)"
    reached, folder, begin = re.fullmatch(words, line).groups()
    assert (folder, begin) == (str(run_dir), f"{saved:,}")
    return int(reached.replace(",", "")) >= saved


class Script:
    """One of the scripts, given as the module that it is."""

    def __init__(self, module):
        self.module, self.name = module, module.__name__

    def start(self, *flags, before="", ignoring_ctrl_c=False):
        """Start it as a process; `before` is Python run ahead of it in the same process. With
        ignoring_ctrl_c it inherits SIGINT ignored, as from a shell's `&`."""
        code = f"import {self.name}, os, signal\n{before}\n{self.name}.main()"
        command = [sys.executable, "-c", code] if before else [sys.executable, f"{self.name}.py"]
        ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
        return subprocess.Popen([*command, *map(str, flags)], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                preexec_fn=ignore if ignoring_ctrl_c else None)  # fmt: skip

    def run(self, *flags, before="", status=0):
        """Run it to the end; returns (standard output, standard error)."""
        process = self.start(*flags, before=before)
        out, err = process.communicate(timeout=240)
        assert process.returncode == status, err
        return out, err

    def main(self, *flags):
        """Run it in this process."""
        return self.module.main([str(flag) for flag in flags])

    def refused(self, capsys, status, flags, *words):
        """In this process: one line, this status."""
        with pytest.raises(SystemExit) as leaving:
            self.main(*flags)
        assert leaving.value.code == status
        return one_line(capsys.readouterr().err, *words)

    def interrupted(self, capsys, monkeypatch, run_dir, *flags, in_update=5):
        """A run with these flags that one Ctrl-C ends, in this process, at the end of an update:
        the network is another by then, and no record has the iteration. True if it says in its last
        line how to go on, and has drawn its picture."""
        real, updates = self.module.update, []
        capsys.readouterr()

        def update(*args):
            result = real(*args)
            updates.append(result)
            if len(updates) == in_update:
                (Path(run_dir) / "learning_curve.png").unlink(missing_ok=True)
                os.kill(os.getpid(), signal.SIGINT)
                raise AssertionError("Ctrl-C is to end the run at once")
            return result

        before = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as leaving:
            patch.setattr(self.module, "update", update)
            self.main(*flags, "--run-dir", run_dir)
        assert leaving.value.code == 130 and len(updates) == in_update
        assert signal.getsignal(signal.SIGINT) is before
        assert (Path(run_dir) / "learning_curve.png").stat().st_size > 10_000
        assert len({e.step for e in events(run_dir)["steps_per_second"]}) == in_update - 1
        out, err = capsys.readouterr()
        assert "finished" not in out
        last = err.strip().splitlines()[-1]
        return told_how_to_go_on(last, run_dir)

    def tensorboard_has_what_update_returned(self, monkeypatch, run_dir, *flags):
        """A run with these flags shows every number of every iteration, as float32."""
        real, returned = self.module.update, []

        def update(*args):
            result = real(*args)
            returned.append(dict(result))
            return result

        monkeypatch.setattr(self.module, "update", update)
        self.main(*flags, "--run-dir", run_dir)
        shown = events(run_dir)
        assert len(returned) > 3 and set(shown) - {"score"} == {*returned[0], "steps_per_second"}
        for name in returned[0]:
            assert [e.value for e in shown[name]] == [np.float32(r[name]) for r in returned], name
        return True

    def pictures_of_a_slow_run(self, monkeypatch, run_dir, *flags):
        """Numbers of iterations after which a run of 8 iterations has drawn its picture; each
        takes 4 seconds of the script's clock and is saved."""
        real_update, real_draw = self.module.update, self.module.Run.draw
        clock, drawn = types.SimpleNamespace(now=1e9), []

        def update(*args):
            clock.now += 4
            return real_update(*args)

        def draw(run):
            drawn.append(run.step // run.args.batch_size)
            real_draw(run)

        fake = types.SimpleNamespace(time=lambda: clock.now, time_ns=time.time_ns)
        monkeypatch.setattr(self.module, "time", fake)
        monkeypatch.setattr(self.module, "update", update)
        monkeypatch.setattr(self.module.Run, "draw", draw)
        args, _ = self.module.parse_args([*map(str, flags), "--run-dir", str(run_dir)])
        steps = ["--total-steps", 8 * args.batch_size, "--checkpoint-every", 1]
        self.main(*flags, *steps, "--run-dir", run_dir)
        return drawn


def one_line(err, *words):
    """Standard error is one line that holds these words."""
    assert len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    for word in words:
        assert str(word) in err, err
    return True


def rows(run_dir):
    """episodes.csv but for its seconds."""
    with open(run_dir / "episodes.csv") as file:
        return [
            (int(r["step"]), float(r["return"]), int(r["length"])) for r in csv.DictReader(file)
        ]


def events(run_dir):
    """{name: TensorBoard's scalars of this name, each with step and value}."""
    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def event_records(run_dir):
    """Everything in the files that TensorBoard reads."""
    paths = sorted(run_dir.glob("events.out.tfevents*"))
    return [record for path in paths for record in EventFileLoader(str(path)).Load()]


def same(one, other):
    """Plain data are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def same_run(a, b):
    """Parameters, moments, Adam's state, counters, settings and episodes equal, bit for bit; only
    the seconds and the paths may differ. What is in episodes.csv is in the checkpoint, and
    TensorBoard has each iteration once."""
    first, second = (torch.load(d / "checkpoint.pt", weights_only=True) for d in (a, b))
    for run_dir, checkpoint in ((a, first), (b, second)):
        assert rows(run_dir) == [tuple(row[:3]) for row in checkpoint["episodes"]] != []
        for path in ("run_dir", "resume"):
            checkpoint["settings"].pop(path)
        checkpoint["episodes"] = [row[:3] for row in checkpoint["episodes"]]
        assert checkpoint.pop("seconds") > 0
        batch_size = checkpoint["settings"]["batch_size"]
        steps = list(range(batch_size, checkpoint["step"] + 1, batch_size))
        assert [e.step for e in events(run_dir)["steps_per_second"]] == steps
    assert first.keys() == second.keys() and first["optimizer"]["state"].keys()
    for name in first:
        assert same(first[name], second[name]), name
    best = [torch.load(d / "best.pt", weights_only=True) if (d / "best.pt").exists() else {}
            for d in (a, b)]  # fmt: skip
    assert all(same(best[0].get(name), best[1].get(name)) for name in ("best", "net", "step"))
    return True


@contextlib.contextmanager
def full_disk():
    """Gives a function that has the system refuse to let this process's files grow beyond some
    bytes, until the context is over."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def allow_files_of(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        yield allow_files_of
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kill_after_a_checkpoint(process, run_dir):
    """SIGKILL at a random moment between the second checkpoint and about the third."""
    path, seen = run_dir / "checkpoint.pt", {}  # seen: {when a checkpoint was written: now}
    while len(seen) < 2:
        assert process.poll() is None, process.communicate()
        if path.exists():
            seen.setdefault(path.stat().st_mtime_ns, time.time())
        time.sleep(0.005)
    first, second = seen.values()
    time.sleep(np.random.default_rng().uniform(0, min(0.3, second - first)))
    process.kill()
    process.communicate()


def wait_for_episodes(process, run_dir, count=3):
    while not (run_dir / "episodes.csv").exists() or len(rows(run_dir)) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


class Clock:
    """The time that a script reads, with its progress bar: it stands still but for `now`."""

    def __init__(self, monkeypatch, module):
        self.now = time.time()
        monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr("tqdm.std.time", self.time)

    def __getattr__(self, name):
        return getattr(time, name)

    def time(self):
        return self.now
