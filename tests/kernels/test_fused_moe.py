"""`fused_moe` in the interpreter: against float64 and `companion.moe`, and what it must not touch."""

import pytest
import torch
from moe_cases import TOLERANCE, layer, normal, off_by, routing

from companion.kernels import fused_moe
from companion.kernels.moe.plan import FORMS, GemmTile
from companion.kernels.moe.reference import fused_moe_reference
from companion.moe import dense_experts, grouped_experts

WIDE = GemmTile(64, 128, 64)  # few programs: the interpreter takes some 20 ms for each
SMALL = GemmTile(16, 32, 32)


def exact(x, w1, w2, weights, ids, *, b1=None, b2=None, **gate):
    """The definition in float64, of the rounded inputs."""
    double = (None if t is None else t.double() for t in (b1, b2))
    b1, b2 = double
    return dense_experts(x.double(), w1.double(), w2.double(), ids, weights.double(), b1=b1, b2=b2, **gate)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("E", [8, 64, 67])
@pytest.mark.parametrize("T", [0, 1, 7, 33, 257])
def test_tokens_experts_and_choices(T, E, k):
    args = layer(T, E, k)
    want = exact(*args)
    for form in FORMS if T < 257 else FORMS[T * E * k % 2 :][:1]:
        out = fused_moe(*args, form=form, tile=WIDE)
        assert out.shape == (T, 48) and off_by(out, want) < TOLERANCE[torch.float32]
    assert off_by(fused_moe_reference(*args), want) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("spread", ["uniform", "odd", "one"])
@pytest.mark.parametrize("form", FORMS)
def test_dtypes_and_uneven_loads(dtype, spread, form):
    args = layer(33, 8, 3, dtype=dtype, spread=spread)
    want = exact(*args)
    out = fused_moe(*args, form=form)
    assert out.dtype == dtype and off_by(out, want) < TOLERANCE[dtype]
    assert off_by(fused_moe_reference(*args), want) < TOLERANCE[dtype]
    ours = grouped_experts(*args[:3], args[4], args[3])
    assert off_by(out, ours) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gpt_oss"])
def test_biases_and_gates(dtype, activation):
    x, w1, w2, weights, ids = layer(17, 8, 2, dtype=dtype)
    w1 = w1 * 4  # far enough for gpt-oss's limit to act
    biases = {"b1": normal(8, 80, dtype=dtype, seed=8), "b2": normal(8, 48, dtype=dtype, seed=9)}
    gate = {} if activation == "silu" else {"limit": 2.0, "alpha": 1.5}
    assert activation == "silu" or float((x @ w1[0, :40].T).max()) > 2
    want = exact(x, w1, w2, weights, ids, **biases, **gate)
    for one in (biases, {"b1": biases["b1"]}, {}):
        out = fused_moe(x, w1, w2, weights, ids, activation=activation, **one, **gate)
        want = exact(x, w1, w2, weights, ids, **one, **gate)
        assert off_by(out, want) < TOLERANCE[dtype]
        reference = fused_moe_reference(x, w1, w2, weights, ids, activation=activation, **one, **gate)
        assert off_by(reference, want) < TOLERANCE[dtype]


def test_two_identities_weighted():
    """Experts that return x and 2 x, weights 0.7 and 0.3: 1.3 x. The gate saturates at silu(g) = g."""
    K, g = 4, 20.0
    w1 = torch.cat([torch.zeros(2, K, K), torch.eye(K).expand(2, K, K)], dim=1)
    w2 = torch.stack([torch.eye(K), 2 * torch.eye(K)]) / g
    b1 = torch.cat([torch.full((2, K), g), torch.zeros(2, K)], dim=1)
    x = normal(3, K)
    out = fused_moe(x, w1, w2, torch.tensor([[0.7, 0.3]] * 3), torch.tensor([[0, 1]] * 3), b1=b1)
    torch.testing.assert_close(out, 1.3 * x)


