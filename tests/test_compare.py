"""plots/compare.py: its groups, its curves and statistics against definitions, its pictures."""

import contextlib
import io
import itertools
import json
import os
import runpy
import string
import subprocess
import sys
from pathlib import Path

import compare
import numpy as np
import pandas as pd
import pytest
import torch

import ppo_atari
import ppo_continuous
import trpo_continuous


def make_run(folder, seed=1, level=0.0, episodes=300, script="ppo_x.py", sha="a", **settings):
    """A run directory of 10 steps an episode."""
    folder.mkdir()
    settings = {"env_id": "Hopper-v5", "seed": seed, "run_dir": str(folder), **settings}
    config = {"script": script, "sha256": sha * 64, "settings": settings}
    (folder / "config.json").write_text(json.dumps(config))
    returns = np.random.default_rng(seed).normal(level, 1, episodes)
    lines = [f"{10 * (k + 1)},{r:.3f},10,1.0" for k, r in enumerate(returns)]
    (folder / "episodes.csv").write_text("\n".join(["step,return,length,seconds", *lines, ""]))
    return folder


def groups(*folders):
    """{label: seeds} as compare.py groups runs"""
    found = {}
    for run in compare.drop_repeated(compare.name_groups(compare.read_runs(folders))):
        found.setdefault(run.label, []).append(run.seed)
    return found


def test_runs_are_grouped_by_the_settings_in_which_they_differ(tmp_path):
    a = make_run(tmp_path / "a", clip_eps=0.2, bf16=False, gamma=0.9, threads=1)
    b = make_run(tmp_path / "b", seed=2, clip_eps=0.2, bf16=False, gamma=0.9, threads=4)
    assert groups(a, b) == {"ppo_x": [1, 2]}
    c = make_run(tmp_path / "c", clip_eps=0.1, bf16=True, gamma=0.9)
    assert groups(a, b, c) == {"clip_eps 0.2, no bf16": [1, 2], "clip_eps 0.1, bf16": [1]}
    # settings that differ between tasks or scripts alone are no difference
    d = make_run(tmp_path / "d", env_id="Reacher-v5", clip_eps=0.3, bf16=False, gamma=0.9)
    e = make_run(tmp_path / "e", script="trpo_x.py", gamma=0.8)
    assert groups(a, d, e) == {"ppo_x": [1, 1], "trpo_x": [1]}
    edited = make_run(tmp_path / "f", clip_eps=0.2, bf16=False, gamma=0.9, sha="b")
    assert groups(a, edited) == {"version aaaaaa": [1], "version bbbbbb": [1]}


def test_the_newest_of_repeated_runs_counts(tmp_path, capsys):
    old, new = make_run(tmp_path / "x", level=0), make_run(tmp_path / "a", level=200)
    os.utime(old, (1, 1))
    compare.main([str(old), str(new), "--out", str(tmp_path / "picture.png")])
    out = capsys.readouterr().out
    assert f"{old}: " in out and "| ppo_x | Hopper-v5 | 1 | 200 |" in out


def test_a_repeated_run_that_was_cut_off_does_not_count(tmp_path, capsys):
    whole = make_run(tmp_path / "x", level=200)
    os.utime(whole, (1, 1))
    cut_off = make_run(tmp_path / "a", level=0, episodes=20)
    compare.main([str(whole), str(cut_off), "--out", str(tmp_path / "picture.png")])
    out = capsys.readouterr().out
    assert f"{cut_off}: " in out and "| ppo_x | Hopper-v5 | 1 | 200 |" in out


