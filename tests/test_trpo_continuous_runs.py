"""trpo_continuous.py as a user runs it: records, exact resume, evaluation, bad input. What it
shares with ppo_continuous.py, letter for letter, is tested with that one."""

import json
import math
import re
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from processes import (
    Script,
    events,
    iterations_in,
    kill_after_a_checkpoint,
    rows,
    same_run,
    told_how_to_go_on,
    wait_for_episodes,
)

import trpo_continuous

SCRIPT = Script(trpo_continuous)
start, run, refused = SCRIPT.start, SCRIPT.run, SCRIPT.refused
SMALL = ["--env-id", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--minibatch-size",
         "32", "--num-epochs", "2", "--max-kl", "0.0001"]  # fmt: skip


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
    assert config["script"] == "trpo_continuous.py" and config["settings"]["max_kl"] == 0.0001

    table = rows(run_dir)
    ends = [step for step, _, _ in table]
    assert len(table) > 100 and ends == sorted(ends) and ends[-1] <= 6400
    assert all(score == length for _, score, length in table)  # raw: 1 a step in CartPole

    scalars = events(run_dir)
    assert set(scalars) == {
        "cg_residual", "entropy", "expected_improvement", "explained_variance", "grad_norm",
        "improvement", "kl", "score", "step_fraction", "steps_per_second", "value_loss",
        "weight_norm",
    }  # fmt: skip
    for name in scalars.keys() - {"score"}:  # which there is none of before an episode is over
        assert [e.step for e in scalars[name]] == list(range(64, 6401, 64))
    for e in scalars["score"]:
        assert e.value == pytest.approx(np.mean([r for t, r, _ in table if t <= e.step][-100:]))
    kls, fractions, gains = (
        [e.value for e in scalars[name]] for name in ("kl", "step_fraction", "improvement")
    )
    assert max(kls) <= 0.0001 + 1e-10 and max(fractions) == 1
    for kl, fraction, gain in zip(kls, fractions, gains, strict=True):
        assert gain > 0 if fraction else kl == gain == 0

    picture = np.asarray(Image.open(run_dir / "learning_curve.png").convert("RGB")).astype(int)
    assert picture.shape == (540, 960, 3)
    assert ((picture[..., 2] - picture[..., 0]) > 30).sum() > 20


def test_tensorboard_has_what_update_returned(tmp_path, monkeypatch):
    assert SCRIPT.tensorboard_has_what_update_returned(
        monkeypatch, tmp_path / "run", *SMALL, "--total-steps", 320
    )


def test_the_picture_is_redrawn_every_ten_seconds_at_most(tmp_path, monkeypatch):
    """Of a run whose iterations take 4 seconds each, saved after every one; and at its end."""
    assert SCRIPT.pictures_of_a_slow_run(monkeypatch, tmp_path / "run", *SMALL) == [3, 6, 8]


def test_goal_score_stops_and_saves_and_the_best_plays(tmp_path, capsys):
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--max-kl", 0.01, "--goal-score", 25, "--run-dir", run_dir]
    SCRIPT.main(*flags, "--total-steps", 10**6)
    returns = [r for _, r, _ in rows(run_dir)]
    assert len(returns) >= 100 and np.mean(returns[-100:]) >= 25
    assert "finished" in capsys.readouterr().out
    best, last = (torch.load(run_dir / f, weights_only=True) for f in ("best.pt", "checkpoint.pt"))
    assert best["step"] == last["step"] and best["best"] == np.mean(returns[-100:])
    assert all(torch.equal(best["net"][name], last["net"][name]) for name in last["net"])
    for path in (run_dir, run_dir / "best.pt"):
        scores = SCRIPT.main("--evaluate", path, "--episodes", 3)
        out, err = capsys.readouterr()
        found = [float(s) for s in re.findall(r"episode \d: return (\d+), \d+ steps", out)]
        assert found == scores and len(scores) == 3 and err == ""
        assert f"policy of step {best['step']:,}" in out


# -------------------------------------------------------------------------------------- Resume


@pytest.mark.parametrize("flags", [
    ["--env-id", "CartPole-v1"], ["--env-id", "Pendulum-v1", "--fvp-fraction", "0.5"],
])  # fmt: skip
def test_a_killed_run_resumes_bit_for_bit(flags, tmp_path):
    flags = [*SMALL, *flags, "--total-steps", 64 * 60, "--checkpoint-every", 7]
    SCRIPT.main(*flags, "--run-dir", tmp_path / "whole")
    broken = tmp_path / "broken"
    process = start(*flags, "--run-dir", broken)
    kill_after_a_checkpoint(process, broken)
    assert process.returncode == -signal.SIGKILL
    iteration = iterations_in(broken / "checkpoint.pt")
    assert 0 < iteration < 60 and iteration % 7 == 0
    SCRIPT.main("--resume", broken)
    assert same_run(tmp_path / "whole", broken)


