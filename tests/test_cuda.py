"""--cuda without a GPU, on a double of one. With a GPU: pytest -m slow -k cuda -n 0"""

import functools
import importlib
import shutil
import sys
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context

import device_double
import pytest
import torch
from processes import ROOT, events, main, rows, same, small

import ppo_atari


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Call a function in a process of the double's own; its first argument is a new folder."""
    with ProcessPoolExecutor(1, get_context("spawn"), device_double.register) as pool:
        folder = lambda: tmp_path_factory.mktemp("script")
        yield lambda function, *args: pool.submit(function, folder(), *args).result()


def load_script(folder):
    """A copy of the script for the double's device, whose games end after 20 steps."""
    text, old = (ROOT / "ppo_atari.py").read_text(), 'torch.device("cuda")'
    assert old in text, f"the script does not say any more: {old}"
    (folder / "ppo_atari.py").write_text(text.replace(old, 'torch.device("gpu")'))
    sys.path.insert(0, str(folder.parent))
    script = importlib.import_module(f"{folder.name}.ppo_atari")
    settings = script.game_settings
    script.game_settings = lambda env_id: settings(env_id) | {"max_num_frames_per_episode": 80}
    return script


def run(folder, *flags):
    """Run main on the CPU or, with --cuda, on the double. Returns its result, the waits, and how
    often each CUDA graph was replayed."""
    device_double.waits.clear(), device_double.replays.clear()
    with device_double.in_use() if "--cuda" in flags else nullcontext():
        result = main(load_script(folder), *flags)
        return result, device_double.waits, sorted(Counter(device_double.replays).values())


def learned(run_dir):
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    scalars = {k: [x.value for x in v] for k, v in events(run_dir).items() if "second" not in k}
    return rows(run_dir), scalars, [checkpoint[k] for k in ("net", "optimizer", "best", "step")]


def play(elsewhere, folder, *flags, start=None):
    """Train, resume what `start` has learned, evaluate, at last on the CPU. Yields results."""
    call, new = functools.partial(elsewhere, run), folder / "new"
    _, waits, replays = call(*small(ppo_atari, 2, "--num-epochs", 2, "--run-dir", new, *flags))
    yield "numbers", learned(new)
    yield "waits", waits
    yield "replays", replays
    shutil.copytree(start or new, folder / "resumed")
    call("--resume", folder / "resumed", "--total-steps", 192, *flags)
    yield "resumed", learned(folder / "resumed")
    yield "scores", [call("--evaluate", new, "--episodes", 1, *where)[0] for where in (flags, ())]


@pytest.fixture(scope="module", params=["", "--bf16"])
def on_cpu(elsewhere, tmp_path_factory, request):
    """A run's flags and directory; what came out there; the waits to be expected on the double."""
    flags = request.param.split()
    results = dict(play(elsewhere, folder := tmp_path_factory.mktemp("cpu"), *flags))
    assert results["numbers"][0] and not results["waits"] and not results["replays"]
    # the network's 10 tensors; each step's actions, and V, there and back; the samples, statistics
    waits = {"train": 10, "rollout": 2 * (32 + 2), "update": 2 * (4 + 1)}
    return flags, folder / "new", results | {"waits": waits}


@pytest.mark.parametrize("more, replays", [([], [7, 65]), (["--no-cuda-graphs"], [])])
def test_a_run_on_the_double_is_the_run_on_the_cpu(more, replays, elsewhere, on_cpu, tmp_path):
    """Bit for bit, with the waits that are to be expected. All calls but the first are replays: of
    the gradient in 2 x 4 minibatches, of the policy in 2 x (32 + 1) steps."""
    flags, start, expected = on_cpu
    expected = expected | {"replays": replays}
    for name, result in play(elsewhere, tmp_path, "--cuda", *more, *flags, start=start):
        assert same(result, expected[name]), name


def record(folder, wait):
    """Call a recording of a function of x and y, where the GPU must `wait` for y or not. Returns
    the result of each call, read at once, and how often Python ran the function."""
    script, calls = load_script(folder), []

    def function(factor, x, y):
        calls.append(factor)
        return factor * x + (y[0].item() if wait else y) + torch.rand_like(x)

    with device_double.in_use():
        recorded, results = script.Recorded(function), []
        tensor = lambda n: torch.full((3,), float(n), device="gpu")
        for n in range(4):
            torch.manual_seed(n)
            results.append(recorded(10, x=tensor(n), y=tensor(-n)).tolist())
    return results, len(calls)


