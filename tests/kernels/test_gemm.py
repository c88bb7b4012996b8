"""`grouped_gemm` in the interpreter: against float64, in both forms, and what it must not touch."""

import pytest
import torch
from moe_cases import TOLERANCE, normal, off_by

from companion.kernels import grouped_gemm
from companion.kernels.moe.gemm import plan_rows
from companion.kernels.moe.plan import FORMS, GemmTile, products, tiles
from companion.kernels.moe.reference import grouped_gemm_reference

COUNTS = {
    "even": [5, 5, 5],
    "empty at both ends": [0, 0, 7, 0, 30, 1, 0],
    "all to one": [0, 0, 33, 0],
    "one each": [1] * 20,
    "one expert": [17],
    "nothing": [0, 0, 0],
}
SMALL = GemmTile(16, 32, 32)


def offsets_of(counts, dtype=torch.int64):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=dtype)


def case(counts, *, K=40, N=24, dtype=torch.float32):
    x = normal(sum(counts), K, dtype=dtype)
    w = normal(len(counts), N, K, dtype=dtype, seed=1, scale=K**-0.5)
    return x, w, offsets_of(counts)


def exact(x, w, offsets, bias=None):
    """float64, a row a turn, from the definition."""
    out = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for e in range(w.shape[0]):
        for row in range(int(offsets[e]), int(offsets[e + 1])):
            out[row] = w[e].double() @ x[row].double()
            if bias is not None:
                out[row] += bias[e].double()
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_float64_of_the_rounded_inputs(counts, form, dtype):
    x, w, offsets = case(counts, dtype=dtype)
    bias = normal(len(counts), 24, dtype=dtype, seed=2)
    for b in (None, bias):
        out = grouped_gemm(x, w, offsets, bias=b, form=form)
        assert out.dtype == dtype and out.shape == (sum(counts), 24)
        assert off_by(out, exact(x, w, offsets, b)) < TOLERANCE[dtype]
        assert (
            off_by(grouped_gemm_reference(x, w, offsets, bias=b), exact(x, w, offsets, b)) < TOLERANCE[dtype]
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("K, N", [(1, 1), (32, 64), (33, 65), (100, 17)])
def test_sizes_that_blocks_do_not_divide(form, K, N):
    x, w, offsets = case([3, 0, 18, 2], K=K, N=N)
    out = grouped_gemm(x, w, offsets, form=form, tile=SMALL)
    assert off_by(out, exact(x, w, offsets)) < TOLERANCE[torch.float32]


@pytest.mark.usefixtures("even_dots")
@pytest.mark.parametrize("block_m", [1, 4, 16, 64])
def test_both_forms_and_a_row_alone_agree_to_the_bit(block_m):
    """With a tile given, a row's sum has one order of terms wherever the row stands."""
    counts, tile = [3, 0, 18, 2, 40], GemmTile(block_m, 32, 16)
    x, w, offsets = case(counts)
    padded, straddling = (grouped_gemm(x, w, offsets, form=form, tile=tile) for form in FORMS)
    assert torch.equal(padded, straddling)
    for row, e in ((0, 0), (3, 2), (20, 2), (62, 4)):
        alone = grouped_gemm(x[row : row + 1], w[e : e + 1], offsets_of([1]), tile=tile)
        assert torch.equal(alone[0], padded[row])


@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_where_it_is(form):
    counts = [3, 0, 9, 4, 0]
    x, w, offsets = case(counts)
    clean = grouped_gemm(x, w, offsets, form=form, tile=SMALL)
    x, w = x.clone(), w.clone()
    w[1] = w[4] = float("nan")  # experts without a row
    assert torch.equal(grouped_gemm(x, w, offsets, form=form, tile=SMALL), clean)
    w[2], x[1] = float("nan"), float("inf")  # an expert between two others in one tile, and a row
    x[15] = float("nan")
    hurt = grouped_gemm(x, w, offsets, form=form, tile=SMALL)
    bad = [1, *range(3, 12), 15]
    good = [row for row in range(16) if row not in bad]
    assert torch.equal(hurt[good], clean[good])
    assert hurt[3:12].isnan().all() and hurt[15].isnan().all() and not hurt[1].isfinite().any()


@pytest.mark.usefixtures("even_dots")
def test_padding_is_not_read():
    """Views into storage that is NaN all around: rows, columns and experts beyond the shape."""
    x, w, offsets = case([3, 5, 0, 9])
    wide_x, wide_w = torch.full((25, 64), torch.nan), torch.full((6, 40, 64), torch.nan)
    wide_x[2:19, 8:48], wide_w[1:5, 4:28, 16:56] = x, w
    view_x, view_w = wide_x[2:19, 8:48], wide_w[1:5, 4:28, 16:56]
    for form in FORMS:
        assert torch.equal(grouped_gemm(view_x, view_w, offsets, form=form), grouped_gemm(x, w, offsets))


def test_rows_may_share_memory_and_stand_in_any_order():
    x, w, offsets = case([3, 5])
    shared = x[:1].expand(8, -1)
    assert off_by(grouped_gemm(shared, w, offsets), exact(shared, w, offsets)) < 5e-6
    by_column = w.transpose(0, 1).contiguous().transpose(0, 1)  # (N, E, K) in memory
    assert not by_column.is_contiguous()
    assert torch.equal(grouped_gemm(x, by_column, offsets), grouped_gemm(x, w, offsets))


@pytest.mark.parametrize("far, counts", [(2**31 + 16, [2, 3]), (2**30, [2, 0, 3])])
def test_an_expert_beyond_two_to_the_31(far, counts):
    """The last expert begins 2**31 elements or more after the first: by its stride, or by stride times id."""
    E = len(counts)
    memory = torch.empty((E - 1) * far + 1024, dtype=torch.float16)  # never touched in between
    w = memory.as_strided((E, 16, 32), (far, 32, 1))
    w.copy_(normal(E, 16, 32, dtype=torch.float16))
    x, offsets = normal(5, 32, dtype=torch.float16), offsets_of(counts)
    assert off_by(grouped_gemm(x, w, offsets), exact(x, w, offsets)) < 1e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_m", [1, 16, 64])
def test_the_plan_is_the_one_that_is_counted(form, block_m):
    for counts in (*COUNTS.values(), [63, 2, 0, 64], [16, 16], [0, 100, 1]):
        plan = plan_rows(offsets_of(counts, torch.int32), sum(counts), block_m, form)
        kept = [(a, b) for a, b in plan.tiles.tolist() if a < b]
        assert kept == tiles(counts, block_m, form)
        assert plan.expert.tolist() == [e for e, n in enumerate(counts) for _ in range(n)]
        walked = sum(len(set(plan.expert[a:b].tolist())) for a, b in kept)
        assert walked == products(counts, block_m, form)


def test_nothing_to_do():
    x, w, offsets = case([0, 0])
    assert grouped_gemm(x, w, offsets).shape == (0, 24)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, o: (x.double(), w.double(), o), "x must be float16"),
        (lambda x, w, o: (x, w.half(), o), "w must have x's dtype"),
        (lambda x, w, o: (x[:, :-1], w, o), "w must have shape"),
        (lambda x, w, o: (x.T.contiguous().T, w, o), "x must have stride 1"),
        (lambda x, w, o: (x, w.transpose(1, 2).contiguous().transpose(1, 2), o), "w must have stride 1"),
        (lambda x, w, o: (x, w[:, :0], o), "only x may be empty"),
        (lambda x, w, o: (x, w, o[:-1]), "offsets must be int32 or int64 of shape"),
        (lambda x, w, o: (x, w, o.to(torch.int16)), "offsets must be int32 or int64 of shape"),
        (lambda x, w, o: (x, w, o - 1), "offsets must rise"),
        (lambda x, w, o: (x, w, o.flip(0)), "offsets must rise"),
        (lambda x, w, o: (x, w, o * 2), "offsets must rise"),
        (lambda x, w, o: (x.requires_grad_(), w, o), "no gradient"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm.__wrapped__(*change(*case([3, 5])))  # without the tests' own check of shapes


def test_options_that_do_not_exist():
    with pytest.raises(ValueError, match="form must be one of 'padded', 'straddle'; got 'other'"):
        grouped_gemm(*case([3, 5]), form="other")
    with pytest.raises(ValueError, match="bias must have shape"):
        grouped_gemm.__wrapped__(*case([3, 5]), bias=torch.zeros(2, 23))
