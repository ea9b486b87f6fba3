"""plots/reproduce.py: its statistics, tables and figures against definitions written out; its runs
killed, stopped, failing and started again."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processes import iterations_in
from torch.nn.utils import parameters_to_vector

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "plots"))
import compare
import reproduce

import ppo_continuous

FAKE = '''
"""Writes what a run of the scripts writes, an episode of 10 steps every 20 ms."""
import argparse, json, signal, sys, time
from pathlib import Path

def parse_args(argv=None):
    p = argparse.ArgumentParser()
    for flag in ("--run-dir", "--resume", "--note"):
        p.add_argument(flag)
    p.add_argument("--env-id", default="A-v1")
    p.add_argument("--broken", action="store_true")
    p.add_argument("--goal-score", type=float)
    for flag, default in (("--seed", 1), ("--threads", 4), ("--total-steps", 100)):
        p.add_argument(flag, type=int, default=default)
    return p.parse_args(argv), None

def main():
    args, _ = parse_args()
    if args.broken:
        print("one of many lines", file=sys.stderr)
        sys.exit("fake.py: error: it is broken")
    folder = Path(args.resume or args.run_dir)
    config = {"script": "fake.py", "sha256": 64 * "5", "settings": vars(args)}
    if args.resume:
        config = json.loads((folder / "config.json").read_text())
        args = argparse.Namespace(**config["settings"])
    else:
        folder.mkdir(parents=True)
        (folder / "episodes.csv").write_text("step,return,length,seconds\\n")
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "checkpoint.pt").touch()
    signal.signal(signal.SIGINT, lambda *_: sys.exit("interrupted"))
    print("started", flush=True)
    step = 10 * ((folder / "episodes.csv").read_text().count("\\n") - 1)
    while step < args.total_steps:
        time.sleep(0.02)
        step += 10
        with open(folder / "episodes.csv", "a") as file:
            file.write(f"{step},{step / 10},10,0.1\\n")

if __name__ == "__main__":
    main()
'''


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


def arguments(*flags):
    """The arguments of `main`, for the functions below it."""
    args, args.flags = reproduce.make_parser().parse_known_args(flags)
    args.seeds = 1
    return args


def harness(tmp_path, variants, *flags):
    """Start it in a process of its own, on an experiment of these variants."""
    code = (f"import sys; sys.path[:0] = ['plots', {str(tmp_path)!r}]; import reproduce\n"
            f"V = reproduce.Variant\n"
            f"reproduce.EXPERIMENTS['tiny'] = [{', '.join(f'V(*{v!r})' for v in variants)}]\n"
            f"reproduce.main()")  # fmt: skip
    folders = [f"--{name}={tmp_path / name}" for name in ("runs-dir", "data-dir", "out")]
    return subprocess.Popen([sys.executable, "-c", code, "tiny", *folders, *map(str, flags)],
                            cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def wait_for(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def children(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def put(place, env_id, seed, returns, folder, last=1000, total=1000):
    """Keep a run of these returns whose last episode ends at step `last` of `total`."""
    steps = np.linspace(last / len(returns), last, len(returns))
    table = np.column_stack((steps, returns, np.ones(len(returns))))
    about = {"script": "x.py", "sha256": 64 * "a", "settings": {"total_steps": total}}
    return compare.keep(compare.Run("", env_id, seed, table, about), place, folder)


# --------------------------------------------------------------------------------- Experiments


def test_no_settings_have_two_places_and_no_place_two_settings():
    """Of a task. A flag that names its default changes no setting, nor does a folder's name."""
    places, settings = {}, {}
    for variants in reproduce.EXPERIMENTS.values():
        for v in variants:
            for task in v.tasks:
                its = [v.script, task]
                if v.script:
                    module = __import__(Path(v.script).stem)
                    flags = ["--env-id", task, *v.flags.split(), "--run-dir", "any"]
                    its += sorted(vars(module.parse_args(flags)[0]).items())
                assert places.setdefault(str(its), v.place) == v.place
                assert settings.setdefault((v.place, task), its) == its
    assert len({place for place in places.values() if place.startswith("table1/")}) == 11


