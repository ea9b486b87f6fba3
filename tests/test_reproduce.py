"""plots/reproduce.py: its statistics and figures against definitions written out; its runs stopped,
failing and started again."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import compare
import numpy as np
import pandas as pd
import pytest
import reproduce
import torch
from torch.distributions import kl_divergence

import ppo_continuous

ROOT = Path(__file__).parent.parent
TINY = "--num-envs 2 --num-steps 64 --minibatch-size 64 --num-epochs 1 --total-steps"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An experiment of its own, "tiny", in tmp_path."""
    for name in ("ppo_continuous.py", "trpo_continuous.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "PLOTS", tmp_path)
    monkeypatch.setattr(compare, "DATA", tmp_path / "data")
    monkeypatch.setitem(reproduce.EXPERIMENTS, "tiny", [])
    monkeypatch.setattr(reproduce, "top_table", pd.DataFrame)
    monkeypatch.setattr(reproduce, "write_tables", lambda tables: None)

    def add(words, flags):
        variant = reproduce.Variant(words, f"tiny/{words}", reproduce.PPO, ("CartPole-v1",), flags)
        reproduce.EXPERIMENTS["tiny"].append(variant)

    return SimpleNamespace(dir=tmp_path, add=add)


def settings_of(variant, task):
    module = __import__(Path(variant.script).stem)
    return module.parse_args(["--env-id", task, *variant.flags.split()])[0]


def test_committed_data_have_the_settings_of_their_experiments():
    """Those that change learning and that the data's version had."""
    checked = 0
    variants = [v for own in reproduce.EXPERIMENTS.values() for v in own if v.script]
    for variant in variants:
        for task in variant.tasks:
            wanted = vars(settings_of(variant, task))
            for path in (compare.DATA / variant.place / task).glob("*.gz"):
                kept = compare.read_run(path).about["settings"]
                for name in (kept.keys() & wanted.keys()) - {*compare.SAME_LEARNING} | {"env_id"}:
                    assert (kept[name] or 0) == (wanted[name] or 0), (path, name)
                checked += 1
    assert checked > 100


def test_a_table_of_fewer_seeds_takes_the_first_ones():
    """The tenth comes last, though its file's name comes second."""
    for _, group in compare.by_group(reproduce.data_of("figure3")):
        seeds = [run.seed for run in group]
        assert seeds == sorted(seeds)


def test_the_rows_of_table_1_mean_what_their_names_say():
    setting = {"clip": "clip_eps", "kl-adaptive": "kl_target", "kl-fixed": "kl_beta"}
    for variant in reproduce.EXPERIMENTS["table1"]:
        args = settings_of(variant, variant.tasks[0])
        kind, _, value = variant.words.rpartition("-")
        assert (args.objective, args.total_steps) == (kind or "none", 10**6)
        assert not kind or getattr(args, setting[kind]) == float(value)
    values = [-0.39, 0.76, 0.82, 0.70, 0.68, 0.74, 0.71, 0.62, 0.71, 0.72, 0.69]
    assert [paper for paper, _ in reproduce.TABLE1.values()] == values


# ------------------------------------------------------------------------------------- Running


@pytest.mark.slow
def test_runs_are_made_kept_and_not_made_again(place, capsys):
    """One that fails is named, and the others go on."""
    place.add("good", f"{TINY} 1280")
    place.add("bad", f"{TINY} 1")
    with pytest.raises(SystemExit, match="failed: tiny/bad/CartPole-v1/seed1"):
        reproduce.main(["tiny", "--seeds", "1"])
    path = place.dir / "data/tiny/good/CartPole-v1/seed1.csv.gz"
    assert list((place.dir / "data").rglob("*.gz")) == [path]
    score = compare.number(compare.read_run(path).score)
    assert f"| good | CartPole-v1 | 1 | {score} |" in capsys.readouterr().out
    assert (place.dir / "tiny.png").exists()
    written = path.stat().st_mtime_ns
    reproduce.main(["tiny", "--seeds", "1", "--only", "good"])
    assert path.stat().st_mtime_ns == written


@pytest.mark.slow
def test_stopped_runs_are_resumed_in_a_folder_of_one_s_own(place, capsys):
    """The command is stopped while a run is on, and given again."""
    place.add("v", f"{TINY} 12800")
    own = place.dir / "my own"
    folder, command = own / "runs/tiny/v/CartPole-v1/seed1", ["tiny", "--seeds", "1", "--into"]

    def stop_once_it_learns():
        while not (folder / "best.pt").exists():  # after 100 episodes
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_once_it_learns).start()
    with pytest.raises(SystemExit) as leaving:
        reproduce.main([*command, str(own)])
    said = capsys.readouterr().out
    assert leaving.value.code == 130 and "tiny --seeds 1" in said and "failed" not in said
    step = torch.load(folder / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < step < 12800 and not (own / "data").exists()
    reproduce.main([*command, str(own)])
    [run] = compare.read_runs([own / "data"])
    assert (own / "tiny.png").exists() and not (place.dir / "data").exists()
    assert run.episodes["step"].iloc[0] <= step < run.episodes["step"].iloc[-1]


def test_it_starts_on_macos_and_windows(place, monkeypatch, capsys):
    """There no system call says which cores are this process's."""
    monkeypatch.delattr(reproduce.os, "sched_getaffinity", raising=False)
    reproduce.main(["tiny", "--draw-only"])
    assert "no run is finished" in capsys.readouterr().out


# ---------------------------------------------------------------------------------- Statistics


def test_the_interval_over_tasks_resamples_within_each_task():
    """Against a bootstrap written out."""
    rng = np.random.default_rng(0)
    tasks = [rng.normal(10 * k, 1 + k, size) for k, size in enumerate((3, 5, 4))]
    own = random.Random(1)
    means = sorted(np.mean([np.mean([own.choice(x) for _ in x]) for x in tasks])
                   for _ in range(5000))  # fmt: skip
    low, high = compare.confidence(tasks, reproduce.mean_of_tasks)
    assert (low, high) == pytest.approx((means[125], means[4875]), abs=0.06)
    assert low < reproduce.mean_of_tasks(*tasks) < high


def test_normalised_scores():
    """0 is random, 1 the best: of a run, or of a setting's mean."""
    scores = {"a": {"S": [0, 10], "T": [5, 5]}, "b": {"S": [6, 8, 99], "T": [-5, 5], "U": [1]}}
    runs = []
    for label, tasks in scores.items():
        for task, values in tasks.items():
            for seed, value in enumerate(values):
                about = {"script": "ppo.py", "settings": {"env_id": task, "seed": seed}}
                episodes = pd.DataFrame({"step": [1], "return": [float(value)]})
                runs.append(compare.Run(Path(), about, episodes, label))
    random_scores = {"S": 2.0, "T": -5.0, "U": 0.0}
    # best: 10 on S, 5 on T; the third seed on S is b's alone, and so is U
    found = reproduce.normalised(runs, random_scores, "run")
    assert [x.tolist() for x in found["a"]] == [[-0.25, 1], [1, 1]]
    assert [x.tolist() for x in found["b"]] == [[0.5, 0.75], [0, 1]]
    found = reproduce.normalised(runs, random_scores, "setting")  # 7 on S, 5 on T
    assert found["a"][0] == pytest.approx([-0.4, 1.6])
    assert found["b"][0] == pytest.approx([0.8, 1.2])


@pytest.mark.parametrize("seeds", [1, 3])
def test_table_1_of_one_seed_has_no_intervals(seeds, monkeypatch, tmp_path):
    runs = []
    for k, row in enumerate(reproduce.TABLE1):
        for seed in range(seeds):
            about = {"script": "ppo.py", "settings": {"env_id": "S", "seed": seed}}
            episodes = pd.DataFrame({"step": [1], "return": [float(k + seed)]})
            runs.append(compare.Run(Path(), about, episodes, row))
    monkeypatch.setattr(reproduce, "random_scores", lambda: {"S": 0.0})
    table, readings = reproduce.table1(runs)
    assert table["best run = 1"].iloc[-1] == ("1.00" if seeds == 1 else "0.92")
    assert table["95% interval"].iloc[-1] == ("–" if seeds == 1 else "0.83 to 1.00")
    reproduce.draw_table1(readings, tmp_path / "table1.png")


def test_random_actions_are_measured():
    """The pendulum falls after some 5 steps of reward 1."""
    assert 3 < reproduce.play_at_random("InvertedPendulum-v5", 20) < 10


# ------------------------------------------------------------------------------ Figures 1 and 2


def test_figure_2_is_drawn_from_the_script_s_own_loss():
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
