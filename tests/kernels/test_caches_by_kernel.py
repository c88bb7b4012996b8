"""Caches and experts through the kernels, against the same steps through torch, in the interpreter.

Every comparison also makes sure that a kernel ran (or did not): a test that falls back to torch unnoticed
would compare torch with itself.
"""

import subprocess
import sys

import pytest
import torch

import companion.kernels.append
from companion.attend import choose
from companion.attend.by_kernels import MOST_QUERIES, kernel_format
from companion.caches import make_cache
from companion.cost import MLASpec, ModelSpec
from companion.kernels import mode, use
from companion.moe import grouped_experts
from companion.quantize import codec

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of two rounded results
OPTIONS = [{}, {"softcap": 20.0, "softmax_scale": 0.2}, {"sinks": True, "return_lse": True}]


def spec(**changes):
    """A model of one layer with 4 query heads over 2."""
    shape = dict(layers=1, d_model=64, heads=4, kv_heads=2, head_dim=32, ffn=64, vocab=50, tied=True)
    extra = dict(max_context=4096, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, window=None)
    return ModelSpec(name="tiny", architecture="llama", **{**shape, **extra, **changes})


class Calls(dict):
    """How often each kernel was called; `last`, with what the last one was."""

    last: tuple


@pytest.fixture
def calls(monkeypatch):
    seen = Calls()
    for name in ("decode_attention", "append", "fused_moe"):
        home = companion.kernels.append if name == "append" else companion.kernels
        real = getattr(home, name)

        def counted(*args, _name=name, _real=real, **kwargs):
            seen[_name], seen.last = seen.get(_name, 0) + 1, (args, kwargs)
            return _real(*args, **kwargs)

        monkeypatch.setattr(home, name, counted)
    return seen


def close(got, want, dtype):
    """Relative Frobenius error; -inf only where it has to be."""
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want))):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = a.double(), b.double()
        assert torch.equal(a.isfinite(), b.isfinite())
        a, b = a[a.isfinite()], b[b.isfinite()]
        assert (a - b).norm() <= TOLERANCE[dtype] * b.norm() + 1e-12


def steps(kind, model, script, *, dtype=torch.float32, batch=2, options=None, **of_cache):
    """Run a script on one cache by torch and on another by kernels; each attend is compared.

    script: (S, counts) brings S tokens, of which counts[b] are real; ("crop", n) crops.
    """
    caches = [make_cache(kind, model, batch=batch, max_tokens=96, dtype=dtype, **of_cache) for _ in "ab"]
    generator = torch.Generator().manual_seed(0)
    options = dict(options or {})
    if options.pop("sinks", None):
        options["sinks"] = torch.linspace(-2, 3, model.heads)

    def rand(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    mla = model.mla
    width = mla.width if mla else model.head_dim
    for S, counts in script:
        if S == "crop":
            for cache in caches:
                cache.crop(counts)
            q = rand(batch, model.heads, 1, width)
            real = [1] * batch
        else:
            k = rand(batch, 1 if mla else model.kv_heads, S, width)
            v = None if mla else rand(batch, model.kv_heads, S, model.v_head_dim)
            q, real = rand(batch, model.heads, S, width), counts or [S] * batch
        results = []
        for cache, how in zip(caches, ("never", "always")):
            with use(how):
                if S != "crop":
                    cache.append(0, k, v, lengths=counts)
                results.append(cache.attend(0, q, **options))
        for b, n in enumerate(real):  # results at padded positions mean nothing
            parts = [tuple(x[b, :, :n] for x in (r if isinstance(r, tuple) else (r,))) for r in results]
            close(parts[1], parts[0], dtype)
    return caches


RAGGED = [(20, [20, 9]), (1, None), (1, [1, 0]), (3, None), (4, [1, 4]), (17, None), (1, None)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_contiguous_and_paged(calls, kind, window, options):
    layers = {} if window is None else {"window": window, "layer_types": ("sliding",)}
    steps(kind, spec(**layers), RAGGED, options=options, **({"block_size": 4} if kind == "paged" else {}))
    assert calls["decode_attention"] == sum(S <= MOST_QUERIES for S, _ in RAGGED)
    assert calls["append"] >= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "quantized"])
