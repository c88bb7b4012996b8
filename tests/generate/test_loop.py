"""The loop around the model: what it yields, when it stops, what it refuses, and that rows do not mix."""

import jaxtyping
import pytest
import torch

from companion.caches import make_cache
from companion.generate import Generation, Sampler, generate

V = 23
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9, 7], [9, 3, 2]]


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def cache_for(decoder, batch=1, max_tokens=30):
    return make_cache("contiguous", decoder.spec, batch=batch, max_tokens=max_tokens, dtype=decoder.dtype)


def samplers():
    return {"greedy": {}, "seeded": {"sampler": Sampler(temperature=1.5, top_p=0.95, seed=11)}}


# --- one answer, however it is computed -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("window", [None, 3])
def test_gen_10_no_cache_cache_and_every_chunk(make_decoder, kind, window):
    decoder = make_decoder(window=window)
    prompt = PROMPTS[0]
    want = generate(decoder, prompt, cache=None, max_new_tokens=12, **samplers()[kind])
    assert len(want.tokens) == 12 and len(set(want.tokens)) > 2
    for chunk in (None, *range(1, len(prompt) + 2)):
        got = generate(decoder, prompt, max_new_tokens=12, prefill_chunk=chunk, **samplers()[kind])
        assert got.tokens == want.tokens
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-10)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("cache, chunk", [("contiguous", None), ("contiguous", 2), (None, None)])
def test_a_row_gets_what_it_gets_alone(decoder, kind, cache, chunk):
    """Prompts of 8, 1, 5 and 3 tokens together; with seeds, row b draws with seed + b."""
    sampler = samplers()[kind]
    together = generate(decoder, PROMPTS, cache=cache, prefill_chunk=chunk, max_new_tokens=9, **sampler)
    for row, (prompt, got) in enumerate(zip(PROMPTS, together)):
        alone = {"sampler": Sampler(temperature=1.5, top_p=0.95, seed=11 + row)} if sampler else {}
        want = generate(decoder, prompt, max_new_tokens=9, **alone)
        assert got.tokens == want.tokens and got.prompt_tokens == len(prompt)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-10)


def test_rows_that_end_early_do_not_disturb_the_others(decoder):
    """Each row may stop at another step: the rest go on over the same cache as if alone."""
    free = generate(decoder, PROMPTS, max_new_tokens=10, stop_ids=())
    counts = {t: sum(t in g.tokens for g in free) for t in range(V)}
    stops = [t for t, n in counts.items() if 0 < n < 4][:3]
    assert stops
    for cache in ("contiguous", None):
        out = generate(decoder, PROMPTS, cache=cache, max_new_tokens=10, stop_ids=stops)
        for got, full in zip(out, free):
            cut = next((i + 1 for i, t in enumerate(full.tokens) if t in stops), 10)
            assert got.tokens == full.tokens[:cut]
            assert got.logprobs == pytest.approx(full.logprobs[:cut], abs=1e-10)
            assert got.finish_reason == ("stop" if full.tokens[cut - 1] in stops else "length")
            assert len(got.itl_s) == cut - 1
    assert len({len(g.tokens) for g in out}) > 1


def test_log_probabilities_are_the_models_own(decoder):
    """Temperature and cut-offs choose; they do not change what the model thought."""
    for sampler in (None, Sampler(temperature=2.0, top_k=4, seed=0)):
        options = {"sampler": sampler} if sampler else {}
        g = generate(decoder, PROMPTS[0], max_new_tokens=8, **options)
        ids = torch.tensor([PROMPTS[0] + g.tokens])
        own = decoder(ids).log_softmax(-1)[0, len(PROMPTS[0]) - 1 : -1]
        want = own.gather(1, torch.tensor(g.tokens)[:, None])[:, 0].tolist()
        assert g.logprobs == pytest.approx(want, abs=1e-10)
        if sampler is None:
            assert g.tokens == own.argmax(-1).tolist()


def test_times_are_there(decoder):
    g = generate(decoder, PROMPTS[0], max_new_tokens=5)
    assert g.ttft_s > 0 and len(g.itl_s) == 4 and all(t > 0 for t in g.itl_s)
    assert generate(decoder, PROMPTS[0], max_new_tokens=1).itl_s == []
    assert isinstance(g, Generation) and g.text is None and g.finish_reason == "length"


# --- stopping -------------------------------------------------------------------------------------


def test_gen_06_rows_stop_each_for_itself(scripted):
    model = scripted([[7, 0, 9, 9, 9], [7, 8, 9, 0, 9], [7, 1, 9, 9, 9]], eos=(0, 1))
    a, b, c = generate(model, [[2], [2, 2], [2]], cache=None, max_new_tokens=10)
    assert (a.tokens, b.tokens, c.tokens) == ([7, 0], [7, 8, 9, 0], [7, 1])
    assert [len(g.logprobs) for g in (a, b, c)] == [2, 4, 2]
    assert {g.finish_reason for g in (a, b, c)} == {"stop"}
    assert [len(g.itl_s) for g in (a, b, c)] == [1, 3, 1]
    assert model.calls == 4  # the loop ends with its last row


def test_finished_rows_write_nothing(scripted):
    model = scripted([[0], [7, 7, 0]], eos=(0,))
    cache = cache_for(model, batch=2)
    generate(model, [[2], [3]], cache=cache, max_new_tokens=10)
    assert [lengths for _, lengths in model.fed] == [[1, 1], [0, 1], [0, 1]]


