"""plots/reproduce.py: its statistics, tables and figures against definitions written out; its runs
stopped, failing and started again."""

import json
import os
import random
import signal
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import kl_divergence

ROOT = Path(__file__).parent.parent

sys.path.insert(0, str(ROOT / "plots"))
import compare
import reproduce

import ppo_continuous

FAKE = '''
"""Writes what a run of the scripts writes."""
import argparse, json, sys
from pathlib import Path

def parse_args(argv=None):
    p = argparse.ArgumentParser()
    for flag, default in (("--run-dir", ""), ("--env-id", "A-v1"), ("--note", "")):
        p.add_argument(flag, default=default)
    p.add_argument("--broken", action="store_true")
    p.add_argument("--goal-score", type=float)
    for flag, default in (("--seed", 1), ("--threads", 4), ("--total-steps", 100)):
        p.add_argument(flag, type=int, default=default)
    return p.parse_args(argv), None

if __name__ == "__main__":
    args, _ = parse_args()
    if args.broken:
        sys.exit("fake.py: it is broken")
    folder = Path(args.run_dir)
    folder.mkdir(parents=True)
    rows = "".join(f"{step},{step / 10},10,0.1\\n" for step in range(10, 101, 10))
    (folder / "episodes.csv").write_text("step,return,length,seconds\\n" + rows)
    config = {"script": "fake.py", "sha256": 64 * "5", "settings": vars(args)}
    (folder / "config.json").write_text(json.dumps(config))
'''
SETTINGS_OF_A_RUN = {"seed", "threads", "compile", "cuda", "run_dir", "resume", "evaluate"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Flags that keep everything in tmp_path, which has a script and an experiment of its own."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    tiny = [reproduce.Variant("good", "tiny/good", str(script), ("A-v1", "ALE/B-v5")),
            reproduce.Variant("bad", "tiny/bad", str(script), ("A-v1",), "--broken")]  # fmt: skip
    monkeypatch.setitem(reproduce.EXPERIMENTS, "tiny", tiny)
    return [f"--{name}={tmp_path / name}" for name in ("runs-dir", "data-dir", "out")]


def settings_of(variant, task):
    module = __import__(Path(variant.script).stem)
    return module.parse_args(["--env-id", task, *variant.flags.split()])[0]


def put(place, env_id, seed, returns, folder, last=1000, total=1000):
    """Keep a run of these returns whose last episode ends at step `last` of `total`."""
    steps = np.linspace(last / len(returns), last, len(returns))
    table = np.column_stack((steps, returns, np.ones(len(returns))))
    about = {"script": "x.py", "sha256": 64 * "a", "settings": {"total_steps": total}}
    return compare.keep(compare.Run("", env_id, seed, table, about), place, folder)


def draw(experiment, folder, capsys):
    """What an experiment prints of the data in a folder."""
    reproduce.main([experiment, "--draw-only", f"--data-dir={folder}", f"--out={folder}"])
    return capsys.readouterr().out


# --------------------------------------------------------------------------------- Experiments


def test_places_are_of_one_settings_each_and_kept_runs_have_them():
    """No settings have two places, no place two settings, of a task. Of kept runs those that change
    learning are compared; --norm-adv was once a switch, and None meant off."""
    places, settings, checked = {}, {}, 0
    for v in (v for variants in reproduce.EXPERIMENTS.values() for v in variants if v.script):
        for task in v.tasks:
            args = vars(settings_of(v, task))
            its = str([v.script, sorted(args.items(), key=str)])
            assert places.setdefault(its, v.place) == v.place
            if (v.place, task) in settings:
                assert settings[v.place, task] == its
                continue
            settings[v.place, task] = its
            folder = compare.data_file(v.place, task, 1).parent
            for path in folder.glob("seed*.json"):
                kept = json.loads(path.read_text())["settings"]
                if kept.get("norm_adv") is True:
                    kept["norm_adv"] = "rollout" if v.script.startswith("trpo") else "minibatch"
                for name in (kept.keys() & args.keys()) - SETTINGS_OF_A_RUN:
                    assert (kept[name] or 0) == (args[name] or 0), (path, name)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("experiment", ["table1", "table1-plain"])
