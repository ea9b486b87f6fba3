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
    event_records,
    events,
    full_disk,
    iterations_in,
    kill_after_a_checkpoint,
    one_line,
    rows,
    same_run,
    told_how_to_go_on,
    wait_for_episodes,
)

import ppo_continuous

SCRIPT = Script(ppo_continuous)
start, run, refused = SCRIPT.start, SCRIPT.run, SCRIPT.refused
SMALL = ["--env-id", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--minibatch-size",
         "32", "--num-epochs", "2", "--learning-rate", "1e-4", "--no-compile"]  # fmt: skip


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
        "clip_fraction", "entropy", "explained_variance", "grad_norm", "kl",
        "learning_rate", "policy_loss", "score", "steps_per_second", "value_loss", "weight_norm",
    }  # fmt: skip
    for name in scalars.keys() - {"score"}:  # which there is none of before an episode is over
        assert [e.step for e in scalars[name]] == list(range(64, 6401, 64))
    assert len([record for record in event_records(run_dir) if record.HasField("summary")]) == 100
    rates = [e.value for e in scalars["learning_rate"]]
    assert rates == pytest.approx([1e-4 * (1 - k / 100) for k in range(100)])
    for e in scalars["score"]:
        last = [score for step, score, _ in table if step <= e.step][-100:]
        assert e.value == pytest.approx(np.mean(last))
    assert len(scalars["score"]) > 97
    assert all(1 < e.value < 1e6 for e in scalars["steps_per_second"])

    picture = np.asarray(Image.open(run_dir / "learning_curve.png").convert("RGB")).astype(int)
    assert picture.shape == (540, 960, 3)
    assert ((picture[..., 2] - picture[..., 0]) > 30).sum() > 20


def test_tensorboard_has_what_update_returned(tmp_path, monkeypatch):
    assert SCRIPT.tensorboard_has_what_update_returned(
        monkeypatch, tmp_path / "run", *SMALL, "--objective", "kl-adaptive", "--total-steps", 320
    )


def test_the_picture_has_the_published_score(tmp_path):
    """With the line's grey where the task has one, and its words in the legend."""
    greys = []
    for env_id in ("CartPole-v1", "Hopper-v5"):
        run_dir = tmp_path / env_id
        args, _ = ppo_continuous.parse_args(["--env-id", env_id, "--run-dir", str(run_dir)])
        with ppo_continuous.Run(args, None, net=torch.nn.Linear(1, 1)) as run:
            run.draw()
        image = Image.open(run_dir / "learning_curve.png").convert("RGB")
        greys.append((np.abs(np.asarray(image).astype(int) - 127).max(-1) < 3).sum())
    assert greys[0] < 150 < greys[1] - greys[0]


def test_the_picture_is_redrawn_every_ten_seconds_at_most(tmp_path, monkeypatch):
    """Of a run whose iterations take 4 seconds each, saved after every one; and at its end."""
    assert SCRIPT.pictures_of_a_slow_run(monkeypatch, tmp_path / "run", *SMALL) == [3, 6, 8]


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
    flags = [*SMALL, *flags, "--total-steps", 64 * 60, "--checkpoint-every", 7]
    SCRIPT.main(*flags, "--run-dir", tmp_path / "whole")
    broken = tmp_path / "broken"
    process = start(*flags, "--run-dir", broken)
    kill_after_a_checkpoint(process, broken)
    assert process.returncode == -signal.SIGKILL
    path = broken / "checkpoint.pt"
    iteration = iterations_in(path)
    assert 0 < iteration < 60 and iteration % 7 == 0
    with open(broken / "episodes.csv", "a") as file:
        file.write("99999,1")  # a row cut short
    ppo_continuous.main(["--resume", str(broken)])
    assert same_run(tmp_path / "whole", broken)
    if "kl-adaptive" in flags:
        assert torch.load(path, weights_only=True)["penalty"]["beta"] != 1


def test_resume_of_a_finished_run_says_so_and_can_be_prolonged(finished, capsys):
    run_dir, _ = finished
    before = rows(run_dir)
    ppo_continuous.main(["--resume", str(run_dir)])
    assert "finished: 6,400 steps" in capsys.readouterr().out and rows(run_dir) == before
    ppo_continuous.main(["--resume", str(run_dir), "--total-steps", "7040"])
    assert "finished: 7,040 steps" in capsys.readouterr().out
    assert rows(run_dir)[: len(before)] == before and len(rows(run_dir)) > len(before)


