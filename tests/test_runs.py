"""Runs of all three scripts: records, stop and resume, evaluation, and what users get wrong."""

import io
import json
import os
import pickle
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import imageio_ffmpeg
import matplotlib.figure
import numpy as np
import probes
import pygame
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from PIL import Image
from processes import (
    ROOT,
    SCRIPTS,
    events,
    in_update,
    load,
    main,
    means_of_100,
    rows,
    run,
    same,
    same_training,
    send,
    shorten_games,
    small,
)
from torch.utils.tensorboard import SummaryWriter

import ppo_atari
import ppo_continuous
import trpo_continuous

each_script = pytest.mark.parametrize("script", SCRIPTS)
# of code that the scripts share, letter for letter
one_script = pytest.mark.parametrize("script", [
    script if script is trpo_continuous else pytest.param(script, marks=pytest.mark.slow)
    for script in SCRIPTS
])  # fmt: skip
# Run is one text in all three (test_copies.py), and games take longest
each_script_once = pytest.mark.parametrize("script", [
    pytest.param(ppo_atari, marks=pytest.mark.slow), ppo_continuous, trpo_continuous,
])  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """{script: directory of a short run}, made when it is asked for."""

    class Finished(dict):
        def __missing__(self, script):
            run_dir = tmp_path_factory.mktemp("runs") / "run"
            main(script, *small(script, 16), "--run-dir", run_dir)
            self[script] = run_dir
            return run_dir

    return Finished()


def refused(script, capsys, *flags):
    """The message of a run that ends with status 1 or 2 and no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as leaving:
        main(script, *flags)
    err = capsys.readouterr().err
    if isinstance(leaving.value.code, str):  # python prints it and exits with 1
        return leaving.value.code
    assert leaving.value.code == 2
    return " ".join(err.replace("│", " ").split())


def files(folder):
    """{path: content} below a folder."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# ------------------------------------------------------------------------------------- Records


@each_script
def test_a_run_leaves_its_records(script, tmp_path):
    """In the environment that a notebook, a cluster and a terminal without Greek leave behind."""
    env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "RANK": "1",
                        "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                        "PYTHONIOENCODING": "ascii"}  # fmt: skip
    run_dir = tmp_path / "run"
    out, err = run(script, *small(script, 16), "--run-dir", run_dir, env=env)
    names = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert names - {"best.pt"} == {"config.json", "episodes.csv", "checkpoint.pt",
                                   "learning_curve.png"}  # fmt: skip
    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["num_envs"] == 2 and config["versions"]["torch"] == torch.__version__
    assert config["script"] == f"{script.__name__}.py" and len(config["sha256"]) == 64
    checkpoint, table = load(run_dir / "checkpoint.pt"), rows(run_dir)
    assert checkpoint["step"] == 16 * 64 and len(table) > 1
    assert [tuple(row[:3]) for row in checkpoint["episodes"]] == table
    ends = [step for step, _, _ in table]
    assert ends == sorted(ends) and sum(length for *_, length in table) <= 16 * 64
    if script is not ppo_atari:  # raw scores: 1 a step in CartPole
        assert all(score == length for _, score, length in table)
    scalars = events(run_dir)
    expected = {"score", "steps_per_second", "value_loss", "entropy", "explained_variance",
                "grad_norm"}  # fmt: skip
    if script is trpo_continuous:
        expected |= {"kl", "improvement", "expected_improvement", "step_fraction", "cg_residual"}
    else:
        expected |= {"policy_loss", "clip_fraction", "learning_rate", "clip_eps"}
        expected |= {"kl", "epochs"} if script is ppo_continuous else {"approx_kl"}
    assert set(scalars) == expected == set(checkpoint["stats"])
    for name in scalars:
        assert [e.step for e in scalars[name]] == list(range(64, 16 * 64 + 1, 64)), name
    for event in scalars["score"]:
        returns = [score for step, score, _ in table if step <= event.step][-100:]
        assert not returns or event.value == pytest.approx(np.mean(returns))
    Image.open(run_dir / "learning_curve.png").verify()
    assert "score" in err and "100%" in err  # the progress
    assert f" {script.__name__}.py --evaluate {run_dir} --render\n" in out
    assert "--resume" not in out


def test_events_are_read_in_the_order_of_writing(tmp_path):
    """Two writers of one second; by their names the second one would come first."""
    for step, name in ((1, "9"), (2, "10")):
        with SummaryWriter(tmp_path / "new", purge_step=step) as writer:
            writer.add_scalar("x", step, step)
        [file] = (tmp_path / "new").iterdir()
        file.rename(tmp_path / f"events.out.tfevents.1.{name}")
    assert [(e.step, e.value) for e in events(tmp_path)["x"]] == [(1, 1), (2, 2)]


