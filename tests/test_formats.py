"""Number formats: every one once, and no other file keeps a list of its own."""

import ast
from fractions import Fraction
from pathlib import Path

import pytest

from companion import formats

ROOT = Path(__file__).resolve().parent.parent
OTHERS = sorted(p for p in (ROOT / "companion").rglob("*.py") if p.name != "formats.py")
WORD = "int4"


def compiled(node):
    """True for a function that Triton compiles: there a format is a word among its constants."""
    marks = getattr(node, "decorator_list", [])
    return any("triton.jit" in ast.unparse(mark) for mark in marks)


def words(source):
    """Lines where the bare word stands as a value, outside what Triton compiles."""
    found, left = [], [ast.parse(source)]
    while left:
        node = left.pop()
        if compiled(node):
            continue
        if isinstance(node, ast.Constant) and node.value == WORD:
            found.append(node.lineno)
        left += ast.iter_child_nodes(node)
    return found


def test_no_other_file_tells_formats_apart_by_the_word():
    assert {str(p.relative_to(ROOT)): n for p in OTHERS if (n := words(p.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "source", ['BITS = {"int4": 4}', 'def f(kv):\n    return kv == "int4"', 'f(x="int4")']
)
def test_a_word_is_found(source):
    assert words(source)


def test_names_and_aliases_lead_to_one_format():
    for name, known in formats.FORMATS.items():
        assert formats.get(name) is known and known.name == name
        for alias in known.aliases:
            assert formats.get(alias) is formats.get(f"torch.{alias}") is known
    with pytest.raises(ValueError, match="kv must be one of .*'int5'"):
        formats.get("int5", argument="kv")


def test_bits_with_scales_are_exact():
    assert formats.get("int4-g128").bits_per_value == Fraction(133, 32)
    assert formats.get("kivi2").bits_per_value == 3 and formats.get("nvfp4").bits_per_value == Fraction(9, 2)
    assert formats.bytes_for(3, "mxfp4") == 2 and formats.bytes_for(7, 6) == 6