def test_ctrl_c_keeps_the_records_and_says_how_to_go_on(tmp_path):
    run_dir = tmp_path / "run"
    process = start(*SMALL, "--total-steps", 10**6, "--run-dir", run_dir)
    wait_for_episodes(process, run_dir)
    (run_dir / "learning_curve.png").unlink(missing_ok=True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished" not in out, err
    assert told_how_to_go_on(err.strip(), run_dir)
    assert (run_dir / "learning_curve.png").stat().st_size > 10_000
    torch.load(run_dir / "checkpoint.pt", weights_only=True)


def test_ctrl_c_ends_a_run_at_once_and_it_resumes_bit_for_bit(tmp_path, capsys, monkeypatch):
    flags = [*SMALL, "--total-steps", 64 * 8, "--checkpoint-every", 3]
    SCRIPT.main(*flags, "--run-dir", tmp_path / "whole")
    broken = tmp_path / "broken"
    assert SCRIPT.interrupted(capsys, monkeypatch, broken, *flags)
    assert iterations_in(broken / "checkpoint.pt") == 3
    (broken / "episodes.csv").unlink()  # the checkpoint has every episode
    SCRIPT.main("--resume", broken)
    assert same_run(tmp_path / "whole", broken)


# ----------------------------------------------------------------------------------- Bad input


@pytest.mark.parametrize("flags, words", [
    (["--max-kl", "0"], ["--max-kl", "at least 1e-12"]),
    (["--max-kl", "nan"], ["--max-kl", "nan", "at least 1e-12"]),
    (["--cg-iters", "0"], ["--cg-iters", "at least 1"]),
    (["--cg-damping", "inf"], ["--cg-damping", "inf", "at least 0"]),
    (["--fvp-fraction", "0"], ["--fvp-fraction", "to 1"]),
    (["--fvp-fraction", "1.5"], ["--fvp-fraction", "to 1"]),
    (["--line-search-steps", "0"], ["--line-search-steps", "at least 1"]),
    (["--backtrack-coef", "1"], ["--backtrack-coef", "from 0.01 to 0.99"]),
    (["--clip-eps", "0.2"], ["--clip-eps"]),
    (["--compile"], ["--compile"]),
    (["--minibatch-size", "100"], ["--minibatch-size", "1024"]),
    (["--env-id", "NoSuchTask-v4"], ["--env-id", "NoSuchTask"]),
    (["--resume", "DIR/none"], ["--resume", "DIR/none"]),
])  # fmt: skip
def test_bad_input_gets_one_line_and_status_2(flags, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    flags = [flag.replace("DIR", here) for flag in flags]
    assert refused(capsys, 2, flags, *(word.replace("DIR", here) for word in words))
    assert not list(tmp_path.iterdir())


def test_resume_and_evaluate_refuse_other_settings_and_scripts(finished, tmp_path, capsys):
    checkpoint = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"script": "ppo_continuous.py"}, tmp_path / "checkpoint.pt")
    for task in ("--resume", "--evaluate"):
        assert refused(capsys, 2, [task, finished[0], "--max-kl", 0.1], "--max-kl", "leave it out")
        assert refused(capsys, 2, [task, tmp_path], task, "is ppo_continuous.py's",
                       "need a whole checkpoint of trpo_continuous.py")  # fmt: skip


# ---------------------------------------------------------------------------- Broken while running


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, capsys, monkeypatch):
    """In the sixth iteration; the last checkpoint is whole."""
    surrogate, calls = trpo_continuous.surrogate, []

    def spoiled(pi, batch):
        if torch.is_grad_enabled():  # once an iteration, not in the line search
            calls.append(pi)
        return surrogate(pi, batch) * (math.nan if len(calls) == 6 else 1)

    monkeypatch.setattr(trpo_continuous, "surrogate", spoiled)
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 6400, "--checkpoint-every", 2, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 6", "gradient is nan", run_dir)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert iterations_in(run_dir / "checkpoint.pt") == 4
    assert all(tensor.isfinite().all() for tensor in checkpoint["net"].values())


def test_a_critic_that_is_not_finite_stops_the_run(tmp_path, capsys):
    """A step size beyond all measure spoils the very first update, and no record shows it."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 6400, "--learning-rate", 1e38, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 1", run_dir)
    assert iterations_in(run_dir / "checkpoint.pt") == 0


@pytest.mark.parametrize("flags", [
    ["--env-id", "LunarLander-v3", "--fvp-fraction", "0.1", "--cg-iters", "1"],
    ["--env-id", "LunarLanderContinuous-v3", "--max-kl", "1e-12"],
    ["--env-id", "Hopper-v5", "--gae-lambda", "1", "--cg-damping", "0", "--backtrack-coef", "0.5"],
    ["--env-id", "Pendulum-v1", "--no-norm-obs", "--no-norm-reward", "--norm-adv", "none",
     "--no-orthogonal", "--line-search-steps", "1", "--cg-iters", "30"],
])  # fmt: skip
def test_other_settings_run(flags, tmp_path, capsys):
    SCRIPT.main(*SMALL, *flags, "--total-steps", 256, "--run-dir", tmp_path / "run")
    assert "finished: 256 steps" in capsys.readouterr().out
    SCRIPT.main("--evaluate", tmp_path / "run", "--episodes", 1)
    assert "over 1 episodes" in capsys.readouterr().out


def test_evaluate_deterministic_plays_the_mode(finished, tmp_path, capsys, monkeypatch):
    """Twice the same episodes whatever the draws, and no action is sampled."""

    def no_sample(self):
        raise AssertionError("sampled")

    monkeypatch.setattr(trpo_continuous.Categorical, "sample", no_sample)
    flags = ["--evaluate", finished[0], "--episodes", 2, "--deterministic"]
    assert SCRIPT.main(*flags) == SCRIPT.main(*flags)
    assert refused(capsys, 2, ["--deterministic"], "--deterministic", "--evaluate")
