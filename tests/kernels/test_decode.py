"""`decode_attention` over caches in full precision: the matrix of shapes, sampled, on hostile inputs."""

import pytest
import torch
from kernel_inputs import check, make

from companion.kernels import decode_attention

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SOME = [37, 0, 1, 17]
# (lengths, (Hq, Hkv), D, dtype, block_size, options of make, options of the call)
MATRIX = [
    ([1], (4, 4), 64, SINGLE, None, {}, {}),
    ([0], (4, 4), 64, HALF, 16, {}, {}),
    (SOME, (8, 2), 64, HALF, None, {}, {}),
    (SOME, (8, 2), 64, BRAIN, 16, {}, {"num_splits": 3}),
    (SOME, (5, 1), 128, SINGLE, 8, {}, {"num_splits": 2}),
    ([97, 140], (6, 2), 128, BRAIN, None, {}, {"num_splits": 2}),
    ([97, 140], (14, 2), 128, HALF, 1, {}, {"num_splits": 3}),
    ([16, 15, 17, 0, 20, 54], (4, 2), 64, HALF, 16, {}, {"num_splits": 2}),
    ([339, 54], (32, 4), 64, HALF, 64, {}, {"num_splits": 4}),
    ([140], (126, 3), 64, BRAIN, 16, {}, {}),
    ([97, 3], (128, 1), 64, HALF, 256, {}, {"num_splits": 2}),
    ([54, 20], (4, 2), 256, SINGLE, 16, {}, {}),
    ([54, 20], (4, 1), 256, HALF, None, {}, {"num_splits": 2}),
    ([37, 1], (4, 2), 59, HALF, 16, {}, {}),
    ([37, 1], (4, 2), 80, SINGLE, None, {}, {"num_splits": 2}),
    ([70, 1], (4, 4), 96, BRAIN, 16, {}, {"num_splits": 2}),
    ([70, 1], (4, 2), 100, HALF, 8, {}, {}),
    ([70, 9], (4, 2), 128, BRAIN, 16, {"v_dim": 64}, {"num_splits": 2}),
    ([70, 9], (4, 2), 64, SINGLE, None, {"v_dim": 96}, {"num_splits": 2}),
    ([70, 9], (4, 2), 192, HALF, 16, {"v_dim": 128}, {}),
    ([70, 0, 33], (16, 1), 576, BRAIN, 64, {"v_dim": 512, "latent": True}, {"num_splits": 2}),
    ([70, 33], (3, 1), 576, HALF, None, {"v_dim": 512, "latent": True}, {}),
    ([33], (20, 1), 80, SINGLE, 16, {"v_dim": 48, "latent": True}, {"num_splits": 2}),
    ([33], (4, 1), 64, SINGLE, 16, {"v_dim": 64, "latent": True}, {}),
    ([1328], (8, 2), 128, BRAIN, 16, {}, {"num_splits": 5}),
    ([2011, 799], (4, 1), 64, SINGLE, 64, {}, {"num_splits": 3}),
    ([4096], (4, 2), 64, HALF, None, {}, {"num_splits": 4}),
    ([20] * 17, (4, 1), 64, HALF, 8, {}, {}),
    # windows of 1, 3, 13, 64, 256 and more than there is
    (SOME, (8, 2), 64, HALF, 16, {"window_size": (0, 0)}, {}),
    ([97, 140, 2], (4, 2), 64, SINGLE, 16, {"window_size": (2, 0)}, {"num_splits": 3}),
    ([97, 140, 2], (4, 2), 96, BRAIN, None, {"window_size": (12, 0)}, {"num_splits": 3}),
    ([97, 140, 64], (4, 2), 64, HALF, 8, {"window_size": (63, -1)}, {"num_splits": 2}),
    ([339, 256, 5], (4, 2), 64, BRAIN, 16, {"window_size": (255, 0)}, {"num_splits": 3}),
    ([97, 140], (4, 2), 64, SINGLE, None, {"window_size": (1000, 0)}, {"num_splits": 2}),
    # softcap, scale
    ([97, 0, 140], (4, 2), 64, SINGLE, 16, {"softcap": 50.0}, {"num_splits": 2}),
    ([97, 140], (4, 2), 64, BRAIN, None, {"softcap": 2.0, "softmax_scale": 0.7}, {}),
    ([97, 140], (4, 2), 64, HALF, None, {"softmax_scale": -0.3}, {"num_splits": 2}),
    ([97], (4, 2), 64, SINGLE, None, {"softcap": 0.5, "deviation": 60.0}, {"num_splits": 2}),
    # several query tokens
    ([97, 1, 0, 3], (8, 2), 64, HALF, 16, {"queries": 4}, {"num_splits": 2}),
    ([97, 1, 0, 3], (4, 4), 64, SINGLE, None, {"queries": 3}, {}),
    ([97, 140, 2], (6, 2), 96, BRAIN, 16, {"queries": 5, "window_size": (12, 0)}, {"num_splits": 2}),
    ([40], (16, 1), 576, HALF, 16, {"queries": 2, "v_dim": 512, "latent": True}, {}),
    ([40, 33], (40, 1), 64, HALF, 16, {"queries": 2}, {"num_splits": 2}),
    ([40, 2], (4, 2), 64, HALF, None, {"queries": 1}, {}),
    # layouts
    (SOME, (8, 2), 64, HALF, 16, {"layout": "heads"}, {"num_splits": 2}),
    (SOME, (8, 2), 64, SINGLE, None, {"layout": "heads"}, {}),
    (SOME, (8, 2), 96, BRAIN, 16, {"layout": "strided"}, {"num_splits": 2}),
    (SOME, (8, 2), 64, HALF, None, {"layout": "strided"}, {}),
]


