"""Facts in a haystack are where it says, and asking for them is fair."""

import pytest
import torch

from companion.caches import make_cache
from companion.study import haystack, recall, text
from companion.study.facts import AFTER, DIGITS, FACT, NAMES


@pytest.fixture
def hay(bytes_tokenizer):
    return haystack(bytes_tokenizer, 3000, needles=8, seed=3)


@pytest.mark.parametrize("length, needles", [(700, 8), (2048, 8), (2049, 5), (5000, 1)])
def test_exactly_as_long_as_asked(bytes_tokenizer, length, needles):
    h = haystack(bytes_tokenizer, length, needles=needles, seed=1)
    assert len(h.ids) == length
    assert len(h.queries) == len(h.names) == len(h.positions) == len(h.depths) == needles


def test_every_fact_stands_in_the_text_once_and_where_it_says(hay, bytes_tokenizer):
    whole = bytes_tokenizer.decode(hay.ids)
    for name, at, (_, answer) in zip(hay.names, hay.positions, hay.queries):
        number = bytes_tokenizer.decode(answer)
        assert len(number) == DIGITS and number.isdigit()
        assert whole.count(FACT.format(name=name) + number + AFTER) == 1 == whole.count(f"the {name} is")
        assert hay.ids[at : at + len(answer)] == answer


def test_without_the_facts_it_is_the_frozen_text(hay, bytes_tokenizer):
    rest = bytes_tokenizer.decode(hay.ids)
    for name, (_, answer) in zip(hay.names, hay.queries):
        rest = rest.replace(FACT.format(name=name) + bytes_tokenizer.decode(answer) + AFTER, "")
    assert rest in text()


def test_depths_are_evenly_spread(hay):
    assert hay.depths == [p / 3000 for p in hay.positions] == sorted(hay.depths)
    gaps = [b - a for a, b in zip(hay.positions, hay.positions[1:])]
    assert max(gaps) - min(gaps) <= 4  # names differ in length by a few bytes
    assert 0 < hay.depths[0] < 1 / 8 and 7 / 8 < hay.depths[-1] < 1


def test_the_question_does_not_hold_the_answer_and_ends_where_it_begins(hay, bytes_tokenizer):
    for name, (question, answer) in zip(hay.names, hay.queries):
        asked = bytes_tokenizer.decode(question)
        assert name in asked and asked.endswith(f"the {name} is ")
        assert bytes_tokenizer.decode(answer) not in asked


def test_a_seed_is_a_haystack(hay, bytes_tokenizer):
    again, other = (haystack(bytes_tokenizer, 3000, needles=8, seed=s) for s in (3, 4))
    assert again == hay
    assert other.ids != hay.ids and {tuple(a) for _, a in other.queries}.isdisjoint(
        tuple(a) for _, a in hay.queries
    )
    assert other.ids[:50] != hay.ids[:50]  # another place in the text


def test_names_are_distinct_and_foreign_to_the_text(hay):
    assert len(set(NAMES)) == len(NAMES) and len(set(hay.names)) == 8
    assert [name for name in NAMES if name in text().lower()] == []


def test_with_the_real_tokenizer_names_and_digits_are_one_token_each(smollm2):
    _, tokenizer = smollm2
    assert [name for name in NAMES if len(tokenizer.encode(" " + name)) != 1] == []
    h = haystack(tokenizer, 512, seed=0)
    assert len(h.ids) == 512 and all(len(answer) == DIGITS for _, answer in h.queries)
    assert all(h.ids[p : p + DIGITS] == answer for p, (_, answer) in zip(h.positions, h.queries))
    # Read as text and cut into tokens again, the answers are still the same tokens.
    again = tokenizer.encode(tokenizer.decode(h.ids))
    for _, answer in h.queries:
        assert any(again[i : i + DIGITS] == answer for i in range(len(again)))


class Merging:
    """A tokenizer to which two digits before a full stop are one token: no digit of an answer is safe."""

    def encode(self, text):
        import re

        return [hash(x) % 10_000 for x in re.findall(r"\d\.|[^\d]|\d", text)]