def test_kept_runs_have_the_settings_of_their_place():
    """Those that change learning; --norm-adv was once a switch, for minibatches in PPO."""
    of_a_run = {"seed", "threads", "compile", "cuda", "run_dir", "resume"}
    checked = 0
    for v in (v for variants in reproduce.EXPERIMENTS.values() for v in variants if v.script):
        module = __import__(Path(v.script).stem)
        for task in v.tasks:
            args, _ = module.parse_args(["--env-id", task, *v.flags.split()])
            folder = reproduce.compare.data_file(v.place, task, 1, reproduce.compare.DATA).parent
            for path in folder.glob("seed*.json"):
                its = json.loads(path.read_text())["settings"]
                if its.get("norm_adv") is True:
                    its["norm_adv"] = (
                        "rollout" if module.__name__.startswith("trpo") else "minibatch"
                    )
                for name in (its.keys() & vars(args).keys()) - of_a_run:
                    assert its[name] == getattr(args, name), (path, name)
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("experiment", reproduce.EXPERIMENTS)
def test_the_scripts_take_the_commands(experiment):
    """And they mean what the variants' names say."""
    for variant in reproduce.EXPERIMENTS[experiment]:
        name, _, script, tasks, flags, _ = variant
        if script is None or not (ROOT / script).exists():
            continue
        module = sys.modules.get(Path(script).stem) or __import__(Path(script).stem)
        args, _ = module.parse_args(["--env-id", tasks[0], *flags.split()])
        assert reproduce.total_steps(script, tasks[0], tuple(flags.split())) == args.total_steps
        if experiment.startswith("table1"):
            kind, _, value = name.rpartition("-")
            assert (args.objective, args.total_steps) == (kind or "none", 10**6)
            setting = {"clip": "clip_eps", "kl-adaptive": "kl_target", "kl-fixed": "kl_beta"}
            assert not kind or getattr(args, setting[kind]) == float(value)
            plain = not (args.norm_obs or args.norm_reward or args.orthogonal)
            assert plain == (args.norm_adv == "none") == (experiment == "table1-plain")
            numbers = (args.anneal, args.max_grad_norm, args.adam_eps)
            assert not plain or numbers == ("none", 0, 1e-8)
        if experiment == "steps":
            its = (args.norm_adv, args.norm_reward, args.max_grad_norm, args.anneal, args.norm_obs)
            assert (
                its
                == {
                    "minibatch": ("minibatch", True, 0.5, "learning-rate", True),
                    "rollout": ("rollout", True, 0.5, "learning-rate", True),
                    "ppo1": ("rollout", False, 0, "both", True),
                    "plain": ("none", False, 0, "none", False),
                }[name]
            )


def test_the_paper_s_column_of_table_1():
    values = [-0.39, 0.76, 0.82, 0.70, 0.68, 0.74, 0.71, 0.62, 0.71, 0.72, 0.69]
    assert [paper for paper, _ in reproduce.TABLE1.values()] == values