@pytest.mark.parametrize("form", FORMS)
def test_slots_that_are_not_sent(form):
    """-1 adds nothing, whatever its weight, and a token without any expert gets 0; memory is poisoned."""
    x, w1, w2, weights, ids = layer(20, 8, 3)
    ids[2, 0] = ids[5, 1] = ids[6, 2] = -1
    ids[9] = -1
    weights[2, 0] = weights[9, 1] = float("nan")
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = fused_moe(x, w1, w2, weights, ids, form=form)
        none = fused_moe(x, w1, w2, weights, torch.full_like(ids, -1), form=form)
    finally:
        torch.use_deterministic_algorithms(False)
    assert off_by(out, exact(x, w1, w2, weights.masked_fill(ids < 0, 0), ids)) < 5e-6
    assert (out[9] == 0).all() and (none == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_where_it_is(form):
    x, w1, w2, weights, ids = layer(20, 8, 2, spread="odd")
    clean = fused_moe(x, w1, w2, weights, ids, form=form, tile=SMALL)
    w1[::2], w2[::2] = float("nan"), float("nan")  # experts without a token
    assert torch.equal(fused_moe(x, w1, w2, weights, ids, form=form, tile=SMALL), clean)
    x[3] = float("nan")
    w2[5] = float("inf")
    out = fused_moe(x, w1, w2, weights, ids, form=form, tile=SMALL)
    hurt = (ids == 5).any(dim=1)
    hurt[3] = True
    assert 1 < int(hurt.sum()) < 20
    assert torch.equal(out[~hurt], clean[~hurt])
    assert not out[hurt].isfinite().any()


@pytest.mark.usefixtures("even_dots")
@pytest.mark.parametrize("form", FORMS)
def test_a_token_is_the_same_alone_and_in_any_batch(form):
    """Bit for bit, with a tile given; on every run; in both forms; and however tokens are ordered."""
    x, w1, w2, weights, ids = layer(33, 8, 3)
    full = fused_moe(x, w1, w2, weights, ids, form=form, tile=SMALL)
    assert torch.equal(full, fused_moe(x, w1, w2, weights, ids, form=form, tile=SMALL))
    assert torch.equal(full, fused_moe(x, w1, w2, weights, ids, form="padded", tile=SMALL))
    for some in (slice(4, 5), slice(0, 7), torch.randperm(33, generator=torch.Generator().manual_seed(1))):
        part = fused_moe(x[some], w1, w2, weights[some], ids[some], form=form, tile=SMALL)
        assert torch.equal(part, full[some])


def test_the_order_of_choices_is_the_order_of_the_sum():
    """Three terms that cancel: 1e8, -1e8 and 1 add up to 1 in this order and to 0 in another."""
    K = 16
    w1 = torch.cat([torch.zeros(3, K, K), torch.eye(K).expand(3, K, K)], dim=1)
    w2 = torch.eye(K).expand(3, K, K) / 20
    b1 = torch.cat([torch.full((3, K), 20.0), torch.zeros(3, K)], dim=1)
    x, weights = torch.ones(1, K), torch.tensor([[1e8, -1e8, 1.0]])
    for ids, order in (([2, 0, 1], [0, 1, 2]), ([0, 2, 1], [0, 2, 1])):
        out = fused_moe(x, w1, w2, weights[:, order], torch.tensor([ids]), b1=b1)
        assert abs(float(out[0, 0]) - (1.0 if order == [0, 1, 2] else 0.0)) < 1e-6


def test_views_and_small_integers():
    """A slice of a wider x, experts from the middle of a stack, int32 ids, float16 weights of the choices."""
    x, w1, w2, weights, ids = layer(9, 8, 2)
    want = fused_moe(x, w1, w2, weights.half().float(), ids)
    wide, stack1, stack2 = (
        torch.full((9, 64), torch.nan),
        torch.full((10, 80, 50), torch.nan),
        w2.repeat(2, 1, 1),
    )
    wide[:, 8:56], stack1[1:9, :, :48] = x, w1
    out = fused_moe(
        wide[:, 8:56], stack1[1:9, :, :48], stack2[4:12].roll(4, 0), weights.half(), ids.to(torch.int32)
    )
    assert torch.equal(out, want)


def test_ids_out_of_range():
    x, w1, w2, weights, ids = layer(9, 8, 2)
    for bad in (8, -2):
        wrong = ids.clone()
        wrong[4, 1] = bad
        with pytest.raises(ValueError, match=r"topk_ids must be in 0..7, or -1 for not sent; got"):
            fused_moe(x, w1, w2, weights, wrong)
        unsent = wrong.where(wrong != bad, -1)
        unchecked = fused_moe(x, w1, w2, weights, wrong, check_ids=False)
        assert torch.equal(unchecked, fused_moe(x, w1, w2, weights, unsent))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(5, 48, dtype=torch.float64)}, "x must be float16"),
        ({"w1": torch.zeros(8, 80, 48).half()}, "w1 must have x's dtype"),
        ({"w1": torch.zeros(8, 81, 48)}, "w1 must have an even number"),
        ({"w1": torch.zeros(8, 80, 47)}, "w1 must have shape"),
        ({"w2": torch.zeros(8, 48, 39)}, "w2 must have shape"),
        ({"w2": torch.zeros(8, 40, 48).transpose(1, 2)}, "w2 must have stride 1"),
        ({"b1": torch.zeros(8, 79)}, "b1 must have shape"),
        ({"b2": torch.zeros(7, 48)}, "b2 must have shape"),
        ({"topk_ids": torch.zeros(4, 2, dtype=torch.int64)}, "topk_ids must have shape"),
        ({"topk_ids": torch.zeros(5, 2, dtype=torch.int16)}, "topk_ids must be int32 or int64"),
        ({"topk_weights": torch.zeros(5, 3)}, "topk_weights must have shape"),
        ({"activation": "relu"}, "activation be 'silu' or 'gpt_oss'"),
        ({"form": "other"}, "form must be one of"),
        ({"x": torch.zeros(5, 48, requires_grad=True)}, "no gradient"),
    ],
)
def test_bad_input_is_named(change, message):
    names = ("x", "w1", "w2", "topk_weights", "topk_ids")
    with pytest.raises(ValueError, match=message):
        fused_moe.__wrapped__(**{**dict(zip(names, layer(5, 8, 2))), **change})


def test_bfloat16_is_refused_below_capability_8(monkeypatch):
    import companion.kernels.moe.gemm as gemm

    monkeypatch.setattr(gemm, "capability", lambda tensor: (7, 5))
    args = layer(5, 8, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16, which needs compute capability 8.0"):
        fused_moe(*args)


def test_routing_of_the_tests_reaches_what_it_says():
    assert set(routing(50, 8, 2, spread="odd")[1].unique().tolist()) == {1, 3, 5, 7}
    assert routing(50, 8, 2, spread="one")[1].unique().tolist() == [7]
