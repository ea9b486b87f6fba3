"""ppo_continuous.py as a user runs it: records, exact resume, evaluation, bad input."""

import json
import os
import pickle
import re
import shutil
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from PIL import Image
from processes import (
    Script,
    events,
    kill_after_a_checkpoint,
    one_line,
    rows,
    same_run,
    wait_for_episodes,
)

import ppo_continuous

SCRIPT = Script(ppo_continuous)
start, run, refused = SCRIPT.start, SCRIPT.run, SCRIPT.refused
SMALL = ["--env-id", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--minibatch-size",
         "32", "--num-epochs", "2", "--learning-rate", "1e-4"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run, with what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    out, err = run(*SMALL, "--total-steps", 6400, "--checkpoint-every", 50, "--run-dir", run_dir)
    assert err == ""
    return run_dir, out


# ------------------------------------------------------------------------------------- Records


def test_a_run_leaves_its_records(finished):
    run_dir, out = finished
    assert "finished: 6,400 steps" in out and str(run_dir) in out
    names = {p.name for p in run_dir.iterdir() if not p.name.startswith("events.out.tfevents")}
    assert names == {"config.json", "episodes.csv", "checkpoint.pt", "best.pt",
                     "learning_curve.png"}  # fmt: skip

    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["num_envs"] == 2 and config["versions"]["torch"] == torch.__version__
    assert len(config["sha256"]) == 64 and config["device"] == "cpu"

    table = rows(run_dir)
    ends = [step for step, _, _ in table]
    assert len(table) > 100 and ends == sorted(ends) and ends[-1] <= 6400
    assert all(score == length for _, score, length in table)  # raw: 1 a step in CartPole
    for half in (0, 3200):  # between two resets no step is lost and none counted twice
        assert 2500 < sum(n for step, _, n in table if half < step <= half + 3200) <= 3200

    scalars = events(run_dir)
    assert set(scalars) == {
        "beta", "clip_fraction", "entropy", "explained_variance", "grad_norm", "kl",
        "learning_rate", "policy_loss", "score", "steps_per_second", "value_loss", "weight_norm",
    }  # fmt: skip
    assert [e.step for e in scalars["kl"]] == list(range(64, 6401, 64))
    rates = [e.value for e in scalars["learning_rate"]]
    assert rates == pytest.approx([1e-4 * (1 - k / 100) for k in range(100)])

    picture = np.asarray(Image.open(run_dir / "learning_curve.png").convert("RGB")).astype(int)
    assert picture.shape == (540, 960, 3)
    assert ((picture[..., 2] - picture[..., 0]) > 30).sum() > 20


def test_the_picture_has_the_published_score(tmp_path):
    """With the line's grey where the task has one."""
    greys = []
    for env_id in ("CartPole-v1", "Hopper-v5"):
        args, _ = ppo_continuous.parse_args(
            ["--env-id", env_id, "--run-dir", str(tmp_path / env_id)]
        )
        records = ppo_continuous.Records(args, None)
        records.draw()
        records.close()
        image = Image.open(tmp_path / env_id / "learning_curve.png").convert("RGB")
        greys.append((np.abs(np.asarray(image).astype(int) - 127).max(-1) < 3).sum())
    assert greys[0] < 150 < greys[1] - greys[0]


def test_import_does_nothing():
    assert SCRIPT.import_does_nothing()


def test_goal_score_stops_and_saves(tmp_path, capsys):
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 10**6, "--goal-score", 15, "--run-dir", run_dir]
    ppo_continuous.main([str(flag) for flag in flags])
    returns = [r for _, r, _ in rows(run_dir)]
    assert len(returns) >= 100 and np.mean(returns[-100:]) >= 15
    assert "finished" in capsys.readouterr().out
    best, last = (torch.load(run_dir / f, weights_only=True) for f in ("best.pt", "checkpoint.pt"))
    assert best["step"] == last["step"] and best["best"] == np.mean(returns[-100:])
    assert all(torch.equal(best["net"][name], last["net"][name]) for name in last["net"])
    ppo_continuous.main(["--resume", str(run_dir)])
    assert "finished" in capsys.readouterr().out and [r for _, r, _ in rows(run_dir)] == returns