def test_the_picture_draws_episodes_their_mean_and_the_published_score(tmp_path, monkeypatch):
    figures = []

    class Figure(matplotlib.figure.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    monkeypatch.setattr(matplotlib.figure, "Figure", Figure)
    args = ppo_atari.Args(run_dir=str(tmp_path / "run"))
    atari_run = ppo_atari.Run(args, None, net=torch.nn.Linear(1, 1))
    atari_run.episodes = [(10 * k, float(k * k % 17), 5, 0.1) for k in range(1, 151)]
    atari_run.save()
    atari_run.close()
    points, mean, published = (line.get_xydata() for line in figures[-1].axes[0].lines)
    returns = [row[1] for row in atari_run.episodes]
    means = [(10 * k, np.mean(returns[k - 100 : k])) for k in range(100, 151)]
    np.testing.assert_array_equal(points, [row[:2] for row in atari_run.episodes])
    np.testing.assert_allclose(mean, means)
    assert set(published[:, 1]) == {274.8}


def test_a_picture_that_cannot_be_drawn_stops_nothing(tmp_path, capsys, monkeypatch):
    """As by a matplotlibrc that asks for LaTeX, where there is none."""
    monkeypatch.setenv("PATH", "")
    with matplotlib.rc_context({"text.usetex": True}):
        main(trpo_continuous, *small(trpo_continuous, 2), "--run-dir", tmp_path / "run")
    assert load(tmp_path / "run" / "checkpoint.pt")["step"] == 128
    assert "learning_curve.png" in capsys.readouterr().out


def test_best_is_the_policy_of_the_best_mean_of_100_episodes(tmp_path):
    flags = [*small(ppo_continuous, 120), "--learning-rate", 1e-4]
    main(ppo_continuous, *flags, "--run-dir", tmp_path / "run")
    means, best = means_of_100(tmp_path / "run", 64), load(tmp_path / "run" / "best.pt")
    assert len(means) > 2 and best["best"] == max(means.values())
    assert best["step"] == min(step for step, mean in means.items() if mean == best["best"])


@one_script
def test_goal_score_stops_and_saves(script, tmp_path, capsys, monkeypatch):
    """From then on --evaluate plays best.pt, which has no episodes to --resume from."""
    shorten_games(monkeypatch)
    run_dir, goal = tmp_path / "run", -1 if script is ppo_atari else 12
    main(script, *small(script, 999), "--goal-score", goal, "--run-dir", run_dir)
    means, best = means_of_100(run_dir, 64), load(run_dir / "best.pt")
    checkpoint = load(run_dir / "checkpoint.pt")
    assert list(means)[-1] == checkpoint["step"] < 64 * 999
    assert [step for step, mean in means.items() if mean >= goal] == [checkpoint["step"]]
    assert best["step"] == checkpoint["step"] and same(best["net"], checkpoint["net"])
    for job, whole in (("--resume", True), ("--evaluate", False)):
        assert ("episodes" in script.parse_args([job, str(run_dir)])[1]) == whole
    assert "--resume" in refused(script, capsys, "--resume", run_dir / "best.pt")


@each_script
def test_eval_every_logs_the_score_without_noise(script, tmp_path, monkeypatch):
    """After the iterations in which a multiple of it was reached."""
    noise, scores = [], iter(range(10))

    def play(net, env, args, sample):
        noise.append(sample)
        env.close()
        return [(next(scores), 1) for _ in range(args.episodes)]

    monkeypatch.setattr(script, "play", play)
    flags = [*small(script, 5), "--eval-every", "1.5e2", "--episodes", 2]
    main(script, *flags, "--run-dir", tmp_path / "run")
    evals = [(e.step, e.value) for e in events(tmp_path / "run")["eval_score"]]
    assert evals == [(192, 0.5), (320, 2.5)] and noise == [False, False]


# ----------------------------------------------------------------------------- Stop and resume


@each_script
def test_the_same_seed_gives_the_same_bits_and_another_does_not(script, tmp_path, monkeypatch):
    """Whether or not the run saves itself and plays in between."""
    shorten_games(monkeypatch)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        own = ["--eval-every", 128, "--episodes", 1] * (name == "b")
        if name == "b":
            monkeypatch.setattr(script.Run, "last_save", property(lambda _: -1e9, lambda *_: None),
                                raising=False)  # fmt: skip
        main(script, *small(script, 4), *own, "--seed", seed, "--run-dir", tmp_path / name)
    assert len(events(tmp_path / "b")["eval_score"]) == 2
    assert same_training(tmp_path / "a", tmp_path / "b")
    assert not same_training(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("script, number", [
    (ppo_atari, signal.SIGTERM), (ppo_continuous, signal.SIGINT),
    (ppo_continuous, signal.SIGUSR1), (trpo_continuous, signal.SIGHUP),
])  # fmt: skip
def test_a_signal_loses_no_step_and_the_run_goes_on(script, number, tmp_path, capsys, monkeypatch):
    shorten_games(monkeypatch)
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    run_dir, before = tmp_path / "run", list(map(signal.getsignal, numbers))
    flags = [*small(script, 12), "--run-dir", run_dir]
    with pytest.raises(SystemExit) as leaving, in_update(monkeypatch, script, 5, send(number)):
        main(script, *flags)
    assert leaving.value.code == 130 and list(map(signal.getsignal, numbers)) == before
    stopped, table = load(run_dir / "checkpoint.pt"), rows(run_dir)
    assert stopped["step"] == 5 * 64 and [tuple(row[:3]) for row in stopped["episodes"]] == table
    assert (run_dir / "learning_curve.png").exists()
    [command] = re.findall(r"--resume .*", capsys.readouterr().out)
    with open(run_dir / "episodes.csv", "a") as file:
        file.write("999999,1,1,1\n")  # what a kill would have left after the checkpoint
    main(script, *command.split())
    resumed = load(run_dir / "checkpoint.pt")
    assert resumed["step"] == 12 * 64 and rows(run_dir)[: len(table)] == table
    assert len(rows(run_dir)) > len(table) and rows(run_dir)[-1][0] <= 12 * 64
    assert resumed["seconds"] > stopped["seconds"] and resumed["best"] >= stopped["best"]
    steps = [e.step for e in events(run_dir)["entropy"]]
    assert steps == list(range(64, 12 * 64 + 1, 64))


def test_under_nohup_a_hangup_does_nothing(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with in_update(monkeypatch, trpo_continuous, 1, send(signal.SIGHUP)):
            main(trpo_continuous, *small(trpo_continuous, 3), "--run-dir", tmp_path / "run")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert load(tmp_path / "run" / "checkpoint.pt")["step"] == 3 * 64


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, capsys, monkeypatch):
    twice = in_update(monkeypatch, ppo_continuous, 2, lambda: [send(signal.SIGINT)() for _ in "12"])
    with pytest.raises(SystemExit) as leaving, twice:
        main(ppo_continuous, *small(ppo_continuous, 9), "--run-dir", tmp_path / "run")
    assert leaving.value.code == 130 and not (tmp_path / "run" / "checkpoint.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("pipeline, goes_on", [
    ("{} 2>&1 | tee log", None),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("{} | tee log", "err"), ("{} >&-", None), ("{} | head -1", "err"), ("{} 2>&-", "out"),
        ("{}", "out"),
    )),
])  # fmt: skip
def test_ctrl_c_in_a_shell(pipeline, goes_on, tmp_path):
    """It reaches every process of the pipeline: whoever reads what the script prints has gone."""
    command = [sys.executable, ROOT / "trpo_continuous.py", *small(trpo_continuous, 10**6)]
    command = shlex.join([str(word) for word in [*command, "--run-dir", "run"]])
    line = f"trap : INT; {pipeline.format(command)}; echo ${{PIPESTATUS[0]}} > status"
    shell = subprocess.Popen(["bash", "-c", line], cwd=tmp_path, text=True, start_new_session=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    while not (tmp_path / "run" / "best.pt").exists():  # 100 episodes have ended
        assert shell.poll() is None, shell.communicate()
        time.sleep(0.05)
    os.killpg(shell.pid, signal.SIGINT)
    out, err = shell.communicate(timeout=60)
    assert (tmp_path / "status").read_text() == "130\n", err
    checkpoint = load(tmp_path / "run" / "checkpoint.pt")
    assert checkpoint["step"] == events(tmp_path / "run")["score"][-1].step
    assert [tuple(row[:3]) for row in checkpoint["episodes"]] == rows(tmp_path / "run")
    for trouble in ("Traceback", "Exception", "Error"):
        assert trouble not in out + err
    if goes_on:
        [line] = re.findall("go on: (.*) --resume run", {"out": out, "err": err}[goes_on])
        python, script = shlex.split(line)  # as typed where it began
        assert tmp_path / python == Path(sys.executable)
        assert (tmp_path / script).resolve() == ROOT / "trpo_continuous.py"


def test_a_run_saves_itself_once_a_minute(tmp_path, monkeypatch):
    """On a clock on which an iteration takes 25 seconds, while someone sets the time of day back;
    a kill leaves the last file whole."""
    script, clock, saved = ppo_continuous, [1e9], []
    real, real_update = script.Run.save, script.update

    class Time:
        monotonic = staticmethod(lambda: clock[0])
        time = staticmethod(lambda: 2e9 - 100 * clock[0])

    def save(run):
        real(run)
        saved.append(run.step // 64)
        if saved == [3]:  # the next save is cut short
            monkeypatch.setattr(script.torch, "save", lambda state, path: path.write_bytes(b"PK"))
            monkeypatch.setattr(script.os, "replace", killed)

    def killed(*_):
        raise SystemExit("killed")

    monkeypatch.setattr(script, "time", Time)
    monkeypatch.setattr(script.Run, "save", save)
    monkeypatch.setattr(script, "update", lambda *args: (clock.__setitem__(0, clock[0] + 25),
                                                        real_update(*args))[1])  # fmt: skip
    with pytest.raises(SystemExit, match="killed"):
        main(script, *small(script, 12), "--run-dir", tmp_path / "run")
    assert saved == [3] and load(tmp_path / "run" / "checkpoint.pt")["step"] == 3 * 64
    assert max(e.step for e in events(tmp_path / "run")["entropy"]) == 6 * 64
    assert [row[3] for row in load(tmp_path / "run" / "checkpoint.pt")["episodes"]][-1] == 75


@each_script_once
def test_a_resumed_run_begins_with_all_that_was_saved(script, tmp_path, monkeypatch):
    """A finished run has nothing to do: its network, moments, optimizer and the rest stay. Two
    copies, prolonged, learn the same."""
    shorten_games(monkeypatch)
    flags = small(script, 3, *(["--objective", "kl-adaptive"] * (script is ppo_continuous)))
    for name in ("a", "b"):
        main(script, *flags, "--run-dir", tmp_path / name)
        before = load(tmp_path / name / "checkpoint.pt")
        main(script, "--resume", tmp_path / name)
        after = load(tmp_path / name / "checkpoint.pt")
        for state in (before, after):
            del state["optimizer"]["param_groups"]  # its settings: the flags' or, so far, Adam's
        for part in before.keys() - {"settings", "seconds"}:
            assert same(before[part], after[part]), part
        main(script, "--resume", tmp_path / name, "--total-steps", 64 * 5)
        assert load(tmp_path / name / "checkpoint.pt")["step"] == 64 * 5
    assert same_training(tmp_path / "a", tmp_path / "b")


def test_a_resumed_run_goes_on_with_its_beta(tmp_path, monkeypatch):
    betas, real = [], ppo_continuous.adapt_beta

    def adapt_beta(beta, kl, kl_target):
        betas.append((beta, real(beta, kl, kl_target)))
        return betas[-1][1]

    monkeypatch.setattr(ppo_continuous, "adapt_beta", adapt_beta)
    flags = small(ppo_continuous, 3, "--objective", "kl-adaptive", "--kl-target", 100)
    main(ppo_continuous, *flags, "--run-dir", tmp_path / "run")
    main(ppo_continuous, "--resume", tmp_path / "run", "--total-steps", 5 * 64)
    assert betas == [(2.0**-k, 2.0 ** -(k + 1)) for k in range(5)]
    assert [e.value for e in events(tmp_path / "run")["beta"]] == [after for _, after in betas]


@each_script
def test_any_flag_changes_a_resumed_run_and_is_told(script, tmp_path, capsys):
    own = [] if script is ppo_continuous else ["--learning-rate", 1e-3]
    main(script, *small(script, 2), *own, "--run-dir", tmp_path / "run")
    capsys.readouterr()
    changes = {"learning_rate": "0.001 -> 0.0001", "total_steps": "128 -> 256"}
    flags = ["--learning-rate", 1e-4, "--total-steps", 256, "--gamma", 0.99, "--threads", 1]
    if script is not trpo_continuous:
        changes, flags = changes | {"adam_eps": "1e-05 -> 0.01"}, [*flags, "--adam-eps", 0.01]
    main(script, "--resume", tmp_path / "run", *flags)
    told = [line for line in capsys.readouterr().out.splitlines() if "->" in line]
    assert sorted(told) == sorted(f"{name} {change}" for name, change in changes.items())
    checkpoint = load(tmp_path / "run" / "checkpoint.pt")
    assert checkpoint["step"] == 256 and checkpoint["settings"]["learning_rate"] == 1e-4
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"] == checkpoint["settings"]
    [group] = checkpoint["optimizer"]["param_groups"]
    assert group["lr"] <= 1e-4  # and not only told
    assert group["eps"] == (1e-8 if script is trpo_continuous else 0.01)


def test_a_fixed_beta_is_that_of_the_flag(tmp_path, monkeypatch):
    """Although the run has adapted one before."""
    betas, real = [], ppo_continuous.update
    flags = small(ppo_continuous, 2, "--objective", "kl-adaptive", "--kl-target", 100)
    main(ppo_continuous, *flags, "--run-dir", tmp_path / "run")
    monkeypatch.setattr(ppo_continuous, "update", lambda *args: (betas.append(args[-2]),
                                                                 real(*args))[1])  # fmt: skip
    flags = ["--objective", "kl-fixed", "--kl-beta", 3, "--total-steps", 4 * 64]
    main(ppo_continuous, "--resume", tmp_path / "run", *flags)
    assert betas == [3, 3]


@each_script_once
def test_an_older_version_s_checkpoint_loads(script, finished, tmp_path):
    """Settings that are gone are dropped; new ones, and None, take their defaults."""
    saved = load(finished[script] / "checkpoint.pt")
    saved["settings"] |= {"gamma": 0.5, "checkpoint_every": 4, "threads": None}
    del saved["settings"]["video"], saved["stats"]
    if script is ppo_continuous:
        saved["penalty"] = {"beta": torch.tensor(0.25)}
    torch.save(saved, tmp_path / "checkpoint.pt")
    expected = {name: value for name, value in saved["settings"].items()
                if name not in ("threads", "checkpoint_every", "total_steps")}  # fmt: skip
    for job in ("resume", "evaluate"):
        expected |= {"run_dir": str(tmp_path), "resume": "", "evaluate": "", job: str(tmp_path)}
        args, _ = script.parse_args([f"--{job}", str(tmp_path)])
        assert args == script.Args(**expected, total_steps=1024)
    main(script, "--resume", tmp_path, "--total-steps", 1024 + 64)
    assert load(tmp_path / "checkpoint.pt")["step"] == 1024 + 64


def test_an_error_in_mid_run_keeps_its_traceback_and_names_resume(tmp_path, capsys, monkeypatch):
    script, run_dir = ppo_continuous, tmp_path / "run"
    main(script, *small(script, 2), "--run-dir", run_dir)

    def fail():
        raise ZeroDivisionError

    capsys.readouterr()
    with pytest.raises(ZeroDivisionError), in_update(monkeypatch, script, 1, fail):
        main(script, "--resume", run_dir, "--total-steps", 640)
    assert f"--resume {run_dir}" in capsys.readouterr().out
    assert load(run_dir / "checkpoint.pt")["step"] == 128


@pytest.mark.parametrize("script", [ppo_continuous, trpo_continuous])
def test_what_is_not_finite_stops_the_run_with_a_sentence(script, tmp_path, capsys):
    flags = [*small(script, 9), "--env-id", "InfReward-v0", "--run-dir", tmp_path / "run"]
    assert "inf" in refused(script, capsys, *flags)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


# -------------------------------------------------------------------------- The task's own parts


class Opened(probes.Probe):
    """As Probe, but it knows which of its kind are open, and fails where it is told."""

    where, open_now = "", set()

    def __init__(self, shape=(1,)):
        self.observation_space = Box(-9, 9, shape)
        self.open_now.add(id(self))

    def reset(self, seed=None, options=None):
        self.fail("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.fail("step")
        return super().step(action)

    def fail(self, where):
        if self.where == where:
            raise ZeroDivisionError

    def close(self):
        self.open_now.discard(id(self))


gym.register("Opened-v0", Opened, max_episode_steps=10)
gym.register("OpenedImage-v0", Opened, kwargs={"shape": (2, 2)})


@pytest.mark.parametrize("script", [ppo_continuous, trpo_continuous])
@pytest.mark.parametrize("where", ["", "step", "reset", "run dir", "spaces", "evaluate"])
def test_tasks_are_closed_also_after_a_failure(where, script, tmp_path, capsys, monkeypatch):
    """One with a simulator of its own would leave it behind. Signals do as before, too."""
    Opened.open_now.clear()
    env_id = "OpenedImage-v0" if where == "spaces" else "Opened-v0"
    flags = [*small(script, 2), "--env-id", env_id, "--run-dir", tmp_path / "run"]
    flags += ["--eval-every", 64, "--episodes", 1]
    if where == "run dir":
        (tmp_path / "run" / "something").mkdir(parents=True)
    if where == "evaluate":
        main(script, *flags)
        flags, where = ["--evaluate", tmp_path / "run"], "step"
    monkeypatch.setattr(Opened, "where", where)
    if where:
        with pytest.raises((ZeroDivisionError, SystemExit)):
            main(script, *flags)
    else:
        main(script, *flags)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not Opened.open_now and handler is signal.default_int_handler


MODULE = """
import subprocess, threading
import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

class Simulator(gym.Env):
    '''A process and a thread of its own, until it is closed.'''
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def __init__(self, fails_at):
        self.fails_at, self.steps, self.over = fails_at, 0, threading.Event()
        threading.Thread(target=self.over.wait).start()
        self.process = subprocess.Popen(["sleep", "600"])
        print("process", self.process.pid, flush=True)

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        assert self.steps != self.fails_at
        return np.zeros(2, np.float32), 1.0, self.steps % 9 == 0, False, {}

    def close(self):
        self.over.set()
        self.process.kill()
        self.process.wait()

gym.register("My-v0", Simulator, kwargs={"fails_at": 0})
gym.register("Fails-v0", Simulator, kwargs={"fails_at": 40})
"""


@pytest.mark.parametrize("script, task, status", [
    (trpo_continuous, "My-v0", 0), (ppo_continuous, "Fails-v0", 1),
])  # fmt: skip
def test_a_task_of_one_s_own_leaves_nothing_running(script, task, status, tmp_path):
    (tmp_path / "my_module.py").write_text(MODULE)
    flags = [*small(script, 2), "--env-id", f"my_module:{task}", "--run-dir", tmp_path / "run"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    out, err = run(script, *flags, status=status, env=env)
    assert ("AssertionError" in err) == bool(status)
    processes = [int(number) for number in re.findall(r"process (\d+)", out)]
    assert len(processes) == 2
    for number in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


# ---------------------------------------------------------------------------------- Evaluation


@one_script
def test_evaluation_repeats_itself_and_records_a_video(script, finished, capsys):
    run_dir = finished[script]
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    once = main(script, "--evaluate", run_dir, "--episodes", 2, "--video", "--seed", 3)
    videos = list((run_dir / "videos").glob("*/*.mp4"))
    assert len(once) == len(videos) == 2 and all(v.stat().st_size > 1000 for v in videos)
    assert once == main(script, "--evaluate", run_dir, "--episodes", 2, "--seed", 3)
    assert "->" not in capsys.readouterr().out
    after = {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir() if p.name != "videos"}
    assert after == {name: t for name, t in before.items() if name != "videos"}


def test_deterministic_takes_the_most_probable_action(finished, capsys, monkeypatch):
    """Twenty of them, by a policy that is almost uniform."""

    def sampled(*_):
        raise AssertionError

    run_dirs = {script: finished[script] for script in (ppo_continuous, ppo_atari)}
    monkeypatch.setattr(ppo_continuous, "draw_noise", sampled)
    monkeypatch.setattr(ppo_atari, "act", sampled)
    for script, run_dir in run_dirs.items():
        assert main(script, "--evaluate", run_dir, "--episodes", 1, "--deterministic")
        with pytest.raises(AssertionError):
            main(script, "--evaluate", run_dir, "--episodes", 1)


class Endless(probes.Probe):
    """As Probe, which never ends, in pictures; it is interrupted at a step."""

    stop_at, metadata = None, {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def step(self, action):
        if self.t == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        assert self.t < 30_000
        return super().step(action)

    def render(self):
        return np.full((16, 16, 3), self.t % 256, np.uint8)


gym.register("Endless-v0", Endless)


@pytest.mark.parametrize("stop_at, frames, told", [
    (100, 100, []),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in ((5010, 5000, []), (20_010, 0, ["10", "20"]))),
])  # fmt: skip
def test_an_endless_episode_tells_its_length_and_keeps_its_video(stop_at, frames, told, tmp_path,
                                                                 capsys, monkeypatch):  # fmt: skip
    script = trpo_continuous
    flags = [*small(script, 1), "--env-id", "Endless-v0", "--run-dir", tmp_path / "run"]
    main(script, *flags)
    monkeypatch.setattr(Endless, "stop_at", stop_at)
    with pytest.raises(SystemExit) as leaving:
        main(script, "--evaluate", tmp_path / "run", *["--video"] * bool(frames))
    assert leaving.value.code == 130
    assert re.findall(r"(\d+),000 steps", capsys.readouterr().out) == told
    videos = list((tmp_path / "run").glob("videos/*/*.mp4"))
    assert len(videos) == bool(frames)
    for video in videos:
        assert abs(imageio_ffmpeg.count_frames_and_secs(video)[0] - frames) <= 2


@pytest.mark.parametrize("script, display", [
    (ppo_atari, {}), (ppo_continuous, {"DISPLAY": ""}), (trpo_continuous, {}),
])  # fmt: skip
def test_render_without_a_display_is_refused(script, display, finished, capsys, monkeypatch):
    for name in ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in display.items():
        monkeypatch.setenv(name, value)
    pygame.display.quit()  # what another test has opened here
    assert "--video" in refused(script, capsys, "--evaluate", finished[script], "--render")


# ----------------------------------------------------------------------------------- Bad input


class Odd(gym.Env):
    """A task with the spaces it is told."""

    def __init__(self, obs=None, actions=None):
        self.observation_space, self.action_space = obs or Box(-1, 1, (2,)), actions or Discrete(2)


gym.register("Pixels-v0", Odd, kwargs={"obs": Box(0, 255, (8, 8, 3), np.uint8)})
gym.register("Matrix-v0", Odd, kwargs={"obs": Box(0, 1, (2, 2))})
gym.register("Parts-v0", Odd, kwargs={"obs": Dict(x=Box(0, 1, (2,)))})
gym.register("Many-v0", Odd, kwargs={"actions": MultiDiscrete([2, 3])})
gym.register("Whole-v0", Odd, kwargs={"actions": Box(0, 5, (2,), np.int64)})
gym.register("InfReward-v0", probes.Wrong, kwargs={"reward": np.inf})


@pytest.mark.parametrize("script, flags, words", [
    (ppo_atari, "--env-id CartPole-v1", ["--env-id CartPole-v1", "ppo_continuous.py"]),
    (ppo_atari, "--env-id NoSuchGame-v4", ["--env-id NoSuchGame-v4"]),
    (ppo_atari, "--env-id Breakout-v4", ["--env-id Breakout-v4", "ALE/Pong-v5"]),
    (ppo_continuous, "--env-id NoSuchTask-v4", ["--env-id NoSuchTask-v4", "ppo_atari.py"]),
    (ppo_continuous, "--env-id no_module:My-v0", ["--env-id no_module:My-v0", "no_module"]),
    (ppo_continuous, "--minibatch-size 300", ["--minibatch-size", "1024"]),
    (ppo_continuous, "--minibatch-size 1", ["--minibatch-size 1", "2"]),
    (ppo_continuous, "--total-steps 500", ["--total-steps", "1024"]),
    (ppo_continuous, "--total-steps 1e999", ["--total-steps inf"]),
    (ppo_atari, "--total-steps many", ["--total-steps", "many"]),
    (ppo_continuous, "--gamma 1.01", ["--gamma 1.01", "0", "1"]),
    (ppo_atari, "--seed -1", ["--seed -1"]),
    (trpo_continuous, "--backtrack-coef 2", ["--backtrack-coef 2.0"]),
    (trpo_continuous, "--learning-rate inf", ["--learning-rate inf"]),
    (trpo_continuous, "--max-kl nan", ["--max-kl nan"]),
    (trpo_continuous, "--fvp-fraction 0", ["--fvp-fraction", "above 0"]),
    (trpo_continuous, "--num-steps 0", ["--num-steps 0", "1"]),
    (ppo_continuous, "--objective l2", ["--objective", "kl-adaptive"]),
    (ppo_continuous, "--num-env 2", ["--num-env"]),
    (ppo_continuous, "--render", ["--render", "--evaluate"]),
    (ppo_atari, "--render --video", ["--render, --video", "one"]),
    (ppo_continuous, "--resume DIR", ["DIR/checkpoint.pt", "No such file"]),
    (ppo_atari, "--evaluate DIR/x.pt", ["DIR/x.pt", "No such file"]),
])  # fmt: skip
def test_bad_input_gets_a_sentence(script, flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(script, capsys, *flags.replace("DIR", str(tmp_path)).split())
    for word in words:
        assert word.replace("DIR", str(tmp_path)) in message, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [ppo_continuous, trpo_continuous])
@pytest.mark.parametrize("task", ["Pixels-v0", "Matrix-v0", "Parts-v0", "Many-v0", "Whole-v0"])
def test_a_task_of_another_shape_is_told_how_to_fit(task, script, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message, env = refused(script, capsys, "--env-id", task), gym.make(task)
    for word in (f"--env-id {task}", str(env.observation_space), str(env.action_space),
                 "FlattenObservation", "--env-id my_module:My-v0"):  # fmt: skip
        assert word in message, message
    assert "ppo_atari.py" not in message and not list(tmp_path.iterdir())


def test_resume_and_evaluate_do_not_go_together(finished, capsys):
    script = trpo_continuous
    before = files(finished[script])
    flags = ["--evaluate", finished[script], "--resume", finished[script]]
    message = refused(script, capsys, *flags)
    assert "--resume" in message and "--evaluate" in message
    assert files(finished[script]) == before


@pytest.mark.parametrize("script, kind", [
    (ppo_atari, "a file"), (ppo_continuous, "below a file"), (ppo_continuous, "not to be made"),
    (trpo_continuous, "not empty"), (ppo_atari, "not empty"),
])  # fmt: skip
def test_a_directory_that_will_not_do_is_refused(script, kind, tmp_path, capsys):
    path = tmp_path / "run"
    if kind == "not empty":
        (path / "something").mkdir(parents=True)
    else:
        path.touch()
    path = {"below a file": path / "run", "not to be made": Path("/proc/run")}.get(kind, path)
    before = files(tmp_path)
    assert f"--run-dir {path}" in refused(script, capsys, *small(script, 1), "--run-dir", path)
    assert files(tmp_path) == before


def test_a_directory_that_is_not_to_be_written_in_is_refused(tmp_path, capsys):
    """Root, too, asks as another user, once all that a run imports is here."""
    main(trpo_continuous, *small(trpo_continuous, 1), "--run-dir", tmp_path / "run")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        path.mkdir(mode=0o555)
        os.chmod(folder, 0o755)
        try:
            if os.getuid() == 0:
                os.seteuid(65534)
            flags = [*small(trpo_continuous, 1), "--run-dir", path]
            assert f"--run-dir {path}" in refused(trpo_continuous, capsys, *flags)
        finally:
            os.seteuid(os.getuid())
        assert not list(path.iterdir())


def test_a_resumed_run_does_not_write_over_another(finished, tmp_path, capsys):
    script = trpo_continuous
    main(script, *small(script, 1), "--run-dir", tmp_path / "run")
    before = files(tmp_path)
    flags = ["--resume", finished[script], "--run-dir", tmp_path / "run"]
    assert f"--run-dir {tmp_path / 'run'}" in refused(script, capsys, *flags)
    assert files(tmp_path) == before


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("kind", ["cut short", "code", "foreign", "of another script"])
def test_what_is_no_checkpoint_is_refused(kind, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, path = finished[ppo_continuous] / "checkpoint.pt", tmp_path / "checkpoint.pt"
    if kind == "cut short":
        path.write_bytes(whole.read_bytes()[:9999])
    elif kind == "code":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save([1, 2] if kind == "foreign" else load(whole) | {"script": "other.py"}, path)
    message = refused(ppo_continuous, capsys, "--resume", tmp_path)
    assert str(path) in message and "ppo_continuous.py" in message
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


# ------------------------------------------------------------------------------- Command line


def test_import_does_nothing(tmp_path):
    code = "import ppo_atari, ppo_continuous, trpo_continuous"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True,
                          capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script, flags, steps", [
    (ppo_atari, [], 10_000_000), (ppo_continuous, [], 100_000),
    (ppo_continuous, ["--env-id", "HalfCheetah-v5"], 1_000_000),
    (trpo_continuous, ["--env-id", "Pendulum-v1"], 300_000),
])  # fmt: skip
def test_help_shows_the_defaults_of_the_task(script, flags, steps, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(script, "--help", *flags)
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert not leaving.value.code and f"(default: {steps})" in out
    for name in ("clip_eps", "max_kl"):
        assert (f"--{name.replace('_', '-')}" in out) == hasattr(script.Args, name)


@each_script
def test_every_flag_is_explained(script, capsys):
    """A comment beside or above each setting becomes its help."""
    with pytest.raises(SystemExit):
        main(script, "--help")
    out = capsys.readouterr().out.replace("│", " ")
    texts = re.split(r"\n\s+--", out)[1:]
    assert len(texts) > 25
    for text in texts:
        words = text.split("(default")[0].split()
        assert len(words) > 3, text


def test_steps_may_be_given_as_1e6():
    args, _ = ppo_continuous.parse_args(["--total-steps", "1e6", "--eval-every", "5e4"])
    for steps, expected in ((args.total_steps, 10**6), (args.eval_every, 50_000)):
        assert steps == expected and isinstance(steps, int)


def test_an_empty_directory_will_do(tmp_path):
    main(trpo_continuous, *small(trpo_continuous, 1), "--run-dir", tmp_path)
    assert load(tmp_path / "checkpoint.pt")["step"] == 64


def test_a_run_s_name_is_a_name_everywhere(tmp_path, monkeypatch):
    """An id may hold a namespace and a module."""
    monkeypatch.chdir(tmp_path)
    main(ppo_atari, *small(ppo_atari, 1), "--env-id", "ale_py:ALE/Pong-v5")
    [run_dir] = Path("runs").iterdir()
    assert re.fullmatch(r"ppo_atari-ale_py-ALE-Pong-v5-seed1-[\d-]+", run_dir.name)


# ----------------------------------------------------------------------------------- Notebooks


@each_script
def test_a_notebook_s_flags_are_not_the_script_s(script, monkeypatch):
    """Those of the kernel: `-f kernel.json`."""
    seen = []
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(script, "train", lambda args, checkpoint: seen.append(args) or stopped)
    stopped = SimpleNamespace(stop=False)
    assert script.main() is None and script.main(["--gamma", "0.5"]) is None
    first, _ = script.parse_args()
    assert seen[0] == first and seen[1].gamma == 0.5


class Cell(io.TextIOBase):
    """As a notebook's standard output: no file, and not to be reconfigured."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


@each_script_once
def test_a_script_runs_in_a_cell(script, tmp_path, monkeypatch):
    """As by %run."""
    cells, flags = [Cell(), Cell()], [*small(script, 1), "--run-dir", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, flags)])
    for name, cell in zip(("stdout", "stderr"), cells, strict=True):
        monkeypatch.setattr(sys, name, cell)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    runpy.run_path(script.__file__, run_name="__main__")
    assert "--evaluate" in cells[0].text and "100%" in cells[1].text
    assert [sys.stdout, sys.stderr] == cells and (tmp_path / "run" / "learning_curve.png").exists()


@pytest.mark.parametrize("error", ["strict", "replace"])
def test_a_terminal_that_cannot_show_greek_gets_help(error, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii", errors=error)
    monkeypatch.setattr(sys, "argv", ["trpo_continuous.py", "--help"])
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(trpo_continuous.__file__, run_name="__main__")
    assert not leaving.value.code and b"--max-kl" in terminal.buffer.getvalue()


@each_script_once
def test_train_works_in_a_thread_and_again(script, tmp_path, capsys, monkeypatch):
    """Twice within a second, each in a directory of its own; with the threads of the settings."""
    monkeypatch.chdir(tmp_path)
    shorten_games(monkeypatch)
    args, _ = script.parse_args(list(map(str, small(script, 4))))
    before, runs, threads = asdict(args), [], []

    def train():
        torch.set_num_threads(2)
        runs.append(script.train(args))
        threads.append(torch.get_num_threads())

    for _ in "12":
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert asdict(args) == before and runs[0].dir != runs[1].dir
    assert threads == [1, 1]
    assert same_training(runs[0].dir, runs[1].dir)
    for finished_run in runs:
        table = [tuple(row[:3]) for row in finished_run.episodes]
        assert table == rows(finished_run.dir) and not finished_run.stop
        assert finished_run.score == np.mean([score for _, score, _ in table][-100:])


@each_script
def test_settings_are_checked_without_a_command_line(script):
    with pytest.raises(ValueError, match="--gamma"):
        script.Args(gamma=2.0)


# --------------------------------------------------------------------------------- The compiler


@pytest.mark.parametrize("flags, works, chosen", [
    ("--total-steps 500000", True, True), ("--total-steps 500000", False, False),
    ("--total-steps 499999", True, False), ("--total-steps 500000 --no-compile", True, False),
    ("--total-steps 5000 --compile", True, True), ("--total-steps 5000 --compile", False, None),
])  # fmt: skip
def test_long_runs_are_compiled_where_torch_can(flags, works, chosen, capsys, monkeypatch):
    tried = []

    def compile(function):
        tried.append(function)
        return function if works else 1 / 0

    monkeypatch.setattr(torch, "compile", compile)
    args, _ = ppo_continuous.parse_args(flags.split())
    if chosen is None:
        with pytest.raises(SystemExit, match="--compile") as leaving:
            ppo_continuous.choose_compile(args)
        assert "\n" not in leaving.value.code
    else:
        assert ppo_continuous.choose_compile(args) is chosen
        told = capsys.readouterr().out.splitlines()
        assert ["compile" in line for line in told] == [True] * (bool(tried) and not works)
    assert bool(tried) == (flags != "--total-steps 499999" and "no" not in flags)


@pytest.mark.slow
@pytest.mark.parametrize("flags, status", [([], 0), (["--compile"], 1)])
def test_without_gcc_a_run_goes_on(flags, status, tmp_path):
    """Unless it was asked for. A long run, which has reached its goal after 100 episodes."""
    env = os.environ | {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    own = small(ppo_continuous, 10**4, "--goal-score", 0, "--run-dir", tmp_path / "run", *flags)
    own.remove("--no-compile")
    out, err = run(ppo_continuous, *own, status=status, env=env)
    assert (tmp_path / "run" / "checkpoint.pt").exists() == (not status)
    told = [line for line in (err if status else out).splitlines() if "compile" in line]
    assert len(told) == 1 and "Traceback" not in err and ("--compile" in told[0]) == bool(status)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TMPDIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_folder_with_a_space_is_survived(name, tmp_path):
    (tmp_path / "with space").mkdir()
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": "", name: str(tmp_path / "with space")}
    env = {key: value for key, value in env.items() if value}
    own = small(ppo_continuous, 10**4, "--goal-score", 0, "--run-dir", tmp_path / "run")
    own.remove("--no-compile")
    _, err = run(ppo_continuous, *own, env=env)
    assert (tmp_path / "run" / "checkpoint.pt").exists() and "Traceback" not in err


def test_code_that_cannot_be_compiled_names_no_compile(monkeypatch):
    def train(*_):
        raise torch._dynamo.exc.Unsupported("print", case_name="x")

    monkeypatch.setattr(ppo_continuous, "train", train)
    with pytest.raises(torch._dynamo.exc.Unsupported) as failing:
        main(ppo_continuous)
    text = "".join(traceback.format_exception(failing.value))
    assert "--no-compile" in text.strip().splitlines()[-1]