def name(row):
    lengths, heads, dim, dtype, block, made, call = row
    words = (
        "+".join(map(str, lengths[:4])),
        "x".join(map(str, heads)),
        dim,
        str(dtype)[6:],
        f"block{block}",
        *(f"{k}={v}" for k, v in {**made, **call}.items()),
    )
    return "-".join(map(str, words)).replace(" ", "")


@pytest.mark.parametrize("row", MATRIX, ids=name)
def test_equals_float64(row):
    lengths, heads, dim, dtype, block_size, made, call = row
    case = make(lengths, heads, dim, dtype=dtype, block_size=block_size, **made)
    check(case.run(decode_attention, **call), case.expected(), dtype)


SINKS = {
    "random": torch.randn(8, generator=torch.Generator().manual_seed(5)),
    "large": torch.tensor([30.0, -30.0] * 4),
    "half": torch.linspace(-3, 3, 8, dtype=HALF),
    "none": torch.full((8,), -torch.inf),
}


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_enter_once(kind, splits):
    case = make([140, 0, 1], (8, 2), 64, dtype=HALF, block_size=16, sinks=SINKS[kind])
    check(case.run(decode_attention, num_splits=splits), case.expected(), HALF)


def test_everything_at_once():
    case = make(
        [140, 0, 97, 2],
        (8, 2),
        96,
        dtype=BRAIN,
        block_size=8,
        queries=3,
        window_size=(40, 0),
        softcap=20.0,
        softmax_scale=0.2,
        sinks=SINKS["random"],
        layout="heads",
    )
    check(case.run(decode_attention, num_splits=3), case.expected(), BRAIN)


def test_scores_far_below_zero_after_a_tile_that_a_query_does_not_see():
    """Query 19 of 20 sees nothing of the first 16 keys; then come scores of -256, whose power of e is 0."""
    case = make(
        [60], (2, 1), 64, queries=20, window_size=(15, 0), softmax_scale=1.0, mean=-4.0, deviation=0.01
    )
    case.q = torch.ones_like(case.q)
    check(case.run(decode_attention), case.expected(), SINGLE)