def test_sixteen_bits(calls, kind, dtype):
    steps(kind, spec(), RAGGED, dtype=dtype)
    assert calls["decode_attention"] >= 3


@pytest.mark.parametrize("kind", ["contiguous", "paged", "quantized"])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(3, 3, 80), (14, 2, 64), (5, 1, 16)])
def test_heads(calls, kind, heads, kv_heads, head_dim):
    steps(kind, spec(heads=heads, kv_heads=kv_heads, head_dim=head_dim), RAGGED[:4])
    assert calls["decode_attention"] >= 3


def test_after_a_crop_and_in_a_fork(calls):
    caches = steps("paged", spec(), [*RAGGED, ("crop", [6, 30]), (1, None), (2, None)], block_size=4)
    fork = caches[1].fork()
    k = torch.randn(2, 2, 1, 32)
    with use("always"):
        fork.append(0, k, k)
        out = fork.attend(0, torch.randn(2, 4, 1, 32))
    assert torch.equal(caches[0].storage.k_cache(0), caches[1].storage.k_cache(0)) is False  # fork wrote
    assert out.isfinite().all() and caches[1].row_lengths() == caches[0].row_lengths()


CODECS = {
    "int8": "int8",
    "int8 with a zero": codec("int8", symmetric=False, scale_dtype=torch.float32),
    "int4": "int4",
    "int4 symmetric": codec("int4", symmetric=True),
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2, one scale": codec("fp8_e5m2", tensor_scale=0.25),
    "fp8_e4m3 per token": codec("fp8_e4m3", group=32),
    "kivi4": "kivi4",
    "kivi2": "kivi2",
}


@pytest.mark.parametrize("kind", ["quantized", "paged"])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("residual", [0, 5])
def test_quantized(calls, kind, name, residual):
    script = [(40, [40, 33]), (1, None), (3, None), (30, None), (1, [0, 1]), (1, None)]
    more = {"block_size": 32} if kind == "paged" else {}
    steps(kind, spec(), script, codec=CODECS[name], residual=residual, **more)
    assert calls["decode_attention"] == 4  # 40 and 30 tokens are prompts; the rest decode


@pytest.mark.parametrize("options", OPTIONS[1:])
@pytest.mark.parametrize("kind", ["quantized", "paged"])
def test_quantized_layers_with_a_window(calls, kind, options):
    model = spec(window=20, layer_types=("sliding",))
    more = {"block_size": 32} if kind == "paged" else {}
    steps(kind, model, [(40, [40, 33]), (1, None), (2, None), ("crop", [32, 32])], codec="kivi4",
          options=options, **more)  # fmt: skip
    assert calls["decode_attention"] == 3


def test_codecs_that_no_kernel_reads_stay_with_torch(calls):
    for name in ("mxfp4", codec("int4", group=16), ("int8", "int4"), ("fp16", "fp16"), "int2"):
        steps("quantized", spec(), [(9, None), (1, None)], codec=name)
    assert not calls
    assert kernel_format(codec("int4", group=8, group_dim=-2), codec("int4", group=8), (32, 32)) is None
    half = codec("fp8_e4m3"), codec("fp8_e4m3", tensor_scale=2.0)
    assert kernel_format(*half, (32, 32)) is None