# -------------------------------------------------------------------------------------- Resume


@pytest.mark.parametrize("flags", [
    ["--env-id", "CartPole-v1", "--objective", "kl-adaptive", "--kl-target", "1e-4"],
    ["--env-id", "Pendulum-v1"],
])  # fmt: skip
def test_a_killed_run_resumes_bit_for_bit(flags, tmp_path, capsys):
    """SIGKILL at a random moment, once the second checkpoint is written."""
    flags = [*SMALL, *flags, "--total-steps", str(64 * 60), "--checkpoint-every", "7"]
    ppo_continuous.main([*flags, "--run-dir", str(tmp_path / "whole")])
    broken = tmp_path / "broken"
    process = start(*flags, "--run-dir", broken)
    kill_after_a_checkpoint(process, broken)
    assert process.returncode == -signal.SIGKILL
    path = broken / "checkpoint.pt"
    iteration = torch.load(path, weights_only=True)["iteration"]
    assert 0 < iteration < 60 and iteration % 7 == 0
    with open(broken / "episodes.csv", "a") as file:
        file.write("99999,1")  # a row cut short
    ppo_continuous.main(["--resume", str(broken)])
    assert same_run(tmp_path / "whole", broken)
    if "kl-adaptive" in flags:
        assert torch.load(path, weights_only=True)["beta"] != 1


def test_resume_of_a_finished_run_says_so_and_can_be_prolonged(finished, capsys):
    run_dir, _ = finished
    before = rows(run_dir)
    ppo_continuous.main(["--resume", str(run_dir)])
    assert "finished: 6,400 steps" in capsys.readouterr().out and rows(run_dir) == before
    ppo_continuous.main(["--resume", str(run_dir), "--total-steps", "7040"])
    assert "finished: 7,040 steps" in capsys.readouterr().out
    assert rows(run_dir)[: len(before)] == before and len(rows(run_dir)) > len(before)


def test_ctrl_c_keeps_the_records_and_says_how_to_go_on(tmp_path):
    run_dir = tmp_path / "run"
    process = start(*SMALL, "--total-steps", 10**6, "--run-dir", run_dir)
    wait_for_episodes(process, run_dir)
    os.remove(run_dir / "learning_curve.png")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert one_line(err, f"ppo_continuous.py --resume {run_dir}")
    assert (run_dir / "learning_curve.png").stat().st_size > 10_000
    assert (run_dir / "episodes.csv").read_text().endswith("\n")
    torch.load(run_dir / "checkpoint.pt", weights_only=True)


def test_a_second_ctrl_c_does_not_wait(tmp_path, capsys, monkeypatch):
    assert SCRIPT.interrupted_twice(capsys, monkeypatch, tmp_path / "run", *SMALL)


# ---------------------------------------------------------------------------------- Evaluation


def test_evaluate_prints_whole_episodes_and_records_a_video(finished, capsys):
    run_dir, _ = finished
    before = {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir()}
    returns = ppo_continuous.main(["--evaluate", str(run_dir), "--episodes", "2", "--video"])
    out, err = capsys.readouterr()
    assert err == ""
    scores = [float(s) for s in re.findall(r"episode \d: return (\d+), \d+ steps", out)]
    assert scores == returns and len(scores) == 2
    assert f"{np.mean(scores):.1f} ± {np.std(scores):.1f}" in out
    videos = sorted((run_dir / "videos").glob("*/*.mp4"))
    assert len(videos) == 2 and all(v.stat().st_size > 1000 for v in videos)
    assert {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir() if p.name != "videos"} == before
    ppo_continuous.main(["--evaluate", str(run_dir / "best.pt"), "--episodes", "2"])
    assert capsys.readouterr().out == out  # the same seed, the same episodes


