"""ppo_atari.py in two processes that torchrun starts, on the CPU."""

import os
import subprocess
import sys

import pytest
import torch
from processes import ROOT, load, rows

import ppo_atari

# What each process does: short games, notes for the test, and the run. Process 1 alone is
# interrupted, in the 7th of 12 iterations or after the 6th.
PROCESS = """
import os, signal, sys, time, torch
import ppo_atari
from ppo_atari import RANK, Args, Games, Run

folder, place, *flags = sys.argv[1:]
settings, train, update = ppo_atari.game_settings, ppo_atari.train, ppo_atari.update
gather = ppo_atari.gather
short = {"max_num_frames_per_episode": 80}
ppo_atari.game_settings = lambda env_id: settings(env_id) | short
reset, log, save, ppo_loss = Games.reset, Run.log, Run.save, ppo_atari.ppo_loss
on_signal, told, signals = Run.on_signal, {"sizes": [], "stats": []}, []

def gradient(net, batch, part):
    net.zero_grad()
    own = {name: x[part] for name, x in batch.items()}
    args = Args(norm_adv="none", num_envs=4, minibatch_size=32)
    ppo_loss(net, **own, clip_eps=torch.tensor(0.1), args=args)[0].backward()
    return [p.grad.clone() for p in net.parameters()]

def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])

def compare_and_train(args, checkpoint):
    torch.manual_seed(0)
    net = ppo_atari.ActorCritic(4, "paper")
    random = {name: torch.randn(16) for name in ("values", "advantages", "targets")}
    batch = random | {
        "frames": torch.randint(256, (16, 4, 84, 84), dtype=torch.uint8),
        "actions": torch.randint(4, (16,)), "log_probs": -1.4 + 0.2 * torch.randn(16)}
    mean = gradient(net, batch, slice(8 * RANK, 8 * RANK + 8))
    own, of_all = flat(mean), flat(gradient(net, batch, slice(16)))
    ppo_atari.average(mean)
    told["errors"] = [((x - of_all).norm() / of_all.norm()).item() for x in (flat(mean), own)]
    told["gathered"] = ppo_atari.gather([(5 - RANK, RANK, 3), (7, RANK, 4)], 3 * RANK)
    return train(args, checkpoint)

def tell_reset(games, seed):
    told["seed"], told["games"] = (seed, torch.initial_seed()), len(games.frames)
    reset(games, seed)

def tell_loss(net, **minibatch):
    told["sizes"].append(len(minibatch["targets"]))
    return ppo_loss(net, **minibatch)

def interrupt(where, iteration):
    if RANK == 1 and where == place and len(told["stats"]) == iteration:
        os.kill(os.getpid(), signal.SIGINT)

def interrupted_update(*args):
    stats = update(*args)
    told["stats"].append((stats["policy_loss"], stats["grad_norm"]))
    interrupt("update", 7)
    return stats

def interrupted_gather(*args):
    result = gather(*args)
    interrupt("gather", 6)
    return result

def late_save(run):  # process 1 leaves first, and torchrun sends SIGTERM to process 0
    end = time.time() + 20
    while RANK == 0 and not signals:
        assert time.time() < end
        time.sleep(0.05)
    save(run)

def tell_signal(run, *args):
    signals.append(args)
    on_signal(run, *args)

def tell_log(run, episodes, stats):
    interrupt("log", 6)
    stop = log(run, episodes, stats)
    state = {"net": run.learned["net"].state_dict(), "episodes": run.episodes, "dir": str(run.dir)}
    torch.save(told | state, f"{folder}/{RANK}.pt")
    return stop

ppo_atari.train, ppo_atari.update, ppo_atari.ppo_loss = (
    compare_and_train, interrupted_update, tell_loss)
ppo_atari.gather = interrupted_gather
Games.reset, Run.log, Run.save, Run.on_signal = tell_reset, tell_log, late_save, tell_signal
ppo_atari.main(flags)
"""
FLAGS = ("--network paper --num-envs 4 --num-steps 16 --minibatch-size 32 --num-epochs 2 "
         "--threads 1 --total-steps 768 --run-dir")  # fmt: skip


@pytest.mark.parametrize("place", [
    "log", *(pytest.param(place, marks=pytest.mark.slow) for place in ("gather", "update")),
])  # fmt: skip
def test_two_processes_have_one_network_and_games_of_their_own(place, tmp_path):
    """The mean gradient of two halves is that of all samples; episodes are gathered in order of
    their steps; when one process is interrupted, wherever, both stop after the same iteration."""
    script, run_dir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(PROCESS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*torchrun, script, tmp_path, place, *FLAGS.split(), run_dir],
        cwd=ROOT, text=True, capture_output=True, timeout=120, env=os.environ | env,
    )  # fmt: skip
    assert done.returncode and 'Traceback (most recent call last):\n  File "/' not in done.stderr
    one, two = [load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for mean_error, own_error in (one["errors"], two["errors"]):
        assert mean_error < 1e-5 and own_error > 0.1
    gathered = [(4, 1, 3), (5, 0, 3), (7, 0, 4), (7, 1, 4)], True
    assert one["gathered"] == two["gathered"] == gathered

    assert all(torch.equal(x, two["net"][name]) for name, x in one["net"].items())
    assert one["stats"] == two["stats"] and len(set(one["stats"])) == 7  # of all samples
    assert one["sizes"] == two["sizes"] == [16] * 7 * 4  # half of M, as often as one process
    assert one["games"] == two["games"] == 2 and one["seed"][0] != two["seed"][0]
    assert all(seed == torch_seed for seed, torch_seed in (one["seed"], two["seed"]))
    episodes = [row[:3] for row in one["episodes"]]
    assert episodes == [row[:3] for row in two["episodes"]] == sorted(episodes) and episodes
    assert len(episodes) == 4 * (7 * 16 // 20)  # all four games
    assert rows(run_dir) == [tuple(row) for row in episodes]

    checkpoint = load(run_dir / "checkpoint.pt")
    assert checkpoint["step"] == 7 * 64
    assert all(torch.equal(x, checkpoint["net"][name]) for name, x in one["net"].items())
    assert f"--resume {run_dir}" in done.stdout
    assert done.stdout.count("--resume") == 1  # process 0 alone speaks
    assert one["dir"] == str(run_dir) and not os.path.exists(two["dir"])


@pytest.mark.parametrize("flags, words", [
    ("--num-envs 8 --minibatch-size 192 --num-steps 96", "multiples of 3 processes"),
    ("--num-envs 6 --minibatch-size 256", "multiples of 3 processes"),
    ("--num-envs 6 --minibatch-size 3", "--minibatch-size 3: need a number from 6"),
    ("--num-envs 9 --minibatch-size 288", None),
])  # fmt: skip
def test_what_does_not_divide_is_refused(flags, words, monkeypatch, capsys):
    """Nor may a process have a single sample to standardise."""
    monkeypatch.setattr(ppo_atari, "WORLD_SIZE", 3)
    if words is None:
        assert ppo_atari.parse_args(flags.split())[0].num_envs == 9
    else:
        with pytest.raises(SystemExit) as leaving:
            ppo_atari.main(flags.split())
        err = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert leaving.value.code == 2 and words in err