@pytest.mark.parametrize("sink_tokens", [0, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_ring(calls, sink_tokens, options):
    model = spec(window=6, layer_types=("sliding",))
    script = [(3, [3, 1]), (1, None), (1, [1, 0]), (5, None), *[(1, None)] * 9, ("crop", [17, 15]), (1, None)]
    steps("sliding", model, script, options=options, step=5, sink_tokens=sink_tokens)
    assert calls["decode_attention"] == sum(S in (1, "crop") for S, _ in script)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_latent_cache(calls, options):
    mla = MLASpec(kv_rank=32, nope_dim=16, rope_dim=16, v_dim=16)
    model = spec(heads=4, kv_heads=4, head_dim=32, v_head_dim=16, mla=mla)
    steps("latent", model, RAGGED, options=options)
    (_, _, values, _), kwargs = calls.last
    assert values is None and kwargs["head_dim_v"] == 32  # the latent is read once
    assert calls["decode_attention"] == sum(S <= MOST_QUERIES for S, _ in RAGGED)


def test_an_empty_cache_and_a_row_without_a_token(calls):
    cache = make_cache("contiguous", spec(), batch=2, max_tokens=8)
    with use("always"):
        out, lse = cache.attend(0, torch.randn(2, 4, 1, 32), return_lse=True)
        assert (out == 0).all() and (lse == -torch.inf).all()
        cache.append(0, torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32), lengths=[3, 0])
        out, lse = cache.attend(0, torch.randn(2, 4, 1, 32), return_lse=True)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all() and lse[0].isfinite().all()


def test_channels_that_lie_apart(calls):
    cache = make_cache("paged", spec(), batch=2, max_tokens=8)
    k, q = torch.randn(2, 2, 32, 3).transpose(2, 3), torch.randn(2, 4, 32, 3).transpose(2, 3)
    with use("always"):
        cache.append(0, k, k)
        got = cache.attend(0, q)
    assert torch.equal(cache.read(0)[0], k) and calls == {"append": 1, "decode_attention": 1}
    with use("never"):
        close(got, cache.attend(0, q), torch.float32)


@pytest.mark.parametrize(
    "kind, options", [("contiguous", {}), ("paged", {}), ("quantized", {"codec": "int8"})]
)
def test_the_real_model_says_the_same(smollm2, calls, kind, options):
    """Three tokens of SmolLM2, every layer of every step through the kernels."""
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    said = []
    for how in ("never", "always"):
        cache = make_cache(kind, model.spec, max_tokens=32, **options)
        with use(how), torch.inference_mode():
            logits = [model(ids, cache, logits="last")]
            for _ in range(2):
                logits.append(model(logits[-1].argmax(-1).view(1, 1), cache, logits="last"))
        said.append(torch.cat([x.flatten()[None] for x in logits]))
    assert torch.equal(said[0].argmax(-1), said[1].argmax(-1))
    assert (said[1] - said[0]).norm() <= 2e-5 * said[0].norm()
    assert calls["decode_attention"] >= 2 * model.spec.layers


# --- experts -----------------------------------------------------------------------------------------------


def moe(T=11, E=5, k=2, K=32, N=48, dtype=torch.float32, bias=False):
    g = torch.Generator().manual_seed(1)
    x, w1, w2 = (torch.randn(*s, generator=g).to(dtype) / 3 for s in ((T, K), (E, 2 * N, K), (E, K, N)))
    ids = (
        torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(T)]) if T else torch.zeros(0, k).long()
    )
    biases = {
        "b1": torch.randn(E, 2 * N, generator=g).to(dtype),
        "b2": torch.randn(E, K, generator=g).to(dtype),
    }
    return (x, w1, w2, ids, torch.rand(T, k, generator=g)), biases if bias else {}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("limit, bias", [(None, False), (None, True), (2.0, True)])
def test_experts(calls, dtype, limit, bias):
    args, biases = moe(dtype=dtype, bias=bias)
    args[3][4], args[3][7, 1] = -1, -1
    with use("never"):
        want = grouped_experts(*args, **biases, limit=limit)
    assert not calls
    with use("always"):
        close(grouped_experts(*args, **biases, limit=limit), want, dtype)
    assert calls == {"fused_moe": 1}


def test_experts_that_stay_with_torch(calls):
    args, _ = moe()
    x, w1, w2, ids, weights = args
    with use("always"):
        want = grouped_experts(*args, capacity=3)
        grouped_experts(x.double(), w1.double(), w2.double(), ids, weights.double())
        turned = w1.transpose(1, 2).contiguous().transpose(1, 2)
        by_torch = grouped_experts(x, turned, w2, ids, weights)
        close(grouped_experts(*args), by_torch, torch.float32)
        assert calls == {"fused_moe": 1}  # the last of these
        grouped_experts(*moe(T=0)[0])
        w1.requires_grad_()
        assert grouped_experts(*args).requires_grad
        with torch.no_grad():
            grouped_experts(*args)
    assert calls == {"fused_moe": 2} and want.isfinite().all()


