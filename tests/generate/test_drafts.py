"""The drafters by themselves, against plain recomputation; and how many guesses a pass gets."""

import jaxtyping
import pytest
import torch
from drafters import mixed, right, wrong
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.caches import make_cache
from companion.generate import (
    Adaptive,
    DecoderDraft,
    Draft,
    MTPDraft,
    NgramDraft,
    Proposal,
    Sampler,
    generate,
    greedy,
    measure_pass_cost,
    probabilities,
    speculate,
)
from tests.generate.test_speculative import DTYPE, PROMPT, V, head_for


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- n-grams ------------------------------------------------------------------------------------------


def by_rescanning(tokens, k, longest, shortest):
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == tokens[len(tokens) - size :]:
                out = list(tokens)
                for i in range(k):
                    out.append(out[stop + i])
                return out[len(tokens) :], size
    return [], None


@settings(deadline=None, max_examples=200)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    grow=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    k=st.integers(1, 9),
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
)
def test_ngrams_equal_a_rescan_however_the_text_grows(tokens, grow, k, shortest, more):
    draft, n = NgramDraft(longest=shortest + more, shortest=shortest), 0
    for step in grow:
        n = min(len(tokens), n + step)
        got = draft.propose(tokens[:n], k)
        want, size = by_rescanning(tokens[:n], k, shortest + more, shortest)
        assert (list(got.ids), got.kind, got.probs) == (want, size and min(size, shortest + 1), None)


def test_ngrams_forget_the_last_text(decoder):
    draft = NgramDraft(shortest=1)
    assert draft.propose([1, 2, 3, 1], 2).ids == [2, 3]
    draft.begin(decoder, 9, greedy)
    assert draft.propose([5, 1], 2).ids == ()


class Counted(list):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        Counted.read += len(got) if isinstance(at, slice) else 1
        return got


def test_a_token_more_costs_the_same_in_a_long_text():
    """In a text that never repeats, so that every ending is looked up in vain."""
    draft, reads = NgramDraft(longest=6, shortest=2), {}
    for n in (100, 3000):
        draft.propose(list(range(n - 1)), 4)
        Counted.read = 0
        draft.propose(Counted(range(n)), 4)
        reads[n] = Counted.read
    assert reads[100] == reads[3000] <= 2 * sum(range(2, 7))


@pytest.mark.parametrize("options", [{"longest": 0}, {"shortest": 0}, {"shortest": True}, {"longest": 1}])
def test_ngram_lengths_that_are_none(options):
    with pytest.raises(ValueError, match="longest|shortest"):
        NgramDraft(**options)


# --- another model, and a head --------------------------------------------------------------------------


def recorded(draft):
    """Every proposal of this drafter, (text, proposal)."""
    seen, real = [], draft.propose

    def propose(tokens, k):
        got = real(tokens, k)
        seen.append((list(tokens), got))
        return got

    draft.propose = propose
    return seen


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_a_model_drafts_what_it_would_say_itself(decoder, make_decoder, cache):
    """Its cache follows the text through every rejection."""
    small = make_decoder(seed=1)
    draft = DecoderDraft(small, cache=cache)
    seen = recorded(draft)
    g = speculate(decoder, PROMPT[:9], draft, draft_tokens=3, max_new_tokens=14, stop_ids=())
    assert len(seen) > 4 and len(g.tokens) == 14
    for text, got in seen:
        want = generate(small, text, cache=None, max_new_tokens=len(got.ids), stop_ids=()).tokens
        assert list(got.ids) == want and got.probs is None


def test_the_distributions_it_reports_are_those_it_drew_from(decoder, make_decoder):
    small, how = make_decoder(seed=1), {"temperature": 0.8, "top_k": 7, "min_p": 0.05}
    draft = DecoderDraft(small)
    seen = recorded(draft)
    options = {"draft_tokens": 3, "max_new_tokens": 14, "stop_ids": ()}
    speculate(decoder, PROMPT[:9], draft, sampler=Sampler(**how, seed=2), **options)
    for text, got in seen:
        with torch.inference_mode():
            logits = small(torch.tensor([[*text, *got.ids]]))[0, len(text) - 1 : -1]
        torch.testing.assert_close(got.probs, probabilities(logits, **how), rtol=0, atol=1e-12)
        assert all(q[id] > 0 for q, id in zip(got.probs, got.ids))


def test_a_draft_model_of_short_context_stops_guessing_there(decoder, make_decoder):
    plain = generate(decoder, PROMPT[:9], max_new_tokens=16, stop_ids=()).tokens
    small = make_decoder(max_context=14)
    g = speculate(decoder, PROMPT[:9], DecoderDraft(small), draft_tokens=4, max_new_tokens=16, stop_ids=())
    assert g.tokens == plain and any(g.drafted) and not any(g.drafted[-6:])


@pytest.mark.parametrize("kind", ["contiguous", None])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_head_sees_the_right_hidden_states(decoder, make_decoder, kind, chunk):
    """Its guesses equal those made of the whole text at once, without any cache."""
    head = head_for(decoder, make_decoder)
    draft = MTPDraft(head)
    seen = recorded(draft)
    options = {"cache": kind, "prefill_chunk": chunk, "max_new_tokens": 12, "stop_ids": ()}
    speculate(decoder, PROMPT[:7], draft, draft_tokens=3, **options)
    assert len({tuple(got.ids) for _, got in seen}) > 3
    with torch.inference_mode():
        for text, got in seen:
            ids = torch.tensor([text])
            hidden = decoder.through(decoder.embed(ids[:, :-1]))
            behind = ids[:, 1:]
            for guess in got.ids:
                out = head(hidden, decoder.embed(behind))
                assert int(head.logits(out[:, -1:]).argmax()) == guess
                # Further guesses: its own output where the target's hidden state would be.
                hidden = torch.cat([hidden, out[:, -1:]], dim=1)
                behind = torch.cat([behind, torch.tensor([[guess]])], dim=1)


