"""Reading on over a filled cache, and the fast caches of the scripts against the real ones."""

import pytest
import torch

from benchmarks import quality_kv, recall_kv
from benchmarks.kv_settings import settings
from benchmarks.readback import ReadBack
from companion.caches import make_cache
from companion.quantize import codec
from companion.study import compare, haystack, recall, store, stored, text
from companion.study.divergence import continued, distance, fill, prompt

NVFP4 = codec("nvfp4", tensor_scale=0.01)
CODECS = {name: choice for name, choice in settings(NVFP4).items() if "g64" not in name}


def tokens(B, S, seed=0):
    return torch.randint(256, (B, S), generator=torch.Generator().manual_seed(seed))


def test_continued_is_the_model_itself(tiny):
    ids = tokens(2, 41)
    held = prompt(tiny, ids[:, :30], room=11, chunk=7)
    parts = continued(tiny, held.fork(), ids[:, 30:], step=4)
    assert [p.shape[1] for p in parts] == [4, 4, 2]
    with torch.inference_mode():
        whole = tiny(ids[:, :-1])
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 30:], rtol=1e-4, atol=1e-4)
    assert held.row_lengths() == [30, 30]


def test_the_exact_cache_is_at_no_distance(tiny):
    ids = tokens(2, 61)
    held = prompt(tiny, ids[:, :40], room=21)
    exact = continued(tiny, held.fork(), ids[:, 40:])
    d = distance(exact, tiny, held.fork(), ids[:, 40:])
    assert d.kl.shape == (2, 20) and d.kl.max() == 0 and d.agree.all()
    cache = make_cache("quantized", tiny.spec, batch=2, max_tokens=61, codec="fp32")
    fill(cache, held)
    assert distance(exact, tiny, cache, ids[:, 40:]).kl.max() < 1e-9


def test_distance_scores_the_tokens_that_follow(tiny):
    ids = tokens(1, 51)
    held = prompt(tiny, ids[:, :40], room=11)
    exact = continued(tiny, held.fork(), ids[:, 40:], step=3)
    cache = make_cache("quantized", tiny.spec, max_tokens=51, codec="int2")
    fill(cache, held)
    other = continued(tiny, cache.fork(), ids[:, 40:], step=3)
    d = distance(exact, tiny, cache, ids[:, 40:])
    by_hand = compare(torch.cat(exact, 1), torch.cat(other, 1), ids[:, 41:])
    for name in ("kl", "nll", "nll_reference"):
        torch.testing.assert_close(getattr(d, name), getattr(by_hand, name))
    assert d.kl.min() > 0