def test_precision_is_shown_at_the_settings_whose_speed_is_compared(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/benchmarks")
    settings = __import__("throughput").SB3_SETTINGS
    assert reproduce.SB3.split() == [*settings, "--total-steps", "1000000"]
    assert [v.flags.removeprefix(reproduce.SB3) for v in reproduce.EXPERIMENTS["precision"]] == [
        "", " --bf16",
    ]  # fmt: skip


def test_steps_are_the_script_s_own():
    steps = [reproduce.total_steps("ppo_continuous.py", task, ()) for task in reproduce.SMALL]
    assert steps == [10**5, 2 * 10**5, 10**6, 10**6]
    assert reproduce.total_steps("ppo_atari.py", "BreakoutNoFrameskip-v4", ()) == 10**7
    flags = ("--total-steps", "4096")
    assert reproduce.total_steps("ppo_continuous.py", "CartPole-v1", flags) == 4096


def test_flags_for_the_scripts_name_the_variant(place):
    args = arguments("tiny", *place, "--note", "a/b", "--total-steps", "9", "--only", "good")
    run, other = reproduce.runs_of(reproduce.EXPERIMENTS["tiny"], args)
    name = "good-note-a-b-total-steps-9"
    assert run.name == f"{name}/A-v1/seed1" and run.steps == 9
    assert other.folder == args.runs_dir / f"tiny/{name}/ALE-B-v5/seed1"
    assert other.data == args.data_dir / f"tiny/{name}/ALE-B-v5/seed1.csv.gz"
    assert run.flags == ("--note", "a/b", "--total-steps", "9")
    variants = [reproduce.Variant("v", "t/v", "ppo_atari.py", reproduce.BREAKOUT)]
    flags = ("--bf16", "--compile", "--learning-rate", "-1e-3")
    with pytest.raises(SystemExit):  # the script's own error
        reproduce.runs_of(variants, arguments("breakout", *flags))
    [run] = reproduce.runs_of(variants, arguments("breakout", *flags[:3], "1e-3"))
    assert run.name == "v-bf16-learning-rate-1e-3/BreakoutNoFrameskip-v4/seed1"


@pytest.mark.parametrize("flags, said", [
    ("--draw-onyl", "unrecognized arguments: --draw-onyl"),
    ("--seed 5", "--seed: not for the runs of an experiment"),
    ("--env-id B-v1", "--env-id: not"),
    ("--goal-score 3", "--goal-score: not"),
])  # fmt: skip
def test_flags_that_no_run_can_have_are_refused_before_any_starts(flags, said, place, capsys,
                                                                  tmp_path):  # fmt: skip
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(["tiny", *place, *flags.split()])
    assert leaving.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs-dir").exists()


@pytest.mark.parametrize("last, whole", [(940, False), (950, True), (1000, True)])
def test_a_run_is_finished_when_its_data_reach_the_end(place, last, whole):
    args = arguments("tiny", *place, "--total-steps=1000", "--only", "ALE")
    [run] = reproduce.runs_of(reproduce.EXPERIMENTS["tiny"], args)
    assert not reproduce.finished(run)
    put("tiny/good-total-steps=1000", "ALE/B-v5", 1, [1.0] * 5, args.data_dir, last)
    assert reproduce.finished(run) == whole


# ------------------------------------------------------------------------------------- Running


def test_runs_are_made_kept_and_not_made_again(place, tmp_path, capsys):
    """A run that fails says so, and the others go on."""
    flags = ["tiny", *place, "--jobs=2", "--note", "x"]
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(flags)
    out, err = capsys.readouterr()
    assert leaving.value.code == 1
    for line in err.strip().splitlines():
        assert "bad-note-x/A-v1/seed" in line and "exit status 1: fake.py: error: it is" in line
        assert str(tmp_path / "runs-dir/tiny/bad-note-x/A-v1/seed") in line
    assert len(err.splitlines()) == 6 and "9 of 9 runs" in out + err
    files = sorted((tmp_path / "data-dir").rglob("seed*.gz"))
    assert [str(path.relative_to(tmp_path / "data-dir/tiny")) for path in files] == [
        f"good-note-x/{task}/seed{k}.csv.gz" for task in ("A-v1", "ALE-B-v5") for k in (1, 2, 3)
    ]
    assert compare.read_table(files[0]).tolist() == [[10 * k, k, 10] for k in range(1, 11)]
    about = json.loads((files[0].parent / "seed1.json").read_text())
    assert about["sha256"] == 64 * "5" and about["settings"]["note"] == "x"
    assert str(tmp_path) not in str(about)
    assert "Made by (SHA-256, runs): fake.py 55555555 × 6" in out
    assert out.count("| good-note-x |") == 2 and "5.50" in out
    assert np.asarray(Image.open(tmp_path / "out/tiny.png")).std() > 10

    log = (tmp_path / "runs-dir/tiny/good-note-x/A-v1/seed1.log").read_text()
    assert log.splitlines()[0] == "$ " + shlex.join(
        [sys.executable, str(tmp_path / "fake.py"), "--env-id", "A-v1", "--seed", "1", "--threads",
         "1", "--note", "x", "--run-dir",
         str(tmp_path / "runs-dir/tiny/good-note-x/A-v1/seed1")]
    )  # fmt: skip
    times = [path.stat().st_mtime_ns for path in files]
    reproduce.main([*flags, "--only", "good"])
    assert [path.stat().st_mtime_ns for path in files] == times
    assert "6 of 6 runs are finished" in capsys.readouterr().out


def test_one_run_after_the_other_waits_for_no_other_process(place, capsys):
    reproduce.main(["tiny", *place, "--jobs=1", "--seeds=1", "--only", "good"])
    out, err = capsys.readouterr()
    assert "2 of 2 runs" in out + err and "waiting for it" not in out + err


def test_what_cannot_be_gone_on_with_is_moved_aside(place, tmp_path):
    """Killed before the first checkpoint; a run over fewer steps."""
    folder = tmp_path / "runs-dir/tiny/good/A-v1/seed1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("half of i")
    flags = ["tiny", *place, "--only", "good/A-v1/seed1"]
    reproduce.main(flags)
    [data] = (tmp_path / "data-dir").rglob("*.gz")
    data.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["settings"]["total_steps"] = 50
    (folder / "config.json").write_text(json.dumps(config))
    reproduce.main(flags)
    [run] = compare.read_runs(tmp_path / "data-dir")
    assert run.table[-1, 0] == 100
    names = sorted(path.name for path in folder.parent.iterdir())
    assert names == ["seed1", "seed1-aside1", "seed1-aside2", "seed1.log"]
    assert (tmp_path / "runs-dir/tiny/good/A-v1/seed1-aside1/config.json").stat().st_size == 9


def test_damaged_files_get_one_line(place, tmp_path, capsys, monkeypatch):
    """A run's own stops that run alone; kept data stop everything before a run starts."""
    flags = ["tiny", *place, "--only", "good/A-v1"]
    broken = FAKE.replace("{step / 10},10,0.1", "{'x' if args.seed == 1 else 3},10,0.1")
    (tmp_path / "fake.py").write_text(broken)
    with pytest.raises(SystemExit) as leaving:
        reproduce.main([*flags, "--seeds=2"])
    err = capsys.readouterr().err
    assert leaving.value.code == 1 and "seed1/episodes.csv is damaged" in err
    [data] = (tmp_path / "data-dir").rglob("*.gz")
    assert data.name == "seed2.csv.gz"
    data.write_bytes(data.read_bytes()[:-20])
    for more in (["--seeds=2"], ["--draw-only"]):
        with pytest.raises(SystemExit) as leaving:
            reproduce.main([*flags, *more])
        err = capsys.readouterr().err
        assert leaving.value.code == 2 and f"{data} is damaged" in err.splitlines()[-1]


def test_a_run_that_another_process_does_is_waited_for(place, tmp_path, capsys):
    """As when this is killed and its runs are not."""
    args = arguments("tiny", *place, "--total-steps=600", "--only", "good")
    run, _ = reproduce.runs_of(reproduce.EXPERIMENTS["tiny"], args)
    with reproduce.lock(run) as log:
        outlived = reproduce.start(run, log, args)
    assert reproduce.lock(run) is None
    assert reproduce.launch([run], args) == ({}, False)
    out, err = capsys.readouterr()
    assert (out + err).count(f"{run.name} is another process's at present: waiting") == 1
    assert outlived.wait(0) == 0 and reproduce.finished(run)
    commands = [line for line in Path(log.name).read_text().splitlines() if line[0] == "$"]
    assert len(commands) == 2 and "--resume" in commands[1]


def test_a_run_that_is_killed_is_reported_by_its_signal(place):
    args = arguments("tiny", *place, "--total-steps=1000", "--only", "good")
    run, _ = reproduce.runs_of(reproduce.EXPERIMENTS["tiny"], args)
    with reproduce.lock(run) as log:
        process = reproduce.start(run, log, args)
        wait_for(lambda: reproduce.steps_done(run.folder) > 0)
        process.kill()
        process.wait()
        assert reproduce.outcome(run, process, log, args) == f"SIGKILL: started ({log.name})"


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_stops_the_runs_and_says_how_to_go_on(which, place, tmp_path):
    variants = [("good", "tiny/good", str(tmp_path / "fake.py"), ("A-v1", "B-v1"))]
    folder = tmp_path / "runs-dir/tiny/good/A-v1/seed1"
    variants = [(*variants[0], "--total-steps 5000")]
    process = harness(tmp_path, variants, "--jobs=2", "--seeds=1")
    other = folder.parent.parent / "B-v1/seed1"
    wait_for(lambda: reproduce.steps_done(folder) and reproduce.steps_done(other))
    runs = children(process)
    process.send_signal(which)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and len(runs) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in runs)
    assert Path(f"{folder}.log").read_text().splitlines()[-1] == "interrupted"
    [line] = err.strip().splitlines()
    assert line.startswith("stopped; go on with: python plots/reproduce.py tiny --runs-dir=")
    assert not list((tmp_path / "data-dir").rglob("*"))


