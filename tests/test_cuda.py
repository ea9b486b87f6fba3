"""--cuda without a GPU, on a double of one. With a GPU: pytest -m slow -k cuda -n 0"""

import functools
import importlib
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context

import device_double
import pytest
import torch
from functorch.compile import make_boxed_func
from processes import ROOT, events, main, rows, same, small
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx, config
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

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
    """Run main on the CPU or, with --cuda, on the double. Returns its result, and the waits."""
    with device_double.in_use() if "--cuda" in flags else nullcontext():
        return main(load_script(folder), *flags), device_double.waits


def learned(run_dir):
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    scalars = {k: [x.value for x in v] for k, v in events(run_dir).items() if "second" not in k}
    return rows(run_dir), scalars, [checkpoint[k] for k in ("net", "optimizer", "best", "step")]


def play(elsewhere, folder, *flags, start=None):
    """Train, resume what `start` has learned, evaluate, at last on the CPU. Yields results."""
    call, new = functools.partial(elsewhere, run), folder / "new"
    _, waits = call(*small(ppo_atari, 2, "--num-epochs", 2, "--run-dir", new, *flags))
    yield "numbers", learned(new)
    yield "waits", waits
    shutil.copytree(start or new, folder / "resumed")
    call("--resume", folder / "resumed", "--total-steps", 192, *flags)
    yield "resumed", learned(folder / "resumed")
    yield "scores", [call("--evaluate", new, "--episodes", 1, *where)[0] for where in (flags, ())]


@pytest.fixture(scope="module")
def on_cpu(elsewhere, tmp_path_factory):
    """A run's directory; what came out there; the waits that are to be expected on the double."""
    results = dict(play(elsewhere, folder := tmp_path_factory.mktemp("cpu")))
    assert results["numbers"][0] and not results["waits"]
    # the network's 10 tensors; each step's actions, and V, there and back; the samples, statistics
    waits = {"train": 10, "rollout": 2 * (32 + 2), "update": 2 * (4 + 1)}
    return folder / "new", results | {"waits": waits}


def test_a_run_on_the_double_is_the_run_on_the_cpu(elsewhere, on_cpu, tmp_path):
    """Bit for bit, with the waits that are to be expected."""
    for name, result in play(elsewhere, tmp_path, "--cuda", start=on_cpu[0]):
        assert same(result, on_cpu[1][name]), name


def minibatch(device):
    torch.manual_seed(0)
    code = ppo_atari.ppo_loss.__code__
    batch = {name: torch.rand(32) / 9 for name in code.co_varnames[3 : code.co_argcount - 1]}
    batch["frames"] = torch.randint(256, (32, 84, 84, 4), dtype=torch.uint8).movedim(-1, 1)
    batch |= {"actions": torch.randint(4, (32,)), "clip_eps": torch.full((), 0.1)}
    return {name: x.to(device) for name, x in batch.items()}


def trace(folder, bf16):
    """The graphs of `act`, `ppo_loss` and its gradients, on tensors without numbers: how many,
    their devices, the types of the convolutions' results, what CUDA graphs refuse."""
    script, graphs = load_script(folder), []
    compiler = lambda graph, inputs: graphs.append(graph.graph) or make_boxed_func(graph.forward)
    keep = {"keep_inference_input_mutations": True}  # as torch's own compiler does
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, **keep)
    compile = functools.partial(torch.compile, backend=backend, fullgraph=True)
    net = script.ActorCritic(4, "paper", orthogonal=False, bf16=bf16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        net, batch = net.to_empty(device="gpu"), minibatch("gpu")
        with torch.no_grad():
            compile(script.act)(net, batch["frames"])
        compile(script.ppo_loss)(net, **batch, args=script.Args(clip_value_loss=True))[0].backward()
    devices, types, refused = set(), set(), []
    for node in (node for graph in graphs for node in graph.nodes):
        results = [x for x in tree_leaves(node.meta.get("val")) if torch.is_tensor(x)]
        devices |= {x.device.type for x in results}
        types |= {x.dtype for x in results if "convolution" in str(node.target)}
        changed = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        refused += [str(node)] if changed or is_cudagraph_unsafe_fx_node(node) else []
    return len(graphs), devices, types, refused


@pytest.mark.parametrize("bf16", [False, True])
def test_what_is_compiled_suits_cuda_graphs(bf16, elsewhere):
    """In one graph each, all on the GPU, nothing changed that was given. The kernels that torch
    makes of them, and CUDA graphs of those, need a GPU."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert elsewhere(trace, bf16) == (3, {"gpu"}, {dtype}, [])


@pytest.fixture
def fresh_compiler():
    """torch keeps what it has compiled, for other tests, too."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("cuda", [False, True])
def test_every_graph_is_compiled_deterministically(cuda, fresh_compiler, monkeypatch):
    """That of `act`, of `ppo_loss` and of its gradients: torch can lose a setting after the first.
    With --cuda they become CUDA graphs."""
    settings = []

    def compiler(graph, inputs, **_):
        settings.append((config.deterministic, config.triton.cudagraphs))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", compiler)
    policy, loss = ppo_atari.compile_both(cuda)
    net, batch = ppo_atari.ActorCritic(4, "paper", orthogonal=False), minibatch("cpu")
    with torch.no_grad():
        policy(net, batch["frames"])
    loss(net, **batch, args=ppo_atari.Args())[0].backward()
    assert settings == [(True, cuda)] * 3


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


def gradients(device, bf16, loss):
    torch.manual_seed(0)
    net = ppo_atari.ActorCritic(4, bf16=bf16).to(device)
    for _ in range(3):  # a CUDA graph is recorded in the second, and replayed in the third
        net.zero_grad()
        value, _ = loss(net, **minibatch(device), args=ppo_atari.Args())
        value.backward()
    return [x.detach().double().cpu() for x in (value, *(p.grad for p in net.parameters()))]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch can use no GPU here")
@pytest.mark.parametrize("flags", ["", "--bf16", "--compile", "--compile --bf16"])
def test_on_a_gpu(flags, tmp_path, capsys):
    """Train, go on on the CPU and back, evaluate; the loss and its gradients. Prints the speed."""
    run_dir, flags = tmp_path / "run", ["--cuda", *flags.split()]
    main(ppo_atari, *flags, "--total-steps", 20 * 1024, "--run-dir", run_dir)
    with capsys.disabled():
        print(f"\n{flags}: {events(run_dir)['steps_per_second'][-1].value:.0f} steps/s")
    for steps, where in ((21_504, ["--no-cuda", "--no-compile"]), (22_528, flags)):
        main(ppo_atari, "--resume", run_dir, "--total-steps", steps, *where)
    assert rows(run_dir) and learned(run_dir)[2][-1] == 22_528
    main(ppo_atari, "--evaluate", run_dir, "--episodes", 2, "--cuda")
    eager, bf16 = ppo_atari.ppo_loss, "--bf16" in flags
    loss = ppo_atari.compile_both(cuda=True)[1] if "--compile" in flags else eager
    expected, tolerance = gradients("cpu", bf16, eager), 0.1 if bf16 else 0.01
    for one, other in zip(expected, gradients("cuda", bf16, loss), strict=True):
        assert (one - other).norm() <= tolerance * one.norm()
