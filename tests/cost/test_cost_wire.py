"""What ranks say to each other: formulas against collectives played message by message, and real models."""

from dataclasses import replace
from fractions import Fraction

import pytest

from companion.cost import (
    cache_copies,
    kv_bytes,
    models,
    on_wire,
    parallel_bytes,
    parameters,
    rank_parameters,
    rank_spec,
    share_of_cache,
)
from companion.cost.wire import KINDS


class Played:
    """n ranks that hold n pieces of one byte each, and a count of every byte that leaves one."""

    def __init__(self, n):
        self.n, self.sent, self.steps = n, [0] * n, 0
        self.held = [[{(rank, piece)} for piece in range(n)] for rank in range(n)]  # who is summed in there

    def step(self, messages):
        """messages: (from, to, pieces); all of a step leave before any arrives."""
        messages = [(a, b, [(p, set(self.held[a][p])) for p in pieces]) for a, b, pieces in messages]
        for a, b, pieces in messages:
            self.sent[a] += len(pieces)
            for p, content in pieces:
                self.held[b][p] |= content
        self.steps += 1

    def ring(self, first):
        """n - 1 steps, in which each rank passes on one piece; rank r begins with piece r + first."""
        n = self.n
        for s in range(n - 1):
            self.step([(r, (r + 1) % n, [(r + first - s) % n]) for r in range(n)])

    @property
    def summed(self):
        """Per rank, the pieces that hold every rank's part."""
        return [{p for p in range(self.n) if len(self.held[r][p]) == self.n} for r in range(self.n)]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_all_reduce_sends_what_the_formula_says(n):
    played = Played(n)
    played.ring(0)
    half = on_wire("reduce_scatter", n, n, "ring")  # n pieces of one byte are the payload
    assert (sum(played.sent), max(played.sent), played.steps) == (half.total, half.busiest, half.steps)
    assert [len(pieces) for pieces in played.summed] == [1] * n
    played.ring(1)
    whole = on_wire("all_reduce", n, n)
    assert (sum(played.sent), max(played.sent), played.steps) == (whole.total, whole.busiest, whole.steps)
    assert played.summed == [set(range(n))] * n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_doubling_sends_what_the_formula_says(n):
    played, reach = Played(n), 1
    while reach < n:
        played.step([(r, r ^ reach, range(n)) for r in range(n)])
        reach *= 2
    w = on_wire("all_reduce", n, n, "doubling")
    assert (sum(played.sent), max(played.sent), played.steps) == (w.total, w.busiest, w.steps)
    assert played.summed == [set(range(n))] * n


@pytest.mark.parametrize("n", [2, 3, 4])
def test_direct_ones_send_what_the_formula_says(n):
    everyone = [(a, b) for a in range(n) for b in range(n) if a != b]
    for kind, pieces, payload in (
        ("all_reduce", lambda b: range(n), n),
        ("reduce_scatter", lambda b: [b], n),
        ("all_to_all", lambda b: [b], n),  # one piece for each rank, one's own stays
        ("all_gather", lambda b: [0], 1),
    ):
        played = Played(n)
        played.step([(a, b, pieces(b)) for a, b in everyone])
        w = on_wire(kind, payload, n, "direct")
        assert (sum(played.sent), max(played.sent), played.steps) == (w.total, w.busiest, w.steps), kind


def test_a_chain_broadcasts():
    w = on_wire("broadcast", 10, 4)
    assert (w.total, w.busiest, w.steps) == (30, 10, 3)


def test_one_rank_and_nothing_to_say_send_nothing():
    for kind in KINDS:
        assert on_wire(kind, 1000, 1) == on_wire(kind, 1000, 1).__class__(0, 0, 0)
        assert on_wire(kind, 0, 4).total == 0


def test_a_payload_that_does_not_divide_is_exact_in_total_and_rounded_up_for_one():
    w = on_wire("all_reduce", 10, 4)  # 2 * 3 * 10 in all, 15 each
    assert (w.total, w.busiest) == (60, 15)
    w = on_wire("all_reduce", 10, 3)  # 13.3 each
    assert (w.total, w.busiest) == (40, 14)


@pytest.mark.parametrize(
    "args, name",
    [
        (("gossip", 1, 2), "kind"),
        (("all_to_all", 1, 2, "ring"), "algorithm"),
        (("all_reduce", -1, 2), "payload"),
        (("all_reduce", 1, 0), "ranks"),
        (("all_reduce", 1, 6, "doubling"), "power of two"),
    ],
)
def test_bad_collectives(args, name):
    with pytest.raises(ValueError, match=name):
        on_wire(*args)


