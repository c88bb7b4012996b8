"""The grouped computation against the dense loop: outputs, gradients, threads, empty experts, NaN."""

import pytest
import torch
import torch.nn.functional as F

from companion.moe import dense_experts, gated, grouped_experts, grouped_linear, split_interleaved

NAN = float("nan")


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}-threads")
def threads(request):
    """The products are cut by the number of threads, so every test of them runs with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def problem(T, E, k, K=10, N=6, *, seed=0, dtype=torch.float64, bias=True, one=None):
    """x, w1, w2, ids, weights and the biases; `one`: every token to this expert."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    ids = torch.rand(T, E, generator=g).argsort(1)[:, :k]
    if one is not None:
        ids = torch.full((T, k), one)
    tensors = rand(T, K), rand(E, 2 * N, K), rand(E, K, N), ids, rand(T, k)
    return *tensors, (dict(b1=rand(E, 2 * N), b2=rand(E, K)) if bias else {})


CASES = {
    "plain": dict(T=33, E=8, k=2),
    "no tokens": dict(T=0, E=8, k=2),
    "one token": dict(T=1, E=8, k=3),
    "one token, one choice": dict(T=1, E=8, k=1),
    "k = 1": dict(T=20, E=4, k=1),
    "k = E": dict(T=20, E=4, k=4),
    "one expert": dict(T=5, E=1, k=1),
    "all to one, few rows": dict(T=7, E=8, k=1, one=3),
    "all to one, many rows": dict(T=67, E=8, k=1, one=7),
    "all to one, several times": dict(T=9, E=4, k=2, one=0),
    "most experts empty": dict(T=3, E=67, k=2),
    "odd sizes": dict(T=40, E=5, k=3, K=7, N=5),
    "around the switch of products": dict(T=64, E=4, k=1),
}


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", list(CASES))
def test_equals_the_dense_loop(case, bias, limit, threads):
    *args, more = problem(**CASES[case], bias=bias)
    more |= dict(limit=limit, alpha=1.3)
    torch.testing.assert_close(
        grouped_experts(*args, **more), dense_experts(*args, **more), atol=1e-12, rtol=0
    )
    single = [a.float() if a.is_floating_point() else a for a in args]
    more = {n: b.float() if torch.is_tensor(b) else b for n, b in more.items()}
    want = dense_experts(*args, **{n: b.double() if torch.is_tensor(b) else b for n, b in more.items()})
    scale = max(float(want.abs().max()), 1.0) if want.numel() else 1.0
    torch.testing.assert_close(
        grouped_experts(*single, **more) / scale, want.float() / scale, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_equal_the_dense_loop(case, threads):
    found = []
    for run in (grouped_experts, dense_experts):
        x, w1, w2, ids, weights, more = problem(**CASES[case])
        leaves = [t.requires_grad_() for t in (x, w1, w2, weights, *more.values())]
        (run(x, w1, w2, ids, weights, **more, limit=0.9) ** 2).sum().backward()
        found.append([t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves])
    for mine, wanted in zip(*found):
        torch.testing.assert_close(mine, wanted, atol=1e-11, rtol=1e-11)


def test_the_gradient_of_an_expert_without_tokens_is_zero():
    x, w1, w2, ids, weights, more = problem(T=3, E=8, k=1, one=5)
    leaves = [t.requires_grad_() for t in (w1, w2, *more.values())]
    torch.full((4000,), NAN)  # memory that comes back to torch.empty dirty
    grouped_experts(x, w1, w2, ids, weights, **more).sum().backward()
    for t in leaves:
        assert t.grad[5].abs().sum() > 0
        assert (t.grad[[0, 1, 2, 3, 4, 6, 7]] == 0).all()


def test_gradcheck():
    x, w1, w2, ids, weights, more = problem(T=4, E=3, k=2, K=3, N=2)
    leaves = [t.requires_grad_() for t in (x, w1, w2, weights, more["b1"], more["b2"])]

    def run(x, w1, w2, weights, b1, b2):
        return grouped_experts(x, w1, w2, ids, weights, b1=b1, b2=b2)

    assert torch.autograd.gradcheck(run, leaves)


def test_only_what_needs_a_gradient_gets_one():
    x, w1, w2, ids, weights, _ = problem(T=6, E=4, k=2, bias=False)
    grouped_experts(x, w1.requires_grad_(), w2, ids, weights).sum().backward()
    assert w1.grad is not None and x.grad is w2.grad is weights.grad is None


@pytest.mark.parametrize("T", [8, 60])  # rows on both sides of the switch of products
def test_a_token_of_nan_reaches_no_other(T, threads):
    x, w1, w2, ids, weights, _ = problem(T=T, E=4, k=2, bias=False, dtype=torch.float32)
    want = grouped_experts(x, w1, w2, ids, weights)
    x[2], x[5] = NAN, float("inf")
    got = grouped_experts(x, w1, w2, ids, weights)
    others = [t for t in range(T) if t not in (2, 5)]
    assert got[others].equal(want[others]) and got[2].isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_the_same_result_twice(threads):
    x, w1, w2, ids, weights, more = problem(T=50, E=8, k=3, dtype=torch.float32)
    first = grouped_experts(x, w1, w2, ids, weights, **more)
    assert first.equal(grouped_experts(x, w1, w2, ids, weights, **more))
    torch.testing.assert_close(first, dense_experts(x, w1, w2, ids, weights, **more), atol=1e-4, rtol=1e-5)


def test_each_row_is_weighted():
    """Two experts that give x and 2 x, weights .7 and .3: 1.3 x."""
    x = torch.tensor([[1.0, -2.0, 0.5]])
    big = 30.0  # silu(30) is 30, so the gate is a constant factor
    w1 = torch.zeros(2, 6, 3)
    b1 = torch.tensor([big] * 3 + [0.0] * 3).repeat(2, 1)
    w1[:, 3:] = torch.eye(3)
    w2 = torch.stack([torch.eye(3), 2 * torch.eye(3)]) / big
    out = grouped_experts(x, w1, w2, torch.tensor([[0, 1]]), torch.tensor([[0.7, 0.3]]), b1=b1)
    torch.testing.assert_close(out, 1.3 * x)


def test_gate_rows_stand_before_up_rows():
    w1, x = torch.tensor([[[2.0], [3.0]]]), torch.tensor([[1.0]])
    out = grouped_experts(x, w1, torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert out.item() == pytest.approx(F.silu(torch.tensor(2.0)).item() * 3.0)


def test_the_clamped_activation_by_hand():
    """Gate is clamped from above only, up on both sides; sigmoid(1.702 g) g (u + 1)."""
    h = torch.tensor([[9.0, -9.0, 1.0, 0.5, 9.0, -9.0]], dtype=torch.float64)  # gates, then ups
    s = torch.sigmoid(1.702 * torch.tensor([7.0, -9.0, 1.0], dtype=torch.float64))
    want = torch.tensor([[7.0 * 1.5, -9.0 * 8.0, 1.0 * -6.0]], dtype=torch.float64) * s
    torch.testing.assert_close(gated(h, limit=7.0), want)


def test_the_plain_activation_leaves_its_input():
    h = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    before = h.clone()
    torch.testing.assert_close(gated(h), F.silu(h[:, :4]) * h[:, 4:])
    assert h.equal(before)


def test_split_interleaved():
    w = torch.arange(12).view(2, 6)
    assert split_interleaved(w, -1).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]
    assert split_interleaved(w.t(), 0).equal(split_interleaved(w, 1).t())
    with pytest.raises(ValueError, match="w must have an even size along dim 0"):
        split_interleaved(torch.zeros(3, 2), 0)


def test_unsent_slots_and_capacity_leave_the_rest_alone():
    x, w1, w2, ids, weights, _ = problem(T=12, E=3, k=2, bias=False)
    ids[4], ids[7, 1] = -1, -1
    plain = grouped_experts(x, w1, w2, ids, weights)
    torch.testing.assert_close(plain, dense_experts(x, w1, w2, ids, weights))
    assert (plain[4] == 0).all()
    limited = grouped_experts(x, w1, w2, ids, weights, capacity=3)
    lists = [[s for s, e in enumerate(ids.flatten().tolist()) if e == want][:3] for want in range(3)]
    kept = torch.zeros(24, dtype=torch.bool)
    kept[[s for slots in lists for s in slots]] = True
    cut = torch.where(kept.view(12, 2), ids, -1)
    torch.testing.assert_close(limited, dense_experts(x, w1, w2, cut, weights), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    *args, _ = problem(T=20, E=4, k=2, bias=False)
    want = dense_experts(*args)
    x, w1, w2, ids, weights = args
    out = grouped_experts(x.to(dtype), w1.to(dtype), w2.to(dtype), ids, weights.float())
    assert out.dtype == dtype
    assert (out.double() - want).norm() / want.norm() < (2e-2 if dtype == torch.bfloat16 else 2e-3)


def test_weights_in_another_memory_order(threads):
    x, w1, w2, ids, weights, _ = problem(T=40, E=4, k=2, bias=False)
    turned = w1.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    want = grouped_experts(x, w1, w2, ids, weights)
    torch.testing.assert_close(grouped_experts(x, turned, w2, ids, weights), want, atol=1e-12, rtol=0)
    wide = torch.zeros(40, 20, dtype=x.dtype)
    wide[:, ::2] = x  # an x with holes
    torch.testing.assert_close(grouped_experts(wide[:, ::2], w1, w2, ids, weights), want, atol=1e-12, rtol=0)


def test_one_expert_is_a_linear_layer():
    x, weight = torch.randn(5, 4), torch.randn(1, 3, 4)
    torch.testing.assert_close(grouped_linear(x, weight, [5]), F.linear(x, weight[0]))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w1=torch.zeros(4, 12, 9)), "w1 must be (E, 2N, K) for x (T, K)"),
        (dict(w1=torch.zeros(4, 11, 10)), "w1 must be (E, 2N, K) for x (T, K)"),
        (dict(w2=torch.zeros(4, 6, 10)), "w2 must be of shape (4, 10, 6), got (4, 6, 10)"),
        (dict(b1=torch.zeros(4, 6)), "b1 must be of shape (4, 12), got (4, 6)"),
        (dict(b2=torch.zeros(3, 10)), "b2 must be of shape (4, 10), got (3, 10)"),
        (dict(weights=torch.zeros(5, 3)), "weights must be of shape (5, 2), got (5, 3)"),
        (
            dict(x=torch.zeros(5, 10).double()),
            "x, w1 and w2 must have one dtype, got torch.float64, torch.float32",
        ),
        (dict(x=torch.zeros(6, 10)), "ids must be (T, k) for x (6, 10), got (5, 2)"),
        (dict(ids=torch.full((5, 2), 4)), "ids must be in 0..3, or -1 for not sent; got 4"),
    ],
)
def test_bad_input(change, message):
    names = ("x", "w1", "w2", "ids", "weights")
    *args, more = problem(T=5, E=4, k=2, dtype=torch.float32)
    with pytest.raises(ValueError) as caught:
        # Past the checker of shapes, as in use outside the tests.
        grouped_experts.__wrapped__(**{**dict(zip(names, args)), **more, **change})
    assert message in str(caught.value)


def test_sizes_must_fit():
    for sizes in ([2, 2], [2, 2, 2], [1, 1, 1, 1]):
        with pytest.raises(ValueError, match="sizes must be 3 counts that add up to 5 rows"):
            grouped_linear(torch.zeros(5, 4), torch.zeros(3, 2, 4), sizes)