def test_a_recording_repeats_the_function(elsewhere):
    """On new numbers, also on new random ones. A forker's function may not be one to record."""
    results, calls = elsewhere(record, False)
    for n, result in enumerate(results):
        torch.manual_seed(n)
        assert result == (9 * n + torch.rand(3)).tolist()
    assert len(results) == 4 and calls == 2
    with pytest.raises(RuntimeError, match="captur") as failing:
        elsewhere(record, True)
    assert "--no-cuda-graphs" in "".join(traceback.format_exception(failing.value))


def test_the_gpu_is_made_ready(monkeypatch, capsys):
    """torchrun's second process gets the second; cuDNN repeats itself, and TF32 is used. Without
    --cuda the CPU is, and a word says that there is a GPU; not in an evaluation."""
    told, cudnn = [], torch.backends.cudnn
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    monkeypatch.setattr(cudnn, "deterministic", False)
    monkeypatch.setattr(ppo_atari, "LOCAL_RANK", 1)
    for evaluated, words in (("", "--cuda"), ("run", "")):
        device = ppo_atari.choose_device(ppo_atari.Args(evaluate=evaluated))
        out = capsys.readouterr().out
        assert device.type == "cpu" and words in out and bool(out) == bool(words)
    assert not told and not cudnn.deterministic
    assert ppo_atari.choose_device(ppo_atari.Args(cuda=True)).type == "cuda"
    assert told == [1, "high"] and cudnn.deterministic


@pytest.mark.parametrize("usable, local_rank", [(False, 0), (True, 1)])
def test_a_gpu_that_cannot_be_used_gets_a_sentence(usable, local_rank, monkeypatch, tmp_path):
    """One whose driver is too old is counted; and torchrun's second process needs a second."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(ppo_atari, "LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit, match=rf"^--cuda: .* {int(usable)} .*GPUs.*$"):
        main(ppo_atari, "--cuda", "--run-dir", tmp_path / "run")


def gradients(device, bf16):
    """Of a minibatch; on the GPU by a CUDA graph, which is recorded in the second call."""
    torch.manual_seed(0)
    net, args = ppo_atari.ActorCritic(4, bf16=bf16), ppo_atari.Args()
    code = ppo_atari.ppo_loss.__code__
    batch = {name: torch.rand(32) / 9 for name in code.co_varnames[3 : code.co_argcount - 1]}
    batch["frames"] = torch.randint(256, (32, 84, 84, 4), dtype=torch.uint8).movedim(-1, 1)
    batch |= {"actions": torch.randint(4, (32,)), "clip_eps": torch.full((), 0.1)}
    batch, net = {name: x.to(device) for name, x in batch.items()}, net.to(device)
    function = ppo_atari.backpropagate
    function = function if device == "cpu" else ppo_atari.Recorded(function)
    for _ in range(3):
        function(net, args, **batch)
    return [p.grad.double().cpu() for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here")
@pytest.mark.parametrize("flags", [[], ["--bf16"]])
def test_on_a_gpu(flags, tmp_path, capsys):
    """Train with CUDA graphs and, to the same bits, without; go on on the CPU and back; evaluate.
    The gradients are the CPU's. Prints the speed."""
    results = []
    for graphs in ("--cuda-graphs", "--no-cuda-graphs"):
        run_dir, own = tmp_path / graphs, ["--cuda", graphs, *flags]
        main(ppo_atari, *own, "--total-steps", 20 * 1024, "--run-dir", run_dir)
        with capsys.disabled():
            print(f"\n{own}: {events(run_dir)['steps_per_second'][-1].value:.0f} steps/s")
        results.append(learned(run_dir))
        for steps, where in ((21_504, ["--no-cuda"]), (22_528, own)):
            main(ppo_atari, "--resume", run_dir, "--total-steps", steps, *where)
        assert rows(run_dir) and learned(run_dir)[2][-1] == 22_528
        main(ppo_atari, "--evaluate", run_dir, "--episodes", 2, "--cuda")
    assert same(*results)
    expected, tolerance = gradients("cpu", bool(flags)), 0.1 if flags else 0.01
    for one, other in zip(expected, gradients("cuda", bool(flags)), strict=True):
        assert (one - other).norm() <= tolerance * one.norm()
