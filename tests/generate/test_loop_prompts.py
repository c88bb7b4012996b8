"""What `generate` refuses, before any work, and the forms in which a prompt may come."""

import jaxtyping
import numpy as np
import pytest
import torch

from companion.generate import Sampler, generate
from tests.generate.test_loop import PROMPTS, Letters, V, cache_for


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "prompt_ids must be at least one token"),
        ([[1, 2], []], {}, "prompt_ids must be at least one token"),
        (torch.zeros(0, dtype=torch.long), {}, "prompt_ids must be at least one token"),
        ([1, V], {}, "prompt_ids must .* 0 to 22, got 23"),
        ([-1], {}, "prompt_ids must .* got -1"),
        ([[1], [2, 99]], {}, "prompt_ids must .* got 99"),
        ([1.5], {}, "prompt_ids must .* got 1.5"),
        ("text", {}, "prompt_ids must be token ids.* got text"),
        (["some", "texts"], {}, "prompt_ids must be token ids.* got text"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must .* got 0"),
        ([1], {"max_new_tokens": -3}, "max_new_tokens must .* got -3"),
        ([1], {"max_new_tokens": True}, "max_new_tokens must .* got True"),
        ([1], {"max_new_tokens": 2.0}, "max_new_tokens must .* got 2.0"),
        ([1], {"prefill_chunk": 0}, "prefill_chunk must .* got 0"),
        ([1], {"prefill_chunk": 1.5}, "prefill_chunk must .* got 1.5"),
        ([1] * 40, {"max_new_tokens": 1}, "made for at most 40"),
        ([1] * 31, {"max_new_tokens": 10}, r"31 tokens plus max_new_tokens=10 is 41.*at most 40"),
        ([[1], [1] * 31], {"max_new_tokens": 10}, "at most 40"),
        ([1], {"max_new_tokens": 40}, "at most 40"),
        ([1], {"cache": "rotating"}, "cache|kind"),
        ([1], {"cache": "latent"}, "latent"),
        ([1], {"stop": ["x"]}, "tokenizer must .* got None"),
        ([1], {"on_text": print}, "tokenizer must .* got None"),
        ([1], {"stop": "word", "tokenizer": Letters()}, "stop must"),
        ([1], {"stop": [""], "tokenizer": Letters()}, "stop must"),
    ],
)
def test_refused_before_any_work(make_decoder, unchecked, monkeypatch, prompt, options, message):
    decoder = make_decoder()
    monkeypatch.setattr(type(decoder), "forward", lambda *a, **k: pytest.fail("the model was run"))
    with pytest.raises(ValueError, match=message):
        generate(decoder, prompt, **({"max_new_tokens": 3} | options))


def test_a_cache_that_does_not_fit_the_prompts(decoder):
    with pytest.raises(ValueError, match="cache must be of batch=1"):
        generate(decoder, [1], cache=cache_for(decoder, batch=2), max_new_tokens=2)
    held = cache_for(decoder, max_tokens=60)
    with torch.inference_mode():
        decoder(torch.ones(1, 30, dtype=torch.long), held)
    with pytest.raises(ValueError, match="prompt of 31 tokens plus max_new_tokens=10 is 41"):
        generate(decoder, [1], cache=held, max_new_tokens=10)
    assert held.row_lengths() == [30]


def test_the_limit_itself_is_allowed(decoder):
    assert len(generate(decoder, [1] * 30, max_new_tokens=10).tokens) == 10
    assert len(generate(decoder, [1] * 39, max_new_tokens=1, cache=None).tokens) == 1


def test_logits_that_are_no_numbers(make_decoder):
    for bad, what in ((float("nan"), "NaN"), (float("inf"), r"NaN|\+inf")):
        decoder = make_decoder()
        with torch.no_grad():
            decoder.norm.weight[0] = bad
        for cache in ("contiguous", None):
            for options in ({}, {"sampler": Sampler(seed=0)}):
                with pytest.raises(ValueError, match=f"logits of row 0 hold ({what})"):
                    generate(decoder, [1, 2], cache=cache, max_new_tokens=2, **options)


# --- forms of a prompt ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, lambda p: torch.tensor(p, dtype=torch.int32)])
def test_forms_of_one_prompt(decoder, form):
    assert (
        generate(decoder, form(PROMPTS[2]), max_new_tokens=3).tokens
        == generate(decoder, PROMPTS[2], max_new_tokens=3).tokens
    )


def test_forms_of_several_prompts(decoder):
    want = [g.tokens for g in generate(decoder, [[1, 2], [3, 4]], max_new_tokens=3)]
    for form in (
        torch.tensor([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        ((1, 2), (3, 4)),
    ):
        assert [g.tokens for g in generate(decoder, form, max_new_tokens=3)] == want
    assert [g.tokens for g in generate(decoder, [[1, 2]], max_new_tokens=3)] == want[:1]


def test_numpy_integers(decoder, unchecked):
    want = generate(decoder, [1, 2], max_new_tokens=3).tokens
    assert generate(decoder, list(np.array([1, 2])), max_new_tokens=3).tokens == want


def test_the_prompt_is_left_alone(decoder):
    prompts = [[1, 2], [3]]
    generate(decoder, prompts, max_new_tokens=3)
    assert prompts == [[1, 2], [3]]


def test_no_gradients_are_kept(decoder):
    assert not torch.is_inference_mode_enabled()
    seen = []
    generate(
        decoder, [1], max_new_tokens=2, sampler=lambda x: (seen.append(x.requires_grad), x.argmax(-1))[1]
    )
    assert seen == [False, False]