def test_a_head_shares_what_it_shares(decoder, make_decoder):
    head = head_for(decoder, make_decoder)
    tied = make_decoder(layers=1)
    own = sum(p.nbytes for p in tied.blocks.parameters()) + tied.norm.weight.nbytes
    joined = 8 * (16 + 16 + 16 * 32)
    assert head.weights_bytes == own + joined + decoder.output.nbytes


# --- how many -----------------------------------------------------------------------------------------


def lengths(policy, decoder, outcomes, kind="x", cost=0.0):
    """Draft lengths that a policy asks for while its guesses are right (True) or wrong."""
    policy.begin(decoder)
    out = []
    for good in outcomes:
        n = policy.chosen(kind, cost)
        out.append(n)
        if n or not cost:
            policy.learn(kind, max(1, n) if good else 0, max(1, n) if good else 1)
    return out


def test_free_guesses_are_used_once_they_would_have_been_right(decoder):
    policy = Adaptive(8)
    never = lengths(policy, decoder, [False] * 50)
    assert never == [0] * 50
    always = lengths(policy, decoder, [True] * 20)
    assert always[0] == 0 and always[3] > 2 and always[-1] == 8
    back = lengths(policy, decoder, [True] * 20 + [False] * 20)
    assert back[19] == 8 and back[-1] == 0


def test_costly_guesses_are_tried_and_given_up_and_tried_less_and_less_often(decoder):
    policy = Adaptive(8)
    out = lengths(policy, decoder, [False] * 600, cost=0.2)
    tries = [i for i, n in enumerate(out) if n]
    gaps = [b - a for a, b in zip(tries, tries[1:])]
    assert out[0] == 2 and gaps == sorted(gaps) and gaps[0] >= 8 and gaps[-1] >= 128
    good = lengths(policy, decoder, [True] * 20, cost=0.2)
    assert 0 not in good and good[-1] == 8


def test_prices_decide(decoder):
    dear, cheap = Adaptive(4, pass_cost=lambda rows: rows), Adaptive(4, pass_cost={5: 1.0})
    assert lengths(dear, decoder, [True] * 30) == [0] * 30
    assert lengths(cheap, decoder, [True] * 30)[:2] == [2, 4]
    with pytest.raises(ValueError, match="pass_cost must .* at least 5, got"):
        Adaptive(4, pass_cost={4: 1.2})
    for memory in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="memory"):
            Adaptive(4, memory=memory)


def test_kinds_are_told_apart(decoder):
    policy = Adaptive(8)
    policy.begin(decoder)
    for _ in range(10):
        policy.learn("good", 1, 1)
        policy.learn("bad", 0, 1)
    assert policy.chosen("good", 0.0) >= 4 and policy.chosen("bad", 0.0) == 0


class Costly(Draft):
    """Another drafter's guesses, at a price."""

    def __init__(self, real, cost):
        self.real, self.cost, self.calls = real, cost, 0

    def propose(self, tokens, k) -> Proposal:
        self.calls += 1
        return self.real.propose(tokens, k)


@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_in_a_run_bad_guesses_are_dropped_and_good_ones_kept(unchecked, make_decoder, cost):
    decoder = make_decoder(max_context=None)
    answer = generate(decoder, PROMPT, max_new_tokens=120, stop_ids=()).tokens
    price = {2: 1.5, 9: 2.5}

    def run(make):
        draft = Costly(make(PROMPT, answer, V), cost)
        options = {"draft_tokens": Adaptive(8, pass_cost=price), "max_new_tokens": 120, "stop_ids": ()}
        g = speculate(decoder, PROMPT, draft, **options)
        assert g.tokens == answer
        paid = sum(1 if not n else 1.5 if n == 1 else 2.5 for n in g.drafted) + cost * sum(g.drafted)
        return paid / (len(answer) - 1)  # of plain decoding's time, as predicted

    assert run(right) < 0.5
    assert run(wrong) <= (1.0 if not cost else 1.15)
    assert run(mixed) < 1.15


def test_prices_are_measured_without_touching_anything(decoder):
    table = measure_pass_cost(decoder, 4, context=20, rounds=2)
    assert list(table) == [1, 2, 3, 4, 5] and table[1] == 1
    assert list(table.values()) == sorted(table.values())
    assert Adaptive(4, pass_cost=table)


def test_the_residual_stream_is_the_hook(decoder):
    """`head(through(embed(ids)))` is the forward pass, with and without a cache."""
    ids = torch.tensor([PROMPT])
    cache = make_cache("contiguous", decoder.spec, max_tokens=22, dtype=DTYPE)
    with torch.inference_mode():
        want = decoder(ids)
        assert torch.equal(decoder.head(decoder.through(decoder.embed(ids))), want)
        assert torch.equal(decoder.head(decoder.through(decoder.embed(ids), cache)), want)
    assert cache.row_lengths() == [22]
