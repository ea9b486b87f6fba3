"""ppo_atari.py in two processes that torchrun starts, on the CPU."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import Script, iterations_in, rows, same_run

import ppo_atari

ROOT = Path(__file__).parent.parent
FLAGS = ["--network", "paper", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32",
         "--num-epochs", "2", "--no-compile", "--total-steps", 64 * 12,
         "--checkpoint-every", 4]  # fmt: skip
SETUP = """
import os, signal, sys, torch, torch.distributed as dist
import ppo_atari
from ppo_atari import RANK
settings = ppo_atari.game_settings
short = {"max_num_frames_per_episode": 80}
ppo_atari.game_settings = lambda env_id: settings(env_id) | short
"""


def torchrun(folder, *flags, before=""):
    """Run it in two processes, each of which runs `before` first; the exit status and what was
    printed, without what torchrun itself says."""
    script = folder / "script.py"
    script.write_text(SETUP + before + "\nppo_atari.main()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [*map(str, command), *map(str, flags)], cwd=ROOT, text=True, capture_output=True,
        timeout=120, env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )  # fmt: skip
    own = [line for line in done.stderr.splitlines() if line.startswith(("ppo_atari", "interr"))]
    return done.returncode, done.stdout, own


COMPARE = """
from types import SimpleNamespace
def gradient(net, batch, part):
    net.zero_grad()
    own = SimpleNamespace(**{name: x[part] for name, x in vars(batch).items()})
    loss(*net(own.frames), own, 0.1, 1.0, 0.01, "none", False)[0].backward()
    return [p.grad.clone() for p in net.parameters()]
def flat(tensors):
    return torch.cat([x.flatten() for x in tensors])
join, compared = ppo_atari.join, []
def join_and_compare(args):
    join(args)
    torch.manual_seed(0)
    net = ppo_atari.ActorCritic(4, "paper")
    batch = SimpleNamespace(
        frames=torch.randint(256, (16, 84, 84, 4), dtype=torch.uint8),
        actions=torch.randint(4, (16,)), log_probs=-1.4 + 0.2 * torch.randn(16),
        advantages=torch.randn(16), targets=torch.randn(16), policy_mask=torch.ones(16))
    mean = gradient(net, batch, slice(8 * RANK, 8 * RANK + 8))
    own, of_all = flat(mean), flat(gradient(net, batch, slice(16)))
    ppo_atari.average(mean)
    errors = [((x - of_all).norm() / of_all.norm()).item() for x in (flat(mean), own)]
    compared.extend([errors, ppo_atari.gather([(5 - RANK, RANK, 3), (7, RANK, 4)])])
ppo_atari.join = join_and_compare
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run, and of each process: its network at the last checkpoint, its seeds, its episodes, its
    folder, the loss and KL of each iteration, the samples in each minibatch, what it compared."""
    folder = tmp_path_factory.mktemp("whole")
    keep = f"""
Run, Games, seeds, logged, sizes = ppo_atari.Run, ppo_atari.Games, [], [], []
save, log, reset, loss = Run.save, Run.log, Games.reset, ppo_atari.ppo_loss
def loss_and_tell(logits, values, *rest):
    sizes.append(len(values))
    return loss(logits, values, *rest)
def log_and_tell(run, episodes, stats):
    logged.append((stats["policy_loss"], stats["approx_kl"]))
    log(run, episodes, stats)
def reset_and_tell(games, seed):
    seeds.append((seed, torch.initial_seed(), len(games.frames)))
    reset(games, seed)
def save_and_tell(run):
    save(run)
    told = run.learned["net"].state_dict(), seeds, run.episodes, str(run.run_dir), logged, sizes
    torch.save([*told, compared], "{folder}/%d.pt" % RANK)
Run.save, Run.log, Games.reset = save_and_tell, log_and_tell, reset_and_tell
ppo_atari.ppo_loss = loss_and_tell
"""
    before = keep + COMPARE
    status, out, err = torchrun(folder, *FLAGS, "--run-dir", folder / "run", before=before)
    assert status == 0 and err == []
    assert len(re.findall("^finished: 768 steps", out, re.M)) == 1  # process 0 alone speaks
    return folder / "run", [torch.load(folder / f"{k}.pt", weights_only=True) for k in (0, 1)]


def test_two_processes_have_one_network_and_games_of_their_own(whole):
    """And before the run the mean gradient of two halves, without a pressed FIRE and without
    standardised advantages, is that of all samples; episodes are gathered in order of their steps.
    """
    run_dir, (first, second) = whole
    net, seeds, episodes, _, logged, sizes, compared = first
    other, other_seeds, other_episodes, scratch, other_logged, other_sizes, other_compared = second
    for (mean_error, own_error), gathered in (compared, other_compared):
        assert mean_error < 1e-5 and own_error > 0.1
        assert gathered == [(4, 1, 3), (5, 0, 3), (7, 0, 4), (7, 1, 4)]
    assert all(torch.equal(net[name], other[name]) for name in net)
    start = ppo_atari.ActorCritic(4, "paper")
    assert not torch.equal(net["value_head.weight"], start.value_head.weight)
    assert len(seeds) == 3 == len(other_seeds)
    assert len({seed for seed, _, _ in seeds + other_seeds}) == 6
    for seed, torch_seed, games in seeds + other_seeds:
        assert seed == torch_seed and games == 2
    assert logged == other_logged and len(set(logged)) == 12  # of all samples
    assert sizes == other_sizes == [16] * 48  # half of M, as often as one process
    assert [row[:3] for row in episodes] == [row[:3] for row in other_episodes]
    assert rows(run_dir) == [tuple(row[:3]) for row in episodes]
    assert all(step % 4 == 0 for step, _, _ in rows(run_dir)) and len(episodes) > 16
    assert not Path(scratch).exists()


@pytest.mark.slow
def test_a_dead_process_ends_the_run_which_resumes_bit_for_bit(whole, tmp_path):
    """SIGKILL to process 1 in the 7th of 12 iterations."""
    broken = tmp_path / "broken"
    die = """
update, calls = ppo_atari.update, []
def dying(*args):
    calls.append(args)
    if len(calls) == 7 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(*args)
ppo_atari.update = dying
"""
    status, out, err = torchrun(tmp_path, *FLAGS, "--run-dir", broken, before=die)
    assert status == 1 and "finished" not in out
    assert len(err) == 1 and str(broken) in err[0]
    assert iterations_in(broken / "checkpoint.pt") == 4
    status, out, err = torchrun(tmp_path, "--resume", broken)
    assert (status, err) == (0, []) and same_run(whole[0], broken)


def test_what_does_not_divide_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(ppo_atari, "PROCESSES", 3)
    refused = Script(ppo_atari).refused
    assert refused(capsys, 2, ["--minibatch-size", "128"], "3 processes", "N = 8", "M = 128")
    assert refused(capsys, 2, ["--num-envs", "6"], "3 processes", "N = 6", "M = 256")
    monkeypatch.setattr(ppo_atari, "PROCESSES", 4)  # one sample has no advantage to standardise
    assert refused(capsys, 2, ["--minibatch-size", "4"], "4 processes", "M = 4, at most M / 2")


def test_one_process_alone_averages_and_gathers_nothing():
    tensors, episodes = [torch.ones(3)], [(0, 1.0, 2), (5, 0.0, 3)]
    ppo_atari.average(tensors)
    assert torch.equal(tensors[0], torch.ones(3)) and ppo_atari.gather(episodes) == episodes
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
