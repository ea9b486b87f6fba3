"""A script as a user runs it: processes, what they print, and what they leave."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent


class Script:
    """One of the scripts, given as the module that it is."""

    def __init__(self, module):
        self.module, self.name = module, module.__name__

    def start(self, *flags, before=""):
        """Start it as a process; `before` is Python run ahead of it in the same process."""
        code = f"import {self.name}, os, signal\n{before}\n{self.name}.main()"
        command = [sys.executable, "-c", code] if before else [sys.executable, f"{self.name}.py"]
        return subprocess.Popen([*command, *map(str, flags)], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

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

    def interrupted_twice(self, capsys, monkeypatch, run_dir, *flags):
        """Ctrl-C twice in an update: it does not wait, and says how to go on."""

        def update(*_):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one is to end it")

        monkeypatch.setattr(self.module, "update", update)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as leaving:
            self.main(*flags, "--run-dir", run_dir)
        assert leaving.value.code == 130 and signal.getsignal(signal.SIGINT) is before
        last = capsys.readouterr().err.strip().splitlines()[-1]
        return last == f"interrupted; go on with: python {self.name}.py --resume {run_dir}"

    def import_does_nothing(self):
        before = {p.name for p in ROOT.iterdir()}
        done = subprocess.run([sys.executable, "-c", f"import {self.name}"], cwd=ROOT, text=True,
                              capture_output=True, check=True)  # fmt: skip
        assert (done.stdout, done.stderr) == ("", "")
        return {p.name for p in ROOT.iterdir()} - before <= {"__pycache__"}


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


def same_run(a, b):
    """Parameters, moments, Adam's state, counters and episodes equal, bit for bit."""
    first, second = (torch.load(d / "checkpoint.pt", weights_only=True) for d in (a, b))
    assert first.keys() == second.keys()
    for name in first.keys() - {"net", "optimizer", "settings", "seconds", "csv_bytes"}:
        assert first[name] == second[name], name
    for name, tensor in first["net"].items():
        assert torch.equal(tensor, second["net"][name]), name
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys() != set()
    for k, state in first["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, second["optimizer"]["state"][k][name]), (k, name)
    assert rows(a) == rows(b) != []
    return True


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
