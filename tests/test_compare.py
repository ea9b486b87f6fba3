"""plots/compare.py: its statistics against definitions written out, its pictures, its errors."""

import gzip
import json
import re
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
    settings = {"env_id": env_id, "seed": seed}
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
    first = path.read_bytes()
    compare.main([str(run), "--keep", "experiment/variant"])
    assert path.read_bytes() == first


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


def test_runs_that_would_be_kept_in_one_place_are_refused(tmp_path, capsys, monkeypatch):
    """Though it may be that each is of another script."""
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    runs = [make_run(tmp_path / name, seed=1) for name in ("a", "b")]
    config = json.loads((runs[1] / "config.json").read_text())
    (runs[1] / "config.json").write_text(json.dumps(config | {"script": "trpo_continuous.py"}))
    with pytest.raises(SystemExit) as leaving:
        compare.main([*map(str, runs), "--keep", "e/v"])
    assert leaving.value.code == 2 and "seed 1: name only one of" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_broken_run_gets_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run", seed=1)
    (run / "config.json").write_text("{")
    with pytest.raises(SystemExit):
        compare.main([str(run)])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_same_data_give_the_same_pictures(tmp_path):
    runs = compare.read_runs(make_run(tmp_path / "run", seed=1))
    for name in ("eps-0.1", "b"):
        compare.draw(runs, tmp_path / name)
    for suffix in (".png", ".svg"):
        files = [(tmp_path / f"{name}{suffix}").read_bytes() for name in ("eps-0.1", "b")]
        assert files[0] == files[1]


def test_kept_data_say_what_made_them(tmp_path):
    run = make_run(tmp_path / "run", 3)
    config = {"script": "ppo_x.py", "sha256": "1", "settings": {"seed": 3, "env_id": "X", "clip": 1,
              "run_dir": "/home/x/runs/1", "resume": "runs/1"}}  # fmt: skip
    (run / "config.json").write_text(json.dumps(config))
    path = compare.keep(compare.read_runs(run)[0], "e/v", tmp_path / "data")
    about = json.loads((path.parent / "seed3.json").read_text())
    assert about.pop("settings") == {"seed": 3, "env_id": "X", "clip": 1}
    assert about == {"script": "ppo_x.py", "sha256": "1", "processor": compare.processor()}
    assert re.match(r"[^,]{3,}(, (avx|amx)\w+)*$", about["processor"])
    [kept] = compare.read_runs(tmp_path / "data")
    assert kept.about == {**about, "settings": {"seed": 3, "env_id": "X", "clip": 1}}


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


def test_a_damaged_file_gets_one_line(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    whole = compare.keep(compare.read_runs(run)[0], "e/v", tmp_path / "data").read_bytes()
    for name, contents in (
        ("cut/seed1.csv.gz", whole[:-30]),
        ("flipped/seed1.csv.gz", whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]),
        ("text/seed1.csv.gz", b"step,return,length\n1,2,3\n"),
        ("name/seed1 (copy).csv.gz", whole),
        ("short/seed1.csv.gz", gzip.compress(b"step,return,length\n1,2\n")),
        ("nan/seed1.csv.gz", gzip.compress(b"step,return,length\n1,nan,3\n")),
    ):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(contents)
        with pytest.raises(SystemExit) as leaving:
            compare.main([str(path)])
        err = capsys.readouterr().err
        assert leaving.value.code == 2 and "damaged" in err and len(err.splitlines()) == 1, name


@pytest.mark.filterwarnings("error")
def test_a_run_without_an_episode_yet_has_an_empty_table(tmp_path):
    (tmp_path / "episodes.csv").write_text("step,return,length,seconds\n")
    assert compare.read_table(tmp_path / "episodes.csv").shape == (0, 3)


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


def test_a_published_line_has_the_colour_of_its_algorithm(tmp_path):
    def table(score):
        return np.column_stack((np.arange(1, 200), np.full(199, score), np.ones(199)))

    names = ("ppo", "trpo")
    runs = [compare.Run(name, "Hopper-v5", 1, table(k)) for k, name in enumerate(names)]
    for shown, expected in (
        (runs, {"C0": (2316.2, 2330), "C1": (1912.9, 2100)}),
        (runs[:1], {"gray": (2316.2, 2330)}),
        (runs[1:], {"gray": (1912.9, 2100)}),
        ([runs[0]._replace(group="a"), *runs], {"gray": (2316.2, 2330), "C2": (1912.9, 2100)}),
    ):
        [axes] = compare.draw(shown, tmp_path / "picture").axes
        for k, style in enumerate((":", "--")):  # Baselines, the paper
            lines = {line.get_color(): line.get_ydata()[0] for line in axes.lines
                     if line.get_linestyle() == style}  # fmt: skip
            assert lines == {color: scores[k] for color, scores in expected.items()}
        assert axes.get_ylim()[1] > max(line[0] for line in expected.values())


def test_an_outlier_at_the_start_does_not_squeeze_the_curves(tmp_path):
    """Nor does a published number far away that is not the first."""
    returns = np.where(np.arange(1000) < 5, -1e4, -5.0)
    table = np.column_stack((np.arange(1, 1001), returns, np.ones(1000)))
    [axes] = compare.draw([compare.Run("trpo", "Reacher-v5", 1, table)], tmp_path / "p").axes
    low, high = axes.get_ylim()
    assert -1100 < low < -1000 and -4.82 < high < 50  # by step 50 the mean is -1004.5