@pytest.mark.slow
def test_killed_and_started_again_the_data_are_the_same(place, tmp_path):
    """SIGKILL to all of it in the middle of a run of ppo_continuous.py, bit for bit; what is
    finished stays, what fails is reported."""
    small = ("--num-envs 2 --num-steps 32 --minibatch-size 32 --num-epochs 1 "
             "--checkpoint-every 20 --total-steps 6400")  # fmt: skip
    ppo_continuous.main(["--env-id", "CartPole-v1", *small.split(),
                         "--run-dir", str(tmp_path / "whole")])  # fmt: skip
    [whole] = compare.read_runs(tmp_path / "whole")
    expected = compare.keep(whole, "whole", tmp_path).read_bytes()
    finished = put("tiny/kept", "CartPole-v1", 1, [7.0], tmp_path / "data-dir", 6400, 6400)
    before = finished.stat()

    script, tasks = "ppo_continuous.py", ("CartPole-v1",)
    variants = [("bad", "tiny/bad", str(tmp_path / "fake.py"), tasks, "--broken"),
                ("kept", "tiny/kept", script, tasks, "--total-steps 6400"),
                ("good", "tiny/good", script, tasks, small)]  # fmt: skip
    flags = ("--seeds", 1, "--jobs", 1)
    process = harness(tmp_path, variants, *flags)
    path = tmp_path / "runs-dir/tiny/good/CartPole-v1/seed1/checkpoint.pt"
    wait_for(path.exists)
    first = path.stat().st_mtime_ns
    wait_for(lambda: path.stat().st_mtime_ns > first)
    [child] = children(process)
    time.sleep(random.uniform(0, 0.1))
    for pid in (process.pid, child):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    data = tmp_path / "data-dir/tiny/good/CartPole-v1/seed1.csv.gz"
    assert 0 < iterations_in(path) < 100 and not data.exists()

    process = harness(tmp_path, variants, *flags)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.fullmatch("(.*bad/CartPole-v1/seed1.*exit status 1: fake.py: error.*\n){2}", err)
    assert data.read_bytes() == expected
    assert (finished.stat().st_ino, finished.stat().st_mtime_ns) == (
        before.st_ino, before.st_mtime_ns
    )  # fmt: skip
    log = Path(f"{path.parent}.log").read_text()
    assert len(re.findall(r"^\$ ", log, re.M)) == 2 and "--resume" in log
    assert "1 of 3 runs are finished" in out and out.count("| CartPole-v1 | 1 |") == 2


