"""Decode attention compiled for CPUs, against the Triton kernels' float64 oracle and against torch."""

import inspect
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import ABSURD, check, make

from companion.attend import Step, by_kernels, choose
from companion.attention import sdpa
from companion.caches import make_cache
from companion.kernels import cpu, decode_on_cpu, mode, use
from companion.kernels.cpu import attention as cpu_attention
from companion.kernels.cpu import attention as cpu_numba
from companion.kernels.cpu import loops as cpu_loops
from companion.kernels.cpu import loops as cpu_step
from companion.kernels.cpu import pool as cpu_threads
from tests.kernels.test_caches_by_kernel import OPTIONS, spec

TILE = cpu_attention.TILE
plain = inspect.unwrap(decode_on_cpu)  # without the run-time types that the tests add, which speak first
EDGES = [0, 1, 3, 4, 5, TILE - 1, TILE, TILE + 1, 4 * TILE + 3]


@pytest.fixture
def threads():
    """Sets torch's threads; the machine's own number comes back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch):
    """Every step is asked for and large enough; counts those that come here."""
    seen = []

    def counted(*args, **kwargs):
        seen.append(args)
        return cpu.run(*args, **kwargs)

    monkeypatch.setattr(cpu, "LEAST_BYTES", 0)
    monkeypatch.setattr(by_kernels, "run", counted)
    return seen


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (7, 1), (16, 2)])
@pytest.mark.parametrize("block_size", [None, 1, 3, 16, TILE + 5])
def test_lengths_groups_pages_and_threads(monkeypatch, threads, n_threads, heads, block_size):
    threads(n_threads)
    monkeypatch.setattr(cpu, "LEAST_TILES", 1)
    monkeypatch.setattr(cpu, "threads", lambda: nullcontext(n_threads))  # beyond the machine's cores too
    case = make(EDGES, heads, 64, block_size=block_size)
    check(case.run(decode_on_cpu), case.expected(), torch.float32)


@pytest.mark.parametrize("options", [
    {"window_size": (0, 0)},
    {"window_size": (TILE - 1, 0)},
    {"window_size": (TILE + 7, -1), "softcap": 5.0},
    {"softmax_scale": 0.5},
    {"softmax_scale": -0.25},
    {"softcap": 20.0, "softmax_scale": 0.2},
    {"sinks": torch.tensor([-3.0, 0.0, 2.0, 40.0])},
    {"sinks": torch.full((4,), -torch.inf)},
    {"sinks": torch.full((4,), 2000.0)},
])  # fmt: skip
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("layout", ["plain", "heads", "strided"])
def test_options_and_layouts(options, block_size, layout):
    case = make(EDGES, (4, 2), 64, block_size=block_size, layout=layout, **options)
    check(case.run(decode_on_cpu), case.expected(), torch.float32)


@pytest.mark.parametrize("dim, v_dim", [(1, 1), (8, 24), (20, 20), (80, 64), (128, 128), (576, 512)])
def test_widths(dim, v_dim):
    case = make(EDGES, (4, 2), dim, v_dim)
    check(case.run(decode_on_cpu), case.expected(), torch.float32)


@pytest.mark.parametrize("loud", [0, 1, 2])
def test_one_tile_far_above_the_others(loud):
    """Scores thousands apart, in either order: what a softmax without a running maximum overflows on."""
    q, k, v = torch.randn(1, 4, 64), torch.randn(1, 3 * TILE, 2, 64), torch.randn(1, 3 * TILE, 2, 64)
    k[:, loud * TILE : (loud + 1) * TILE] *= 1000
    stops = torch.tensor([3 * TILE], dtype=torch.int32)
    out, lse = decode_on_cpu(q, k, v, stops, return_lse=True)
    wide = (x.double() for x in (q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)))
    want, want_lse = sdpa(*wide, return_lse=True)
    torch.testing.assert_close(out.double(), want[:, :, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse[:, :, 0], rtol=1e-6, atol=0)


def test_nan_and_infinity_that_are_seen_are_told_and_stay_in_their_row():
    case = make([200, 200], (4, 2), 64)
    clean = case.run(decode_on_cpu)[0]
    k, v = case.cache["k_cache"], case.cache["v_cache"]
    for store, value in ((k, torch.nan), (v, torch.nan), (v, torch.inf)):
        before = store[0, 77, 0, 3].item()
        store[0, 77, 0, 3] = value
        out = case.run(decode_on_cpu)[0]
        store[0, 77, 0, 3] = before
        assert not out[0, :2].isfinite().all(dim=-1).any() and torch.equal(out[0, 2:], clean[0, 2:])
        assert torch.equal(out[1], clean[1])


@settings(deadline=None)  # the first call compiles
@given(
    lengths=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=5),
    heads=st.integers(1, 4),
    parts=st.integers(1, 9),
)
def test_a_plan_has_every_key_once_and_parts_of_one_size(lengths, heads, parts):
    first = np.array([min(pair) for pair in lengths])
    stops = np.array([max(pair) for pair in lengths])
    pieces, begins = cpu_attention.plan(first, stops, heads, parts)
    keys = {(r, j) for r, low, high in pieces for j in range(low, high)}
    assert len(keys) == (pieces[:, 2] - pieces[:, 1]).sum()
    assert keys == {
        (b * heads + h, j) for b in range(len(stops)) for h in range(heads) for j in range(first[b], stops[b])
    }
    tiles = [
        sum(-(-(high - low) // TILE) for _, low, high in pieces[a:b]) for a, b in zip(begins, begins[1:])
    ]
    assert len(tiles) == parts and begins[-1] == len(pieces) and max(tiles) - min(tiles) <= 1


def test_power_of_two():
    x = np.concatenate([np.linspace(-126, 0, 200_001), -np.logspace(-30, 0, 1000)]).astype(np.float32)
    got = np.array([cpu_attention.power_of_two(v) for v in x], np.float64)
    assert np.abs(got / np.exp2(x.astype(np.float64)) - 1).max() < 2.5e-7
    assert 0 < cpu_attention.power_of_two(np.float32(-np.inf)) < 2e-38
    assert np.isnan(cpu_attention.power_of_two(np.float32(np.nan)))


def test_two_callers_at_once(threads):
    threads(2)
    case = make([3000, 2000], (9, 3), 64)
    want, wrong = case.run(decode_on_cpu)[0], []

    def caller():
        for _ in range(20):
            if not torch.equal(case.run(decode_on_cpu)[0], want):
                wrong.append(1)

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def test_torch_keeps_its_number_of_threads():
    """The pool of OpenMP is both's; starting Numba's threads sets it, once in a process."""
    code = (
        "import torch; from companion.kernels import decode_on_cpu; torch.set_num_threads(1); "
        "q, k = torch.ones(1, 2, 8), torch.ones(1, 9, 1, 8); n = torch.tensor([9], dtype=torch.int32); "
        "decode_on_cpu(q, k, k, n); decode_on_cpu(q, k, k, n); print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_numba_keeps_its_number_of_threads(threads):
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    for torchs, numbas in ((1, most), (most, 1)):
        threads(torchs)
        numba.set_num_threads(numbas)
        with cpu_threads.threads() as n:
            assert n == numba.get_num_threads() == min(torchs, most)
        assert numba.get_num_threads() == numbas
    numba.set_num_threads(most)


@pytest.mark.parametrize("change, message", [
    ({"q": torch.randn(2, 1, 4, 64)}, "q has shape"),
    ({"q": torch.randn(2, 4, 32)}, "k_cache has shape"),
    ({"q": torch.randn(2, 3, 64)}, "q"),
    ({"q": torch.randn(2, 4, 64, dtype=torch.float64)}, "q"),
    ({"cache_seqlens": torch.tensor([5, 99], dtype=torch.int32)}, "cache_seqlens: lengths"),
    ({"cache_seqlens": torch.tensor([5, -1], dtype=torch.int32)}, "cache_seqlens: lengths"),
    ({"block_table": torch.full((2, 3), ABSURD, dtype=torch.int32)}, "block_table: row 0"),
    ({"block_table": torch.full((2, 3), -1, dtype=torch.int32)}, "block_table: row 0"),
    ({"softcap": float("nan")}, "softcap"),
    ({"window_size": (3, 4)}, "window_size"),
    ({"sinks": torch.zeros(3)}, "sinks has shape"),
])  # fmt: skip
def test_bad_input(change, message):
    given = {
        "q": torch.randn(2, 4, 64),
        "k_cache": torch.randn(2, 9, 2, 64),
        "v_cache": torch.randn(2, 9, 2, 64),
        "cache_seqlens": torch.tensor([5, 9], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        plain(**{**given, **change})


def test_half_precision_is_refused_by_name():
    half = torch.randn(1, 4, 64, dtype=torch.float16), *torch.randn(2, 1, 9, 2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="float32"):
        plain(*half, torch.tensor([9], dtype=torch.int32))


SCRIPT = [(70, [70, 9]), (1, None), (1, [1, 0]), (3, None), (1, None)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_caches_decode_here(calls, kind, window, options):
    layers = {} if window is None else {"window": window, "layer_types": ("sliding",)}
    model = spec(**layers)
    options = dict(options)
    if options.pop("sinks", None):
        options["sinks"] = torch.linspace(-2, 3, model.heads)
    caches = [make_cache(kind, model, batch=2, max_tokens=96) for _ in "ab"]
    g = torch.Generator().manual_seed(0)
    for S, counts in SCRIPT:
        q = torch.randn(2, model.heads, S, model.head_dim, generator=g)
        k, v = torch.randn(2, 2, model.kv_heads, S, model.head_dim, generator=g)
        results = []
        for cache, how in zip(caches, ("never", "compiled")):
            with use(how):
                cache.append(0, k, v, lengths=counts)
                found = cache.attend(0, q, **options)
                results.append(found if isinstance(found, tuple) else (found,))
        for b, n in enumerate(counts or [S, S]):
            for ours, theirs in zip(*results):
                torch.testing.assert_close(ours[b, :, :n], theirs[b, :, :n], rtol=1e-5, atol=1e-6)
    # One token each: twice. Three tokens, and a row without a new one, are torch's.
    assert len(calls) == 2


def test_what_torch_keeps(calls):
    """Gradients, other dtypes, and what was not asked for."""
    model = spec()
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 1, 32)

    def attend(dtype=torch.float32, how="compiled", gradient=False):
        cache = make_cache("contiguous", model, max_tokens=8, dtype=dtype)
        cache.append(0, k.to(dtype), k.to(dtype))
        with use(how):
            return cache.attend(0, q.to(dtype).requires_grad_(gradient))

    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        attend(dtype)
    attend(how="never")
    attend(how="auto")
    assert attend(gradient=True).requires_grad and not calls
    attend()
    assert len(calls) == 1


def test_small_steps_stay_with_torch(monkeypatch):
    monkeypatch.setattr(cpu, "LEAST_BYTES", 2_000_000)
    q, store = torch.randn(1, 4, 1, 32), torch.randn(1, 2, 5000, 32)
    with use("compiled"):
        for stops, window, paged, there in (
            ([3906], None, False, False),
            ([3907], None, False, True),
            ([5000], 3000, False, False),
            ([1], None, True, True),  # torch would gather its page
        ):
            pages = {"table": torch.zeros(1, 1, dtype=torch.int32)} if paged else {}
            step = Step([n - 1 for n in stops], stops, q.device, **pages)
            assert choose(q.device, q.dtype).fits(q, store, store, step, window) is there


def test_without_numba_it_is_refused_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    caches = cpu_threads.numba, mode._numba_fails
    for cache in caches:
        cache.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"choice='compiled'.*what-a-token-costs\[cpu\]"):
            use("compiled")
        assert mode.choice() == "auto"
        monkeypatch.setenv(mode.USE_VARIABLE, "compiled")
        with pytest.raises(ImportError, match=f"{mode.USE_VARIABLE}='compiled'"):
            mode.choice()
        q, k = torch.randn(1, 4, 32), torch.randn(1, 1, 2, 32)
        with pytest.raises(ImportError, match=r"what-a-token-costs\[cpu\]"):
            decode_on_cpu(q, k, k, torch.ones(1, dtype=torch.int32))
    finally:
        for cache in caches:
            cache.cache_clear()


def test_loops_on_disk_are_those_of_these_files(tmp_path):
    """Numba would go on with a caller whose callee, in another file, has changed."""
    folder = Path(cpu_numba.__file__).parent
    for room in folder.glob("*.py"):
        shutil.copy(room, tmp_path)
    assert cpu_numba.digest(tmp_path) == cpu_numba.DIGEST
    for name in ("attention.py", "loops.py"):
        before = cpu_numba.digest(tmp_path)
        (tmp_path / name).write_text("# changed")
        assert cpu_numba.digest(tmp_path) != before
    for loop in (cpu_attention.decode, cpu_loops.linear, cpu_loops.gated, cpu_step.step):
        assert loop.py_func.__qualname__.endswith(cpu_numba.DIGEST)
