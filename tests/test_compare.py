"""plots/compare.py: its statistics against definitions written out, its pictures, its data."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import compare

import ppo_atari
import ppo_continuous
import trpo_continuous


def make_run(folder, seed, episodes=300, env_id="PongNoFrameskip-v4"):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    settings = {"env_id": env_id, "seed": seed, "run_dir": str(folder), "resume": ""}
    (folder / "config.json").write_text(json.dumps({"script": "ppo_x.py", "settings": settings}))
    steps = np.cumsum(rng.integers(1, 50, episodes))
    lines = [f"{s},{r:.3f},10,1.0" for s, r in zip(steps, rng.normal(size=episodes), strict=True)]
    (folder / "episodes.csv").write_text("\n".join(["step,return,length,seconds", *lines, ""]))
    return folder


def test_curve_is_the_mean_of_the_last_episodes_finished():
    rng = np.random.default_rng(0)
    table = np.column_stack(
        (np.cumsum(rng.integers(0, 4, 40)) + 5, rng.normal(size=40), np.ones(40))
    )
    grid = np.arange(0, 100)
    result = compare.curve(table, grid, window=7)
    for step, value in zip(grid, result, strict=True):
        done = [r for s, r, _ in table if s <= step]
        if not done or step > table[-1, 0]:
            assert np.isnan(value)
        else:
            assert value == pytest.approx(sum(done[-7:]) / len(done[-7:]))


def test_interquartile_mean_drops_a_quarter_on_either_side():
    assert compare.interquartile_mean(np.array([8.0, 1, 2, 100])) == pytest.approx((2 + 8) / 2)
    # of three values a quarter is 0.75 of a value
    assert compare.interquartile_mean(np.array([0.0, 9, 3])) == pytest.approx((3 + 9 / 4) / 1.5)
    values = np.random.default_rng(0).normal(size=(2, 16))
    middle = np.sort(values, axis=-1)[:, 4:12].mean(axis=-1)
    np.testing.assert_allclose(compare.interquartile_mean(values), middle)


@pytest.mark.parametrize("statistic", ["mean", "iqm"])
def test_interval_covers_as_often_as_it_says(statistic):
    """Of 300 groups of 20 normal seeds, about 95% of intervals hold the true mean."""
    values = np.random.default_rng(1).normal(size=(300, 20))
    low, high = compare.interval(values, statistic)
    assert 0.88 < np.mean((low < 0) & (high > 0)) < 0.98


def test_pictures_of_runs_of_unequal_length(tmp_path, capsys):
    runs = [make_run(tmp_path / f"r{k}", k, episodes=300 - 80 * k) for k in range(3)]
    runs.append(make_run(tmp_path / "none", 4, episodes=0))
    runs.append(make_run(tmp_path / "other", 1, env_id="ALE/Breakout-v5"))
    compare.main([*map(str, runs), "--out", str(tmp_path / "picture")])
    picture = np.asarray(Image.open(tmp_path / "picture.png").convert("RGB"))
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20
    svg = (tmp_path / "picture.svg").read_text()
    assert svg.startswith("<?xml")
    out = capsys.readouterr().out
    assert out.count("last 100 episodes") == 5 and "seed 4: last 100 episodes -" in out


def test_kept_data_is_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    run = make_run(tmp_path / "run", 3, env_id="ALE/Breakout-v5")
    compare.main([str(run), "--keep", "experiment/variant"])
    path = tmp_path / "data/experiment/variant/ALE-Breakout-v5/seed3.csv.gz"
    with gzip.open(path, "rt") as file:
        assert file.readline() == "step,return,length\n"
    [kept] = compare.read_runs(tmp_path / "data/experiment")
    assert kept[:3] == ("variant", "ALE/Breakout-v5", 3)
    np.testing.assert_array_equal(kept.table, compare.read_runs(run)[0].table)
    assert kept.about["script"] == "ppo_x.py" and kept.about["processor"]
    assert kept.about["settings"] == {"env_id": "ALE/Breakout-v5", "seed": 3}


def test_a_folder_that_is_no_run_gets_one_line(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit) as leaving:
            compare.main([str(path)])
        err = capsys.readouterr().err
        assert leaving.value.code == 2 and str(path) in err and len(err.splitlines()) == 1


def test_two_runs_that_cannot_be_told_apart_are_refused(tmp_path, capsys):
    runs = [str(make_run(tmp_path / name, seed=1)) for name in ("a", "b")]
    with pytest.raises(SystemExit) as leaving:
        compare.main(runs)
    assert leaving.value.code == 2 and "seed 1" in capsys.readouterr().err


def test_a_shorter_run_does_not_replace_a_longer_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    long, short = (make_run(tmp_path / f"r{n}", 1, episodes=n) for n in (30, 20))
    for run in (short, long):
        compare.main([str(run), "--keep", "e/v"])
    with pytest.raises(SystemExit) as leaving:
        compare.main([str(short), "--keep", "e/v"])
    assert leaving.value.code == 2 and "further than this run" in capsys.readouterr().err
    [kept] = compare.read_runs(tmp_path / "data")
    assert len(kept.table) == 30


def test_a_line_cut_short_is_left_out(tmp_path):
    run = make_run(tmp_path / "run", 1, episodes=5)
    table = compare.read_runs(run)[0].table
    with open(run / "episodes.csv", "a") as file:
        file.write("30,3")
    np.testing.assert_array_equal(compare.read_runs(run)[0].table, table)


@pytest.mark.parametrize("script, whose, algorithm", [
    (ppo_atari, "PPO paper, 10M steps", "PPO"),
    (ppo_continuous, "OpenAI's Baselines", "PPO"),
    (trpo_continuous, "OpenAI's Baselines", "TRPO"),
])  # fmt: skip
def test_published_scores_are_those_of_the_scripts(script, whose, algorithm):
    scores, by = script.PUBLISHED_SCORES, script.PUBLISHED_BY
    assert ("paper" in by) == ("paper" in whose) and ("Baselines" in by) == ("Baselines" in whose)
    here = {
        env_id: score
        for env_id, score in compare.PUBLISHED[whose][algorithm].items()
        if script is ppo_atari or not env_id.endswith("NoFrameskip-v4")
    }
    assert scores == here and len(scores) in (6, 7)


def test_published_numbers_are_lines_of_the_colour_of_their_algorithm(tmp_path):
    table = np.column_stack((np.arange(1, 200), np.full(199, 2000), np.ones(199)))
    runs = [compare.Run(name, "Hopper-v5", 1, table) for name in ("ppo", "trpo")]
    [axes] = compare.draw(runs, tmp_path / "picture").axes
    shown = {(line.get_color(), line.get_ydata()[0]) for line in axes.lines
             if len(line.get_xdata()) == 2}  # fmt: skip
    assert shown == {("C0", 2316.2), ("C0", 2330), ("C1", 1912.9), ("C1", 2100)}


def test_a_mean_is_of_the_seeds_that_reach_the_end(tmp_path):
    """Here the interquartile mean, of nine seeds of which one ends early and is a curve of its own;
    another ends at 98% of the steps, and so does the mean."""
    steps = np.arange(1, 301)
    scores = np.array([1, 2, 3, 4, 5, 6, 70, 80, 999])
    runs = [compare.Run("ppo", "X", seed, np.column_stack((steps, steps * 0 + score, steps)))
            for seed, score in enumerate(scores)]  # fmt: skip
    runs[8] = runs[8]._replace(table=runs[8].table[:200])
    runs[0] = runs[0]._replace(table=runs[0].table[:294])
    [axes] = compare.draw(runs, tmp_path / "picture", "iqm").axes
    short, line = axes.lines
    assert short.get_linewidth() < 1 < line.get_linewidth()
    assert np.nanmax(short.get_ydata()) == 999
    assert axes.figure.legends[0].texts[0].get_text() == "ppo, 8 seeds, 1 shorter"
    assert line.get_xdata()[-1] == pytest.approx(294e-6, abs=1e-6)
    scores = scores[:8]
    assert line.get_ydata()[-1] == pytest.approx(compare.interquartile_mean(scores)) == 4.5
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == pytest.approx(compare.interval(scores[None], "iqm").flat)


def test_committed_data_can_be_read():
    for path in (ROOT / "plots/data").rglob("seed*.csv.gz"):
        [run] = compare.read_runs(path)
        assert len(run.table) > 10 and (np.diff(run.table[:, 0]) >= 0).all()
        if run.group != "random":
            settings = run.about["settings"]
            assert (settings["env_id"], settings["seed"]) == (run.env_id, run.seed)
            assert len(run.about["sha256"]) == 64 and run.about["processor"]
