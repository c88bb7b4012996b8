"""Verdicts: how often they are wrong, and that what they ask for does tell."""

import math
import random

import pytest

from companion.lab.fit import FAILS, HOLDS, UNTOLD, Estimate, line, mean, verdict

SIMULATIONS = 1500
X = [128, 512, 1024, 2048, 4096]
SLOPE, SCATTER = 2e-6, 1.5e-3


def rare(count, rate, n=SIMULATIONS):
    return count <= n * rate + 4 * math.sqrt(n * rate * (1 - rate))


def judged(rng, slope, rounds=3, x=X, scatter=SCATTER, low=0.5, high=2.0):
    """A sweep on a machine with this slope, against the claim that it is SLOPE within a factor of 2."""
    x = x * rounds
    fit = line(x, [0.03 + slope * n + rng.gauss(0, scatter) for n in x])
    estimate = fit["slope"].scaled(1 / SLOPE)
    return verdict("c", estimate, low=low, high=high, expected=1.0, runs=len(x), contexts=x)


def exact(value, half=0.0):
    return Estimate(value, value - half, value + half, half / 2, 10)


@pytest.mark.parametrize(
    "value, half, outcome",
    [(1.0, 0.3, HOLDS), (2.5, 0.3, FAILS), (0.2, 0.1, FAILS), (1.9, 0.3, UNTOLD), (2.1, 0.3, UNTOLD),
     (1.0, 5.0, UNTOLD), (2.0, 0.0, UNTOLD)],
)  # fmt: skip
def test_the_interval_against_the_band(value, half, outcome):
    assert verdict("c", exact(value, half), low=0.5, high=2.0, runs=12).outcome == outcome


@pytest.mark.parametrize(
    "value, low, high, outcome",
    [(3.0, 0.0, None, HOLDS), (-3.0, 0.0, None, FAILS), (0.1, 0.0, None, UNTOLD),
     (3.0, None, 0.0, FAILS), (-3.0, None, 0.0, HOLDS)],
)  # fmt: skip
def test_a_band_with_one_edge(value, low, high, outcome):
    assert verdict("c", exact(value, 0.5), low=low, high=high, runs=12).outcome == outcome


@pytest.mark.parametrize("edge", [0.5, 2.0])
def test_a_claim_at_its_edge_is_confirmed_in_at_most_5_of_200(edge):
    """The worst case: the truth lies where the claim just stops holding."""
    rng = random.Random(3)
    outcomes = [judged(rng, edge * SLOPE, scatter=3e-4).outcome for _ in range(SIMULATIONS)]
    assert rare(outcomes.count(HOLDS), 0.025) and rare(outcomes.count(FAILS), 0.025)


def test_a_true_claim_is_denied_in_at_most_5_of_100():
    rng = random.Random(4)
    assert rare(sum(judged(rng, SLOPE, scatter=8e-3).outcome == FAILS for _ in range(SIMULATIONS)), 0.05)


def test_a_wrong_prediction_is_called_wrong():
    """The machine does four times what the claim allows, with scatter a tenth of that."""
    rng = random.Random(5)
    outcomes = [judged(rng, 8 * SLOPE, scatter=1e-3).outcome for _ in range(200)]
    assert outcomes.count(FAILS) == 200


def test_a_right_prediction_holds():
    rng = random.Random(6)
    outcomes = [judged(rng, SLOPE, rounds=6, scatter=4e-4).outcome for _ in range(200)]
    assert outcomes.count(HOLDS) >= 199


def test_a_run_too_short_cannot_tell_and_says_what_could():
    """Contexts of 16 to 64 tokens: the slope is lost in the scatter."""
    v = judged(random.Random(7), SLOPE, x=[16, 32, 64], rounds=2)
    assert v.outcome == UNTOLD
    assert v.runs_needed > 6 and v.context_needed > 64
    assert f"{v.runs_needed:,} runs" in v.reason and f"{v.context_needed:,} tokens" in v.reason


def told(rng, **options):
    return sum(judged(rng, SLOPE, **options).outcome != UNTOLD for _ in range(150)) / 150


def test_the_runs_asked_for_do_tell():
    """Twice as many as the least that could tell, tell mostly; a quarter of them seldom do."""
    v = judged(random.Random(8), SLOPE, scatter=5e-3)
    rounds, rng = math.ceil(v.runs_needed / len(X)), random.Random(9)
    assert v.outcome == UNTOLD and rounds > 3
    assert told(rng, rounds=2 * rounds, scatter=5e-3) > 0.6
    assert told(rng, rounds=max(1, rounds // 4), scatter=5e-3) < 0.3


def test_the_context_asked_for_does_tell():
    v, rng = judged(random.Random(8), SLOPE, scatter=5e-3), random.Random(10)
    stretched = [round(128 + (n - 128) * (v.context_needed - 128) / (4096 - 128)) for n in X]
    assert max(stretched) == v.context_needed > 4096
    assert told(rng, x=[2 * n for n in stretched], scatter=5e-3) > 0.6
    assert told(rng, scatter=5e-3) < 0.3


def test_one_run_per_coefficient_asks_for_two_more():
    v = verdict("c", mean([1.0]), low=0.5, high=2.0, expected=1.0, runs=1)
    assert v.outcome == UNTOLD and v.runs_needed == 3 and v.interval == (None, None)


def test_scatter_without_end_has_no_plan():
    e = Estimate(0.5, -1e9, 1e9, 5e8, 10)
    v = verdict("c", e, low=0.5, high=2.0, runs=12, contexts=X)
    assert v.outcome == UNTOLD and v.runs_needed is None and v.context_needed is None
    assert "no feasible" in v.reason


def test_nothing_measured():
    v = verdict("c", None, low=0.5, missing="the endpoint counts no tokens")
    assert v.outcome == UNTOLD and v.reason == "the endpoint counts no tokens" and v.value is None


@pytest.mark.parametrize("band", [{}, {"low": 2.0, "high": 1.0}, {"low": 1.0, "high": 1.0}])
def test_a_band_that_is_none(band):
    with pytest.raises(ValueError, match="verdict on 'c'"):
        verdict("c", exact(1.0), **band)