def test_the_rows_of_table_1_mean_what_their_names_say(experiment):
    setting = {"clip": "clip_eps", "kl-adaptive": "kl_target", "kl-fixed": "kl_beta"}
    for variant in reproduce.EXPERIMENTS[experiment][1:]:  # but for random actions
        args = settings_of(variant, variant.tasks[0])
        kind, _, value = variant.name.rpartition("-")
        assert (args.objective, args.total_steps) == (kind or "none", 10**6)
        assert not kind or getattr(args, setting[kind]) == float(value)
        extras = args.norm_obs, args.norm_reward, args.orthogonal, args.norm_adv, args.max_grad_norm
        plain = (False, False, False, "none", 0)
        assert extras == (plain if "plain" in experiment else (True, True, True, "minibatch", 0.5))
    values = [-0.39, 0.76, 0.82, 0.70, 0.68, 0.74, 0.71, 0.62, 0.71, 0.72, 0.69]
    assert [paper for paper, _ in reproduce.TABLE1.values()] == values


@pytest.mark.parametrize("flags, said", [
    ("--draw-onyl", "unrecognized arguments: --draw-onyl"),
    ("--seed 5", "--seed: not for the runs of an experiment"),
    ("--goal-score 3", "--goal-score: not"),
    ("--only Hoper", "no run's name contains Hoper"),
])  # fmt: skip
def test_flags_that_no_run_can_have_are_refused_before_any_starts(flags, said, place, capsys,
                                                                  tmp_path):  # fmt: skip
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(["tiny", *place, *flags.split()])
    assert leaving.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs-dir").exists()


# ------------------------------------------------------------------------------------- Running


def test_runs_are_made_kept_and_not_made_again(place, tmp_path, capsys):
    """A run that fails says so, and the others go on; a folder without a checkpoint is moved."""
    flags = ["tiny", *place, "--jobs=2", "--seeds=1", "--note", "x"]
    half = tmp_path / "runs-dir/tiny/good-note-x/A-v1/seed1"
    half.mkdir(parents=True)
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(flags)
    out, err = capsys.readouterr()
    assert leaving.value.code == 1
    assert "bad-note-x/A-v1/seed1: exit status 1: fake.py: it is broken" in err
    files = sorted((tmp_path / "data-dir").rglob("seed*.gz"))
    assert [str(path.relative_to(tmp_path / "data-dir/tiny")) for path in files] == [
        f"good-note-x/{task}/seed1.csv.gz" for task in ("A-v1", "ALE-B-v5")
    ]
    assert compare.read_table(files[0]).tolist() == [[10 * k, k, 10] for k in range(1, 11)]
    assert "Made by (SHA-256, runs): fake.py 55555555 × 2" in out
    assert out.count("| good-note-x |") == 2 and "5.50" in out
    assert (tmp_path / "out/tiny.png").exists()
    assert sum(path.is_dir() for path in half.parent.iterdir()) == 2
    times = [path.stat().st_mtime_ns for path in files]
    reproduce.main([*flags, "--only", "good"])
    assert [path.stat().st_mtime_ns for path in files] == times
    assert "2 of 2 runs are finished" in capsys.readouterr().out


def test_a_run_that_was_stopped_is_gone_on_with(place, tmp_path, monkeypatch, capsys):
    """Of ppo_continuous.py, by Ctrl-C; it saves itself before it ends."""
    small = "--num-envs 2 --num-steps 64 --minibatch-size 64 --num-epochs 1 --total-steps 19200"
    variant = reproduce.Variant("v", "tiny/v", "ppo_continuous.py", ("CartPole-v1",), small)
    monkeypatch.setitem(reproduce.EXPERIMENTS, "tiny", [variant])
    flags, folder = ["tiny", *place, "--seeds=1"], tmp_path / "runs-dir/tiny/v/CartPole-v1/seed1"

    def interrupt():
        end = time.monotonic() + 60
        while not reproduce.steps_done(folder) and time.monotonic() < end:
            time.sleep(0.01)
        if reproduce.steps_done(folder):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(flags)
    assert leaving.value.code == 130 and "stopped; go on with: python" in capsys.readouterr().err
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < step < 19200 and not (tmp_path / "data-dir").exists()
    reproduce.main(flags)
    log = Path(f"{folder}.log").read_text()
    assert log.count("\n$ ") == 1 and f"--resume {folder}" in log
    [run] = compare.read_runs(tmp_path / "data-dir")
    assert reproduce.covers(run.table, 19200) and run.table[0, 0] <= step