def test_render_without_a_display_says_so(finished, capsys, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    flags = ["--evaluate", finished[0], "--render", "--episodes", 1]
    assert refused(capsys, 1, flags, "--render", "--video")


def test_evaluate_sees_through_the_saved_moments(finished, tmp_path, capsys):
    """Other moments, other episodes; best.pt and checkpoint.pt both hold them."""
    checkpoint = torch.load(finished[0] / "best.pt", weights_only=True)
    assert checkpoint["net"]["obs_moments.count"] % 64 == 0
    scores = []
    for shift in (0.0, 5.0):
        checkpoint["net"]["obs_moments.mean"] += shift
        torch.save(checkpoint, tmp_path / "x.pt")
        scores.append(ppo_continuous.main(["--evaluate", str(tmp_path / "x.pt")]))
    assert scores[0] != scores[1]


# ----------------------------------------------------------------------------------- Bad input


class Odd(gym.Env):
    """An environment with the spaces it is told, which shows or rewards what it is told."""

    def __init__(self, obs=None, actions=None, spoil=None, render_mode=None):
        self.observation_space, self.action_space = obs or Box(-1, 1, (2,)), actions or Discrete(2)
        self.spoil, self.t = spoil, 0

    def reset(self, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        self.t += 1
        late = self.t > 300
        obs = np.array([0.0, np.nan if self.spoil == "obs" and late else 0.0])
        return obs, np.inf if self.spoil == "reward" and late else 1.0, self.t % 7 == 0, False, {}


gym.register("Pixels-v0", Odd, kwargs={"obs": Box(0, 255, (8, 8, 3), np.uint8)})
gym.register("Symbols-v0", Odd, kwargs={"obs": Discrete(5)})
gym.register("Parts-v0", Odd, kwargs={"obs": Dict(x=Box(0, 1, (2,)))})
gym.register("Many-v0", Odd, kwargs={"actions": MultiDiscrete([2, 3])})
gym.register("Whole-v0", Odd, kwargs={"actions": Box(0, 5, (2,), np.int64)})
gym.register("NanObs-v0", Odd, kwargs={"spoil": "obs"})
gym.register("InfReward-v0", Odd, kwargs={"spoil": "reward"})


@pytest.mark.parametrize("flags, words", [
    (["--env-id", "NoSuchTask-v4"], ["--env-id", "NoSuchTask"]),
    (["--env-id", "Pixels-v0"], ["--env-id", "one dimension"]),
    (["--env-id", "Symbols-v0"], ["--env-id", "Discrete(5)"]),
    (["--env-id", "Parts-v0"], ["--env-id", "Dict"]),
    (["--env-id", "Many-v0"], ["--env-id", "MultiDiscrete"]),
    (["--env-id", "Whole-v0"], ["--env-id", "floats"]),
    (["--minibatch-size", "300"], ["--minibatch-size", "512"]),
    (["--total-steps", "500"], ["--total-steps", "512"]),
    (["--num-envs", "0"], ["--num-envs", "at least 1"]),
    (["--num-envs", "two"], ["--num-envs", "two"]),
    (["--gamma", "1.01"], ["--gamma", "from 0 to 1"]),
    (["--gae-lambda", "nan"], ["--gae-lambda", "nan"]),
    (["--learning-rate", "inf"], ["--learning-rate", "inf"]),
    (["--objective", "l2"], ["--objective", "kl-adaptive"]),
    (["--kl-target", "-1"], ["--kl-target"]),
    (["--kl-beta", "-1"], ["--kl-beta"]),
    (["--seed", "-1"], ["--seed"]),
    (["--no-such-flag"], ["--no-such-flag"]),
    (["--render"], ["--render", "--evaluate"]),
    (["--resume", "DIR/none"], ["--resume", "DIR/none"]),
    (["--evaluate", "DIR/none"], ["--evaluate", "DIR/none"]),
    (["--run-dir", "DIR"], ["--run-dir", "DIR", "exists"]),
])  # fmt: skip
def test_bad_input_gets_one_line_and_status_2(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    flags = [flag.replace("DIR", here) for flag in flags]
    assert refused(capsys, 2, flags, *(word.replace("DIR", here) for word in words))
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("task", ["resume", "evaluate"])
@pytest.mark.parametrize("kind, word", [
    ("cut short", "whole"), ("code", "plain data"), ("foreign", "not a checkpoint"),
    ("other script", "not a checkpoint of ppo_continuous.py"), ("empty", "not a checkpoint"),
])  # fmt: skip
def test_bad_checkpoints(task, kind, word, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = (finished[0] / "checkpoint.pt").read_bytes()
    path = tmp_path / "checkpoint.pt"
    if kind == "other script":
        contents = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
        torch.save(contents | {"script": "ppo_atari.py"}, path)
    elif kind in ("foreign", "empty"):
        torch.save([1, 2, 3] if kind == "foreign" else {"script": "ppo_continuous.py"}, path)
    else:
        path.write_bytes(pickle.dumps(Evil()) if kind == "code" else whole[: len(whole) // 2])
    assert refused(capsys, 2, [f"--{task}", tmp_path], f"--{task}", path, word)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("damage", [("step,return", "a,b"), ("\n", "\nx")])
def test_resume_refuses_a_damaged_episodes_csv(damage, finished, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    path = run_dir / "episodes.csv"
    text = path.read_text()
    path.write_text(text.replace(*damage, 1) + "0" * len(text))
    assert refused(capsys, 2, ["--resume", run_dir], "--resume", path, "damaged")


def test_resume_and_evaluate_refuse_other_settings(finished, capsys):
    for task in ("--resume", "--evaluate"):
        for flag in (["--env-id", "Pendulum-v1"], ["--gamma", "0.9"], ["--no-norm-obs"]):
            assert refused(capsys, 2, [task, finished[0], *flag], flag[0][-8:], "leave it out")


# ---------------------------------------------------------------------------- Broken while running


@pytest.mark.parametrize("env_id, word", [("NanObs-v0", "nan"), ("InfReward-v0", "inf")])
def test_what_is_not_finite_stops_the_run(env_id, word, tmp_path, capsys):
    """Spoiled in the fifth iteration, ahead of its update: the last checkpoint is whole."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--env-id", env_id, "--num-envs", 1, "--num-steps", 64, "--total-steps", 6400]
    flags += ["--checkpoint-every", 2, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 5", word, run_dir)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == 4
    assert all(tensor.isfinite().all() for tensor in checkpoint["net"].values())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys, monkeypatch):
    """A step size beyond all measure spoils the very first update, and no record shows it."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 6400, "--learning-rate", 1e38, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 1", run_dir)
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 0


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_whole(tmp_path):
    """The system refuses files over 100 kB, so Adam's state no longer fits."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)"
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 3200, "--checkpoint-every", 4, "--run-dir", run_dir]
    _, err = run(*flags, before=limit, status=1)
    assert one_line(err, run_dir, "File too large")
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 0


@pytest.mark.parametrize("flags", [
    ["--env-id", "LunarLander-v3"], ["--env-id", "LunarLanderContinuous-v3"],
    ["--env-id", "Hopper-v5", "--objective", "kl-adaptive", "--gae-lambda", "1"],
    ["--env-id", "Pendulum-v1", "--no-norm-obs", "--no-norm-reward", "--no-norm-adv",
     "--no-orthogonal", "--anneal", "none", "--max-grad-norm", "0", "--adam-eps", "1e-8"],
])  # fmt: skip
def test_other_settings_run(flags, tmp_path, capsys):
    ppo_continuous.main([*SMALL, *flags, "--total-steps", "256", "--run-dir", str(tmp_path / "r")])
    assert "finished: 256 steps" in capsys.readouterr().out
    ppo_continuous.main(["--evaluate", str(tmp_path / "r"), "--episodes", "1"])
    assert "over 1 episodes" in capsys.readouterr().out


def test_compile_without_a_compiler_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    flags = [*SMALL, "--compile", "--run-dir", tmp_path / "run"]
    assert refused(capsys, 2, flags, "--compile", "CXX")
    assert not (tmp_path / "run").exists()
