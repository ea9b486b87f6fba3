"""A double of the GPU: the device "gpu", whose tensors keep their numbers on the CPU.

A run on it is the run on the CPU, bit for bit. But it refuses operations on tensors of both
devices, and notices a pinned source that changes before an asynchronous copy was waited for. What
is copied to the CPU so is zero until then. It counts the waits. A CUDA graph repeats operations on
the memory in which they were recorded, which is NaN until then, and it refuses what waits. There
are no kernels, second GPU or clock. Once registered, it changes torch for the whole process.
"""

import os
from collections import Counter
from contextlib import contextmanager
from functools import partial
from traceback import walk_stack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten, Tensor = torch.ops.aten, torch.Tensor
waits = Counter()  # by function of the script
pinned, saved = set(), set()  # addresses of pinned memory, and of what was saved to a file
leaving, arriving = [], []  # (CPU tensor, its numbers) of the copies not yet waited for
recording, replays = [], []  # the graph that is being recorded, if one is; the graphs replayed
address = lambda tensor: tensor.untyped_storage().data_ptr()
tensors_in = lambda *tree: [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class OnDevice(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    __torch_dispatch__ = classmethod(lambda cls, *args: call(*args))
    __reduce_ex__ = lambda self, n: saved.add(address(self.bare)) or self.bare.__reduce_ex__(n)
    tolist = lambda self: self.cpu().tolist()

    def __new__(cls, bare):
        at = {"strides": bare.stride(), "storage_offset": bare.storage_offset(), "device": "gpu:0"}
        self = Tensor._make_wrapper_subclass(cls, bare.shape, dtype=bare.dtype, **at)
        self.bare = bare
        return self


class Mode(TorchDispatchMode):
    __torch_dispatch__ = lambda self, *args: call(*args)


def call(function, types, args=(), kwargs=None):
    """Do an operation on the numbers, and put its result where it belongs."""
    kwargs = dict(kwargs or {})
    tensors = tensors_in(args, kwargs)
    ours = {id(x.bare): x for x in tensors if isinstance(x, OnDevice)}
    there = bool(ours)  # whether the result is on the device
    if kwargs.get("device"):
        there, kwargs["device"] = kwargs["device"].type == "gpu", torch.device("cpu")
    pin, later = kwargs.pop("pin_memory", False), False
    mask = function is aten.index.Tensor and any(x.dtype == torch.bool for x in tensors)
    unknown = mask or torch.Tag.data_dependent_output in function.tags  # to the CPU
    if function in (aten._to_copy.default, aten.copy_.default):
        source, there = tensors[-1], isinstance(args[0], OnDevice) if len(tensors) > 1 else there
        if isinstance(source, OnDevice) != there:
            later = kwargs.get("non_blocking") or args[2:] == (True,)
            later = later and (not there or address(source) in pinned)
            unknown = not later
    elif ours and len(ours) < len({id(x) for x in tensors}):
        raise RuntimeError(f"{function}: tensors on both devices")
    if unknown and (ours or there):
        wait()
    args, kwargs = tree_map_only(OnDevice, lambda x: x.bare, (args, kwargs))
    result = function(*args, **kwargs)
    if recording and there:
        recording[0].append((function, args, kwargs, result))
    if later and there:
        leaving.append((source, source.clone()))
    elif later:
        arriving.append((result, result.clone()))
        result.zero_()
    if pin:
        pinned.add(address(result))
    wrap = lambda x: ours[id(x)] if id(x) in ours else OnDevice(x)
    return tree_map_only(Tensor, wrap, result) if there else result


class Graph(list):
    """Stands for torch.cuda.CUDAGraph: functions, their arguments and their results."""

    @torch.no_grad()
    def replay(self):
        replays.append(id(self))
        for function, args, kwargs, result in self:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                old.copy_(new)


@contextmanager
def record(graph):
    """Stands for torch.cuda.graph: afterwards nothing has been computed yet."""
    state, known = torch.get_rng_state(), set()
    recording.append(graph)
    try:
        yield
    finally:
        recording.clear()
    torch.set_rng_state(state)
    for _, args, _, result in graph:
        known.update(map(address, tensors_in(args)))
        for x in tensors_in(result):
            if x.is_floating_point() and address(x) not in known:
                x.fill_(torch.nan)


def wait():
    """From here on, what happened before has happened on the device, too."""
    if recording:
        raise RuntimeError("operation not permitted when stream is capturing")
    codes = [frame.f_code for frame, _ in walk_stack(None)]
    names = [code.co_name for code in codes if code.co_filename.endswith("ppo_atari.py")]
    waits.update([name for name in names if name[0] != "<"][:1])
    late = any(not torch.equal(source, numbers) for source, numbers in leaving)
    for target, numbers in arriving:
        target.copy_(numbers)
    leaving.clear(), arriving.clear()
    assert not late, "a pinned source has changed before it was copied"


def in_bf16(function, *args):
    """A layer under autocast, which torch defines for the devices that it knows."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return function(*tree_map_only(Tensor, Tensor.bfloat16, args))


def register():
    """Tell torch of the device, for the whole process and before its first backward pass."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _setup_privateuseone_for_python_backend("gpu")
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) comes to Mode, too
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    tag = lambda storage: "cuda:0" if storage.data_ptr() in saved else None
    torch.serialization.register_package(0, tag, lambda storage, location: None)
    kept = [torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("aten", "_")]
    for layer in (aten.conv2d.default, aten.linear.default):
        kept[0].impl(layer, partial(in_bf16, layer))
    kept[1].fallback(torch.library.fallthrough_kernel)
    torch.gpu.kept = kept


@contextmanager
def in_use():
    """Within, the device passes for a GPU: torch.cuda says so, and a file says "cuda:0"."""
    [record.clear() for record in (waits, pinned, saved, leaving, arriving, replays)]
    cuda = {"is_available": lambda: True, "device_count": lambda: 1, "set_device": lambda n: None,
            "is_current_stream_capturing": lambda: False, "get_device_name": str,
            "CUDAGraph": Graph, "graph": record}  # fmt: skip
    with mock.patch.multiple(torch.cuda, **cuda), Mode():
        yield
        wait()