SHORT = [*SMALL, "--objective", "kl-adaptive", "--kl-target", "1e-4", "--total-steps", "768",
         "--checkpoint-every", "3"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 iterations that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    SCRIPT.main(*SHORT, "--run-dir", run_dir)
    return run_dir


@pytest.mark.parametrize("in_update", [5, 6, 7])
def test_ctrl_c_ends_a_run_at_once_and_it_resumes_bit_for_bit(in_update, whole, tmp_path, capsys,
                                                              monkeypatch):  # fmt: skip
    """One, two and no iterations after a checkpoint: these are repeated, and seen once."""
    run_dir = tmp_path / "run"
    assert SCRIPT.interrupted(capsys, monkeypatch, run_dir, *SHORT, in_update=in_update)
    assert iterations_in(run_dir / "checkpoint.pt") == (in_update - 1) // 3 * 3
    SCRIPT.main("--resume", run_dir)
    assert same_run(whole, run_dir)


@pytest.mark.parametrize("error, status", [(KeyboardInterrupt, 130), (FloatingPointError, 1)])
def test_the_best_policy_outlives_an_interruption(error, status, tmp_path, monkeypatch):
    """Also one of an iteration after the last checkpoint: best.pt is as good as the records say."""
    run_dir, real, updates = tmp_path / "run", ppo_continuous.update, []

    def update(*args):
        updates.append(real(*args))
        if len(updates) == 90:
            raise error("in the test")
        return updates[-1]

    monkeypatch.setattr(ppo_continuous, "update", update)
    flags = [*SMALL, "--total-steps", 6400, "--checkpoint-every", 200, "--run-dir", run_dir]
    with pytest.raises(SystemExit) as leaving:
        SCRIPT.main(*flags)
    assert leaving.value.code == status and iterations_in(run_dir / "checkpoint.pt") == 0
    returns = [r for _, r, _ in rows(run_dir)]
    best = torch.load(run_dir / "best.pt", weights_only=True)
    means = np.convolve(returns, np.full(100, 1 / 100), mode="valid")
    assert np.isclose(best["best"], means).any() and 0 < best["step"] < 90 * 64
    assert SCRIPT.main("--evaluate", run_dir, "--episodes", 1)


def test_ctrl_c_reaches_a_run_in_the_background(tmp_path):
    """A shell's `&` starts a process with SIGINT ignored."""
    run_dir = tmp_path / "run"
    process = start(*SMALL, "--total-steps", 10**6, "--run-dir", run_dir, ignoring_ctrl_c=True)
    wait_for_episodes(process, run_dir)
    (run_dir / "learning_curve.png").unlink(missing_ok=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished" not in out, err
    assert told_how_to_go_on(err.strip(), run_dir)
    assert (run_dir / "learning_curve.png").stat().st_size > 10_000
    assert (run_dir / "episodes.csv").read_text().endswith("\n")
    torch.load(run_dir / "checkpoint.pt", weights_only=True)


@pytest.mark.parametrize("damage", ["lost", "cut short", "longer", "header", "digits", "a folder"])
def test_resume_writes_episodes_csv_anew(damage, finished, tmp_path, capsys):
    """The checkpoint has every episode, so that whatever happened to the file is undone."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    path = run_dir / "episodes.csv"
    whole = path.read_text()
    if damage in ("lost", "a folder"):
        path.unlink()
    else:
        path.write_text({
            "cut short": whole[: len(whole) // 2], "longer": whole + "0" * len(whole),
            "header": whole.replace("step,return", "a,b"), "digits": whole.replace("1", "x"),
        }[damage])  # fmt: skip
    if damage == "a folder":
        path.mkdir()
        assert refused(capsys, 2, ["--resume", run_dir], path, "Is a directory")
        path.rmdir()
    SCRIPT.main("--resume", run_dir)
    assert "finished: " in capsys.readouterr().out and path.read_text() == whole


@pytest.mark.slow
def test_a_compiled_run_resumes_bit_for_bit(tmp_path):
    """Each part in a process of its own, which compiles anew."""
    flags = [*SMALL, "--compile", "--objective", "kl-adaptive", "--kl-target", 1e-4, "--anneal",
             "both", "--total-steps", 64 * 30, "--checkpoint-every", 4]  # fmt: skip
    run(*flags, "--run-dir", tmp_path / "whole")
    broken = tmp_path / "broken"
    process = start(*flags, "--run-dir", broken)
    wait_for_episodes(process, broken, count=20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and one_line(err, f"--resume {broken}")
    assert 0 < iterations_in(broken / "checkpoint.pt") < 30
    run("--resume", broken)
    assert same_run(tmp_path / "whole", broken)


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
    again = capsys.readouterr().out.splitlines()
    assert again[1:] == out.splitlines()[1:]  # the same seed, the same episodes
    assert out.splitlines()[0] == again[0] + f", recording to {videos[0].parent}"


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
    (["--env-id", "NoSuchTask-v4"], ["--env-id", "NoSuchTask", "HalfCheetah-v5"]),
    (["--env-id", "Pixels-v0"], ["--env-id", "(8, 8, 3)", "need a Box of one dimension"]),
    (["--env-id", "Symbols-v0"], ["--env-id", "Discrete(5)", "need a Box of one dimension"]),
    (["--env-id", "Parts-v0"], ["--env-id", "Dict", "need a Box of one dimension"]),
    (["--env-id", "Many-v0"], ["--env-id", "MultiDiscrete", "need", "Discrete"]),
    (["--env-id", "Whole-v0"], ["--env-id", "int64", "Box of floats of one dimension"]),
    (["--minibatch-size", "1"], ["--minibatch-size 1", "need a finite number at least 2"]),
    (["--minibatch-size", "300"], ["--minibatch-size", "1024"]),
    (["--total-steps", "500"], ["--total-steps", "1024"]),
    (["--num-envs", "0"], ["--num-envs 0", "need a finite number at least 1"]),
    (["--num-envs", "two"], ["--num-envs", "two"]),
    (["--gamma", "1.01"], ["--gamma 1.01", "need a finite number from 0 to 1"]),
    (["--gae-lambda", "nan"], ["--gae-lambda", "nan", "from 0 to 1"]),
    (["--learning-rate", "inf"], ["--learning-rate", "inf", "at least 0"]),
    (["--objective", "l2"], ["--objective", "kl-adaptive"]),
    (["--kl-target", "-1"], ["--kl-target", "at least 1e-12"]),
    (["--kl-beta", "-1"], ["--kl-beta", "at least 1e-12"]),
    (["--objective", "kl-adaptive", "--kl-beta", "0"], ["--kl-beta 0.0", "at least 1e-12"]),
    (["--target-kl", "0"], ["--target-kl 0.0", "at least 1e-12"]),
    (["--seed", "-1"], ["--seed", "from 0 to"]),
    (["--seed", str(2**63)], ["--seed", str(2**63 - 1)]),
    (["--goal-score", "nan"], ["--goal-score", "nan", "need a finite number"]),
    (["--goal-score", "inf"], ["--goal-score", "inf", "need a finite number"]),
    (["--num-env", "2"], ["--num-env"]),
    (["--no-such-flag"], ["--no-such-flag"]),
    (["--render"], ["--render", "--evaluate"]),
    (["--resume", "DIR/none"], ["--resume", "DIR/none"]),
    (["--evaluate", "DIR/none"], ["--evaluate", "DIR/none"]),
    (["--run-dir", "DIR"], ["new", "--run-dir", "DIR", "exists"]),
    (["--resume", "DIR", "--evaluate", "DIR"],
     ["--evaluate: leave it out; --resume goes by the checkpoint"]),
])  # fmt: skip
def test_bad_input_gets_one_line_and_status_2(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    flags = [flag.replace("DIR", here) for flag in flags]
    assert refused(capsys, 2, flags, *(word.replace("DIR", here) for word in words))
    assert not list(tmp_path.iterdir())


def test_the_hint_at_a_new_folder_is_for_one_that_exists(tmp_path, capsys):
    """Not for a folder that cannot be made."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as leaving:
        SCRIPT.main(*SMALL, "--total-steps", 64, "--run-dir", tmp_path / "file/run")
    err = capsys.readouterr().err
    assert leaving.value.code == 2 and one_line(err, tmp_path / "file/run", "Not a directory")
    assert "new" not in err.split("Not a directory")[1]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("task", ["resume", "evaluate"])
@pytest.mark.parametrize("kind, word", [
    ("cut short", "need a whole checkpoint"), ("code", "of plain data"), ("foreign", "need"),
    ("other script", "is ppo_atari.py's"), ("empty", "need a whole checkpoint"),
    ("without net", "KeyError 'net'"), ("net a list", "TypeError"),
    ("settings a list", "AttributeError"),
])  # fmt: skip
def test_bad_checkpoints(task, kind, word, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = (finished[0] / "checkpoint.pt").read_bytes()
    path = tmp_path / "checkpoint.pt"
    contents = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
    if kind == "other script":
        torch.save(contents | {"script": "ppo_atari.py"}, path)
    elif kind.endswith("a list"):
        torch.save(contents | {kind.split()[0]: [1]}, path)
    elif kind == "without net":
        torch.save({name: contents[name] for name in contents if name != "net"}, path)
    elif kind in ("foreign", "empty"):
        torch.save([1, 2, 3] if kind == "foreign" else {"script": "ppo_continuous.py"}, path)
    else:
        path.write_bytes(pickle.dumps(Evil()) if kind == "code" else whole[: len(whole) // 2])
    assert refused(capsys, 2, [f"--{task}", tmp_path], f"--{task} {path}: ", word,
                   "need a whole checkpoint of ppo_continuous.py, of ")  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_resume_refuses_a_checkpoint_that_lacks_a_part(finished, tmp_path, capsys):
    """As one by another version of the script may."""
    contents = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
    for part in ("net", "optimizer", "penalty", "episodes", "step", "settings"):
        rest = {name: contents[name] for name in contents if name != part}
        torch.save(rest, tmp_path / "checkpoint.pt")
        assert refused(capsys, 2, ["--resume", tmp_path], "--resume", tmp_path, "need a whole")
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


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
    assert iterations_in(run_dir / "checkpoint.pt") == 4
    assert all(tensor.isfinite().all() for tensor in checkpoint["net"].values())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys, monkeypatch):
    """A step size beyond all measure spoils the very first update, and no record shows it."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 6400, "--learning-rate", 1e38, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 1", run_dir)
    assert iterations_in(run_dir / "checkpoint.pt") == 0


@pytest.mark.parametrize("every, kilobytes, file", [
    (4, 100, "checkpoint.pt"), (10**6, 60, "events"), (4, 30, "checkpoint.pt"),
])  # fmt: skip
def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_whole(every, kilobytes, file,
                                                                   tmp_path, capsys):  # fmt: skip
    """The system refuses larger files: the checkpoint with Adam's state, or TensorBoard's events,
    or the very first checkpoint."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--num-steps", 8, "--minibatch-size", 16, "--num-epochs", 1]
    flags += ["--total-steps", 10**6, "--checkpoint-every", every, "--run-dir", run_dir]
    with full_disk() as allow_files_of:
        allow_files_of(kilobytes * 1000)
        assert refused(capsys, 1, flags, run_dir, "File too large", "iteration ")
    sizes = {p.name: p.stat().st_size for p in run_dir.iterdir()}
    if kilobytes == 30:
        assert "checkpoint.pt" not in sizes and "best.pt" not in sizes
    else:
        assert iterations_in(run_dir / "checkpoint.pt") == 0
    full = [name for name, size in sizes.items() if size == kilobytes * 1000]
    assert len(full) == 1 and full[0].startswith(file)


@pytest.mark.parametrize("flags", [
    ["--env-id", "LunarLander-v3"], ["--env-id", "LunarLanderContinuous-v3"],
    ["--env-id", "Hopper-v5", "--objective", "kl-adaptive", "--gae-lambda", "1"],
    ["--env-id", "Pendulum-v1", "--no-norm-obs", "--no-norm-reward", "--norm-adv", "none",
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


def test_evaluating_a_compiled_policy_needs_no_compiler(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    checkpoint = torch.load(finished[0] / "best.pt", weights_only=True)
    checkpoint["settings"]["compile"] = True
    torch.save(checkpoint, tmp_path / "x.pt")
    assert len(SCRIPT.main("--evaluate", tmp_path / "x.pt", "--episodes", 1)) == 1


def test_evaluate_deterministic_plays_the_mode(finished, tmp_path, capsys, monkeypatch):
    """Twice the same episodes whatever the draws, and no action is sampled."""

    def no_sample(self):
        raise AssertionError("sampled")

    monkeypatch.setattr(ppo_continuous.Categorical, "sample", no_sample)
    flags = ["--evaluate", finished[0], "--episodes", 2, "--deterministic"]
    assert SCRIPT.main(*flags) == SCRIPT.main(*flags)
    assert refused(capsys, 2, ["--deterministic"], "--deterministic", "--evaluate")