def test_random_actions_are_measured():
    run = reproduce.play_at_random("InvertedPendulum-v5", 1)
    assert run[:3] == ("random", "InvertedPendulum-v5", 1) and len(run.table) == 100
    assert run.table[-1, 0] == run.table[:, 2].sum()
    assert 3 < run.table[:, 1].mean() < 15  # reward 1 a step until the pendulum falls


# ---------------------------------------------------------------------------------- Statistics


def test_interval_against_one_written_out():
    """Resampling within each task only, with a generator of its own."""
    rng = np.random.default_rng(0)
    strata = [rng.normal(10 * k, 1 + k, size) for k, size in enumerate((3, 5, 4))]
    own = random.Random(1)
    means = sorted(np.mean([np.mean([own.choice(x) for _ in x]) for x in strata])
                   for _ in range(5000))  # fmt: skip
    low, high = reproduce.interval(strata)
    assert (low, high) == pytest.approx((means[125], means[4875]), abs=0.06)
    assert low < reproduce.mean(strata) < high
    # between tasks nothing is drawn: seeds that agree leave no doubt, however far the tasks are
    assert reproduce.interval([np.zeros(3), np.ones(3)]) == pytest.approx((0.5, 0.5))
    assert np.isnan(reproduce.interval([np.zeros(3), np.ones(2)])).all()


def test_normalised_scores():
    scores = {
        "a": {"S": np.array([0.0, 10]), "T": np.array([5.0, 5])},
        "b": {"S": np.array([6.0, 8, 99]), "T": np.array([-5.0, 5]), "U": np.ones(2)},
    }
    random_scores = {"S": 2.0, "T": -5.0, "U": 0.0, "V": 1.0}
    # best: 10 on S, 5 on T; the third seed on S is b's alone
    runs = reproduce.normalise(scores, random_scores, "run")
    settings = reproduce.normalise(scores, random_scores, "setting")  # 7 on S, 5 on T
    assert {row: {task: list(x) for task, x in own.items()} for row, own in runs.items()} == {
        "a": {"S": [-0.25, 1], "T": [1, 1]}, "b": {"S": [0.5, 0.75], "T": [0, 1]}
    }  # fmt: skip
    assert list(settings["a"]["S"]) == pytest.approx([-0.4, 1.6])
    assert list(settings["b"]["S"]) == pytest.approx([0.8, 1.2])


# -------------------------------------------------------------------------- Tables and pictures


def test_the_table_beside_published_scores(tmp_path, capsys):
    for seed, level in ((1, 2000.0), (2, 2400), (3, 2900)):
        put("figure3/ppo", "Hopper-v5", seed, [0] * 50 + [level - 1, level + 1] * 50, tmp_path)
    for seed, level in ((1, -9.0), (2, -10)):
        put("figure3/trpo", "Reacher-v5", seed, [level] * 100, tmp_path)
    put("figure3/trpo", "Reacher-v5", 3, [-8.0] * 9, tmp_path, last=500)
    lines = draw("figure3", tmp_path, capsys).splitlines()
    assert ("| ppo | Hopper-v5 | 3 | 2433.3 ± 450.9 | 2000.0 to 2900.0 | "
            "2316.2 ✓ | 2330 ✓ |") in lines  # fmt: skip
    assert "| trpo | Reacher-v5 | 2 | -9.50 ± 0.71 | – | -4.82 ✗ | -115 ✓ |" in lines
    assert "- trpo: at or above OpenAI's Baselines (✓) on 0 of 1 tasks" in lines
    assert lines[-2:] == ["Not finished: trpo/Reacher-v5/seed3, -8.00 at step 500 of 1,000",
                          "Made by (SHA-256, runs): x.py aaaaaaaa × 6"]  # fmt: skip
    assert "TRPO, 2 seeds" in (tmp_path / "figure3.svg").read_text()


