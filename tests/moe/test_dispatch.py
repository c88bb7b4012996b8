"""dispatch: a permutation and its inverse, counts, capacity, what is not sent; combine undoes gather."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.moe import capacity_of, combine, dispatch, gather


@st.composite
def choices(draw, unsent=False):
    """(ids, E): any ids at all, repeated ones included."""
    E, T, k = draw(st.integers(1, 9)), draw(st.integers(0, 12)), draw(st.integers(1, 4))
    one = st.integers(-1 if unsent else 0, E - 1)
    rows = draw(st.lists(st.lists(one, min_size=k, max_size=k), min_size=T, max_size=T))
    return torch.tensor(rows, dtype=torch.int64).reshape(T, k), E


def plainly(ids, E, capacity=None):
    """Slots per expert, in the order of tokens, by a loop."""
    lists = [[] for _ in range(E)]
    for slot, e in enumerate(ids.flatten().tolist()):
        if e >= 0 and (capacity is None or len(lists[e]) < capacity):
            lists[e].append(slot)
    return lists


@settings(max_examples=100, deadline=None)
@given(choices(unsent=True), st.one_of(st.none(), st.integers(0, 4)))
def test_equals_the_loop(drawn, capacity):
    ids, E = drawn
    plan = dispatch(ids, E, capacity=capacity)
    want = plainly(ids, E, capacity)
    assert plan.order.tolist() == [slot for slots in want for slot in slots]
    assert plan.counts.tolist() == plan.sizes == [len(slots) for slots in want]
    assert plan.offsets.tolist() == [sum(plan.sizes[:e]) for e in range(E + 1)]
    assert plan.dropped == int((ids >= 0).sum()) - len(plan.order)
    assert plan.tokens.tolist() == [slot // ids.shape[1] for slot in plan.order.tolist()]


@settings(max_examples=100, deadline=None)
@given(choices(unsent=True), st.one_of(st.none(), st.integers(0, 4)))
def test_inverse_is_the_inverse(drawn, capacity):
    ids, E = drawn
    plan = dispatch(ids, E, capacity=capacity)
    back = plan.inverse.flatten()
    for row, slot in enumerate(plan.order.tolist()):
        assert back[slot] == row
    assert int((back >= 0).sum()) == len(plan.order) == len(set(plan.order.tolist()))
    assert plan.inverse.shape == ids.shape and plan.sent.equal(plan.inverse >= 0)
    assert not (plan.sent & (ids < 0)).any()


@settings(max_examples=50, deadline=None)
@given(choices())
def test_without_capacity_nothing_is_lost(drawn):
    ids, E = drawn
    plan = dispatch(ids, E)
    assert sorted(plan.order.tolist()) == list(range(ids.numel())) and plan.dropped == 0
    assert plan.counts.tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()


@pytest.mark.parametrize("k", [1, 3])
def test_every_number_of_tokens_up_to_130(k):
    for T in range(131):
        ids = torch.randint(0, 8, (T, k), generator=torch.Generator().manual_seed(T))
        assert dispatch(ids, 8).order.tolist() == [s for slots in plainly(ids, 8) for s in slots]


def test_all_tokens_to_one_expert():
    plan = dispatch(torch.full((4, 1), 2), 5)
    assert plan.order.tolist() == [0, 1, 2, 3] and plan.sizes == [0, 0, 4, 0, 0]


def test_capacity_drops_later_tokens_first_whatever_their_choice():
    ids = torch.tensor([[1, 0], [0, 1], [0, 2], [0, 1]])
    plan = dispatch(ids, 3, capacity=2)
    assert plan.order.tolist() == [1, 2, 0, 3, 5]  # expert 0: tokens 0, 1; expert 1: tokens 0, 1; expert 2
    assert plan.sent.tolist() == [[True, True], [True, True], [False, True], [False, False]]
    assert plan.dropped == 3


def test_capacity_of_zero_sends_nothing():
    plan = dispatch(torch.tensor([[0, 1]]), 2, capacity=0)
    assert plan.order.tolist() == [] and plan.dropped == 2


def test_capacity_factor():
    assert capacity_of(256, 64, 8, 1.0) == 32
    assert capacity_of(256, 64, 8, 1.25) == 40
    assert capacity_of(3, 8, 2, 1.0) == 1  # rounded up
    assert capacity_of(0, 8, 2, 1.0) == 0
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor must be a positive finite number"):
            capacity_of(3, 8, 2, bad)


@settings(max_examples=60, deadline=None)
@given(choices(unsent=True), st.one_of(st.none(), st.integers(0, 3)))
def test_combine_of_gather_is_the_weighted_sum_of_what_was_sent(drawn, capacity):
    ids, E = drawn
    T, k = ids.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(T, k, generator=generator, dtype=torch.float64)
    plan = dispatch(ids, E, capacity=capacity)
    rows = gather(x, plan)
    assert rows.equal(x[plan.tokens])
    want = x * (weights * plan.sent).sum(1, keepdim=True)
    torch.testing.assert_close(combine(rows, weights, plan), want, atol=1e-12, rtol=0)


def test_a_slot_that_is_not_sent_counts_for_nothing_even_with_weight_nan():
    plan = dispatch(torch.tensor([[0, -1], [-1, -1]]), 2)
    weights = torch.tensor([[2.0, torch.nan], [torch.nan, torch.nan]])
    out = combine(gather(torch.tensor([[1.0], [torch.nan]]), plan), weights, plan)
    assert out.tolist() == [[2.0], [0.0]]


def test_low_precision_rows_are_added_in_float32():
    """256 + 1 + 1 in bfloat16 is 256 if added one by one."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    plan = dispatch(torch.tensor([[0, 1, 2]]), 3)
    out = combine(rows, torch.ones(1, 3), plan)
    assert out.dtype == torch.bfloat16 and out.tolist() == [[258.0]]
    weights = torch.tensor([[1 + 2.0**-9, -1.0, 0.0]])  # bfloat16 would round the first to 1
    assert combine(torch.ones(3, 1, dtype=torch.bfloat16), weights, plan).tolist() == [[2.0**-9]]


@pytest.mark.parametrize("capacity", [None, 2])
def test_gradients(capacity):
    ids = torch.tensor([[0, 2], [2, 1], [-1, 2], [2, 0]])
    plan = dispatch(ids, 4, capacity=capacity)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: combine(gather(a, plan) ** 2, w, plan), (x, weights))


@pytest.mark.parametrize(
    "ids, experts, capacity, message",
    [
        ([[0, 3]], 3, None, "ids must be in 0..2, or -1 for not sent; got 3"),
        ([[0, -2]], 3, None, "ids must be in 0..2, or -1 for not sent; got -2"),
        ([[0, 10**15]], 3, None, "got 1000000000000000"),
        ([[0, 1]], 0, None, "experts must be a positive integer, got 0"),
        ([[0, 1]], 3, -1, "capacity must be an integer of at least 0, got -1"),
    ],
)
def test_bad_input(ids, experts, capacity, message):
    with pytest.raises(ValueError) as caught:
        dispatch(torch.tensor(ids), experts, capacity=capacity)
    assert message in str(caught.value)


def test_ids_of_another_kind_are_refused():
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"ids must be int64 of shape \(T, k\)"):
            dispatch.__wrapped__(wrong, 4)
