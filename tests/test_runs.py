"""Runs of all three scripts: records, stop and resume, evaluation, and what users get wrong."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import gymnasium as gym
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
    start,
)

import ppo_atari
import ppo_continuous
import trpo_continuous

each_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """{script: (directory, what it printed) of a short run}, made when it is asked for."""

    class Finished(dict):
        def __missing__(self, script):
            run_dir = tmp_path_factory.mktemp("runs") / "run"
            self[script] = run_dir, *run(script, *small(script, 16), "--run-dir", run_dir)
            return self[script]

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


# ------------------------------------------------------------------------------------- Records


@each_script
def test_a_run_leaves_its_records(script, finished):
    run_dir, out, err = finished[script]
    names = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert names - {"best.pt"} == {"config.json", "episodes.csv", "checkpoint.pt",
                                   "learning_curve.png"}  # fmt: skip
    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["num_envs"] == 2 and config["versions"]["torch"] == torch.__version__
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
        expected |= {"policy_loss", "approx_kl", "clip_fraction", "learning_rate"}
        expected |= {"kl", "beta"} if script is ppo_continuous else set()
    assert set(scalars) == expected
    for name in scalars:
        assert [e.step for e in scalars[name]] == list(range(64, 16 * 64 + 1, 64)), name
    for event in scalars["score"]:
        returns = [score for step, score, _ in table if step <= event.step][-100:]
        assert not returns or event.value == pytest.approx(np.mean(returns))
    Image.open(run_dir / "learning_curve.png").verify()
    assert "score" in err and "100%" in err  # the progress
    assert f" {script.__name__}.py --evaluate {run_dir} --render\n" in out


def test_the_picture_draws_episodes_their_mean_and_the_published_score(tmp_path, monkeypatch):
    figures = []

    class Figure(ppo_atari.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    monkeypatch.setattr(ppo_atari, "Figure", Figure)
    args = ppo_atari.Args(run_dir=str(tmp_path / "run"))
    with ppo_atari.Run(args, None, net=torch.nn.Linear(1, 1)) as atari_run:
        atari_run.episodes = [(10 * k, float(k * k % 17), 5, 0.1) for k in range(1, 151)]
    points, mean, published = (line.get_xydata() for line in figures[-1].axes[0].lines)
    returns = [row[1] for row in atari_run.episodes]
    means = [(10 * k, np.mean(returns[k - 100 : k])) for k in range(100, 151)]
    np.testing.assert_array_equal(points, [row[:2] for row in atari_run.episodes])
    np.testing.assert_allclose(mean, means)
    assert set(published[:, 1]) == {274.8}


def test_best_is_the_policy_of_the_best_mean_of_100_episodes(tmp_path):
    flags = [*small(ppo_continuous, 120), "--learning-rate", 1e-4]
    main(ppo_continuous, *flags, "--run-dir", tmp_path / "run")
    means, best = means_of_100(tmp_path / "run", 64), load(tmp_path / "run" / "best.pt")
    assert len(means) > 2 and best["best"] == max(means.values())
    assert best["step"] == min(step for step, mean in means.items() if mean == best["best"])


@each_script
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


# ----------------------------------------------------------------------------- Stop and resume


@each_script
def test_the_same_seed_gives_the_same_bits_and_another_does_not(script, tmp_path, monkeypatch):
    """Whether or not the run saves itself in between."""
    shorten_games(monkeypatch)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        if name == "b":
            monkeypatch.setattr(script.Run, "last_save", property(lambda _: 0, lambda *_: None),
                                raising=False)  # fmt: skip
        main(script, *small(script, 6), "--seed", seed, "--run-dir", tmp_path / name)
    assert same_training(tmp_path / "a", tmp_path / "b")
    assert not same_training(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("script, number", [
    (ppo_atari, signal.SIGTERM), (ppo_continuous, signal.SIGINT), (trpo_continuous, signal.SIGTERM),
])  # fmt: skip
def test_a_signal_loses_no_step_and_the_run_goes_on(script, number, tmp_path, capsys, monkeypatch):
    shorten_games(monkeypatch)
    run_dir, before = tmp_path / "run", signal.getsignal(number)
    flags = [*small(script, 12), "--run-dir", run_dir]
    with pytest.raises(SystemExit) as leaving, in_update(monkeypatch, script, 5, send(number)):
        main(script, *flags)
    assert leaving.value.code == 128 + number and signal.getsignal(number) is before
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


@each_script
def test_a_resumed_run_begins_with_all_that_was_saved(script, tmp_path, monkeypatch):
    """A finished run has nothing to do: its network, moments, optimizer and the rest stay. Two
    copies, prolonged, learn the same."""
    shorten_games(monkeypatch)
    flags = small(script, 6, *(["--objective", "kl-adaptive"] * (script is ppo_continuous)))
    for name in ("a", "b"):
        main(script, *flags, "--run-dir", tmp_path / name)
        before = load(tmp_path / name / "checkpoint.pt")
        main(script, "--resume", tmp_path / name)
        after = load(tmp_path / name / "checkpoint.pt")
        for part in before.keys() - {"settings", "seconds"}:
            assert same(before[part], after[part]), part
        main(script, "--resume", tmp_path / name, "--total-steps", 64 * 9)
        assert load(tmp_path / name / "checkpoint.pt")["step"] == 64 * 9
    assert same_training(tmp_path / "a", tmp_path / "b")


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, capsys, monkeypatch):
    twice = in_update(monkeypatch, ppo_continuous, 2, lambda: [send(signal.SIGINT)() for _ in "12"])
    with pytest.raises(SystemExit) as leaving, twice:
        main(ppo_continuous, *small(ppo_continuous, 9), "--run-dir", tmp_path / "run")
    assert leaving.value.code == 130 and not (tmp_path / "run" / "checkpoint.pt").exists()


def test_ctrl_c_reaches_a_real_process(tmp_path):
    process = start(ppo_continuous, *small(ppo_continuous, 10**6), "--run-dir", tmp_path / "run")
    while not (tmp_path / "run" / "episodes.csv").exists() or len(rows(tmp_path / "run")) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"--resume {tmp_path / 'run'}" in out
    python, name = re.search(r"(\S+) (\S+) --resume", out).groups()  # as typed where it began
    assert ROOT / python == Path(sys.executable) and (ROOT / name).exists()
    assert load(tmp_path / "run" / "checkpoint.pt")["step"] >= 64


def test_a_run_saves_itself_once_a_minute(tmp_path, monkeypatch):
    """On a clock on which an iteration takes 25 seconds; a kill leaves the last file whole."""
    script, clock, saved = ppo_continuous, [1e9], []
    real, real_update = script.Run.save, script.update

    class Time:
        time = staticmethod(lambda: clock[0])
        strftime = staticmethod(lambda _: "now")

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


@each_script
def test_an_older_version_s_checkpoint_loads(script, tmp_path):
    """Settings that are gone are dropped; new ones, and None, take their defaults."""
    settings = asdict(script.Args(gamma=0.5)) | {"checkpoint_every": 4, "threads": None}
    del settings["video"]
    saved = {"script": f"{script.__name__}.py", "settings": settings, "episodes": []}
    torch.save(saved, tmp_path / "checkpoint.pt")
    for job in ("resume", "evaluate"):
        args, _ = script.parse_args([f"--{job}", str(tmp_path)])
        assert args == script.Args(gamma=0.5, run_dir=str(tmp_path), **{job: str(tmp_path)})


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


# ---------------------------------------------------------------------------------- Evaluation


@each_script
def test_evaluation_repeats_itself_and_records_a_video(script, finished, capsys):
    run_dir, *_ = finished[script]
    before = {path.name: path.stat().st_mtime_ns for path in run_dir.iterdir()}
    once = main(script, "--evaluate", run_dir, "--episodes", 2, "--video", "--seed", 3)
    videos = list((run_dir / "videos").glob("*/*.mp4"))
    assert len(once) == len(videos) == 2 and all(v.stat().st_size > 1000 for v in videos)
    assert once == main(script, "--evaluate", run_dir, "--episodes", 2, "--seed", 3)
    after = {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir() if p.name != "videos"}
    assert after == {name: t for name, t in before.items() if name != "videos"}


def test_deterministic_takes_the_most_probable_action(finished, capsys, monkeypatch):
    def sampled(*_):
        raise AssertionError

    monkeypatch.setattr(ppo_continuous.Categorical, "sample", sampled)
    monkeypatch.setattr(ppo_atari, "act", sampled)
    for script in (ppo_continuous, ppo_atari):
        run_dir, *_ = finished[script]
        assert main(script, "--evaluate", run_dir, "--episodes", 1, "--deterministic")


@pytest.mark.parametrize("script, display", [(ppo_atari, ""), (ppo_continuous, ":77")])
def test_render_without_a_display_is_refused(script, display, finished, capsys, monkeypatch):
    """Nothing listens on the second."""
    for name in ("WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    pygame.display.quit()  # what another test has opened here
    assert "--video" in refused(script, capsys, "--evaluate", finished[script][0], "--render")


# ----------------------------------------------------------------------------------- Bad input


class Odd(gym.Env):
    """A task with the spaces it is told."""

    def __init__(self, obs=None, actions=None):
        self.observation_space, self.action_space = obs or Box(-1, 1, (2,)), actions or Discrete(2)


gym.register("Pixels-v0", Odd, kwargs={"obs": Box(0, 255, (8, 8, 3), np.uint8)})
gym.register("Parts-v0", Odd, kwargs={"obs": Dict(x=Box(0, 1, (2,)))})
gym.register("Many-v0", Odd, kwargs={"actions": MultiDiscrete([2, 3])})
gym.register("Whole-v0", Odd, kwargs={"actions": Box(0, 5, (2,), np.int64)})
gym.register("InfReward-v0", probes.Wrong, kwargs={"reward": np.inf})


@pytest.mark.parametrize("script, flags, words", [
    (ppo_atari, "--env-id CartPole-v1", ["--env-id CartPole-v1", "ppo_continuous.py"]),
    (ppo_atari, "--env-id NoSuchGame-v4", ["--env-id NoSuchGame-v4"]),
    (ppo_atari, "--env-id Breakout-v4", ["--env-id Breakout-v4", "(2, 5)"]),
    (ppo_continuous, "--env-id NoSuchTask-v4", ["--env-id NoSuchTask-v4", "ppo_atari.py"]),
    (ppo_continuous, "--env-id Pixels-v0", ["--env-id Pixels-v0", "(8, 8, 3)", "need a Box"]),
    (trpo_continuous, "--env-id Parts-v0", ["--env-id Parts-v0", "Dict", "need a Box"]),
    (ppo_continuous, "--env-id Many-v0", ["--env-id Many-v0", "MultiDiscrete", "need Discrete"]),
    (trpo_continuous, "--env-id Whole-v0", ["--env-id Whole-v0", "int64", "Box of floats"]),
    (ppo_continuous, "--minibatch-size 300", ["--minibatch-size", "1024"]),
    (ppo_continuous, "--minibatch-size 1", ["--minibatch-size 1", "at least 2"]),
    (ppo_continuous, "--total-steps 500", ["--total-steps", "1024"]),
    (ppo_continuous, "--gamma 1.01", ["--gamma 1.01", "from 0 to 1"]),
    (trpo_continuous, "--learning-rate inf", ["--learning-rate inf"]),
    (trpo_continuous, "--max-kl nan", ["--max-kl nan"]),
    (trpo_continuous, "--num-steps 0", ["--num-steps 0", "at least 1"]),
    (ppo_continuous, "--objective l2", ["--objective", "kl-adaptive"]),
    (ppo_continuous, "--num-env 2", ["--num-env"]),
    (ppo_continuous, "--render", ["--render", "--evaluate"]),
    (ppo_continuous, "--run-dir DIR", ["--run-dir DIR", "exists"]),
    (ppo_continuous, "--resume DIR", ["DIR/checkpoint.pt", "does not exist"]),
    (trpo_continuous, "--evaluate DIR --resume DIR", ["--resume", "--evaluate"]),
])  # fmt: skip
def test_bad_input_gets_a_sentence(script, flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(script, capsys, *flags.replace("DIR", str(tmp_path)).split())
    for word in words:
        assert word.replace("DIR", str(tmp_path)) in message, message
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("kind", ["cut short", "code", "foreign", "of another script"])
def test_what_is_no_checkpoint_is_refused(kind, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole, path = finished[ppo_continuous][0] / "checkpoint.pt", tmp_path / "checkpoint.pt"
    if kind == "cut short":
        path.write_bytes(whole.read_bytes()[:9999])
    elif kind == "code":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save([1, 2] if kind == "foreign" else load(whole) | {"script": "other.py"}, path)
    message = refused(ppo_continuous, capsys, "--resume", tmp_path)
    assert str(path) in message and "ppo_continuous.py" in message
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@each_script
@pytest.mark.parametrize("job", ["--resume", "--evaluate"])
def test_a_checkpoint_s_settings_stay(job, script, finished, capsys):
    for flag in ("--gamma", "--run-dir"):
        assert flag in refused(script, capsys, job, finished[script][0], flag, "0.5")


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
    for text in re.split(r"\n\s+--", out)[1:]:
        words = text.split("(default")[0].split()
        assert len(words) > 3, text


def test_a_terminal_that_cannot_show_greek_gets_help():
    out, _ = run(trpo_continuous, "--help", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert "--max-kl" in out


def test_a_reader_that_leaves_does_not_stop_a_run(tmp_path):
    """As in `python ppo_continuous.py | head -1`."""
    process = start(ppo_continuous, *small(ppo_continuous, 60), "--run-dir", tmp_path / "run")
    assert "CartPole-v1" in process.stdout.readline()
    process.stdout.close()
    process.stderr.read()
    process.wait(timeout=120)
    assert load(tmp_path / "run" / "checkpoint.pt")["step"] == 64 * 60


def test_a_run_s_name_is_a_name_everywhere(tmp_path, monkeypatch):
    """An id may hold a namespace and a module."""
    monkeypatch.chdir(tmp_path)
    main(ppo_atari, *small(ppo_atari, 1), "--env-id", "ale_py:ALE/Pong-v5")
    [run_dir] = Path("runs").iterdir()
    assert re.fullmatch(r"ppo_atari-ale_py-ALE-Pong-v5-seed1-[\d-]+", run_dir.name)


@pytest.mark.parametrize("script", [ppo_atari, ppo_continuous])
@pytest.mark.parametrize("flags, found, chosen", [
    ("--total-steps 500000", True, True), ("--total-steps 500000", False, False),
    ("--total-steps 499999", True, False), ("--total-steps 500000 --no-compile", True, False),
    ("--total-steps 5000 --compile", True, True), ("--total-steps 5000 --compile", False, None),
])  # fmt: skip
def test_long_runs_are_compiled_where_there_is_a_compiler(script, flags, found, chosen, tmp_path,
                                                          monkeypatch):  # fmt: skip
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(script.sysconfig, "get_path", lambda name: tmp_path)
    monkeypatch.setattr(script.shutil, "which", lambda name: "/usr/bin/g++" if found else None)
    args, _ = script.parse_args(flags.split())
    if chosen is None:
        with pytest.raises(SystemExit, match="--compile"):
            script.choose_compile(args)
    else:
        assert script.choose_compile(args) is chosen


@each_script
def test_settings_are_checked_without_a_command_line(script):
    """As in a notebook."""
    with pytest.raises(ValueError, match="--gamma"):
        script.Args(gamma=2.0)