def test_a_second_published_number_near_the_curves_is_in_the_picture(tmp_path):
    table = np.column_stack((np.arange(1, 301), np.arange(1, 301), np.ones(300)))
    run = compare.Run("ppo", "BreakoutNoFrameskip-v4", 1, table)
    for growth, seen in ((1.4, True), (0.2, False)):  # up to 350 and to 50; the number is 405.7
        scaled = run._replace(table=table * [1, growth, 1])
        [axes] = compare.draw([scaled], tmp_path / "picture").axes
        assert (axes.get_ylim()[1] > 405.7) == seen


def test_of_several_tasks_a_published_number_is_a_triangle_at_the_right_edge(tmp_path):
    """In its algorithm's colour, the second one open; a number out of sight is written there."""
    table = np.column_stack((np.arange(1, 300), np.linspace(2500, 4000, 299), np.ones(299)))
    runs = [
        compare.Run(name, task, 1, table)
        for name in ("ppo", "trpo")
        for task in ("Hopper-v5", "Walker2d-v5", "Unknown-v5")
    ]
    figure = compare.draw(runs, tmp_path / "picture")
    assert [axes.get_title() for axes in figure.axes] == ["Hopper-v5", "Unknown-v5", "Walker2d-v5"]
    for axes, expected in zip(figure.axes, (
        {("C0", True, 2316.2), ("C0", False, 2330), ("C1", True, 1912.9), ("C1", False, 2100)},
        set(), {("C0", True, 3425), ("C0", False, 3460), ("C1", True, 2342.6)},  # not 1100
    ), strict=True):  # fmt: skip
        marks = [line for line in axes.lines if line.get_marker() == "<"]
        assert expected == {
            (m.get_color(), m.get_markerfacecolor() == m.get_color(), m.get_ydata()[0])
            for m in marks
        }
        for mark in marks:
            place = mark.get_transform().transform((1, mark.get_ydata()[0]))
            across, up = axes.transAxes.inverted().transform(place)
            assert across == pytest.approx(1) and 0 <= up <= 1 and not mark.get_clip_on()
        far = [(text.get_text(), text.get_color()) for text in axes.texts]
        assert far == ([("◁ 1100 ↓", "C1")] if "Walker" in axes.get_title() else [])
    [legend] = figure.legends
    assert {text.get_text() for text in legend.texts} == {
        "ppo, 1 seed", "trpo, 1 seed", "OpenAI's Baselines, PPO", "OpenAI's Baselines, TRPO",
        "PPO paper's Fig. 3, by eye, PPO", "PPO paper's Fig. 3, by eye, TRPO",
    }  # fmt: skip


@pytest.mark.parametrize("seeds", [1, 3, 4, 5])
def test_single_seeds_are_thin_curves_and_five_have_a_band(seeds, tmp_path):
    steps = np.arange(1, 301)
    runs = [compare.Run("ppo", "Hopper-v5", seed, np.column_stack((steps, steps * seed, steps)))
            for seed in range(1, seeds + 1)]  # fmt: skip
    [axes] = compare.draw(runs, tmp_path / "picture", words={"ppo": "the defaults"}).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(curves) == {1: 1, 3: 4, 4: 5, 5: 1}[seeds]
    assert len(axes.collections) == (seeds == 5)
    thick = max(curves, key=lambda line: line.get_linewidth())
    assert thick.get_xdata()[-1] == pytest.approx(300e-6)  # millions
    assert thick.get_ydata()[-1] == pytest.approx(250.5 * (1 + seeds) / 2)
    first = axes.figure.legends[0].texts[0].get_text()
    assert first == f"the defaults, {seeds} seed{'s' * (seeds > 1)}"
    note = axes.figure.get_supxlabel()
    assert ("thick: mean over seeds; thin: single seeds" in note) == (seeds in (3, 4))
    assert ("curve: mean over seeds; band:" in note) == (seeds == 5)


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


def test_a_group_of_unequal_numbers_of_seeds_is_one_entry_of_the_legend(tmp_path):
    table = np.column_stack((np.arange(1, 300), np.ones(299), np.ones(299)))
    runs = [compare.Run("ppo", task, seed, table) for task, seed in (("A", 1), ("A", 2), ("B", 1))]
    published = {str(k): {"PPO": {"A": 1 + k / 10}} for k in range(4)}  # four, one out of sight
    published["far"] = {"PPO": {"A": 99}}
    figure = compare.draw(runs, tmp_path / "picture", published=published)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.texts][0] == "ppo, 1 to 2 seeds"
    [axes] = compare.draw(runs[:1], tmp_path / "one", published=published).axes
    assert "far: 99" not in {text.get_text() for text in axes.figure.legends[0].texts}
    assert [text.get_text() for text in axes.texts][-1] == "far: 99 ↑"
    assert len({text.get_position() for text in axes.texts}) == 4


def test_committed_data_can_be_read():
    for path in (ROOT / "plots/data").rglob("seed*.csv.gz"):
        [run] = compare.read_runs(path)
        assert len(run.table) > 10 and (np.diff(run.table[:, 0]) >= 0).all()
        if run.group != "random":
            settings = run.about["settings"]
            assert (settings["env_id"], settings["seed"]) == (run.env_id, run.seed)
            assert len(run.about["sha256"]) == 64 and run.about["processor"]
