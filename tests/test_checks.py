"""What every room checks its arguments with: what passes, and what the one ValueError says."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest

from companion import checks


class Index:
    def __index__(self):
        return 7


@pytest.mark.parametrize(
    "value, bounds, made", [(1, (), 1), (Index(), (), 7), (0, (0,), 0), (5, (2, 5), 5), (-1, (-1,), -1)]
)
def test_a_whole_number(value, bounds, made):
    got = checks.whole("n", value, *bounds)
    assert got == made and type(got) is int


@pytest.mark.parametrize(
    "value, bounds, accepted",
    [
        (0, (), "a positive integer"),
        (True, (), "a positive integer"),
        (1.0, (), "a positive integer"),
        ("3", (0,), "an integer of at least 0"),
        (-1, (0,), "an integer of at least 0"),
        (6, (2, 5), "an integer from 2 to 5"),
        (None, (2, 5), "an integer from 2 to 5"),
    ],
)
def test_what_is_no_whole_number(value, bounds, accepted):
    with pytest.raises(ValueError) as e:
        checks.whole("n", value, *bounds, owner="f")
    assert str(e.value) == f"f: n must be {accepted}, got {value!r}"


@pytest.mark.parametrize("value", [0, 0.5, 1, Fraction(1, 3)])
def test_a_number(value):
    assert checks.number("x", value, 0, 1) == float(value)
    assert checks.number("x", value) == float(value)


@pytest.mark.parametrize(
    "value, bounds, accepted",
    [
        (math.nan, (), "a finite number"),
        (-math.inf, (), "a finite number"),
        (True, (), "a finite number"),
        (-0.5, (0,), "a finite number of at least 0"),
        (1.5, (0, 1), "a number from 0 to 1"),
        ("1", (-math.inf, 1), "a number from -inf to 1"),
    ],
)
def test_what_is_no_number(value, bounds, accepted):
    with pytest.raises(ValueError) as e:
        checks.number("x", value, *bounds)
    assert str(e.value) == f"x must be {accepted}, got {value!r}"


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "1", None])
def test_what_is_not_positive(value):
    with pytest.raises(ValueError, match="x must be a positive finite number, got"):
        checks.positive("x", value)
    with pytest.raises(ValueError, match="x must be above 0 and at most 1, got"):
        checks.positive("x", 2 if value is None else value, 1)
    assert checks.positive("x", 10**300) == 1e300


def test_a_choice():
    assert checks.choice("kind", "a", ["a", "b"]) == "a"
    with pytest.raises(ValueError, match="kind must be one of a, b, got 'c'"):
        checks.choice("kind", "c", ["a", "b"])
    with pytest.raises(ValueError, match=r"kind must be one of 1, 2, got \[1\]"):
        checks.choice("kind", [1], [1, 2])  # what cannot be hashed is none either


def test_a_shape():
    def of(*shape):
        return SimpleNamespace(shape=shape)

    checks.shape("x", of(2, 3), 2, "S")
    checks.shape("x", of())
    for tensor, expected, said in [
        (of(2, 3), (2, 4), r"\(2, 4\), got \(2, 3\)"),
        (of(2, 3), ("B", 4), r"\(B, 4\), got \(2, 3\)"),
        (of(2, 3), (2,), r"\(2,\), got \(2, 3\)"),
        (of(), ("N",), r"\(N,\), got \(\)"),
    ]:
        with pytest.raises(ValueError, match=f"x must be of shape {said}"):
            checks.shape("x", tensor, *expected)


def test_near_names():
    known = ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"]
    assert checks.near_names("meta-llama/Llama_3.1 8B", known)[0] == "llama-3.1-8b"
    assert checks.near_names("zzz", known) == []


def test_a_broken_invariant_is_no_bad_argument():
    checks.must(True, "{} is well", 1)
    with pytest.raises(checks.BrokenInvariant, match="3 of 4"):
        checks.must(0, "{} of {}", 3, 4)
    assert not issubclass(checks.BrokenInvariant, ValueError)
