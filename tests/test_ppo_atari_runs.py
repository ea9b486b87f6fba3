"""ppo_atari.py as a user runs it: records, exact resume, evaluation, and what bad input gets."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from processes import (
    Clock,
    Script,
    events,
    full_disk,
    iterations_in,
    one_line,
    rows,
    same_run,
    told_how_to_go_on,
    wait_for_episodes,
)

import ppo_atari

SCRIPT = Script(ppo_atari)
start, run, refused = SCRIPT.start, SCRIPT.run, SCRIPT.refused
SMALL = ["--network", "paper", "--num-envs", "2", "--num-steps", "16", "--minibatch-size", "16",
         "--num-epochs", "1", "--threads", "1", "--no-compile"]  # fmt: skip
SHORT_GAMES = (  # truncated after 20 steps, to see many games in little time
    "settings = ppo_atari.game_settings\n"
    "short = {'max_num_frames_per_episode': 80}\n"
    "ppo_atari.game_settings = lambda env_id: settings(env_id) | short\n"
)


def shorten_games(patch):
    """SHORT_GAMES for runs in this process."""
    settings = ppo_atari.game_settings
    short = {"max_num_frames_per_episode": 80}
    patch.setattr(ppo_atari, "game_settings", lambda env_id: settings(env_id) | short)


@pytest.fixture
def short_games(monkeypatch):
    shorten_games(monkeypatch)


def ctrl_c(patch, in_update):
    """Ctrl-C in an update of a run in this process, which is the in_update-th."""
    update, calls = ppo_atari.update, []

    def interrupted(*args):
        stats = update(*args)
        calls.append(stats)
        if len(calls) == in_update:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("Ctrl-C is to end the run at once")
        return stats

    patch.setattr(ppo_atari, "update", interrupted)


def interrupt(run_dir, *flags, in_update):
    """A run of short games in this process, interrupted."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as leaving:
        shorten_games(patch)
        ctrl_c(patch, in_update)
        SCRIPT.main(*flags, "--run-dir", run_dir)
    assert leaving.value.code == 130


def updates_of(patch, clock, seconds):
    """Every update takes so many seconds on this clock."""
    update = ppo_atari.update

    def slow(*args):
        clock.now += seconds
        return update(*args)

    patch.setattr(ppo_atari, "update", slow)


@pytest.fixture(scope="module")
def whole_and_interrupted(tmp_path_factory):
    """Two runs of the same settings: a whole one of 20 iterations, and one interrupted in the 14th,
    with a checkpoint of the 10th."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*SMALL, "--total-steps", 32 * 20, "--checkpoint-every", 10]
    with pytest.MonkeyPatch.context() as patch:
        shorten_games(patch)
        SCRIPT.main(*flags, "--run-dir", folder / "whole")
    interrupt(folder / "interrupted", *flags, in_update=14)
    return folder / "whole", folder / "interrupted"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run, with what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    out, err = run(*SMALL, "--total-steps", 1600, "--checkpoint-every", 25, "--run-dir", run_dir)
    assert err == ""
    return run_dir, out


# ------------------------------------------------------------------------------------- Records


def test_a_run_leaves_its_records(finished):
    run_dir, out = finished
    assert "finished: 1,600 steps" in out and str(run_dir) in out
    names = {p.name for p in run_dir.iterdir() if not p.name.startswith("events.out.tfevents")}
    assert names == {"config.json", "episodes.csv", "checkpoint.pt", "learning_curve.png"}

    config = json.loads((run_dir / "config.json").read_text())
    assert config["settings"]["num_envs"] == 2 and config["versions"]["torch"] == torch.__version__
    assert config["script"] == "ppo_atari.py" and config["device"] == "cpu"
    assert config["sha256"] == hashlib.sha256(Path(ppo_atari.__file__).read_bytes()).hexdigest()

    text = (run_dir / "episodes.csv").read_text().splitlines()
    assert text[0] == "step,return,length,seconds" and len(text) > 4
    ends = [step for step, _, _ in rows(run_dir)]
    assert ends == sorted(ends) and ends[-1] <= 1600 and all(step % 2 == 0 for step in ends)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == 1600
    assert [",".join(map(str, row)) for row in checkpoint["episodes"]] == text[1:]

    scalars = events(run_dir)
    others = {"weight_norm", "explained_variance", "learning_rate", "score", "steps_per_second"}
    assert set(scalars) == {*ppo_atari.STATS, *others}
    assert [e.step for e in scalars["entropy"]] == list(range(32, 1601, 32))
    assert 0 < scalars["entropy"][-1].value <= np.log(4) + 1e-6
    rates = [e.value for e in scalars["learning_rate"]]
    assert rates == pytest.approx([2.5e-4 * (1 - k / 50) for k in range(50)])


def test_episodes_between_clean_boundaries_add_up(finished):
    """Lengths: between two resets of the games no step is lost and none counted twice."""
    run_dir, _ = finished
    per_actor = {}
    for step, _, length in rows(run_dir):
        per_actor.setdefault((step - 1) // 800, []).append(length)
    assert all(sum(lengths) <= 800 for lengths in per_actor.values())
    assert max(sum(lengths) for lengths in per_actor.values()) > 400


def test_the_picture_shows_games_and_the_paper(finished):
    """Dots in blue and the paper's grey line."""
    run_dir, _ = finished
    picture = np.asarray(Image.open(run_dir / "learning_curve.png").convert("RGB")).astype(int)
    assert picture.shape == (540, 960, 3)
    assert ((picture[..., 2] - picture[..., 0]) > 30).sum() > 20
    assert (np.abs(picture - 127).max(-1) < 3).sum() > 200


