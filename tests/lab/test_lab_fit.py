"""Fits and intervals: textbook values, numpy, and how often the intervals miss."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from companion.lab.fit import least_squares, line, mean, parabola, ratio
from companion.stats import t_quantile

SIMULATIONS = 2000


def rare(count, rate, n=SIMULATIONS):
    """Whether `count` of n is no more than a rate explains: four standard deviations."""
    return count <= n * rate + 4 * math.sqrt(n * rate * (1 - rate))


@pytest.mark.parametrize(
    "p, degrees, printed",  # any table of Student's t
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.975, 10, 2.228), (0.975, 30, 2.042),
     (0.975, 120, 1.980), (0.95, 4, 2.132), (0.995, 7, 3.499), (0.9, 1, 3.078), (0.975, 10**6, 1.960)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(p, degrees, printed):
    assert abs(t_quantile(p, degrees) - printed) < 0.0006


def test_quantiles_of_one_and_two_degrees_have_closed_forms():
    for p in (0.6, 0.9, 0.975, 0.999):
        assert t_quantile(p, 1) == pytest.approx(math.tan(math.pi * (p - 0.5)), rel=1e-9)
        s = 2 * p - 1
        assert t_quantile(p, 2) == pytest.approx(s * math.sqrt(2 / (1 - s * s)), rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 131072), st.floats(1e-4, 1e3)), min_size=4, max_size=40),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=60)
def test_coefficients_and_errors_are_numpy_s(pairs, seed):
    x, y = map(list, zip(*pairs))
    if len(set(x)) < 3:
        return
    fit = line(x, y)
    A = np.stack([np.ones(len(x)), np.array(x, float)], 1)
    told, squares, *_ = np.linalg.lstsq(A, np.array(y), rcond=None)
    cov = np.linalg.inv(A.T @ A) * (np.sum((A @ told - y) ** 2) / (len(x) - 2))
    size = max(map(abs, y))
    assert fit["intercept"].value == pytest.approx(told[0], abs=1e-6 * size)
    assert fit["slope"].value == pytest.approx(told[1], abs=1e-6 * size / max(x))
    assert fit["slope"].stderr == pytest.approx(math.sqrt(cov[1, 1]), rel=1e-4, abs=1e-9 * size / max(x))


def test_a_line_without_scatter_is_found_exactly():
    fit = line([512, 1024, 4096], [0.75, 1.0, 2.5])
    assert fit["intercept"].value == pytest.approx(0.5) and fit["slope"].value == pytest.approx(1 / 2048)
    assert fit.scatter < 1e-12 and fit["slope"].high - fit["slope"].low < 1e-12


def test_a_parabola_is_found():
    x = [128, 256, 512, 1024, 2048]
    fit = parabola(x, [0.01 + 2e-3 * n + 3e-7 * n * n for n in x])
    assert [fit[k].value for k in ("intercept", "slope", "curvature")] == pytest.approx([0.01, 2e-3, 3e-7])


def test_weights_are_repeated_points():
    x, y = [1, 2, 3, 5], [1.0, 2.5, 2.0, 6.0]
    columns = {"one": [1.0] * 4, "x": x}
    weighted = least_squares(columns, y, weights=[1, 3, 1, 2])
    many = line([1, 2, 2, 2, 3, 5, 5], [1.0, 2.5, 2.5, 2.5, 2.0, 6.0, 6.0])
    assert weighted["x"].value == pytest.approx(many["slope"].value)


@pytest.mark.parametrize("rise, least", [(1.0, 0.07), (8.0, 0.10)])
def test_relative_scatter_needs_relative_weights(rise, least):
    """A 95 % interval misses the slope in 5 of 100 sweeps; with equal weights it does in more."""
    random, missed = np.random.default_rng(5), {True: 0, False: 0}
    x = [0, 1024, 2048, 4096, 8192] * 4
    for _ in range(2000):
        y = [(1 + rise * n / 8192) * (1 + 0.05 * random.standard_normal()) for n in x]
        for relative in missed:
            slope = line(x, y, relative=relative)["slope"]
            missed[relative] += not slope.low < rise / 8192 < slope.high
    assert 0.035 < missed[True] / 2000 < 0.068 and missed[False] / 2000 > least


def test_relative_weights_need_times():
    with pytest.raises(ValueError, match="line: y must be above 0"):
        line([1, 2, 3], [1.0, 0.0, 2.0], relative=True)


def test_two_points_give_a_line_and_no_interval():
    fit = line([1, 2], [3.0, 5.0])
    assert fit["slope"].value == pytest.approx(2) and fit["slope"].degrees == 0
    assert (fit["slope"].low, fit["slope"].high) == (-math.inf, math.inf)
    assert fit["slope"].to_dict()["low"] is None


@pytest.mark.parametrize(
    "x, y, says",
    [([1], [1.0], "need at least 2"), ([3, 3, 3], [1.0, 2.0, 3.0], "too few different"),
     ([1, 2], [1.0], "2 values"), ([1, 2], [1.0, math.nan], "finite"), ([1, math.inf], [1.0, 2.0], "finite")],
)  # fmt: skip
def test_points_that_give_no_line(x, y, says):
    with pytest.raises(ValueError, match=says):
        line(x, y)


def test_scaling_turns_the_interval_too():
    e = mean([1.0, 2.0, 3.0])
    turned = e.scaled(-2)
    assert (turned.value, turned.stderr) == pytest.approx((-4, 2 / math.sqrt(3)))
    assert turned.low < -4 < turned.high and turned.low == -2 * e.high


def test_a_ratio_of_pairs_forgets_what_both_share():
    slow = [1.0, 3.0, 10.0, 2.0]
    e = ratio([2 * s for s in slow], slow)
    assert e.value == pytest.approx(2) and e.high - e.low < 1e-9


@pytest.mark.parametrize("a, b", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_no_ratio(a, b):
    with pytest.raises(ValueError, match="ratio"):
        ratio(a, b)


def test_one_in_twenty_intervals_misses():
    """Normal scatter, five contexts, three rounds: 95 % means 95 %, neither less nor much more."""
    rng, x = random.Random(1), [128, 512, 1024, 2048, 4096] * 3
    missed = 0
    for _ in range(SIMULATIONS):
        slope = line(x, [0.03 + 2e-6 * n + rng.gauss(0, 1e-3) for n in x])["slope"]
        missed += not slope.low <= 2e-6 <= slope.high
    assert rare(missed, 0.05) and rare(SIMULATIONS - missed, 0.95)


def test_skewed_scatter_misses_little_more():
    """Times have a long upper tail; with 15 points the interval of a slope still misses about 5 in 100."""
    rng, x = random.Random(2), [128, 512, 1024, 2048, 4096] * 3
    missed = 0
    for _ in range(SIMULATIONS):
        slope = line(x, [(0.03 + 2e-6 * n) * rng.lognormvariate(0, 0.3) for n in x])["slope"]
        missed += not slope.low <= 2e-6 * math.exp(0.045) <= slope.high
    assert rare(missed, 0.07)