def test_random_actions_are_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(reproduce.EXPERIMENTS, "table1", [
        reproduce.Variant("random", "table1/random", None, ("InvertedPendulum-v5",))
    ])  # fmt: skip
    flags = [f"--data-dir={tmp_path}", f"--out={tmp_path}", f"--runs-dir={tmp_path / 'runs'}"]
    reproduce.main(["table1", *flags])
    [run] = compare.read_runs(tmp_path / "table1/random")
    assert run[:3] == ("random", "InvertedPendulum-v5", 1) and len(run.table) == 100
    assert run.table[-1, 0] == run.table[:, 2].sum()
    assert 3 < run.table[:, 1].mean() < 15  # reward 1 a step until the pendulum falls
    again = reproduce.play_at_random("InvertedPendulum-v5", 1, 20)
    np.testing.assert_array_equal(run.table[:20], again.table)


def test_a_name_that_no_run_has_gets_one_line(place, capsys):
    with pytest.raises(SystemExit) as leaving:
        reproduce.main(["tiny", *place, "--only", "Hoper"])
    assert leaving.value.code == 2 and "Hoper" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- Statistics


def test_score_is_the_mean_of_the_last_hundred():
    table = np.column_stack((np.arange(150), np.arange(150), np.ones(150)))
    assert reproduce.score(table) == sum(range(50, 150)) / 100
    assert reproduce.score(table[:7]) == 3 and np.isnan(reproduce.score(table[:0]))