def test_the_third_bill_of_deepseek_v3():
    """8 of 256 experts, rows of 7,168 numbers, 58 of 61 layers; there in fp8, back in bf16."""
    bill = parallel_bytes("deepseek-v3", tokens=1, expert=32, dispatch_dtype="fp8")
    assert bill["dispatch"].payload == 58 * 8 * 7168 * 1 == 3_325_952
    assert bill["combine"].payload == 58 * 8 * 7168 * 2 == 6_651_904
    assert bill["counts"].payload == 58 * 256 * 8 == 118_784  # of a step, whatever its tokens
    assert bill.by_kind == {"all_to_all": (3 * 58, 3_325_952 + 6_651_904 + 118_784)}
    # One of 32 rows stays at home, if the routing is even.
    assert bill["dispatch"].wire().busiest == 3_325_952 * 31 // 32
    # All of it in bf16, or there with one float32 scale per 128 values.
    assert parallel_bytes("deepseek-v3", tokens=1, expert=32)["dispatch"].payload == 6_651_904
    scaled = parallel_bytes("deepseek-v3", tokens=1, expert=32, dispatch_dtype=8.25)["dispatch"].payload
    assert scaled == 58 * 8 * (7168 + 7168 // 128 * 4)


def test_the_bill_of_tensor_parallelism():
    """Llama-3.1-70B: two sums per layer, each of 8,192 numbers."""
    bill = parallel_bytes("llama-3.1-70b", tokens=1, tensor=8)
    assert bill.payload == 2 * 80 * 8192 * 2 == 2_621_440
    assert bill.by_kind == {"all_reduce": (160, 2_621_440)}
    assert bill.wire == 2_621_440 * 2 * 7 // 8
    assert bill["attention"].wire().steps == 80 * 14
    assert bill["attention"].wire("direct").steps == 80
    assert parallel_bytes("llama-3.1-70b", tokens=64, tensor=8).payload == 64 * bill.payload  # a batch of 64
    assert parallel_bytes("llama-3.1-70b", tokens=0, tensor=8).payload == 0


def test_no_split_no_bill():
    bill = parallel_bytes("deepseek-v3", tokens=5)
    assert bill.exchanges == () and bill.payload == bill.wire == 0 and bill.by_kind == {}
    with pytest.raises(KeyError, match="dispatch"):
        bill["dispatch"]


def test_both_splits_add_up():
    both = parallel_bytes("deepseek-v3", tokens=7, tensor=4, expert=8)
    alone = [parallel_bytes("deepseek-v3", tokens=7, **split) for split in ({"tensor": 4}, {"expert": 8})]
    assert both.payload == sum(b.payload for b in alone)
    assert both.wire == sum(b.wire for b in alone)


def test_a_cache_split_by_heads_until_they_run_out():
    for name in ("llama-3.1-8b", "deepseek-v3", "qwen3-30b-a3b", "smollm2-135m"):
        spec = models[name]
        for n in (n for n in range(1, spec.heads + 1) if spec.heads % n == 0):
            try:
                one = kv_bytes(rank_spec(spec, tensor=n), 100)
            except ValueError:
                continue  # neither divides the other
            assert cache_copies(spec, n) == Fraction(n * one, kv_bytes(spec, 100))
            assert cache_copies(spec, n) == n * share_of_cache(spec, n)  # what `decode_step` reckons with
    assert cache_copies("llama-3.1-8b", 16) == 2
    assert cache_copies("deepseek-v3", 16) == 16  # every rank the whole latent


def test_ranks_together_hold_the_model_and_the_copies():
    """Sum over ranks = the model, and (ranks - 1) times what is whole on each."""
    spec = models["llama-3.1-8b"]
    whole = 2 * spec.vocab * spec.d_model + (2 * spec.layers + 1) * spec.d_model
    assert 8 * rank_parameters(spec, tensor=8) == parameters(spec) + 7 * whole
    copied = 2 * spec.layers * spec.d_model * spec.kv_heads * spec.head_dim  # keys and values once more
    assert 16 * rank_parameters(spec, tensor=16) == parameters(spec) + 15 * whole + copied
    deep = models["deepseek-v3"]
    experts = 58 * 256 * 3 * 7168 * 2048
    assert rank_parameters(deep, expert=64) == parameters(deep) - experts + experts // 64


@pytest.mark.parametrize(
    "change, ranks, message",
    [
        ({}, {"tensor": 3}, "tensor must .* heads=32, got 3"),
        ({"kv_heads": 8, "heads": 48}, {"tensor": 12}, "tensor must .* kv_heads=8, got 12"),
        ({"ffn": 1001}, {"tensor": 2}, "tensor must .* ffn=1001, got 2"),
        ({}, {"expert": 2}, "expert must .* without experts, got 2"),
        ({}, {"tensor": 0}, "tensor"),
    ],
)
def test_ranks_that_do_not_divide(change, ranks, message):
    with pytest.raises(ValueError, match=message):
        parallel_bytes(replace(models["llama-3.1-8b"], **change), tokens=1, **ranks)


@pytest.mark.parametrize(
    "ranks, message",
    [({"expert": 3}, "expert must .* moe.experts=8, got 3"), ({"tensor": 32}, None), ({"expert": 8}, None)],
)
def test_ranks_of_a_mixture(ranks, message):
    if message is None:
        rank_spec("mixtral-8x7b", **ranks)
    else:
        with pytest.raises(ValueError, match=message):
            rank_spec("mixtral-8x7b", **ranks)


def test_a_dense_width_counts_only_where_a_layer_is_dense():
    spec = replace(models["mixtral-8x7b"], ffn=7)
    assert rank_spec(spec, tensor=2).moe.ffn == 14336 // 2
    with pytest.raises(ValueError, match="ffn=7"):
        rank_spec(replace(spec, moe=replace(spec.moe, first_dense=1)), tensor=2)