def test_filling_in_one_step_is_a_prompt_in_one_pass(tiny):
    """Each layer attends to its own step exactly, so what is stored is the exact numbers, quantized."""
    ids = tokens(1, 40)
    filled, handed = (make_cache("quantized", tiny.spec, max_tokens=40, codec="kivi2") for _ in "ab")
    fill(filled, prompt(tiny, ids))
    with torch.inference_mode():
        tiny(ids, handed)
    for layer in range(tiny.spec.layers):
        for a, b in zip(filled.read(layer), handed.read(layer)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_cache_that_holds_something_is_not_filled(tiny):
    held = prompt(tiny, tokens(1, 8), room=8)
    with pytest.raises(ValueError, match="cache must be an empty one, got one of 8 tokens"):
        fill(held, held)


@pytest.mark.parametrize("name", CODECS)
def test_read_back_equals_the_quantized_cache(tiny, name):
    choice, residual = CODECS[name]
    ids = tokens(2, 121)
    held = prompt(tiny, ids[:, :70], room=51)
    exact = torch.cat(continued(tiny, held.fork(), ids[:, 70:]), 1)
    found = []
    for make in (ReadBack, lambda *a, **o: make_cache("quantized", *a, **o)):
        cache = make(tiny.spec, batch=2, max_tokens=121, codec=choice, residual=min(residual, 40))
        fill(cache, held)
        found.append(torch.cat(continued(tiny, cache, ids[:, 70:]), 1))
    effect = float(
        (found[0] - exact).abs().max()
    )  # float32 noise may round another way: not equal bit for bit
    assert 1e-4 < effect and (found[0] - found[1]).abs().max() < 0.2 * effect


@pytest.mark.parametrize(
    "length, codec, residual", [(1600, "kivi2", 0), (1605, "int2", 0), (1605, "kivi2", 1800)]
)
def test_all_questions_in_one_pass_equal_recall(tiny, bytes_tokenizer, length, codec, residual):
    """Of any length: names are not equally long, so the shorter questions are padded."""
    hay = haystack(bytes_tokenizer, length, needles=16, seed=1)
    assert len({len(q) for q, _ in hay.queries}) > 1
    held = prompt(tiny, torch.tensor([hay.ids]))
    cache = make_cache("quantized", tiny.spec, max_tokens=1800, codec=codec, residual=residual)
    fill(cache, held)
    slow = recall(tiny, cache, hay)
    plain = recall_kv.read_back(tiny, held, codec, residual, recall_kv.longest(hay))
    fast = recall_kv.asked(tiny, plain, hay)
    assert [r for r, _ in slow] == [r for r, _ in fast]
    assert [n for _, n in fast] == pytest.approx([n for _, n in slow], rel=1e-4)


def test_a_question_that_would_fill_a_group_is_refused(tiny):
    held = prompt(tiny, tokens(1, 95))
    recall_kv.read_back(tiny, held, "kivi2", 40, 8)  # 32 are quantized and 63 wait; a group is full at 72
    with pytest.raises(ValueError, match="room=9; behind a tail of 63"):
        recall_kv.read_back(tiny, held, "kivi2", 40, 9)


# --- the scripts, on a model of 30,000 numbers ------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from companion import study as results

    monkeypatch.setattr(results, "FOLDER", tmp_path)
    return tmp_path


ONLY = ("int8", "kivi2 r0", "keys int2 channel")


def test_quality_script(tiny, bytes_tokenizer, folder):
    ids = bytes_tokenizer.encode(text()[:4000])
    done = quality_kv.run(tiny, ids, 10, prefix=64, scored=32, only=ONLY, keep=False)
    assert list(folder.iterdir()) == []
    assert len(done["reference"]["nll"]) == 10 and set(done["settings"]) == set(ONLY)
    for e in done["settings"].values():
        assert len(e["kl"]) == len(e["agree"]) == len(e["dnll"]) == len(e["kl_by_quarter"]) == 10
        assert e["summary"]["kl"]["mean"] == pytest.approx(sum(e["kl"]) / 10)
    kl = {name: e["summary"]["kl"]["mean"] for name, e in done["settings"].items()}
    assert kl["int8"] < kl["keys int2 channel"] < kl["kivi2 r0"]
    assert done["settings"]["kivi2 r0"]["bits"] == 3 and done["settings"]["keys int2 channel"]["bits"] == 9.5
    assert done["settings"]["int8"]["bits"] == 8.5  # heads of 32 here
    assert done["pairs"]["kl"]["tested"] == 3


def test_quality_script_goes_on_where_it_was_stopped(tiny, bytes_tokenizer, folder, monkeypatch):
    ids = bytes_tokenizer.encode(text()[:4000])
    options = dict(prefix=64, scored=32, only=ONLY)
    whole = quality_kv.run(tiny, ids, 10, **options, keep=False)
    real, calls = quality_kv.distance, []

    def stopped(*args):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(quality_kv, "distance", stopped)
    with pytest.raises(KeyboardInterrupt):
        quality_kv.run(tiny, ids, 10, **options)
    assert not stored("quality_kv")["complete"]
    calls[:] = [1] * 10
    done = quality_kv.run(tiny, ids, 10, **options)
    assert done["complete"] and len(calls) == 10 + 2 + 3  # what was left, and the checks
    for name in ONLY:
        assert done["settings"][name]["kl"] == pytest.approx(whole["settings"][name]["kl"], rel=1e-9)
    assert done["reference"]["nll"] == pytest.approx(whole["reference"]["nll"])


def test_recall_script(tiny, bytes_tokenizer, folder):
    plan = [(1000, 0), (1000, 1), (1200, 0)]
    done = recall_kv.run(tiny, bytes_tokenizer, plan, names=("int8", "int2 token g32"))
    assert done["complete"] and [h["length"] for h in done["haystacks"]] == [1000, 1000, 1200]
    assert done["one_pass_nll_difference"] < 1e-2
    row = done["summary"]["1000"]["int2 token g32"]
    assert row["n"] == 16 and row["haystacks"] == 2
    means = [sum(h["nll"]["int2 token g32"]) / 8 for h in done["haystacks"][:2]]
    assert row["nll"] == pytest.approx(sum(means) / 2)
    assert row["nll_se"] == pytest.approx(abs(means[0] - means[1]) / 2)
    # A second run finds everything there.
    before = done["haystacks"]
    again = recall_kv.run(tiny, bytes_tokenizer, plan, names=("int8", "int2 token g32"))
    assert again["haystacks"] == before


def test_a_store_of_other_settings_is_not_continued(tiny, bytes_tokenizer, folder):
    store("recall_kv", {"model": "another", "haystacks": [{"length": 1000, "seed": 0}], "machine": 1})
    done = recall_kv.run(tiny, bytes_tokenizer, [(1000, 0)], names=("int8",))
    assert len(done["haystacks"]) == 1 and "right" in done["haystacks"][0]
