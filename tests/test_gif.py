"""plots/gif.py: a game of a policy, picture by picture."""

import gif
import numpy as np
from PIL import Image, ImageSequence
from processes import main, small

import ppo_atari


def test_a_gif_is_the_video_that_evaluate_records(tmp_path, monkeypatch):
    """Every second picture that gymnasium's RecordVideo has of the same game."""
    run_dir, out, recorded = tmp_path / "run", tmp_path / "game.gif", []
    main(ppo_atari, *small(ppo_atari, 1), "--run-dir", run_dir)
    before = sorted(run_dir.iterdir())
    gif.main([str(run_dir), str(out), "--seed", "3", "--fps", "25", "--every", "2"])
    assert sorted(run_dir.iterdir()) == before

    def stop_recording(video):
        recorded.extend(video.recorded_frames[::2])
        video.recorded_frames, video.recording = [], False

    monkeypatch.setattr(ppo_atari.wrappers.RecordVideo, "stop_recording", stop_recording)
    main(ppo_atari, "--evaluate", run_dir, "--video", "--episodes", 1, "--seed", 3)

    with Image.open(out) as file:
        shown = [np.asarray(x.convert("RGB")) for x in ImageSequence.Iterator(file)]
        times = [x.info["duration"] for x in ImageSequence.Iterator(file)]
        assert file.info["loop"] == 0 and file.size == (160, 210)
    assert set(times) <= {40 * k for k in range(1, 100)} and sum(times) == 40 * len(recorded)
    assert len(recorded) > 50
    shown = [image for image, time in zip(shown, times, strict=True) for _ in range(time // 40)]
    np.testing.assert_array_equal(shown, recorded)