def test_interval_against_one_written_out():
    """Resampling within each task only, with a generator of its own."""
    rng = np.random.default_rng(0)
    strata = [rng.normal(10 * k, 1 + k, size) for k, size in enumerate((3, 5, 4))]
    own, means = random.Random(1), []
    for _ in range(20_000):
        of_tasks = []
        for values in strata:
            drawn = [own.choice(values) for _ in values]
            of_tasks.append(sum(drawn) / len(drawn))
        means.append(sum(of_tasks) / len(of_tasks))
    means.sort()
    expected = means[int(0.025 * len(means))], means[int(0.975 * len(means))]
    low, high = reproduce.interval(strata)
    assert (low, high) == pytest.approx(expected, abs=0.03) and low < reproduce.mean(strata) < high
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


def test_rank_correlation_against_its_definitions():
    """Without ties 1 - 6 Σ d² / (n (n² - 1)); a tie shares the mean of its ranks."""
    x, y = [0.1, 5, 2, -3], [7, 9, 8, 10]  # of ranks 2 4 3 1 and 1 3 2 4, d² 1 1 1 9
    assert reproduce.rank_correlation(x, y) == pytest.approx(1 - 6 * 12 / (4 * 15))
    # ranks 1 2.5 2.5 4 and 1 2 3 4: covariance 4.5, variances 4.5 and 5
    tied = reproduce.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4])
    assert tied == pytest.approx(4.5 / np.sqrt(4.5 * 5))


# -------------------------------------------------------------------------- Tables and pictures


