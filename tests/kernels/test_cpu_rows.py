"""Compiled products of few rows, and the small loops beside them, against float64."""

import inspect
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from companion.attend import by_kernels
from companion.kernels import cpu as cpu_rows
from companion.kernels import linear_on_cpu, use
from companion.kernels.cpu import loops as cpu_loops
from companion.model.products import Int8Matrix, matrix, product
from companion.rope import Rope

plain = inspect.unwrap(linear_on_cpu)  # without the run-time types that the tests add, which speak first
CODES = torch.ones(3, 4, dtype=torch.int8)
LEAST, NONE = cpu_loops.LEAST_WEIGHTS, cpu_rows.NO_SCALE


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours, exact):
    return (ours.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize(
    "out, width", [(1, 1), (7, 5), (5, 7), (63, 33), (3 * LEAST // 64 + 1, 64), (9, LEAST)]
)
@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_equals_linear_in_float64(monkeypatch, n_threads, out, width):
    monkeypatch.setattr(cpu_rows, "threads", lambda: nullcontext(n_threads))  # beyond the machine's cores too
    weight, bias = random(out, width), random(out, seed=1)
    for rows in (*range(10), 17):
        for shape in ((rows, width), (rows, 1, width), (1, 1, rows, width)):
            x = random(*shape, seed=2)
            for b in (None, bias):
                y = linear_on_cpu(x, weight, b)
                exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
                assert y.shape == exact.shape and y.is_contiguous() and close(y, exact)


@pytest.mark.parametrize("out, width", [(1, 1), (7, 5), (63, 33), (2 * LEAST // 64 + 1, 64)])
def test_int8_codes_with_a_scale_for_each_output(out, width):
    weight, bias = random(out, width), random(out, seed=1)
    matrix = Int8Matrix(weight)
    exact = matrix.codes.double() * matrix.scale.double()[:, None]
    for rows in (0, 1, 2, 3, 8, 9):
        x = random(rows, width, seed=2)
        for b in (None, bias):
            y = linear_on_cpu(x, matrix.codes, b, scale=matrix.scale)
            assert close(y, F.linear(x.double(), exact, None if b is None else b.double()))
    extremes = torch.tensor([[-128, 127, -1, 0]], dtype=torch.int8)
    y = linear_on_cpu(torch.eye(4), extremes, scale=torch.tensor([0.5]))
    assert y[:, 0].tolist() == [-64.0, 63.5, -0.5, 0.0]


def test_one_row_alone_and_rows_with_gaps():
    x, weight = random(60, 8).t()[::2], random(96, 60)  # (4, 60), strided
    assert close(linear_on_cpu(x, weight), x.double() @ weight.double().t())
    assert close(linear_on_cpu(x[1], weight), weight.double() @ x[1].double())


def test_nan_and_infinity_are_told_and_stay_in_their_row():
    weight = random(40, 33)
    for R in (1, 2, 3):
        for row in range(R):
            for bad in (torch.nan, torch.inf):
                x = random(R, 33)
                clean = linear_on_cpu(x, weight)
                x[row, 7] = bad
                y = linear_on_cpu(x, weight)
                others = [r for r in range(R) if r != row]
                assert not y[row].isfinite().any() and torch.equal(y[others], clean[others])


@pytest.mark.parametrize("change, message", [
    ({"x": torch.randn(2, 5)}, "x has shape"),
    ({"x": torch.tensor(1.0)}, "x has shape"),
    ({"x": torch.randn(2, 4, dtype=torch.float64)}, "x is torch.float64"),
    ({"weight": torch.randn(3, 4).half()}, "weight is torch.float16"),
    ({"weight": torch.randn(4)}, "weight has shape"),
    ({"weight": torch.randn(4, 3).t()}, "weight has shape .* without gaps"),
    ({"bias": torch.randn(4)}, "bias has shape"),
    ({"scale": torch.randn(3)}, "weight is torch.float32 .* need torch.int8"),
    ({"weight": CODES}, "weight is torch.int8 .* need torch.float32"),
    ({"weight": CODES, "scale": torch.ones(4)}, "scale has shape"),
    ({"weight": CODES, "scale": torch.ones(3).double()}, "scale is torch.float64"),
    ({"bias": torch.randn(3, dtype=torch.float64)}, "bias is torch.float64"),
])  # fmt: skip
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        plain(**{"x": torch.randn(2, 4), "weight": torch.randn(3, 4), "bias": torch.randn(3), **change})


def test_what_the_model_multiplies_here(monkeypatch):
    """Few rows in float32 that no gradient passes, where the user asked for it."""
    seen = []
    monkeypatch.setattr(by_kernels, "linear", lambda *given: seen.append(given) or cpu_rows.linear(*given))
    weight, x = matrix([random(96, 60)]), random(cpu_rows.ROWS + 1, 60)

    def asked(how, x, weight=weight):
        seen.clear()
        with use(how):
            y = product(x, weight)
        assert close(y, x.double() @ weight.double().t())
        return len(seen)

    assert asked("compiled", x[:1]) == asked("compiled", x[:-1]) == 1
    assert not asked("compiled", x) and not asked("auto", x[:1]) and not asked("never", x[:1])
    assert not asked("compiled", x[:1].double(), weight.double())
    assert not asked("compiled", x[:1].clone().requires_grad_())
    with torch.no_grad():
        assert asked("compiled", x[:1].clone().requires_grad_())
    assert not asked("compiled", x[:1], weight.t().contiguous().t())


def test_which_int8_products_are_computed_here(monkeypatch):
    seen = []
    monkeypatch.setattr(by_kernels, "linear", lambda *given: seen.append(given) or cpu_rows.linear(*given))
    weight, x = Int8Matrix(random(96, 64)), random(cpu_rows.ROWS + 1, 64)

    def asked(how, x, weight=weight, tolerance=1e-6):
        seen.clear()
        with use(how):
            y = product(x, weight)
        exact = x.double() @ weight.dense(torch.float64).t()
        assert (y - exact).norm() <= tolerance * exact.norm()
        return len(seen)

    assert asked("compiled", x[:1]) == asked("compiled", x[:-1]) == 1
    assert not asked("compiled", x) and not asked("auto", x[:1]) and not asked("compiled", x[:1].double())
    assert not asked("compiled", x[:1].bfloat16(), tolerance=1e-2)
    assert not asked("compiled", x[:1], Int8Matrix(random(96, 64).bfloat16()))  # its scale is bfloat16
    assert not asked("compiled", x[:1].clone().requires_grad_())


@pytest.mark.parametrize("rows, width", [(1, 1), (3, 33), (2, 576)])
def test_norm_in_place_and_beside(rows, width):
    x, weight = random(rows, width) * 100, random(width, seed=1)
    exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    y = torch.empty_like(x)
    for out in (y, x):
        cpu_loops.rms_norm(x.numpy(), weight.numpy(), np.float32(1e-5), out.numpy())
        assert close(out, exact)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("together", [True, False])
def test_turn_is_the_rotation(partial, together):
    rope = Rope(16, theta=100.0, partial=partial)
    positions = torch.tensor([[7]] if together else [[7], [0], [300]])
    x = random(3, 4, 1, 16)
    exact = rope(x.double(), positions.expand(3, 1))
    cos, sin = (t[:, 0].numpy() for t in rope.cos_sin(positions))
    cpu_loops.apply_rope(x[:, :, 0].numpy(), cos, sin)
    torch.testing.assert_close(x.double(), exact, rtol=0, atol=1e-4)  # float32 angles of 300 radians


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_gated(gelu, n_threads):
    K, width = 64, LEAST // 64 + 3
    gate_up, down, x = random(2 * width, K) / 4, random(K, width, seed=1), random(3, K, seed=2)
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, dim=1)
    act = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    hidden, y = np.empty((2, 3, width), np.float32), torch.empty(3, K)
    cpu_loops.gated(x.numpy(), gate_up.numpy(), NONE, down.numpy(), NONE, gelu, n_threads, hidden, y.numpy())
    assert close(y, (act * up) @ down.double().t())


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_far_from_zero(gelu):
    """exp overflows beyond 88: the gate is then 0, or the number itself."""
    gate_up = torch.tensor([[-1e4], [-200.0], [-90.0], [0.0], [90.0], [1e4], *[[1.0]] * 6])
    hidden, y = np.empty((2, 1, 6), np.float32), torch.empty(6, 1).t().contiguous()
    cpu_loops.gated(
        np.ones((1, 1), np.float32),
        gate_up.numpy(),
        NONE,
        np.eye(6, dtype=np.float32),
        NONE,
        gelu,
        1,
        hidden,
        y.numpy(),
    )
    act = F.gelu if gelu else F.silu
    torch.testing.assert_close(y[0], act(gate_up[:6, 0]), rtol=1e-6, atol=1e-30)