def test_the_published_scores_are_those_of_table_6():
    assert ppo_atari.PUBLISHED_BY == "paper, after 10 million steps"
    assert ppo_atari.PUBLISHED_SCORES == {
        "BeamRiderNoFrameskip-v4": 1590.0, "BreakoutNoFrameskip-v4": 274.8,
        "PongNoFrameskip-v4": 20.7, "QbertNoFrameskip-v4": 14293.3,
        "SeaquestNoFrameskip-v4": 1204.5, "SpaceInvadersNoFrameskip-v4": 942.5,
    }  # fmt: skip


@pytest.mark.parametrize("env_id, line", [
    ("BreakoutNoFrameskip-v4", ("paper, after 10 million steps: 274.8", 274.8)),
    ("FreewayNoFrameskip-v4", None),
])  # fmt: skip
def test_the_picture_draws_each_episode_their_mean_and_the_published_score(
    env_id, line, tmp_path, monkeypatch
):
    figures = []

    class Figure(ppo_atari.Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    monkeypatch.setattr(ppo_atari, "Figure", Figure)
    args = SimpleNamespace(env_id=env_id, seed=7)
    episodes = [(10 * k, float(k * k % 17), 5, 0.1) for k in range(1, 151)]
    run = SimpleNamespace(args=args, episodes=episodes, run_dir=tmp_path)
    ppo_atari.Run.draw(run)
    [axes] = figures[0].axes
    lines = {each.get_label(): each.get_xydata() for each in axes.lines}
    returns = [row[1] for row in episodes]
    means = [(10 * k, np.mean(returns[k - 100 : k])) for k in range(100, 151)]
    np.testing.assert_array_equal(lines.pop("one episode"), [row[:2] for row in episodes])
    np.testing.assert_allclose(lines.pop("mean of the last 100"), means)
    assert {label: set(xy[:, 1]) for label, xy in lines.items()} == ({line[0]: {line[1]}} if line
                                                                     else {})  # fmt: skip
    assert env_id in axes.get_title() and "seed 7" in axes.get_title()
    assert (tmp_path / "learning_curve.png").stat().st_size > 10_000


@pytest.mark.parametrize("seconds, drawn", [(1, [7]), (3, [12, 21])])
def test_the_picture_is_drawn_every_ten_seconds_at_most_and_at_the_end(
    seconds, drawn, tmp_path, monkeypatch
):
    """7 iterations, each of which ends with a checkpoint."""
    clock = Clock(monkeypatch, ppo_atari)
    updates_of(monkeypatch, clock, seconds)
    start, times = clock.now, {"draw": [], "save": []}

    def spy(name, method):
        def spied(run):
            times[name].append(round(clock.now - start))
            method(run)

        monkeypatch.setattr(ppo_atari.Run, name, spied)

    spy("draw", ppo_atari.Run.draw)
    spy("save", ppo_atari.Run.save)
    flags = [*SMALL, "--total-steps", 32 * 7, "--checkpoint-every", 1]
    SCRIPT.main(*flags, "--run-dir", tmp_path / "run")
    assert times == {"draw": drawn, "save": [k * seconds for k in range(8)]}
    assert (tmp_path / "run" / "learning_curve.png").stat().st_size > 10_000


def test_progress_is_a_line_every_30_seconds(tmp_path, monkeypatch, short_games, capsys):
    """Where there is no terminal: 20 iterations of 7 seconds each."""
    clock = Clock(monkeypatch, ppo_atari)
    updates_of(monkeypatch, clock, 7)
    SCRIPT.main(*SMALL, "--total-steps", 640, "--checkpoint-every", 20, "--run-dir", tmp_path / "r")
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line for line in out.splitlines() if "mean of last 100" in line]
    seen = [re.search(r" (\d+)/640 \[(\d\d):(\d\d)<.*episode (\d+)", line) for line in lines]
    seen = [tuple(map(int, match.groups())) for match in seen]
    expected = [(step, *divmod(7 * step // 32, 60)) for step in (160, 320, 480, 640)]
    assert sorted({each[:3] for each in seen}) == expected
    ends = [step for step, _, _ in rows(tmp_path / "r")]
    for step, _, _, count in seen:
        assert count == sum(end <= step for end in ends)


def test_progress_is_a_bar_in_a_terminal(tmp_path, monkeypatch, capsys):
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    SCRIPT.main(*SMALL, "--total-steps", 64, "--run-dir", tmp_path / "run")
    out = "".join(capsys.readouterr())
    assert re.search(r"\r100%\|.*\| 64/64 \[.*steps/s, episode 0, mean of last 100: nan\]", out)


def test_goal_score_stops_and_saves(tmp_path, short_games, capsys):
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", "1000000", "--goal-score", "-1", "--run-dir", str(run_dir)]
    ppo_atari.main(flags)
    returns = [r for _, r, _ in rows(run_dir)]
    assert 100 <= len(returns) <= 102 and "finished" in capsys.readouterr().out
    best, last = (torch.load(run_dir / f, weights_only=True) for f in ("best.pt", "checkpoint.pt"))
    assert best["step"] == last["step"] and best["best"] == np.mean(returns[-100:])
    assert all(torch.equal(best["net"][name], last["net"][name]) for name in last["net"])
    ppo_atari.main(["--resume", str(run_dir)])
    assert "finished" in capsys.readouterr().out and [r for _, r, _ in rows(run_dir)] == returns


def test_best_is_the_best_policy_of_all(tmp_path, short_games, capsys):
    """best.pt holds the highest mean of 100 games that the run has seen, not the last."""
    run_dir = tmp_path / "run"
    flags = ["--total-steps", "2400", "--checkpoint-every", "40", "--run-dir", str(run_dir)]
    ppo_atari.main([*SMALL, *flags])
    table = rows(run_dir)
    ends = [step for step, _, _ in table]
    means = {}
    for step in range(32, 2401, 32):  # after every iteration
        done = sum(end <= step for end in ends)
        if done >= 100 and any(step - 32 < end <= step for end in ends):
            means[step] = np.mean([r for _, r, _ in table[done - 100 : done]])
    best = torch.load(run_dir / "best.pt", weights_only=True)
    assert len(means) > 2 and best["best"] == max(means.values())
    assert best["step"] == max(step for step, mean in means.items() if mean == best["best"])
    for event in events(run_dir)["score"]:
        done = [r for end, r, _ in table if end <= event.step]
        assert event.value == pytest.approx(np.mean(done[-100:]), rel=1e-6)
    capsys.readouterr()
    ppo_atari.main(["--evaluate", str(run_dir), "--episodes", "1"])
    assert f"policy of step {best['step']:,}" in capsys.readouterr().out


# -------------------------------------------------------------------------------------- Resume


def test_a_killed_run_resumes_bit_for_bit(tmp_path, short_games):
    """SIGKILL at a random moment, and once between writing a checkpoint and renaming it."""
    flags = [*SMALL, "--total-steps", 32 * 24, "--checkpoint-every", 4]
    SCRIPT.main(*flags, "--run-dir", tmp_path / "whole")
    broken = tmp_path / "broken"
    half_written = (
        "replace, calls = os.replace, []\n"
        "def die(source, target):\n"
        "    calls.append(target)\n"
        "    if 'checkpoint' in str(target) and len(calls) > 4:\n"
        "        os.truncate(source, os.path.getsize(source) // 2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    replace(source, target)\n"
        "os.replace = die\n"
    )
    died = {"status": -signal.SIGKILL, "before": SHORT_GAMES + half_written}
    run(*flags, "--run-dir", broken, **died)
    assert (broken / "checkpoint.pt.tmp").exists()
    assert iterations_in(broken / "checkpoint.pt") in range(4, 24, 4)  # the one before is whole
    size = os.path.getsize(broken / "episodes.csv")
    process = start("--resume", broken, before=SHORT_GAMES)
    while os.path.getsize(broken / "episodes.csv") <= size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)  # until it has got further than the one before
    time.sleep(np.random.default_rng().uniform(0, 0.3))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with open(broken / "episodes.csv", "a") as file:
        file.write("99999,1")  # a row cut short
    SCRIPT.main("--resume", broken)
    assert same_run(tmp_path / "whole", broken)
    assert same_scalars(tmp_path / "whole", broken)
    assert not (broken / "checkpoint.pt.tmp").exists()


def same_scalars(a, b):
    """TensorBoard shows each step once, and the same values but for the speed."""
    first, second = (
        {name: [(e.step, e.value) for e in scalars] for name, scalars in events(d).items()
         if name != "steps_per_second"} for d in (a, b)
    )  # fmt: skip
    assert first == second != {}
    return True


@pytest.mark.parametrize("after", [1, 2])
def test_tensorboard_shows_each_step_once_after_a_resume(after, tmp_path, short_games):
    """Interrupted when one iteration had been logged since the checkpoint; and in the iteration
    after that in which the first episodes ended."""
    run_dir = tmp_path / "run"
    interrupt(run_dir, *SMALL, "--total-steps", 160, "--checkpoint-every", 5, in_update=after + 1)
    assert len(events(run_dir)["entropy"]) == after
    assert ("score" in events(run_dir)) == (after == 2)
    SCRIPT.main("--resume", run_dir)
    for name, scalars in events(run_dir).items():
        first = 64 if name == "score" else 32
        assert [e.step for e in scalars] == list(range(first, 161, 32)), name


@pytest.mark.parametrize("damage", ["lost", "shortened", "foreign", "longer"])
def test_resuming_writes_the_table_anew(damage, whole_and_interrupted, tmp_path, short_games):
    """Whatever has become of episodes.csv: it is made from the checkpoint, byte for byte but for
    the seconds of the episodes that came after it."""
    whole, interrupted = whole_and_interrupted
    run_dir, path = tmp_path / "run", tmp_path / "run" / "episodes.csv"
    shutil.copytree(interrupted, run_dir)
    contents = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes({"shortened": contents[:-50], "foreign": b"\xff\x00 no table",
                          "longer": contents * 30}[damage])  # fmt: skip
    assert SCRIPT.main("--resume", run_dir) is None
    first, second = (
        [line.rpartition(b",") for line in (d / "episodes.csv").read_bytes().split(b"\n")]
        for d in (whole, run_dir)
    )
    assert [line[:2] for line in first] == [line[:2] for line in second]
    count = len(torch.load(interrupted / "checkpoint.pt", weights_only=True)["episodes"])
    kept = contents.split(b"\n")[: count + 1]
    assert count > 4 and [b"".join(line) for line in second[: count + 1]] == kept
    assert same_run(whole, run_dir) and same_scalars(whole, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [
    "--bf16", "--compile", *(
        pytest.param(f"--cuda {more}".strip(), marks=pytest.mark.skipif(
            not torch.cuda.is_available(), reason="no GPU"
        )) for more in ("", "--bf16", "--compile")
    )
])  # fmt: skip
def test_an_interrupted_run_resumes_bit_for_bit_on_any_machine(machine, tmp_path):
    """Interrupted in the second iteration after a checkpoint. CUDA graphs are used, or it is an
    error."""
    flags = [*SMALL, *machine.split(), "--total-steps", 32 * 20, "--checkpoint-every", 10]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    before = SHORT_GAMES
    if "--cuda" in machine:
        before += "os.environ['TORCHINDUCTOR_CUDAGRAPH_OR_ERROR'] = '1'\n"
    run(*flags, "--run-dir", whole, before=before)
    interrupt = (
        "update, calls = ppo_atari.update, []\n"
        "def interrupted(*args):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 12:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return update(*args)\n"
        "ppo_atari.update = interrupted\n"
    )
    _, err = run(*flags, "--run-dir", broken, status=130, before=before + interrupt)
    assert one_line(err, f"--resume {broken}")
    assert iterations_in(broken / "checkpoint.pt") == 10
    run("--resume", broken, before=before)
    assert same_run(whole, broken)


def test_resume_of_a_finished_run_says_so_and_can_be_prolonged(finished, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    before = rows(run_dir)
    ppo_atari.main(["--resume", str(run_dir)])
    assert "finished: 1,600 steps" in capsys.readouterr().out and rows(run_dir) == before
    ppo_atari.main(["--resume", str(run_dir), "--total-steps", "2400"])
    assert "finished: 2,400 steps" in capsys.readouterr().out
    assert rows(run_dir)[: len(before)] == before and len(rows(run_dir)) > len(before)


def test_seeds_make_different_runs(tmp_path):
    nets = []
    for seed in (1, 2):
        run_dir = tmp_path / str(seed)
        ppo_atari.main(
            [*SMALL, "--total-steps", "32", "--seed", str(seed), "--run-dir", str(run_dir)]
        )
        nets.append(torch.load(run_dir / "checkpoint.pt", weights_only=True)["net"])
    assert not torch.equal(nets[0]["trunk.0.weight"], nets[1]["trunk.0.weight"])


def test_ctrl_c_keeps_the_records_and_says_how_to_go_on(tmp_path):
    """Also in a run that a shell's `&` started, with SIGINT ignored, by kill -INT."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 10**6, "--run-dir", run_dir]
    process = start(*flags, ignoring_ctrl_c=True)
    wait_for_episodes(process, run_dir, count=3)  # not all of one iteration: one has its score
    (run_dir / "learning_curve.png").unlink(missing_ok=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert told_how_to_go_on(err.strip(), run_dir)
    assert (run_dir / "learning_curve.png").stat().st_size > 10_000
    assert (run_dir / "episodes.csv").read_text().endswith("\n")
    last = events(run_dir)["score"][-1]
    assert last.value == pytest.approx(
        np.mean([r for step, r, _ in rows(run_dir) if step <= last.step][-100:])
    )
    torch.load(run_dir / "checkpoint.pt", weights_only=True)


def test_ctrl_c_in_an_update_ends_the_run_which_resumes_bit_for_bit(
    whole_and_interrupted, tmp_path, capsys, monkeypatch, short_games
):
    """The iteration is not finished: its update is lost, and done again when resuming."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 32 * 20, "--checkpoint-every", 10]
    assert SCRIPT.interrupted(capsys, monkeypatch, run_dir, *flags, in_update=13)
    assert iterations_in(run_dir / "checkpoint.pt") == 10
    steps = [e.step for e in events(run_dir)["entropy"]]
    assert steps == list(range(32, 32 * 12 + 1, 32))
    SCRIPT.main("--resume", run_dir)
    assert same_run(whole_and_interrupted[0], run_dir)
    assert same_scalars(whole_and_interrupted[0], run_dir)


# ---------------------------------------------------------------------------------- Evaluation


def test_evaluate_prints_whole_games_and_records_a_video(finished, capsys):
    run_dir, _ = finished
    before = {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir()}
    SCRIPT.main("--evaluate", run_dir, "--episodes", 2, "--video")
    out, err = capsys.readouterr()
    assert err == "" and out.endswith("with the policy of step 1,600\n")
    scores = [float(s) for s in re.findall(r"game \d: score (\d+), \d+ steps", out)]
    assert len(scores) == 2
    assert f"{np.mean(scores):.1f} ± {np.std(scores):.1f}" in out
    videos = sorted((run_dir / "videos").glob("*/*.mp4"))
    assert len(videos) == 2 and all(v.stat().st_size > 5000 for v in videos)
    assert {p.name: p.stat().st_mtime_ns for p in run_dir.iterdir() if p.name != "videos"} == before
    SCRIPT.main("--evaluate", run_dir / "checkpoint.pt", "--episodes", 2)
    again = capsys.readouterr().out.splitlines()
    assert again[1:] == out.splitlines()[1:]  # the same seed, the same games
    assert out.splitlines()[0].endswith(f".pt, recording to {videos[0].parent}")
    assert again[0] == f"playing {run_dir}/checkpoint.pt"


def test_render_without_a_display_says_so(finished, capsys, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    flags = ["--evaluate", finished[0], "--render", "--episodes", 1]
    assert refused(capsys, 1, flags, "--render", "--video")


def test_evaluate_plays_the_policy_that_it_was_given(finished, tmp_path, capsys):
    """A policy that only ever waits, one that only ever moves left: the games differ."""
    checkpoint = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
    outcomes = []
    for action in (0, 3):
        checkpoint["net"]["policy_head.weight"].zero_()
        checkpoint["net"]["policy_head.bias"] = 50.0 * torch.nn.functional.one_hot(
            torch.tensor(action), 4
        )
        torch.save(checkpoint, tmp_path / "x.pt")
        scores = ppo_atari.main(["--evaluate", str(tmp_path / "x.pt"), "--episodes", "2"])
        outcomes.append((scores, capsys.readouterr().out))
    assert outcomes[0][1] != outcomes[1][1]
    assert all(len(scores) == 2 for scores, _ in outcomes)


# ----------------------------------------------------------------------------------- Bad input


@pytest.mark.parametrize("flags, words", [
    (["--env-id", "NoSuchGame-v4"], ["--env-id", "NoSuchGame"]),
    (["--env-id", "CartPole-v1"], ["--env-id", "need an Atari game"]),
    (["--minibatch-size", "300"], ["--minibatch-size 300", "1024"]),
    (["--minibatch-size", "0"], ["--minibatch-size 0", "need a finite number at least 2"]),
    (["--minibatch-size", "1"], ["--minibatch-size 1", "need a finite number at least 2"]),
    (["--total-steps", "1000"], ["--total-steps 1000", "1024"]),
    (["--num-envs", "0"], ["--num-envs 0", "need a finite number at least 1"]),
    (["--num-envs", "two"], ["--num-envs", "two"]),
    (["--gamma", "1.01"], ["--gamma 1.01", "need a finite number from 0 to 1"]),
    (["--gae-lambda", "nan"], ["--gae-lambda nan", "need a finite number from 0 to 1"]),
    (["--learning-rate", "-1"], ["--learning-rate -1", "need a finite number at least 0"]),
    (["--learning-rate", "inf"], ["--learning-rate inf", "need a finite number at least 0"]),
    (["--clip-eps", "-0.1"], ["--clip-eps -0.1", "need a finite number at least 0"]),
    (["--seed", "-1"], ["--seed -1", "need a finite number from 0 to"]),
    (["--network", "resnet"], ["--network", "paper", "nature"]),
    (["--threads", "0"], ["--threads 0", "need a finite number from 1 to 1024"]),
    (["--threads", "100000"], ["--threads 100000", "need a finite number from 1 to 1024"]),
    (["--no-such-flag"], ["--no-such-flag"]),
    (["--goal-score", "nan"], ["--goal-score nan", "need a finite number"]),
    (["--render"], ["--render", "--evaluate"]),
    (["--episodes", "3"], ["--episodes", "--evaluate"]),
    (["--evaluate", "RUN", "--render", "--video"], ["--render", "--video"]),
    (["--evaluate", "RUN", "--threads", "1"], ["--threads", "leave it out"]),
    (["--resume", ""], ["--resume", "No such file", "need a whole checkpoint of ppo_atari.py"]),
    (["--seed", str(2**64)], ["--seed", f"from 0 to {2**63 - 1}"]),
    (["--resume", "DIR/none"], ["--resume", "DIR/none", "need a whole checkpoint"]),
    (["--evaluate", "DIR/none"], ["--evaluate", "DIR/none", "need a whole checkpoint"]),
    (["--run-dir", "DIR"], ["DIR", "exists", "need", "new", "--run-dir"]),
    (["--run-dir", "DIR/file/run"], ["DIR/file/run: Not a directory"]),
])  # fmt: skip
def test_bad_input_gets_one_line_and_status_2(
    flags, words, finished, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    here = str(tmp_path)
    flags = [flag.replace("DIR", here).replace("RUN", str(finished[0])) for flag in flags]
    assert refused(capsys, 2, flags, *(word.replace("DIR", here) for word in words))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("gpus, processes", [(0, 1), (2, 4)])
def test_more_processes_than_gpus(gpus, processes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))  # as torchrun sets it
    flags = ["--cuda", "--run-dir", tmp_path / "run"]
    assert refused(capsys, 2, flags, f"of {processes} CUDA GPUs torch finds {gpus}", "--no-cuda")
    assert not (tmp_path / "run").exists()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("task, kind, word", [
    *((task, kind, word) for task in ("resume", "evaluate") for kind, word in [
        ("cut short", ""), ("cut to 1000 bytes", ""), ("empty", ""), ("code", "plain data"),
        ("foreign", ""), ("nothing but tensors", ""), ("other script", "dqn.py"),
        ("no settings", "KeyError"), ("no net", "'net'"), ("no step", "'step'"),
    ]),
    ("resume", "no optimizer", "'optimizer'"),
    ("resume", "no episodes", "'episodes'"),
])  # fmt: skip
def test_bad_checkpoints(task, kind, word, finished, tmp_path, capsys, monkeypatch):
    """They are refused, and all that is there stays as it was."""
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir, ignore=shutil.ignore_patterns("videos"))
    path = run_dir / "checkpoint.pt"
    whole, checkpoint = path.read_bytes(), torch.load(path, weights_only=True)
    if kind.startswith("no "):
        del checkpoint[kind.removeprefix("no ")]
        torch.save(checkpoint, path)
    elif kind in ("foreign", "nothing but tensors", "other script"):
        contents = {"foreign": [1, 2, 3], "nothing but tensors": checkpoint["net"],
                    "other script": checkpoint | {"script": "dqn.py"}}[kind]  # fmt: skip
        torch.save(contents, path)
    else:
        path.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"",
                          "cut to 1000 bytes": whole[:1000],
                          "code": pickle.dumps(Evil())}[kind])  # fmt: skip
    before = {p.name: p.read_bytes() for p in run_dir.iterdir()}
    need = "need a whole checkpoint of ppo_atari.py, of "
    assert refused(capsys, 2, [f"--{task}", run_dir], f"--{task}", path, need, word)
    assert {p.name: p.read_bytes() for p in run_dir.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_resume_needs_the_same_number_of_processes(finished, tmp_path, monkeypatch, capsys):
    path = tmp_path / "checkpoint.pt"
    checkpoint = torch.load(finished[0] / path.name, weights_only=True)
    torch.save(checkpoint | {"settings": checkpoint["settings"] | {"processes": 2}}, path)
    assert refused(capsys, 2, ["--resume", tmp_path], "--resume", "need torchrun with 2 processes")
    monkeypatch.setattr(ppo_atari, "PROCESSES", 4)
    assert refused(capsys, 2, ["--resume", tmp_path], "--resume", "need torchrun with 2 processes")
    assert len(SCRIPT.main("--evaluate", tmp_path, "--episodes", 1)) == 1


@pytest.mark.parametrize("missing", ["optimizer", "episodes"])
def test_evaluating_needs_the_policy_alone(missing, finished, tmp_path):
    checkpoint = torch.load(finished[0] / "checkpoint.pt", weights_only=True)
    del checkpoint[missing]
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert len(SCRIPT.main("--evaluate", tmp_path, "--episodes", 1)) == 1


@pytest.mark.parametrize(
    "flag", [["--env-id", "PongNoFrameskip-v4"], ["--gamma", "0.9"], ["--bf16"]]
)
def test_resume_refuses_other_settings(flag, finished, capsys):
    for task in ("--resume", "--evaluate"):
        assert refused(capsys, 2, [task, finished[0], *flag], flag[0], "leave it out")


# ---------------------------------------------------------------------------- Broken while running


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys, monkeypatch):
    """Spoiled after 10 iterations: the checkpoint is from before, and no record shows a nan."""
    loss, calls = ppo_atari.ppo_loss, []

    def spoiled(*args):
        calls.append(1)
        objective, stats = loss(*args)
        return (objective * float("nan"), stats) if len(calls) > 20 else (objective, stats)

    monkeypatch.setattr(ppo_atari, "ppo_loss", spoiled)
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--total-steps", 3200, "--checkpoint-every", 4, "--run-dir", run_dir]
    assert refused(capsys, 1, flags, "iteration 11", "is nan", run_dir)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert iterations_in(run_dir / "checkpoint.pt") == 8
    assert all(tensor.isfinite().all() for tensor in checkpoint["net"].values())


@pytest.mark.parametrize("limit", [5_000_000, 4_000])
def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_whole(
    limit, tmp_path, capsys, monkeypatch, short_games
):
    """No file may grow beyond 5 MB: Adam's state no longer fits after the first update. Beyond 4 kB
    (once the first checkpoint is written): the table and TensorBoard's events do not."""
    run_dir, every = tmp_path / "run", 4 if limit == 5_000_000 else 1000
    flags = [*SMALL, "--total-steps", 32 * 300, "--checkpoint-every", every, "--run-dir", run_dir]
    save = ppo_atari.Run.save
    with full_disk() as allow_files_of:

        def save_and_limit(run):
            save(run)
            allow_files_of(limit)

        if limit == 4_000:
            monkeypatch.setattr(ppo_atari.Run, "save", save_and_limit)
        else:
            allow_files_of(limit)
        assert refused(capsys, 1, flags, "iteration", "File too large", "any checkpoint", run_dir)
    assert iterations_in(run_dir / "checkpoint.pt") == 0


def test_other_games_run(tmp_path):
    """Without lives or without FIRE, with many actions, with sticky actions."""
    for env_id in ("FreewayNoFrameskip-v4", "MontezumaRevengeNoFrameskip-v4", "ALE/Pong-v5"):
        run_dir = tmp_path / env_id
        ppo_atari.main(
            [*SMALL, "--total-steps", "64", "--env-id", env_id, "--run-dir", str(run_dir)]
        )
        assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["step"] == 64


@pytest.mark.parametrize("flags", [["--network", "nature", "--clip-value-loss"], ["--bf16"]])
def test_other_settings_run(flags, tmp_path, capsys):
    ppo_atari.main([*SMALL, "--total-steps", "64", *flags, "--run-dir", str(tmp_path / "run")])
    assert "finished: 64 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_compile_gives_the_same_loss_and_runs(tmp_path):
    """The compiled loss and its gradient are the eager ones; actions come from another stream."""
    torch.manual_seed(0)
    net = ppo_atari.ActorCritic(4, "paper")
    minibatch = SimpleNamespace(
        frames=torch.randint(0, 256, (32, 84, 84, 4), dtype=torch.uint8),
        actions=torch.randint(0, 4, (32,)), log_probs=torch.full((32,), -1.4),
        values=torch.zeros(32), advantages=torch.randn(32), targets=torch.randn(32),
        policy_mask=(torch.arange(32) > 3).float(),
    )  # fmt: skip

    def loss(minibatch, clip_eps):
        logits_and_values = net(minibatch.frames)
        return ppo_atari.ppo_loss(*logits_and_values, minibatch, clip_eps, 1.0, 0.01, True, True)

    results = []
    for function in (loss, torch.compile(loss)):
        net.zero_grad()
        value, stats = function(minibatch, torch.tensor(0.1))
        value.backward()
        results.append([value.detach(), stats, *(p.grad.clone() for p in net.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-5)
    out, _ = run(*SMALL, "--total-steps", 64, "--compile", "--run-dir", tmp_path / "run")
    assert "finished: 64 steps" in out


def test_a_run_on_the_gpu_is_compiled_only_if_told_to(capsys):
    args, _ = ppo_atari.parse_args([])
    args.cuda = True
    assert ppo_atari.choose_compile(args) is False and capsys.readouterr().out == ""


def test_evaluate_deterministic_plays_the_mode(finished, capsys, monkeypatch):
    """The same games again, and no action is sampled."""

    def no_sample(*_):
        raise AssertionError("sampled")

    sampled = SCRIPT.main("--evaluate", finished[0], "--episodes", 1, "--seed", 3)
    monkeypatch.setattr(ppo_atari, "act", no_sample)
    flags = ["--evaluate", finished[0], "--episodes", 1, "--deterministic", "--seed", 3]
    assert SCRIPT.main(*flags) == SCRIPT.main(*flags) and len(sampled) == 1
    assert refused(capsys, 2, ["--deterministic"], "--deterministic", "--evaluate")


def test_a_gpu_that_is_not_used_is_mentioned(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    SCRIPT.main(*SMALL, "--total-steps", 32, "--run-dir", tmp_path / "run")
    assert capsys.readouterr().out.splitlines()[0] == "a GPU is here: --cuda uses it"
