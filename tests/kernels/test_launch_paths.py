"""Launch paths on meta tensors: under the device's guard, without a wait, with few operations."""

import inspect
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launches import Waits, Watch, record, unguarded

from companion.kernels import attend_with_tail, decode_attention, fused_moe, grouped_gemm, merge_splits, mode
from companion.kernels.append import append
from companion.kernels.copy import copy

ROOT = Path(__file__).resolve().parents[2]
HALF, FLOAT = torch.float16, torch.float32


def empty(*shape, dtype=HALF):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return empty(*shape, dtype=torch.int32)


def scales(*names):
    return {name: empty(64, 16, 2) for name in names}


def decode(*, pages=True, latent=False, **how):
    """A decode call of five sequences, over pages of 16 tokens or 100 slots."""
    shape = (64, 16, 2) if pages else (5, 100, 2)
    k = empty(*shape, 64, dtype=how.pop("codes", HALF))
    how |= {"block_table": ints(5, 12)} if pages else {}
    how |= {"head_dim_v": 32} if latent else {}
    return partial(decode_attention, empty(5, 8, 64), k, None if latent else k, ints(5), **how)


def tail():
    q, k, new = empty(5, 8, 64), empty(64, 32, 2, 32, dtype=torch.uint8), empty(5, 40, 2, 64)
    fields = {f"k_{n}": empty(64, 1, 2, 64) for n in ("scale", "zero")}
    fields |= {f"v_{n}": empty(64, 32, 2, 2) for n in ("scale", "zero")}
    how = dict(block_table=ints(5, 12), kv_format="kivi4", **fields)
    return partial(attend_with_tail, q, k, k, ints(5), new, new, ints(5), **how)


def write(**how):
    new, cache = empty(5, 2, 64), empty(64, 16, 2, 64)
    return partial(append, new, new, cache, cache, **how)


def merge():
    return partial(merge_splits, empty(5, 1, 8, 4, 64, dtype=FLOAT), empty(5, 8, 1, 4, dtype=FLOAT))


def moe(tokens, **how):
    x, w1, w2 = empty(tokens, 64), empty(8, 96, 64), empty(8, 64, 48)
    return partial(fused_moe, x, w1, w2, empty(tokens, 2), empty(tokens, 2, dtype=torch.int64), **how)


# name -> (call, launches, operations of torch: allocations and views count)
PATHS = {
    "decode": (decode(), 2, 9),
    "decode, contiguous": (decode(pages=False), 2, 9),
    "decode, sinks and a window": (decode(sinks=empty(8), window_size=(63, 0)), 2, 11),
    "decode, int8": (decode(codes=torch.int8, kv_format="int8", **scales("k_scale", "v_scale")), 2, 9),
    "decode, fp8 with a number": (
        decode(codes=torch.uint8, kv_format="fp8_e4m3", k_scale=0.5, v_scale=2.0), 2, 13,
    ),
    "decode, latent": (decode(latent=True), 2, 9),
    "decode with a tail": (tail(), 3, 12),
    "merge": (merge(), 1, 2),
    "append by slots": (write(slot_mapping=ints(5)), 1, 3),
    "append by lengths": (write(cache_seqlens=ints(5), block_table=ints(5, 12)), 1, 2),
    "copy": (partial(copy, empty(100)), 1, 5),
    "grouped_gemm": (partial(grouped_gemm, empty(20, 64), empty(8, 96, 64), ints(9)), 1, 27),
    "fused_moe": (moe(4, check_ids=False), 3, 39),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_nothing_waits_and_little_is_asked_of_torch(monkeypatch, name):
    call, launches, operations = PATHS[name]
    seen = record(monkeypatch)
    with Watch() as watch:
        call()
    assert [x.kernel for x in seen] and len(seen) == launches
    assert watch.count <= operations, watch.names


@pytest.mark.parametrize("name", PATHS)
def test_every_launch_is_under_the_guard_of_its_tensors(monkeypatch, name):
    seen = record(monkeypatch)
    PATHS[name][0]()
    for launch in seen:
        assert launch.guard == torch.device("meta"), launch.kernel
        assert {t.device for t in launch.tensors} == {launch.guard}


def test_the_recorder_sees_a_guard_that_was_not_entered(monkeypatch):
    seen = record(monkeypatch)
    from companion.kernels.copy.kernel import copy_kernel

    copy_kernel[(1,)](empty(4), empty(4), 4, BLOCK=4)
    assert seen[0].guard is None


def test_the_guard_is_the_device_of_a_gpu_and_nothing_on_a_cpu(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    guard = inspect.unwrap(mode.on)  # a stand-in for a tensor on a GPU is no tensor
    with guard(torch.ones(1)):
        assert entered == []
    with guard(SimpleNamespace(device=torch.device("cuda:1"))):
        assert entered == [torch.device("cuda:1")]


def test_no_launch_is_outside_a_guard():
    found = {file.name: unguarded(file.read_text()) for file in (ROOT / "companion").rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from .kernel import add\ndef f(x):\n    add[(1,)](x)",
        "def f(x):\n    with on(x):\n        pass\n    add_kernel[(1,)](x)",
        "def f(x):\n    with on(x):\n        return lambda: add_kernel[(1,)](x)",
        "def f(x):\n    with torch.no_grad():\n        kernel.add_kernel[(1,)](x)",
        "@triton.jit\ndef add(x): ...\nadd[(1,)](1)",
    ],
)
def test_an_unguarded_launch_is_found(source):
    assert len(unguarded(source)) == 1


def test_guarded_launches_and_other_tables_of_functions_pass():
    source = "from .kernel import add\ndef f(x):\n    with mode.on(x):\n        add[(1,)](x)\n    OPS[1](x)"
    assert unguarded(source) == []


WAITS = {
    "item": lambda x: x.sum().item(),
    "a number of": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "from the host": lambda x: torch.tensor([1, 2]).to("meta"),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x[x > 0],
    "a masked write": lambda x: x.index_put_((x > 0,), x.new_ones(())),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.bincount(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.ones(4, device="meta").repeat_interleave(x),
}


@pytest.mark.parametrize("what", WAITS)
def test_an_operation_that_waits_is_found(what):
    with pytest.raises(Waits), Watch():
        WAITS[what](ints(4))


def test_checks_of_values_wait_where_they_are_asked_for(monkeypatch):
    """The other half: with its checks on, the same paths are caught."""
    record(monkeypatch)
    for call in (decode(check=True), moe(4, check_ids=True)):
        with pytest.raises(Waits), Watch():
            call()
