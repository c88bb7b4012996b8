"""An engine's steps through the paged kernel, against the same steps through torch, in the interpreter."""

import pytest
import torch

import companion.kernels.append
from companion.caches.paged import PagedStorage
from companion.cost import ModelSpec
from companion.engine import Engine, Request
from companion.engine.forward import PackedStep, Span
from companion.kernels import use

WIDTHS = dict(d_model=64, heads=4, kv_heads=2, head_dim=32, ffn=64, vocab=50)
SPANS = [(0, 1), (5, 6), (16, 17), (30, 31), (0, 9), (11, 17)]  # four decodes, two chunks of prompts


@pytest.fixture
def calls(monkeypatch):
    seen = {"append": 0, "paged": 0}
    for name in ("append", "decode_attention"):
        home = companion.kernels.append if name == "append" else companion.kernels
        real = getattr(home, name)

        def counted(*args, _name=name, _real=real, **kwargs):
            seen["append"] += _name == "append"
            seen["paged"] += kwargs.get("block_table") is not None
            return _real(*args, **kwargs)

        monkeypatch.setattr(home, name, counted)
    return seen


def spec(window):
    kind = "mistral" if window else "llama"
    return ModelSpec(
        name="tiny", architecture=kind, layers=1, **WIDTHS, max_context=64, window=window, tied=True
    )


def play(model, spans, options, poison):
    """Everything that the spans hold, written and read by steps; the last step's attention (T, Hq, 1, D)."""
    storage = PagedStorage(model, num_blocks=40, block_size=4)
    for store in (*storage.k, *storage.v):
        store.fill_(poison)  # what a block held before may be anything
    random = torch.Generator().manual_seed(7)
    tables = [
        storage.manager.allocate(range(100 * i, 100 * i + stop)).table for i, (_, stop) in enumerate(spans)
    ]
    before = [Span(t, 0, start) for t, (start, _) in zip(tables, spans) if start]
    for step in (sorted(before, key=lambda s: s.stop > 1), [Span(t, *s) for t, s in zip(tables, spans)]):
        n = sum(s.stop - s.start for s in step)
        q = torch.randn(n, model.heads, 1, model.head_dim, generator=random)
        k, v = (torch.randn(n, model.kv_heads, 1, model.head_dim, generator=random) for _ in "kv")
        packed = PackedStep(storage, step)
        packed.append(0, k, v)
        out = packed.attend(0, q, **options)
    return out


@pytest.mark.parametrize("poison", [0.0, float("nan")])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0, "softmax_scale": 0.3}, {"sinks": torch.ones(4)}])
def test_a_step_is_the_same(calls, window, options, poison):
    model = spec(window)
    with use("never"):
        want = play(model, SPANS, options, poison)
    assert calls == {"append": 0, "paged": 0}
    with use("always"):
        got = play(model, SPANS, options, poison)
    assert calls["append"] == 2 and calls["paged"] >= 1
    assert got.isfinite().all() and (got - want).norm() <= 5e-6 * want.norm()


def test_one_row_whose_blocks_are_neighbours(calls):
    model = spec(None)
    with use("always"):
        got = play(model, [(13, 14)], {}, float("nan"))
    assert calls["paged"] == 1
    torch.testing.assert_close(got, play(model, [(13, 14)], {}, 0.0), rtol=1e-5, atol=1e-6)


def test_the_real_model_says_the_same(smollm2, calls):
    model, tokenizer = smollm2
    prompts = [tokenizer.encode(t) for t in ("The capital of France is", "One, two, three,")]

    def run():
        engine = Engine(model, num_blocks=16, block_size=4)
        for prompt in prompts:
            engine.add(Request(prompt, max_new_tokens=3))
        return {done.id: list(done.tokens) for done in engine.run()}

    with use("never"):
        want = run()
    with use("always"):
        assert run() == want
    assert calls["paged"] >= 2 * model.spec.layers
