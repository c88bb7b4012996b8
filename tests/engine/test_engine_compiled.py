"""The engine where decode steps go through all layers by one compiled call: the same completions."""

import itertools

import pytest
import torch
from engine_models import OPTIONS, PROMPTS, alone, tiny_decoder

from companion.engine import Engine, Request
from companion.generate import Sampler
from companion.kernels import use


@pytest.mark.parametrize("ways", [["compiled"], ["compiled", "auto"]], ids=["always", "in turns"])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("windowed", [False, True])
@torch.inference_mode()
def test_the_same_completions(taken, windowed, seed, ways):
    """Steps of decodes alone are compiled, mixed ones not: each reads what the other wrote, amid NaN.

    In turns with torch, which gathers whole blocks and so reads what lies behind a row's last token.
    """
    model = tiny_decoder(window=5 if windowed else None, dtype=torch.float32)
    engine = Engine(model, 30, 4, max_tokens_per_step=9)
    for store in (*engine.storage.k, *engine.storage.v):
        store.fill_(float("nan"))
    expected = [alone(p, 7, seed=seed, windowed=windowed) for p in PROMPTS]
    for prompt in PROMPTS:
        options = {} if seed is None else {"sampler": Sampler(**OPTIONS, seed=seed)}
        engine.add(Request(prompt, 7, stop_ids=(), **options))
    for how in itertools.cycle(ways):
        with use(how):
            engine.step()
        if not engine.unfinished:
            break
    done = engine.run()
    for completion, want in zip(done, expected, strict=True):
        assert completion.tokens == want.tokens
        assert completion.logprobs == pytest.approx(want.logprobs, rel=0, abs=1e-4)
    steps = len(engine.history)
    assert 0 < len(taken) < steps and max(taken) > 1
