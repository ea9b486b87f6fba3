"""plots/gif.py: a game of a policy, picture by picture."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

import ppo_atari

sys.path.insert(0, str(Path(__file__).parent.parent / "plots"))
import gif


@pytest.fixture
def run_dir(tmp_path):
    flags = ["--network", "paper", "--num-envs", 2, "--num-steps", 16, "--minibatch-size", 32]
    flags += ["--total-steps", 32, "--threads", 1, "--run-dir", tmp_path / "run"]
    ppo_atari.main([str(flag) for flag in flags])
    return tmp_path / "run"


def test_a_gif_is_the_video_that_evaluate_records(run_dir, monkeypatch):
    """Every second picture that gymnasium's RecordVideo has of the same game."""
    out, before, recorded = run_dir.parent / "game.gif", sorted(run_dir.iterdir()), []
    gif.main([str(run_dir), str(out), "--seed", "3", "--fps", "25", "--every", "2"])
    assert sorted(run_dir.iterdir()) == before

    def stop_recording(video):
        recorded.extend(video.recorded_frames[::2])
        video.recorded_frames, video.recording = [], False

    monkeypatch.setattr(ppo_atari.RecordVideo, "stop_recording", stop_recording)
    flags = ["--evaluate", run_dir, "--video", "--episodes", "1", "--seed", 3]
    ppo_atari.main([str(flag) for flag in flags])

    with Image.open(out) as file:
        shown = [np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(file)]
        times = [x.info["duration"] for x in ImageSequence.Iterator(file)]
        assert file.info["loop"] == 0 and file.size == (160, 210)
    assert set(times) <= {40 * k for k in range(1, 100)} and sum(times) == 40 * len(recorded)
    assert len(recorded) > 50
    shown = [image for image, time in zip(shown, times, strict=True) for _ in range(time // 40)]
    np.testing.assert_array_equal(shown, recorded)