def test_table_1(tmp_path, capsys):
    """Two tasks of three that every row has; two rows of eleven, of which one is figure3's."""
    levels = {  # seeds 1, 2, 3
        "table1/none": {"Hopper-v5": (100, 200, 0), "Swimmer-v5": (-20, -10, -30)},
        "figure3/ppo": {"Hopper-v5": (2000, 2100, 1900), "Swimmer-v5": (100, 110, 120),
                        "Reacher-v5": (-7, -8, -9)},
        "table1/random": {"Hopper-v5": (20,), "Swimmer-v5": (0,), "Reacher-v5": (-40,)},
    }  # fmt: skip
    for place, of_tasks in levels.items():
        for task, scores in of_tasks.items():
            for k, level in enumerate(scores):
                put(place, task, k + 1, [level] * 100, tmp_path)
    out = draw("table1", tmp_path, capsys)
    assert "| none | 100.0 ± 100.0 | – | -20.00 ± 10.00 |" in out
    lines = [line.split(" | ") for line in out[out.index("| objective") :].splitlines()]
    rows = {line[0]: line for line in lines}
    for row, place, paper in (
        ("none", "table1/none", "-0.39"),
        ("clip-0.2", "figure3/ppo", "0.82"),
    ):
        _, said, best_run, low_high, best_setting, _, runs = rows[f"| {row}"]
        assert (said, runs) == (paper, "6 |")
        for value, hopper, swimmer in ((best_run, 2100, 120), (best_setting, 2000, 110)):
            values = [(x - 20) / (hopper - 20) for x in levels[place]["Hopper-v5"]]
            values += [(x - 0) / swimmer for x in levels[place]["Swimmer-v5"]]
            assert float(value) == pytest.approx(sum(values) / 6, abs=0.0051)
        low, high = map(float, low_high.split(" to "))
        assert low <= float(best_run) <= high
    assert "Averaged over Hopper-v5, Swimmer-v5." in out and "no data: Reacher-v5." in out
    assert "Rank correlation with the paper's column, best run = 1: 1.00" in out
    assert (tmp_path / "table1.png").exists()


# ------------------------------------------------------------------------------ Figures 1 and 2


def test_figure_1_is_eq_7(tmp_path):
    figure = reproduce.figure1(Namespace(out=tmp_path))
    for axes, advantage in zip(figure.axes, (1.0, -1.0), strict=True):
        for r, value in zip(*axes.lines[0].get_data(), strict=True):
            clipped = min(max(r, 0.8), 1.2)
            assert value == pytest.approx(min(r * advantage, clipped * advantage))


def test_figure_2_is_drawn_from_the_script_s_own_loss(tmp_path, capsys):
    args, batch, net, old, new = update = reproduce.first_update(3)
    factors = [-0.5, 0.0, 0.7, 1.0, 2.5]
    kl, l_cpi, clipped, l_clip = reproduce.surrogates(*update, factors).values()
    assert kl[1] == 0 and l_cpi[1] == clipped[1] == l_clip[1] == pytest.approx(0, abs=1e-6)
    assert (kl[[0, 2, 3, 4]] > 0).all() and 0.005 < kl[3] < 0.05
    assert (l_clip <= np.minimum(l_cpi, clipped) + 1e-7).all() and l_clip[3] > l_clip[4]
    names = ("obs", "actions", "pi_old", "log_probs", "advantages", "targets")
    samples = {name: getattr(batch, name).flatten(0, 1) for name in names}
    args.vf_coef = args.ent_coef = 0
    for k, factor in enumerate(factors):
        torch.nn.utils.vector_to_parameters(old + factor * (new - old), net.parameters())
        with torch.no_grad():
            for args.objective, expected in (("none", l_cpi[k]), ("clip", l_clip[k])):
                loss, _ = ppo_continuous.ppo_loss(net, **samples, clip_eps=0.2, beta=0, args=args)
                assert -loss.item() == pytest.approx(expected, abs=1e-6)
            pi_old = net.distribution(batch.pi_old)
            assert kl[k] == pytest.approx(kl_divergence(pi_old, net.pi(batch.obs)).mean().item())