def test_whose_stop_ids_count(scripted):
    def run(**options):
        return generate(scripted([[5, 0, 6, 1]], eos=(0,)), [2], cache=None, max_new_tokens=6, **options)

    assert run().tokens == [5, 0]
    assert run(stop_ids=[1]).tokens == [5, 0, 6, 1]
    assert run(stop_ids=[5, 1]).tokens == [5]
    never = run(stop_ids=())
    assert never.tokens == [5, 0, 6, 1, 1, 1] and never.finish_reason == "length"


def test_a_stop_id_on_the_last_allowed_token_is_a_stop(scripted):
    g = generate(scripted([[5, 0]], eos=(0,)), [2], cache=None, max_new_tokens=2)
    assert (g.tokens, g.finish_reason) == ([5, 0], "stop")


class Letters:
    """Token 5 is "a", 6 "b", ...; tokens 20 and 21 are the halves of an é; 0 decodes to nothing."""

    def decode(self, ids):
        out = b""
        for i in ids:
            out += {20: b"\xc3", 21: b"\xa9", 22: b"c\xc3", 0: b""}.get(i, bytes([ord("a") + i - 5]))
        return out.decode("utf-8", "replace")


def test_text_pieces_and_stop_strings(scripted):
    told = []
    out = generate(
        scripted([[5, 20, 21, 6, 0], [7, 5, 6, 7, 8], [5, 5, 20, 8, 8]], eos=(0,)),
        [[2], [2], [2]],
        cache=None,
        max_new_tokens=5,
        tokenizer=Letters(),
        stop=["bc", "bd"],
        on_text=lambda row, piece: told.append((row, piece)),
    )
    assert [g.text for g in out] == ["aéb", "ca", "aa\ufffddd"]
    assert [g.finish_reason for g in out] == ["stop", "stop", "length"]
    assert [len(g.tokens) for g in out] == [5, 4, 5]  # tokens of the stop string included
    for row, g in enumerate(out):
        assert "".join(p for r, p in told if r == row) == g.text
    assert all(piece for _, piece in told)


def test_a_stop_string_found_at_the_very_end_is_a_stop(scripted):
    for script, text in (([5, 6, 7], "a"), ([5, 6, 22], "a")):
        g = generate(scripted([script]), [2], cache=None, max_new_tokens=3, tokenizer=Letters(), stop=["bc"])
        assert (g.text, g.finish_reason, g.tokens) == (text, "stop", script)


def test_text_that_only_looked_like_a_stop_string_is_given_out(scripted):
    g = generate(scripted([[5, 6]]), [2], cache=None, max_new_tokens=2, tokenizer=Letters(), stop=["bc"])
    assert (g.text, g.finish_reason) == ("ab", "length")


def test_text_of_the_real_model(smollm2):
    decoder, tokenizer = smollm2
    pieces = []
    g = generate(
        decoder,
        tokenizer.encode("One, two, three, four,"),
        max_new_tokens=12,
        tokenizer=tokenizer,
        stop=["seven"],
        on_text=lambda row, piece: pieces.append(piece),
    )
    assert g.text == "".join(pieces) == " five, six, " and g.finish_reason == "stop"


# --- a cache that is given ------------------------------------------------------------------------


def test_a_filled_cache_is_continued(decoder):
    whole = generate(decoder, PROMPTS[0], cache=None, max_new_tokens=9)
    cache = cache_for(decoder)
    with torch.inference_mode():
        decoder(torch.tensor([PROMPTS[0][:5]]), cache)
    first = generate(decoder, PROMPTS[0][5:], cache=cache, max_new_tokens=4)
    assert first.tokens == whole.tokens[:4] and first.prompt_tokens == 3
    # The last token was returned but not read yet: it is the next prompt.
    assert cache.row_lengths() == [8 + 3]
    second = generate(decoder, first.tokens[-1:], cache=cache, max_new_tokens=5)
    assert second.tokens == whole.tokens[4:9]
    assert second.logprobs == pytest.approx(whole.logprobs[4:9], abs=1e-10)


def test_a_filled_ragged_cache_is_continued(decoder):
    cache = cache_for(decoder, batch=2)
    with torch.inference_mode():
        decoder(torch.tensor([[3, 1, 4, 1], [5, 0, 0, 0]]), cache, lengths=[4, 1])
    out = generate(decoder, [[1, 5], [7, 7, 7]], cache=cache, max_new_tokens=6)
    for g, prompt in zip(out, ([3, 1, 4, 1, 1, 5], [5, 7, 7, 7])):
        assert g.tokens == generate(decoder, prompt, cache=None, max_new_tokens=6).tokens
    assert cache.row_lengths() == [6 + 5, 4 + 5]


def test_a_cache_of_exactly_the_room_needed(decoder):
    want = generate(decoder, PROMPTS[0], max_new_tokens=5).tokens
    cache = cache_for(decoder, max_tokens=8 + 4)
    assert generate(decoder, PROMPTS[0], cache=cache, max_new_tokens=5).tokens == want
    assert cache.row_lengths() == [12]


def test_a_cache_with_too_little_room_is_refused_before_any_work(decoder):
    cache = cache_for(decoder, max_tokens=8 + 3)
    with pytest.raises(ValueError, match=r"cache has max_tokens=11.*max_new_tokens=5"):
        generate(decoder, PROMPTS[0], cache=cache, max_new_tokens=5)
    assert cache.nbytes_used == 0
