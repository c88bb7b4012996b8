"""Standard errors by hand, Student's t against its closed forms, power against simulation."""

import itertools
import math
import random
import statistics

import pytest

from companion.stats import (
    clustered,
    detectable,
    estimate,
    holm,
    needed,
    paired,
    separated,
    t_quantile,
    two_sided,
)


def test_a_standard_error_by_hand():
    e = estimate([1, 2, 4, 9])
    # mean 4, squares 9 + 4 + 0 + 25 = 38
    assert (e.mean, e.n) == (4, 4) and e.se == pytest.approx(math.sqrt(38 / 3 / 4))
    assert estimate([5]).se is None and estimate([2, 2, 2]).se == 0
    x = [random.Random(0).gauss(0, 1) for _ in range(50)]
    assert estimate(x).se == pytest.approx(statistics.stdev(x) / 50**0.5)
    with pytest.raises(ValueError, match="values must be at least one"):
        estimate([])


def test_facts_of_one_haystack_count_as_one_sample():
    all_or_nothing = [[1] * 8, [0] * 8, [1] * 8, [0] * 8]
    e = clustered(all_or_nothing)
    assert e.mean == 0.5 and e.n == 4 and e.se == pytest.approx(statistics.stdev([1, 0, 1, 0]) / 2)
    assert e.se > 2 * estimate([x for s in all_or_nothing for x in s]).se  # which took 32 of 4
    with pytest.raises(ValueError, match="samples must be of one size"):
        clustered([[1, 2], [3]])


def test_t_against_its_closed_forms():
    for t in (0.0, 0.3, 1.0, -2.5, 40.0):
        assert two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(abs(t)))
        assert two_sided(t, 2) == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t))
        x = abs(t) / math.sqrt(3)
        assert two_sided(t, 3) == pytest.approx(1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x)))
        x = abs(t) / math.sqrt(4 + t * t)
        assert two_sided(t, 4) == pytest.approx(1 - 1.5 * (x - x**3 / 3))
    normal = statistics.NormalDist()
    assert two_sided(1.5, 100_001) == pytest.approx(2 * (1 - normal.cdf(1.5)), rel=1e-4)


@pytest.mark.parametrize("df", [5, 7, 8, 15])
def test_t_against_the_integral_of_its_density(df):
    c = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi)
    n, t = 2000, 2.0
    xs = [t * i / n for i in range(n + 1)]
    f = [c * (1 + x * x / df) ** (-(df + 1) / 2) for x in xs]
    simpson = (f[0] + f[-1] + 4 * sum(f[1::2]) + 2 * sum(f[2:-1:2])) * t / n / 3
    assert two_sided(t, df) == pytest.approx(1 - 2 * simpson, rel=1e-9)


def test_quantiles_invert_the_tail_on_both_sides_of_the_change_of_method():
    for df in (1, 2, 7, 15, 200, 201, 1000):
        for p in (0.6, 0.8, 0.975):
            assert 1 - two_sided(t_quantile(p, df), df) / 2 == pytest.approx(p, abs=1e-7)
    assert t_quantile(0.975, 15) == pytest.approx(2.1314, abs=1e-4)  # as in any table
    with pytest.raises(ValueError, match="p must .* got 0.2"):
        t_quantile(0.2, 5)


def test_paired_by_hand():
    t = paired([1, 3, 5], [0, 1, 2])  # differences 1, 2, 3
    assert (t.difference, t.n, t.sd) == (2, 3, pytest.approx(1)) and t.se == pytest.approx(1 / 3**0.5)
    assert t.p == pytest.approx(1 - 12**0.5 / math.sqrt(2 + 12))
    assert paired([1, 2], [1, 2]).p == 1 and paired([2, 3], [1, 2]).p == 0
    with pytest.raises(ValueError, match="a and b must .* got 2 and 3"):
        paired([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="at least 2"):
        paired([1], [2])


def test_p_is_uniform_where_nothing_differs():
    rng = random.Random(1)
    ps = [paired([rng.gauss(0, 1) for _ in range(6)], [0.0] * 6).p for _ in range(4000)]
    for alpha in (0.01, 0.05, 0.3):
        share = sum(p < alpha for p in ps) / 4000
        assert abs(share - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / 4000)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_holm_keeps_its_promise():
    """Of 20 comparisons with nothing in them, none is called different in 95 of 100 studies."""
    rng = random.Random(2)
    wrong = sum(min(holm([rng.random() for _ in range(20)])) < 0.05 for _ in range(2000)) / 2000
    assert 0.03 < wrong < 0.07
    assert sum(min(rng.random() for _ in range(20)) < 0.05 for _ in range(2000)) / 2000 > 0.5  # without it


@pytest.mark.parametrize("effect", [1.0, 0.6])
def test_power_by_simulation(effect):
    n = needed(effect, 1.0)
    rng = random.Random(3)

    def found(n):
        draws = ([effect + rng.gauss(0, 1) for _ in range(n)] for _ in range(2000))
        return sum(paired(d, [0.0] * n).p < 0.05 for d in draws) / 2000

    assert found(n) == pytest.approx(0.8, abs=0.05)
    assert found(n // 2) < 0.65
    assert detectable(1.0, n) <= effect < detectable(1.0, n - 1)


def test_how_many_scales_as_it_should():
    assert needed(0.1, 1.0) == pytest.approx(7.849 * 100, abs=3)  # (1.960 + 0.8416)**2 / 0.1**2
    assert needed(-0.1, 1.0) == needed(0.1, 1.0) == needed(1.0, 10.0)
    assert needed(5.0, 1e-9) == 2
    for bad, what in (((0, 1), "difference"), ((math.nan, 1), "difference"), ((1, -1), "sd")):
        with pytest.raises(ValueError, match=what):
            needed(*bad)
    with pytest.raises(ValueError, match="n must .* got 1"):
        detectable(1.0, 1)


def test_separated_names_every_pair_once_and_corrects_for_their_number():
    rng = random.Random(4)
    base = [rng.gauss(0, 1) for _ in range(16)]
    table = {
        "a": base,
        "near": [x + rng.gauss(0.02, 0.1) for x in base],
        "far": [x + rng.gauss(2, 0.1) for x in base],
        "same": list(base),
    }
    rows = {(r["a"], r["b"]): r for r in separated(table)}
    assert len(separated(table)) == 6
    assert {frozenset(pair) for pair in rows} == {frozenset(p) for p in itertools.combinations(table, 2)}
    far = rows["a", "far"]
    assert far["apart"] and far["difference"] < -1.9 and far["needed"] == 2
    assert not rows["a", "near"]["apart"] and rows["a", "near"]["needed"] > 16
    assert rows["a", "same"]["p_holm"] == 1 and rows["a", "same"]["needed"] is None
    assert all(r["p_holm"] >= r["p"] for r in rows.values())
