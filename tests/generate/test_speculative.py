"""Speculation says what plain decoding says: every drafter, draft length, cache, ending, hostile drafts."""

import random

import jaxtyping
import pytest
import torch
from drafters import Knows, Repeats, Says, mixed, right, wrong
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from companion.caches import PagedStorage, make_cache
from companion.generate import (
    Adaptive,
    DecoderDraft,
    MTPDraft,
    MTPHead,
    NgramDraft,
    Sampler,
    Speculation,
    generate,
    greedy,
    speculate,
)
from companion.quantize import codec

V, NEW = 23, 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]  # 22 tokens
INT4 = codec("int4", group=16, group_dim=-2), codec("int4", group=4)
DTYPE = torch.float64
quick = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def unchecked(monkeypatch):
    """Shapes are checked in the other tests; checking them in every layer takes most of the time."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def head_for(decoder, make_decoder, seed=5):
    """A head of one random layer that shares embedding and output with the model."""
    body = make_decoder(seed=seed, layers=1)
    body.embedding, body.output = decoder.embedding, decoder.output
    g = torch.Generator().manual_seed(seed)
    enorm, hnorm = (1 + 0.1 * torch.randn(16, generator=g, dtype=DTYPE) for _ in range(2))
    project = 0.3 * torch.randn(16, 32, generator=g, dtype=DTYPE)
    return MTPHead(body, enorm=enorm, hnorm=hnorm, project=project)


def drafter(name, decoder, make_decoder, prompt, answer):
    make = {
        "right": lambda: right(prompt, answer, V),
        "wrong": lambda: wrong(prompt, answer, V),
        "mixed": lambda: mixed(prompt, answer, V),
        "repeats": Repeats,
        "nothing": lambda: Says([]),
        "ngram": lambda: NgramDraft(longest=3, shortest=1),
        "itself": lambda: DecoderDraft(decoder),
        "other": lambda: DecoderDraft(make_decoder(seed=1)),
        "other, paged": lambda: DecoderDraft(make_decoder(seed=1), cache="paged"),
        "mtp": lambda: MTPDraft(head_for(decoder, make_decoder)),
    }
    return make[name]()


NAMES = ["right", "wrong", "mixed", "repeats", "nothing", "ngram", "itself", "other", "other, paged", "mtp"]


@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_and_every_length(unchecked, decoder, make_decoder, name):
    plain = generate(decoder, PROMPT[:9], max_new_tokens=NEW, stop_ids=())
    for k in (*range(1, 7), Adaptive(4, pass_cost=lambda rows: 1.0)):
        draft = drafter(name, decoder, make_decoder, PROMPT[:9], plain.tokens)
        g = speculate(decoder, PROMPT[:9], draft, draft_tokens=k, max_new_tokens=NEW, stop_ids=())
        assert g.tokens == plain.tokens and g.finish_reason == "length"
        assert g.logprobs == pytest.approx(plain.logprobs, abs=1e-10)
        assert len(g.itl_s) == NEW - 1 and g.ttft_s > 0 and g.passes == sum(t > 0 for t in g.itl_s)
        assert sum(g.accepted) + g.passes == NEW - 1
        if isinstance(k, int) and name in ("right", "itself"):
            assert g.passes == -(-(NEW - 1) // (k + 1)) and g.acceptance == 1  # the bonus token is there
        if name == "wrong":
            assert g.passes == NEW - 1 and g.acceptance == 0 and g.tokens_per_pass == 1


def quantized(decoder, residual=6, codec=INT4, **options):
    shape = {"max_tokens": 38, "dtype": DTYPE}
    return make_cache("quantized", decoder.spec, codec=codec, residual=residual, **shape, **options)


def paged_by_a_manager(decoder, prompt, block_size=4):
    """A row whose first blocks were found in the prefix cache, and the storage to look at afterwards."""
    storage = PagedStorage(decoder.spec, num_blocks=24, block_size=block_size, dtype=DTYPE)
    first = storage.manager.allocate(prompt)
    shape = {"max_tokens": 40, "dtype": DTYPE, "storage": storage}
    cache = make_cache("paged", decoder.spec, sequences=[first], **shape)
    with torch.inference_mode():
        decoder(torch.tensor([prompt]), cache)
    storage.manager.register(first)
    seq = storage.manager.allocate(prompt)
    assert seq.shared > 0
    return make_cache("paged", decoder.spec, sequences=[seq], **shape), seq, storage


CACHES = {
    "none": lambda d: None,
    "by name": lambda d: "contiguous",
    "contiguous": lambda d: make_cache("contiguous", d.spec, max_tokens=37, dtype=DTYPE),
    "paged": lambda d: make_cache("paged", d.spec, max_tokens=37, block_size=3, dtype=DTYPE),
    "quantized": quantized,
    "paged, quantized": lambda d: make_cache(
        "paged", d.spec, max_tokens=38, dtype=DTYPE, codec=INT4, residual=6, block_size=16
    ),
    "streaming": lambda d: make_cache(
        "streaming", d.spec, max_tokens=37, dtype=DTYPE, window=9, sink_tokens=2, step=7
    ),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["right", "wrong", "mixed", "other", "mtp"])
def test_every_cache(unchecked, decoder, make_decoder, kind, name):
    """22 prompt tokens, of which the quantized caches have 16 in four bits; the next group is never full."""
    plain = generate(decoder, PROMPT, cache=CACHES[kind](decoder), max_new_tokens=NEW, stop_ids=())
    for k in range(1, 7):
        cache = CACHES[kind](decoder)
        draft = drafter(name, decoder, make_decoder, PROMPT, plain.tokens)
        options = {"cache": cache, "draft_tokens": k, "max_new_tokens": NEW, "stop_ids": ()}
        g = speculate(decoder, PROMPT, draft, **options)
        assert g.tokens == plain.tokens
        assert g.logprobs == pytest.approx(plain.logprobs, abs=1e-10)
        if hasattr(cache, "row_lengths"):  # as after `generate`: all but the newest token
            assert cache.row_lengths() == [len(PROMPT) + NEW - 1]


def test_four_bits_are_felt(decoder):
    """Or the test above would compare unquantized caches."""
    exact = generate(decoder, PROMPT, max_new_tokens=4, stop_ids=()).logprobs
    rough = generate(decoder, PROMPT, cache=quantized(decoder), max_new_tokens=4, stop_ids=()).logprobs
    assert max(abs(a - b) for a, b in zip(exact, rough)) > 1e-4


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_quantizes_every_token_does_so_a_draft_earlier(decoder, paged):
    """With guesses that are all wrong, a residual of 8 and drafts of 3 it is plain decoding at 8 - 3."""

    def cache(residual):
        if not paged:
            return quantized(decoder, residual, "int4")
        shape = {"max_tokens": 38, "dtype": DTYPE, "block_size": 1}
        return make_cache("paged", decoder.spec, codec="int4", residual=residual, **shape)

    options = {"max_new_tokens": NEW, "stop_ids": ()}
    plain = generate(decoder, PROMPT, cache=cache(8 - 3), **options)
    draft = Says([0, 0, 0])
    g = speculate(decoder, PROMPT, draft, cache=cache(8), draft_tokens=3, **options)
    assert not any(g.accepted[:-3])
    sure = NEW - 3  # the last drafts are shorter
    assert g.tokens[:sure] == plain.tokens[:sure]
    assert g.logprobs[:sure] == pytest.approx(plain.logprobs[:sure], abs=1e-10)
    other = generate(decoder, PROMPT, cache=cache(8), **options)
    assert max(abs(a - b) for a, b in zip(other.logprobs[:sure], plain.logprobs)) > 1e-6


@pytest.mark.parametrize("kind", ["sliding", "contiguous", "paged"])
@pytest.mark.parametrize("name", ["right", "wrong", "mixed", "other", "mtp"])
def test_windowed_layers(unchecked, make_decoder, kind, name):
    model = make_decoder(window=5)
    plain = generate(model, PROMPT, max_new_tokens=NEW, stop_ids=())
    for k in range(1, 7):
        shape = {"max_tokens": 37, "dtype": DTYPE}
        caches = [
            kind,
            make_cache(kind, model.spec, **shape, **({"step": k + 1} if kind == "sliding" else {})),
        ]
        for cache in caches:
            draft = drafter(name, model, make_decoder, PROMPT, plain.tokens)
            g = speculate(model, PROMPT, draft, cache=cache, draft_tokens=k, max_new_tokens=NEW, stop_ids=())
            assert g.tokens == plain.tokens
            assert g.logprobs == pytest.approx(plain.logprobs, abs=1e-10)


@pytest.mark.parametrize("name", ["right", "wrong", "mixed", "other"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_rows_of_a_managers_sequence(unchecked, decoder, make_decoder, name, k):
    plain = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=())
    cache, seq, storage = paged_by_a_manager(decoder, PROMPT)
    free = storage.manager.num_free
    draft = drafter(name, decoder, make_decoder, PROMPT[seq.shared :], plain.tokens)
    options = {"cache": cache, "draft_tokens": k, "max_new_tokens": NEW, "stop_ids": ()}
    g = speculate(decoder, PROMPT[seq.shared :], draft, **options)
    assert g.tokens == plain.tokens and g.prompt_tokens == len(PROMPT) - seq.shared
    assert list(seq.tokens) == PROMPT + g.tokens[:-1]
    storage.manager.check()
    storage.manager.free(seq)
    assert storage.manager.num_free > free
    storage.manager.check()


def test_latent_attention(unchecked):
    import transformers

    from companion.model import from_transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=V, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=6, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = from_transformers(transformers.DeepseekV3ForCausalLM(config).eval().to(DTYPE))
    plain = generate(model, PROMPT, cache="latent", max_new_tokens=NEW, stop_ids=())
    for k in range(1, 7):
        for make in (right, wrong, mixed):
            draft = make(PROMPT, plain.tokens, V)
            options = {"cache": "latent", "draft_tokens": k, "max_new_tokens": NEW, "stop_ids": ()}
            g = speculate(model, PROMPT, draft, **options)
            assert g.tokens == plain.tokens
            assert g.logprobs == pytest.approx(plain.logprobs, abs=1e-9)


@quick
@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=14),
    k=st.integers(1, 6),
    chunk=st.none() | st.integers(1, 5),
    seed=st.integers(0, 9),
    kind=st.sampled_from(["contiguous", "paged", "none"]),
    name=st.sampled_from(NAMES),
)
def test_any_prompt(decoder, make_decoder, prompt, k, chunk, seed, kind, name):
    n = random.Random(seed).randint(1, NEW)
    plain = generate(decoder, prompt, max_new_tokens=n, stop_ids=())
    draft = drafter(name, decoder, make_decoder, prompt, plain.tokens)
    cache = None if kind == "none" else kind
    options = {"max_new_tokens": n, "prefill_chunk": chunk, "stop_ids": ()}
    assert speculate(decoder, prompt, draft, draft_tokens=k, cache=cache, **options).tokens == plain.tokens


@pytest.mark.parametrize("name", ["right", "wrong", "mixed", "ngram", "repeats"])
def test_guesses_that_are_not_drawn_leave_a_seeded_text_as_it_is(decoder, make_decoder, name):
    """The target chooses with the same random numbers as alone; a guess can only agree."""
    how = {"temperature": 1.2, "top_k": 6, "top_p": 0.95, "seed": 4}
    plain = generate(decoder, PROMPT, max_new_tokens=NEW, sampler=Sampler(**how), stop_ids=())
    draft = drafter(name, decoder, make_decoder, PROMPT, plain.tokens)
    options = {"draft_tokens": 3, "max_new_tokens": NEW, "stop_ids": ()}
    g = speculate(decoder, PROMPT, draft, sampler=Sampler(**how), **options)
    assert g.tokens == plain.tokens
    if name == "right":
        assert g.passes == -(-(NEW - 1) // 4)


def test_a_seed_gives_the_same_text_again(decoder, make_decoder):
    def run(seed):
        draft = DecoderDraft(make_decoder(seed=1))
        options = {"draft_tokens": 3, "max_new_tokens": NEW, "stop_ids": ()}
        return speculate(decoder, PROMPT, draft, sampler=Sampler(seed=seed), **options).tokens

    assert run(1) == run(1) != run(2)


def test_temperature_0_with_drawn_guesses(decoder, make_decoder):
    plain = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=())
    draft = DecoderDraft(make_decoder(seed=1), sampler=Sampler(temperature=2.0, seed=1))
    for sampler in (greedy, Sampler(temperature=0, seed=0)):
        options = {"draft_tokens": 3, "max_new_tokens": NEW, "stop_ids": ()}
        assert speculate(decoder, PROMPT, draft, sampler=sampler, **options).tokens == plain.tokens


# --- endings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["right", "mixed", "wrong", "other"])
def test_a_stop_id_inside_a_draft(unchecked, decoder, make_decoder, name):
    free = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=()).tokens
    for at in range(NEW):
        stop = [free[at]]
        plain = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=stop)
        for k in (2, 5):
            draft = drafter(name, decoder, make_decoder, PROMPT, free)
            cache = make_cache("contiguous", decoder.spec, max_tokens=37, dtype=DTYPE)
            options = {"cache": cache, "draft_tokens": k, "max_new_tokens": NEW, "stop_ids": stop}
            g = speculate(decoder, PROMPT, draft, **options)
            assert g.tokens == plain.tokens and g.finish_reason == plain.finish_reason == "stop"
            assert len(g.logprobs) == len(g.tokens) == len(g.itl_s) + 1
            assert cache.row_lengths() == [len(PROMPT) + len(g.tokens) - 1]


def test_a_drafted_stop_id_that_the_target_does_not_say_stops_nothing(decoder):
    plain = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=())
    never = next(t for t in range(V) if t not in plain.tokens)
    g = speculate(decoder, PROMPT, Says([never] * 4), draft_tokens=4, max_new_tokens=NEW, stop_ids=[never])
    assert g.tokens == plain.tokens and g.finish_reason == "length"


@pytest.mark.parametrize("n", range(1, 12))
def test_never_a_token_too_many(decoder, n):
    """Nor a place in the cache: one of exactly the room that plain decoding needs."""
    answer = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=()).tokens
    cache = make_cache("contiguous", decoder.spec, max_tokens=len(PROMPT) + n - 1, dtype=DTYPE)
    draft = right(PROMPT, answer, V)
    options = {"cache": cache, "draft_tokens": 6, "max_new_tokens": n, "stop_ids": ()}
    g = speculate(decoder, PROMPT, draft, **options)
    assert g.tokens == answer[:n] and cache.row_lengths() == [len(PROMPT) + n - 1]
    assert all(k <= n - (at - len(PROMPT)) - 1 for at, k in draft.asked)


class Letters:
    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


def test_text_arrives_and_stop_strings_end_it(unchecked, decoder):
    answer = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=()).tokens
    for at in range(1, NEW - 1):
        stop = Letters().decode(answer[at : at + 2])
        for k in (1, 4, 6):
            told, pieces = [], []
            options = {"max_new_tokens": NEW, "stop_ids": (), "tokenizer": Letters(), "stop": [stop]}
            plain = generate(decoder, PROMPT, on_text=lambda r, t, told=told: told.append(t), **options)
            g = speculate(
                decoder, PROMPT, right(PROMPT, answer, V), draft_tokens=k,
                on_text=lambda r, t, pieces=pieces: pieces.append(t), **options,
            )  # fmt: skip
            assert (g.text, g.tokens, g.finish_reason) == (plain.text, plain.tokens, "stop")
            assert pieces == told and "".join(pieces) == g.text and stop not in g.text


def test_a_filled_cache_is_continued(decoder):
    whole = generate(decoder, PROMPT, max_new_tokens=NEW, stop_ids=())
    for make in (right, mixed, wrong):
        cache = make_cache("contiguous", decoder.spec, max_tokens=37, dtype=DTYPE)
        with torch.inference_mode():
            decoder(torch.tensor([PROMPT[:15]]), cache)
        draft = make(PROMPT[15:], whole.tokens, V)
        options = {"cache": cache, "draft_tokens": 3, "max_new_tokens": NEW, "stop_ids": ()}
        assert speculate(decoder, PROMPT[15:], draft, **options).tokens == whole.tokens
        assert cache.row_lengths() == [37]


def test_what_is_counted(decoder):
    answer = generate(decoder, PROMPT, max_new_tokens=9, stop_ids=()).tokens
    # Right, right, wrong, ...: every pass of three guesses yields two of them and the target's own.
    draft = Knows(PROMPT, answer, V, lambda at: (at - len(PROMPT) - 1) % 3 == 2)
    g = speculate(decoder, PROMPT, draft, draft_tokens=3, max_new_tokens=9, stop_ids=())
    assert isinstance(g, Speculation)
    assert (g.drafted, g.accepted) == ([3, 3, 1], [2, 2, 1])
    assert g.passes == 3 and g.tokens_per_pass == 8 / 3 and g.acceptance == 5 / 7


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [True, 0, -1, 2.0])
def test_draft_lengths_that_are_none(unchecked, decoder, k):
    with pytest.raises(ValueError, match="draft_tokens"):
        speculate(decoder, PROMPT, NgramDraft(), draft_tokens=k, max_new_tokens=4)


@pytest.mark.parametrize(
    "draft, match",
    [
        (Says([V]), "proposal must .* 0 to 22, got 23"),
        (Says([-1]), "proposal must .* got -1"),
        (Says([1.5]), "proposal must .* got 1.5"),
        (Says([1] * 5, uncut=True), "proposal must be at most 3 tokens, got 5"),
        (Says([1], torch.ones(1, 4) / 4), r"probs must be of shape \(1, 23\), got \(1, 4\)"),
        (Says([1], torch.ones(1, V)), "cannot have been drawn"),
        (Says([1], torch.eye(V)[:1]), "cannot have been drawn"),
        (Says([1], torch.full((1, V), torch.nan)), "cannot have been drawn"),
    ],
)
def test_drafts_that_cannot_be(unchecked, decoder, draft, match):
    with pytest.raises(ValueError, match=f"draft: Says.*{match}"):
        speculate(decoder, PROMPT, draft, draft_tokens=3, max_new_tokens=NEW, stop_ids=())


def test_what_is_no_drafter_or_another_models(unchecked, decoder, make_decoder):
    with pytest.raises(ValueError, match="draft must be a Draft"):
        speculate(decoder, PROMPT, make_decoder(), max_new_tokens=4)
    with pytest.raises(ValueError, match="vocabulary of 29.*one of 23"):
        speculate(decoder, PROMPT, DecoderDraft(make_decoder(vocab=29)), max_new_tokens=4)
    head = head_for(decoder, make_decoder)
    with pytest.raises(ValueError, match="vocabulary 23; tiny has 16 and 29"):
        speculate(make_decoder(vocab=29), PROMPT, MTPDraft(head), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"project must be of shape \(16, 32\), got \(16, 16\)"):
        MTPHead(make_decoder(), enorm=torch.ones(16), hnorm=torch.ones(16), project=torch.ones(16, 16))


def test_several_prompts(unchecked, decoder):
    with pytest.raises(ValueError, match="prompt_ids must be one prompt"):
        speculate(decoder, [[1, 2], [3]], NgramDraft(), max_new_tokens=4)


@pytest.mark.parametrize(
    "kind, options, match",
    [
        ("quantized", {"codec": INT4, "residual": 3}, "residual=3 and quantizes 16 tokens.*at least 4"),
        ("paged", {"codec": INT4, "residual": 3, "block_size": 16}, "residual=3.*at least 4"),
        ("streaming", {"window": 9, "step": 4}, "step=4; .*a step of 5"),
        ("linear", {}, "LinearCache, in which a rejected draft leaves its mark"),
        ("evicting", {"budget": 8}, "EvictingCache, in which"),
    ],
)
def test_caches_that_cannot_take_a_draft_back_are_refused_at_once(decoder, kind, options, match):
    cache = make_cache(kind, decoder.spec, max_tokens=38, dtype=DTYPE, **options)
    with pytest.raises(ValueError, match=match):
        speculate(decoder, PROMPT, NgramDraft(), cache=cache, draft_tokens=4, max_new_tokens=NEW)
    assert cache.row_lengths() == [0]


def test_the_same_caches_take_shorter_drafts(decoder):
    plain = generate(decoder, PROMPT, cache=quantized(decoder, 6), max_new_tokens=4, stop_ids=())
    options = {"cache": quantized(decoder, 6), "max_new_tokens": 4, "stop_ids": ()}
    assert speculate(decoder, PROMPT, Repeats(), draft_tokens=6, **options).tokens == plain.tokens


# --- the real model -----------------------------------------------------------------------------------


def test_real_model(smollm2):
    """Equal up to the first place where the two likeliest tokens are too close for float32 to tell."""
    model, tokenizer = smollm2
    ids = tokenizer.encode("red, green, blue, red, green, blue, red, green, blue, red,")
    plain = generate(model, ids, max_new_tokens=20, stop_ids=())
    g = speculate(model, ids, NgramDraft(), draft_tokens=4, max_new_tokens=20, stop_ids=())
    with torch.inference_mode():
        best = model(torch.tensor([ids + plain.tokens]))[0, len(ids) - 1 : -1].topk(2).values
    sure = (best[:, 0] - best[:, 1] > 1e-3).int().cumprod(0).sum()
    assert sure >= 10 and g.tokens[:sure] == plain.tokens[:sure]
    assert g.tokens_per_pass > 2