def test_a_picture_of_runs_of_unequal_length(tmp_path, capsys):
    runs = [make_run(tmp_path / f"r{k}", k, k, episodes=300 - 80 * k) for k in range(3)]
    runs.append(make_run(tmp_path / "none", 4, episodes=0))
    runs.append(make_run(tmp_path / "other", 1, env_id="ALE/Breakout-v5"))
    compare.main([*map(str, runs), "--out", str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "| ppo_x | ALE/Breakout-v5 | 1 |" in capsys.readouterr().out


def test_a_run_that_stopped_early_is_named(tmp_path, capsys):
    """A run of whole rollouts, fewer steps than --total-steps, has not stopped early."""
    long, short = (make_run(tmp_path / str(n), n, episodes=n, total_steps=3999, num_steps=1000,
                            num_envs=3) for n in (300, 20))  # fmt: skip
    compare.main([str(long), str(short), "--out", str(tmp_path / "picture.png")])
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith(f"{short}:")]
    assert "200" in line and "3,000" in line and f"{long}:" not in out


def test_the_first_twentieth_does_not_set_the_height(tmp_path):
    steps = np.arange(10, 100_001, 10)
    returns = np.where(steps < 200, -1e6, 1.0)  # 19 episodes, gone from the mean after 119
    episodes = pd.DataFrame({"step": steps, "return": returns, "length": 1})
    about = {"script": "ppo.py", "settings": {"env_id": "A", "seed": 1}}
    run = compare.Run(Path(), about, episodes, "x")
    [axes] = compare.draw([run], tmp_path / "picture.png", published=False).axes
    assert -1 < axes.get_ylim()[0] < 1 < axes.get_ylim()[1] < 3


def test_the_mean_curve_ends_where_the_shortest_run_does(tmp_path):
    folders = [make_run(tmp_path / str(k), k, level=k, episodes=100 * (k + 1)) for k in range(5)]
    runs = [run._replace(label="x") for run in compare.read_runs(folders)]
    [axes] = compare.draw(runs, tmp_path / "picture.png", published=False, window=100).axes
    [mean] = axes.lines
    assert mean.get_xdata()[-1] == pytest.approx(1000, abs=20)
    at_1000 = [run.episodes["return"][:100].mean() for run in runs]
    assert mean.get_ydata()[-1] == pytest.approx(np.mean(at_1000), abs=0.05)
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert min(at_1000) < low + 1 and high < max(at_1000) + 1
    [axes] = compare.draw(runs[:3], tmp_path / "picture.png", published=False).axes
    assert len(axes.lines) == 4 and not axes.collections  # each seed, then their mean


def test_curve_is_the_mean_of_the_last_episodes_finished():
    """It ends where the next episode should have finished."""
    rng = np.random.default_rng(0)
    steps, returns = np.cumsum(rng.integers(0, 4, 400)) + 5, rng.normal(size=400)
    grid = np.arange(0, 1000, 7)
    longest = max(steps[0], *(b - a for a, b in itertools.pairwise(steps)))
    for window in (10, 100):
        episodes = pd.DataFrame({"step": steps, "return": returns})
        for step, value in zip(grid, compare.curve(episodes, grid, window), strict=True):
            done = returns[steps <= step][-window:]
            if len(done) == 0 or step > steps[-1] + longest:
                assert np.isnan(value)
            else:
                assert value == pytest.approx(sum(done) / len(done))


def test_the_bootstrap_interval_covers_as_often_as_it_says():
    """Of 300 groups of 20 normal seeds, about 95% of intervals hold the true mean."""
    values = np.random.default_rng(1).normal(size=(300, 20))
    low, high = compare.confidence([values], resamples=1000)
    assert 0.88 < np.mean((low < 0) & (high > 0)) < 0.98


def test_scores_are_rounded():
    assert compare.spread([1889.4, 1890.4, 2100.0]) == "1960 ± 121"
    assert compare.spread([12.34]) == "12.3" and compare.spread([-3.971, -4.5]) == "-4.24 ± 0.37"
    assert compare.bounds([np.array([1.0, 1, 1])]) == "1.00 to 1.00"
    assert compare.bounds([np.array([1.0, 2])]) == "–"


def test_published_scores_are_lines_in_the_colour_of_their_algorithm(tmp_path):
    episodes = pd.DataFrame({"step": np.arange(1, 200), "return": np.linspace(1e3, 3e3, 199)})
    settings = {"env_id": "Hopper-v5", "seed": 1}
    runs = [compare.Run(Path(), {"script": name, "settings": settings}, episodes, name)
            for name in ("ppo_continuous.py", "trpo_continuous.py")]  # fmt: skip
    [axes] = compare.draw(runs, tmp_path / "picture.png").axes
    shown = {(line.get_color(), line.get_ydata()[0]) for line in axes.lines
             if len(line.get_xdata()) == 2}  # fmt: skip
    looks = compare.looks_of(["ppo_continuous.py", "trpo_continuous.py"]).values()
    first, second = (look["color"] for look in looks)
    assert shown == {(first, 2316.2), (first, 2330), (second, 1912.9), (second, 2100)}
    rows = compare.score_table(runs).to_dict("records")
    assert [row["OpenAI's Baselines"] for row in rows] == ["2316", "1913"]


@pytest.mark.parametrize("game, end, lines", [
    ("Seaquest", 950, {1204.5, 1518.3}),  # the curve ends well below them
    ("Qbert", 2700, set()),  # 14293 and more: the curve would be flat beside them
])  # fmt: skip
def test_a_published_score_is_a_line_unless_it_would_flatten_the_curve(tmp_path, game, end, lines):
    episodes = pd.DataFrame({"step": np.arange(1, 400), "return": np.linspace(440, end, 399)})
    settings = {"env_id": f"{game}NoFrameskip-v4", "seed": 1}
    run = compare.Run(Path(), {"script": "ppo_atari.py", "settings": settings}, episodes, "PPO")
    [axes] = compare.draw([run], tmp_path / "picture.png").axes
    shown = {line.get_ydata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    low, high = axes.get_ylim()
    assert shown == lines and all(low < line < high for line in lines)


@pytest.mark.parametrize("script, source, algorithm", [
    (ppo_atari, "PPO paper, 10M steps", "PPO"),
    (ppo_continuous, "OpenAI's Baselines", "PPO"),
    (trpo_continuous, "OpenAI's Baselines", "TRPO"),
])  # fmt: skip
def test_published_scores_are_those_of_the_scripts(script, source, algorithm):
    assert compare.PUBLISHED[source][algorithm] == script.PUBLISHED_SCORES


def test_kept_data_is_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    run = make_run(tmp_path / "run", 3, env_id="ALE/Breakout-v5")
    compare.main([str(run), "--keep", "experiment/variant"])
    path = tmp_path / "data/experiment/variant/ALE-Breakout-v5/seed3.csv.gz"
    assert capsys.readouterr().out.strip() == str(path)
    [kept] = compare.read_runs([tmp_path / "data"])
    columns = ["step", "return", "length"]
    pd.testing.assert_frame_equal(kept.episodes, compare.read_run(run).episodes[columns])
    assert kept.about["processor"] and "run_dir" not in kept.about["settings"]
    assert kept.about["seconds"] == 1


def test_two_settings_are_not_kept_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    runs = [str(make_run(tmp_path / str(eps), 1, clip_eps=eps)) for eps in (0.1, 0.2)]
    with pytest.raises(SystemExit, match="same task and seed"):
        compare.main([*runs, "--keep", "experiment/variant"])
    assert not (tmp_path / "data").exists()


def test_what_is_no_run_is_named_and_the_rest_is_drawn(tmp_path, capsys):
    good, *bad = [make_run(tmp_path / str(k), level=200) for k in range(7)]
    (bad[0] / "episodes.csv").write_text("")
    (bad[1] / "episodes.csv").unlink()
    (bad[2] / "config.json").write_text('{"model": "another tool"}')
    (bad[3] / "config.json").write_text("[1, 2")
    (bad[4] / "episodes.csv").write_text("step,return,length\n1,two,3\n")
    (bad[5] / "config.json").unlink()
    bad += [make_run(tmp_path / "none", 2, episodes=0), tmp_path / "missing"]
    compare.main([str(good), *map(str, bad), "--out", str(tmp_path / "picture.png")])
    lines = capsys.readouterr().out.splitlines()
    for path in bad:
        assert len([line for line in lines if line.startswith(f"{path}: left out")]) == 1, path
    assert lines[-3].startswith("| ppo_x | Hopper-v5 | 1 | 200 |")
    assert (tmp_path / "picture.png").exists()


def test_a_folder_without_runs_is_an_error(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SystemExit, match="no run"):
            compare.main([str(path)])
        assert f"{path}: left out" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["missing/x.png", "x.doc"])
def test_a_picture_that_cannot_be_written_is_an_error_before_the_work(out, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "read_runs", None)
    with pytest.raises(SystemExit, match=f"^--out .*{out}: "):
        compare.main([str(tmp_path), "--out", str(tmp_path / out)])


def test_no_two_groups_look_alike():
    looks = compare.looks_of([f"group {letter}" for letter in string.ascii_letters[:25]])
    assert len({(look["color"], str(look["ls"])) for look in looks.values()}) == 25


@pytest.mark.parametrize("tasks", [1, 5])
@pytest.mark.parametrize("length", [34, 90])
def test_the_legend_fits_in_the_picture(tasks, length, tmp_path):
    words = ["gamma 0.99, num_epochs 3, norm_adv minibatch, " * 2, "max_grad_norm 0.5, wwmm " * 4]
    runs = []
    for t in range(tasks):
        for k in range(4):
            run = compare.read_run(make_run(tmp_path / f"{t}{k}", env_id=f"Task-v{t}"))
            runs.append(run._replace(label=f"{k} {words[k % 2][:length]}"))
    short = compare.draw([run._replace(label=run.label[0]) for run in runs], tmp_path / "short.png")
    figure = compare.draw(runs, tmp_path / "picture.png")
    [legend] = figure.legends
    box, page = legend.get_window_extent(), figure.bbox
    assert page.x0 <= box.x0 < box.x1 <= page.x1 and page.y0 <= box.y0 < box.y1 <= page.y1
    heights = [drawn.axes[0].get_window_extent().height for drawn in (figure, short)]
    assert heights[0] > 0.95 * heights[1]  # a long legend takes no room from the panels


def test_numbers_in_order_get_a_range_of_colours_and_stand_at_the_ends(tmp_path):
    values = ("0.01", "0.5", "0.2")  # one curve above another
    runs = [compare.read_run(make_run(tmp_path / x))._replace(label=f"ε {x}") for x in values]
    [axes] = compare.draw(runs, tmp_path / "picture.png", published=False).axes
    lightness = {x: compare.looks_of([f"ε {v}" for v in values])[f"ε {x}"]["color"][:3].sum()
                 for x in values}  # fmt: skip
    assert lightness["0.01"] < lightness["0.2"] < lightness["0.5"]
    heights = [text.xy[1] for text in axes.texts]
    assert {text.get_text() for text in axes.texts} == {*values}
    assert np.diff(heights).min() > 0.04 * np.ptp(axes.get_ylim())
    assert not compare.in_order(["ε 0.1", "ε 0.2", "β 3"])


def test_it_draws_whatever_matplotlib_is_told(tmp_path):
    """A notebook's backend, which is not here, LaTeX, which need not be here, and no ± to print."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.family: no such font\n")
    environment = os.environ | {"MPLBACKEND": "module://no_such_module.backend_inline",
                                "MATPLOTLIBRC": str(tmp_path),
                                "PYTHONIOENCODING": "ascii"}  # fmt: skip
    run, picture = make_run(tmp_path / "run"), tmp_path / "picture.png"
    command = [sys.executable, compare.__file__, str(run), "--out", str(picture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and picture.exists()


@pytest.mark.parametrize("name, flags", [
    ("compare", ["{}/run", "--out", "{}/picture.png"]), ("exercise", ["{}/work"]),
    ("reproduce", ["lesson-delta", "--draw-only", "--into", "{}/own"]),
])  # fmt: skip
def test_commands_run_in_a_notebook(name, flags, tmp_path, monkeypatch):
    """Its standard output is not a file's."""
    make_run(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", [name, *(flag.format(tmp_path) for flag in flags)])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(Path(compare.__file__).with_name(f"{name}.py")), run_name="__main__")
    assert out.getvalue()


def test_the_processor_is_named_with_its_model(monkeypatch):
    """Zen 4 and Zen 5 may both call themselves AMD EPYC."""
    info = "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"
    monkeypatch.setattr(Path, "read_text", lambda path: info)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/proc/cpuinfo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    assert compare.processor(cuda=False) == "AMD EPYC, cpu family 26, model 2, avx2"
    assert compare.processor(cuda=True) == "AMD EPYC, cpu family 26, model 2, avx2, NVIDIA H100"