# --- the policy --------------------------------------------------------------------------------------------


def taken(first, *more):
    """Whether the backend of the moment has a kernel for these."""
    found = choose(first.device, first.dtype)
    return found.name == "triton" and found.takes(first, *more)


def test_the_default_on_a_cpu_is_torch(calls, monkeypatch):
    monkeypatch.delenv(mode.USE_VARIABLE, raising=False)
    assert mode.choice() == "auto" and not taken(torch.zeros(2))
    grouped_experts(*moe()[0])
    assert not calls


def test_the_innermost_choice_holds_and_is_taken_back(monkeypatch):
    monkeypatch.setenv(mode.USE_VARIABLE, "never")
    assert mode.choice() == "never"
    with use("always"):
        assert taken(torch.zeros(2))
        with pytest.raises(RuntimeError), use("never"):
            assert mode.choice() == "never" and not taken(torch.zeros(2))
            raise RuntimeError
        assert mode.choice() == "always"
    assert mode.choice() == "never"
    monkeypatch.setenv(mode.USE_VARIABLE, "")
    assert mode.choice() == "auto"


def test_an_unknown_choice_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="choice='off'; accepted: 'auto', 'compiled', 'always', 'never'"):
        use("off")
    monkeypatch.setenv(mode.USE_VARIABLE, "1")
    with pytest.raises(ValueError, match="COMPANION_KERNELS='1'; accepted"):
        taken(torch.zeros(2))


def test_tensors_that_no_kernel_takes():
    with use("always"):
        assert taken(torch.zeros(2), None, torch.zeros(2, dtype=torch.uint8))
        assert taken(torch.zeros(2).to(torch.float8_e4m3fn))
        assert not taken(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
        assert not taken(torch.zeros(2), torch.zeros(2, device="meta"))
        assert not taken(torch.zeros(2, requires_grad=True))
        with torch.no_grad():
            assert taken(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize(
    "capability, dtype, runs",
    [
        ((7, 0), torch.float16, False),
        ((7, 5), torch.float16, True),
        ((7, 5), torch.bfloat16, False),
        ((7, 5), torch.float32, True),
        ((8, 0), torch.bfloat16, True),
        ((9, 0), torch.float16, True),
        ((12, 0), torch.bfloat16, True),
    ],
)
def test_capabilities(monkeypatch, capability, dtype, runs):
    assert not mode.runs_on(capability, {dtype})  # this process interprets
    monkeypatch.setattr(mode, "interpreted", lambda: False)
    assert mode.runs_on(capability, {dtype, torch.int32}) is runs


def run(code, **environment):
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "", **environment})  # fmt: skip
    return done.stdout.strip(), done.stderr.strip().splitlines()[-1:]


STEP = """
import sys, torch
from companion.caches import make_cache
from companion.cost import models
from companion.moe import grouped_experts
import companion.kernels.append
from companion.kernels import decode_attention, fused_moe, grouped_gemm, use
from companion.kernels.append import append
from companion.kernels.copy import copy
cache = make_cache("paged", models["smollm2-135m"], max_tokens=40)
quantized = make_cache("quantized", models["smollm2-135m"], max_tokens=40, codec="int4")
x = torch.randn(1, 3, 20, 64)
for c in (cache, quantized):
    c.append(0, x, x)
    c.attend(0, torch.randn(1, 9, 1, 64))
ids = torch.tensor([[0], [1]])
grouped_experts(torch.ones(2, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3), ids, torch.ones(2, 1))
print("triton" in sys.modules)
"""


def test_a_cpu_user_never_imports_triton():
    assert run(STEP) == ("False", [])
    assert run("import triton, sys; print('triton' in sys.modules)")[0] == "True"  # it would be seen


def test_always_without_the_interpreter_says_how():
    out, error = run(STEP, COMPANION_KERNELS="always")
    assert out == "" and "RuntimeError: a kernel on CPU tensors needs Triton's interpreter" in error[0]
    assert run(STEP, COMPANION_KERNELS="always", TRITON_INTERPRET="1")[0] == "True"