def test_the_table_beside_published_scores(tmp_path, capsys):
    for seed, level in ((1, 2000.0), (2, 2400), (3, 2900)):
        put("figure3/ppo", "Hopper-v5", seed, [0] * 50 + [level - 1, level + 1] * 50, tmp_path)
    for seed, level in ((1, -9.0), (2, -10)):
        put("figure3/trpo", "Reacher-v5", seed, [level] * 100, tmp_path)
    put("figure3/ppo-bf16", "Hopper-v5", 1, [1.0] * 3, tmp_path)
    put("figure3/trpo", "Reacher-v5", 3, [-8.0] * 9, tmp_path, last=500)
    flags = ["--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"]
    reproduce.main(["figure3", *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("| variant | task | seeds | mean ± std | 95% interval | "
                        "OpenAI's Baselines | PPO paper's Fig. 3, by eye |")  # fmt: skip
    assert lines[2] == ("| ppo | Hopper-v5 | 3 | 2433.3 ± 450.9 | 2000.0 to 2900.0 | "
                        "2316.2 ✓ | 2330 ✓ |")  # fmt: skip
    assert lines[3] == "| ppo-bf16 | Hopper-v5 | 1 | 1.00 | – | 2316.2 ✗ | 2330 ✗ |"
    assert lines[4] == "| trpo | Reacher-v5 | 2 | -9.50 ± 0.71 | – | -4.82 ✗ | -115 ✓ |"
    assert "- ppo: at or above OpenAI's Baselines (✓) on 1 of 1 tasks" in lines
    assert "- trpo: at or above OpenAI's Baselines (✓) on 0 of 1 tasks" in lines
    assert lines[-2:] == ["Not finished: trpo/Reacher-v5/seed3, -8.00 at step 500 of 1,000",
                          "Made by (SHA-256, runs): x.py aaaaaaaa × 7"]  # fmt: skip
    assert np.asarray(Image.open(tmp_path / "figure3.png")).std() > 10
    svg = (tmp_path / "figure3.svg").read_text()
    assert "PPO, bfloat16, 1 seed" in svg and "TRPO, 2 seeds" in svg and "shorter" not in svg


def test_unfinished_runs_are_drawn_while_none_is_finished(tmp_path, capsys):
    put("figure3/trpo", "Reacher-v5", 3, [-8.0] * 9, tmp_path, last=500)
    reproduce.main(["figure3", "--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"])
    assert capsys.readouterr().out.startswith("No run is finished.\nNot finished: trpo/Reacher-v5")
    assert "TRPO, 1 seed" in (tmp_path / "figure3.svg").read_text()


def test_the_steps_side_by_side(tmp_path, capsys):
    for place, env_id, levels in (
        ("figure3/ppo", "Hopper-v5", (2000, 2400, 2900)), ("figure3/ppo", "Swimmer-v5", (107,)),
        ("steps/ppo1", "Hopper-v5", (2000, 2400)), ("steps/rollout", "Swimmer-v5", (108,)),
    ):  # fmt: skip
        for k, level in enumerate(levels):
            put(place, env_id, k + 1, [level] * 100, tmp_path)
    reproduce.main(["steps", "--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| task | PPO paper's Fig. 3, by eye | minibatch | rollout | ppo1 |"
    assert lines[2:6] == [
        "| Hopper-v5 | 2330 | 2433.3 ± 450.9 ✓ | – ✗ | 2200.0 ± 282.8 ✗ |",
        "| Swimmer-v5 | 108 | 107.0 ✗ | 108.0 ✓ | – ✗ |",
        "| at or above |  | 1 of 2 | 1 of 2 | 0 of 2 |",
        "| seeds |  | 1 to 3 | 1 | 2 |",
    ]
    assert np.asarray(Image.open(tmp_path / "steps.png")).std() > 10


def test_table_1(tmp_path, capsys):
    """Two tasks of three that every row has; two rows of eleven, of which one is figure3's."""
    levels = {  # seeds 1, 2, 3
        "table1/none": {"Hopper-v5": (100, 200, 0), "Swimmer-v5": (-20, -10, -30)},
        "figure3/ppo": {
            "Hopper-v5": (2000, 2100, 1900),
            "Swimmer-v5": (100, 110, 120),
            "Reacher-v5": (-7, -8, -9),
        },
    }
    for place, of_tasks in levels.items():
        for task, scores in of_tasks.items():
            for k, level in enumerate(scores):
                put(place, task, k + 1, [level] * 100, tmp_path)
    for task, level in (("Hopper-v5", 20), ("Swimmer-v5", 0), ("Reacher-v5", -40)):
        put("table1/random", task, 1, [level] * 100, tmp_path)
    flags = ["--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"]
    reproduce.main(["table1", *flags])
    out = capsys.readouterr().out
    assert "| mean return | Hopper-v5 | Reacher-v5 | Swimmer-v5 |" in out
    assert "| random | 20.00 | -40.00 | 0.00 |" in out
    assert "| none | 100.0 ± 100.0 | – | -20.00 ± 10.00 |" in out
    assert "| clip-0.2 | 2000.0 ± 100.0 | -8.00 ± 1.00 | 110.0 ± 10.00 |" in out
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
        assert low <= float(best_run) <= high and high - low > 0.01
    assert "Averaged over Hopper-v5, Swimmer-v5." in out
    assert "Rank correlation with the paper's column, best run = 1: 1.00" in out
    assert "no data: Reacher-v5." in out
    assert np.asarray(Image.open(tmp_path / "table1.png")).std() > 10
    svg = (tmp_path / "table1.svg").read_text()
    assert "2 tasks, 6 runs a row" in svg and "kl-fixed-10" not in svg


@pytest.mark.parametrize("experiment, group, words", [
    ("breakout", "nature", "the defaults"),
    ("breakout", "nature-bf16", "the defaults, bfloat16"),
    ("breakout", "lr-1e-3-paper-bf16", "Sec. 6.4's network, step size 1e-3, bfloat16"),
    ("objectives", "clip-0.2", "clipped, ε 0.2"),
    ("objectives", "none-no-clip-actions", "neither clipped nor penalised, actions unclipped"),
    ("precision", "float32", "float32"),
    ("precision", "float32-two-processes", "float32, two processes"),
])  # fmt: skip
def test_curves_are_named_in_words(experiment, group, words):
    assert reproduce.words_for(experiment, group) == words


def test_without_data_nothing_is_drawn(tmp_path, capsys):
    for experiment in reproduce.EXPERIMENTS:
        reproduce.main([experiment, "--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"])
        assert capsys.readouterr().out.strip() == "No run is finished."
    assert not list(tmp_path.iterdir())


def test_short_runs_stand_beside_no_published_score(tmp_path, capsys):
    flags = ["--draw-only", f"--data-dir={tmp_path}", f"--out={tmp_path}"]
    for experiment, beside in (("precision", False), ("breakout", True)):
        for variant in reproduce.EXPERIMENTS[experiment]:
            put(variant.place, reproduce.BREAKOUT[0], 1, 120 * [20.0], tmp_path)
        reproduce.main([experiment, *flags])
        said = capsys.readouterr().out + (tmp_path / f"{experiment}.svg").read_text()
        assert ("274.8" in said, "405.7" in said) == (beside, beside)


# ------------------------------------------------------------------------------ Figures 1 and 2


def test_figure_1_is_eq_7(tmp_path):
    figure = reproduce.figure1(Namespace(out=tmp_path))
    eps = 0.2
    for axes, advantage in zip(figure.axes, (1.0, -1.0), strict=True):
        curve, dot, *_ = axes.lines
        for r, value in zip(*curve.get_data(), strict=True):
            clipped = min(max(r, 1 - eps), 1 + eps)
            assert value == pytest.approx(min(r * advantage, clipped * advantage), abs=1e-6)
        assert dot.get_xydata().tolist() == [[1, advantage]] and dot.get_color() == "r"
        names = [label.get_text() for label in axes.get_xticklabels()]
        places = dict(zip(names, axes.get_xticks(), strict=True))
        assert places["1"] == 1
        assert places["1+ε" if advantage > 0 else "1−ε"] == 1 + advantage * eps
    assert np.asarray(Image.open(tmp_path / "figure1.png")).std() > 10


def test_figure_2_is_the_script_s_first_update(tmp_path, capsys):
    """θ_old and the new θ are those of a run of the script, and what is drawn is its own loss."""
    args, batch, net, old, new = update = reproduce.first_update(3)
    ppo_continuous.main(["--env-id", "Hopper-v5", "--seed", "3", "--total-steps", "2048",
                         "--run-dir", str(tmp_path / "run")])  # fmt: skip
    checkpoint = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["net"]
    names = [name for name, _ in net.named_parameters()]
    assert torch.equal(new, parameters_to_vector([checkpoint[name] for name in names]))

    factors = [-0.5, 0.0, 0.7, 1.0, 2.5]
    kl, l_cpi, clipped, l_clip = reproduce.surrogates(*update, factors).values()
    assert kl[1] == 0 and l_cpi[1] == clipped[1] == l_clip[1] == pytest.approx(0, abs=1e-6)
    assert (kl[[0, 2, 3, 4]] > 0).all() and 0.005 < kl[3] < 0.05
    assert (l_clip <= np.minimum(l_cpi, clipped) + 1e-7).all() and l_clip[3] > l_clip[4]
    batch.actions, batch.advantages, batch.targets = (
        x.flatten(0, 1) for x in (batch.actions, batch.advantages, batch.targets)
    )
    for k, factor in enumerate(factors):
        torch.nn.utils.vector_to_parameters(old + factor * (new - old), net.parameters())
        with torch.no_grad():
            pi, values = net(batch.obs)
            for objective, expected in (("none", l_cpi[k]), ("clip", l_clip[k])):
                loss = ppo_continuous.ppo_loss(
                    pi, values, batch, objective, 0.2, 1, 0, 0, "minibatch"
                )
                assert -loss.item() == pytest.approx(expected, abs=1e-6)
            q, p = (torch.distributions.Normal(x.mean, x.stddev) for x in (pi, batch.pi_old))
            exact = torch.distributions.kl_divergence(p, q).sum(-1).mean().item()
            assert kl[k] == pytest.approx(exact, rel=1e-4, abs=1e-7)


def test_figure_2_is_drawn(tmp_path, capsys, monkeypatch):
    made = []
    means = {name: np.linspace(0, k, 401) for k, name in enumerate(("kl", "cpi", "clip", "l"))}
    monkeypatch.setattr(reproduce, "first_update", lambda seed: made.append(seed) or (seed,))
    monkeypatch.setattr(reproduce, "surrogates", lambda seed, factors: means)
    reproduce.main(["figure2", "--seeds=2", f"--out={tmp_path}"])
    assert made == [1, 2] and "| seed 2 | 0.0000 | 3.00 |" in capsys.readouterr().out
    assert np.asarray(Image.open(tmp_path / "figure2.png")).std() > 10