class Beginning:
    """Every text begins with token 256."""

    def encode(self, text):
        return [256, *text.encode()]


def test_an_answer_that_is_cut_differently_in_place_is_refused():
    with pytest.raises(ValueError, match="differently in its place"):
        haystack(Merging(), 3000)


def test_a_begin_token_stands_at_the_beginning_and_nowhere_else():
    h = haystack(Beginning(), 2000, seed=2)
    assert len(h.ids) == 2000 and h.ids[0] == 256 and h.ids.count(256) == 1
    assert all(256 not in q + a for q, a in h.queries)


@pytest.mark.parametrize(
    "length, options, what",
    [
        (100, {}, "length must .* got 100"),
        (10**6, {}, "length must .* got 1000000"),
        (0, {}, "length must .* got 0"),
        (2000, {"needles": 0}, "needles must .* got 0"),
        (2000, {"needles": len(NAMES) + 1}, f"needles must .* got {len(NAMES) + 1}"),
        (2000, {"needles": True}, "needles must .* got True"),
    ],
)
def test_refused(bytes_tokenizer, length, options, what):
    with pytest.raises(ValueError, match=what):
        haystack(bytes_tokenizer, length, **options)


# --- recall ---------------------------------------------------------------------------------------------


def held(hay, spec):
    cache = make_cache("contiguous", spec, max_tokens=len(hay.ids) + 200)
    zeros = torch.zeros(1, 2, len(hay.ids), 32)
    for layer in range(spec.layers):
        cache.append(layer, zeros, zeros)
    return cache


def test_recall_of_a_model_that_knows_some_numbers(hay, scripted):
    """It answers as written, but for one digit of the third number and the last one of the sixth."""

    def following(ids):
        for i, (question, answer) in enumerate(hay.queries):
            if ids[: len(question)] == question:
                said = list(answer)
                if i in (2, 5):
                    said[-1 if i == 5 else 1] = ord("x")
                return [0] * (len(question) - 1) + said
        raise AssertionError("an unknown question")

    model = scripted(following)
    cache = held(hay, model.spec)
    found = recall(model, cache, hay)
    assert [right for right, _ in found] == [True, True, False, True, True, False, True, True]
    sure = torch.log(torch.exp(torch.tensor(5.0, dtype=torch.float64)) + 255) - 5  # nll of a token said
    for i, (_, nll) in enumerate(found):
        assert nll == pytest.approx(float(5 * sure + (5 if i in (2, 5) else 0)), rel=1e-6)
    # Each question saw the haystack and nothing of the others; the cache is as it was.
    assert [n for _, n in model.fed] == [[len(hay.ids)]] * 8 and cache.row_lengths() == [len(hay.ids)]
    # Teacher-forced: the answer's last digit is never fed.
    assert all(fed[0] == q + a[:-1] for (fed, _), (q, a) in zip(model.fed, hay.queries))


def test_recall_equals_the_whole_text_read_at_once(tiny, bytes_tokenizer):
    h = haystack(bytes_tokenizer, 900, needles=2, seed=5)
    cache = make_cache("contiguous", tiny.spec, max_tokens=1100)
    with torch.inference_mode():
        tiny(torch.tensor([h.ids]), cache, logits="last")
        for (right, nll), (question, answer) in zip(recall(tiny, cache, h), h.queries):
            whole = tiny(torch.tensor([h.ids + question + answer]))[0, -len(answer) - 1 : -1].double()
            expected = -whole.log_softmax(-1)[range(len(answer)), answer].sum()
            assert nll == pytest.approx(float(expected), abs=1e-3)
            assert right == (whole.argmax(-1).tolist() == answer)


def test_recall_over_another_text_is_refused(tiny, hay):
    cache = make_cache("contiguous", tiny.spec, max_tokens=10)
    with pytest.raises(ValueError, match="cache must hold one row"):
        recall(tiny, cache, hay)
