"""The prefix index: digests that anybody can recompute, hits that are compared, entries that go in time."""

import hashlib
import random
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from paging_plain import index_state, load

from companion.paging import ROOT, BrokenInvariant, PrefixIndex, block_digest

plain = load()
HERE = Path(__file__).resolve().parents[2]


def documented_digest(parent, tokens, extra=()):
    """The layout that the module states, built from its words alone."""
    data = parent + struct.pack("<Q", len(tokens)) + struct.pack(f"<{len(tokens)}I", *tokens)
    for x in extra:
        kind = {str: "s", bytes: "y", int: "i", bool: "b", type(None): "n"}[type(x)]
        text = x if isinstance(x, bytes) else str(x).encode()
        data += f"{kind}{len(text)}:".encode() + text
    return hashlib.sha256(data).digest()


# --- digests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [(), ("salt",), ("salt", 7, None, True, b"\xff"), ("é",)])
def test_the_digest_is_the_documented_one(extra):
    first = block_digest(ROOT, [1, 2, 3], extra)
    assert first == documented_digest(bytes(32), [1, 2, 3], extra)
    assert block_digest(first, [2**32 - 1, 0], extra) == documented_digest(first, [2**32 - 1, 0], extra)
    assert block_digest(ROOT, array("I", [1, 2, 3]), extra) == first == block_digest(ROOT, (1, 2, 3), extra)


def test_the_index_uses_the_same_digests():
    index = PrefixIndex(3)
    index.register([5, 9], [1, 2, 3, 4, 5, 6, 7], ("me",))
    assert index.digest(5) == block_digest(ROOT, [1, 2, 3], ("me",))
    assert index.digest(9) == block_digest(index.digest(5), [4, 5, 6], ("me",))
    assert index.content(9) == [4, 5, 6] and list(index) == [5, 9] and 9 in index and 7 not in index


def test_two_processes_agree():
    code = (
        "from companion.paging import *; i = PrefixIndex(4); "
        "i.register([0, 1], range(9), ('tenant', 3)); print(i.digest(0).hex(), i.digest(1).hex())"
    )
    outputs = set()
    for seed in ("1", "2"):  # of Python's own hash, which differs between processes
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=HERE,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    (output,) = outputs
    first = documented_digest(bytes(32), [0, 1, 2, 3], ("tenant", 3))
    second = documented_digest(first, [4, 5, 6, 7], ("tenant", 3))
    assert output.split() == [first.hex(), second.hex()]


def test_what_must_differ_differs():
    keys = [
        (),
        ("",),
        ("a",),
        ("b",),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        (b"a",),
        (1,),
        ("1",),
        (True,),
        ("True",),
    ]
    keys += [(None,), ("None",), (0,), (False,), (1, 11), (11, 1), ("a1:b",), (10**30,), (-1,)]
    keys += [("s1:a",), ("as1:b",), ("a", "")]
    digests = {block_digest(ROOT, [1, 2], key) for key in keys}
    digests |= {block_digest(ROOT, t) for t in ([1], [2, 1], [1, 2, 0], [0, 1, 2], [258], [], [1, 3])}
    digests |= {block_digest(block_digest(ROOT, [1]), [2])}
    assert len(digests) == len(keys) + 7 + 1


# --- hits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_hit_ends_before_the_last_token(size, more, blocks):
    """Prompts of block - 1, block, block + 1 tokens: the last token is always left to compute."""
    n = blocks * size + more
    prompt = list(range(100, 100 + n))
    index = PrefixIndex(size)
    index.register(range(n // size), prompt)
    assert len(index) == n // size
    hit = index.match(prompt)
    assert hit == list(range(max(0, n - 1) // size)) and len(hit) * size < max(n, 1)
    index.check()


def test_lengths_zero_and_one():
    for size in (1, 4):
        index = PrefixIndex(size)
        assert index.match([]) == index.match([7]) == [] == index.register([], [])
        index.register([0], [7] * size)
        assert index.match([]) == index.match([7]) == []
    index = PrefixIndex(1)
    index.register([0], [7])
    assert index.match([7, 8]) == [0] and index.match([8, 7]) == []


def test_only_equal_beginnings_are_found():
    index = PrefixIndex(2)
    index.register([0, 1, 2], [1, 2, 3, 4, 5, 6, 7])
    assert index.match([1, 2, 3, 4, 5, 6, 7]) == [0, 1, 2]
    assert index.match([1, 2, 3, 4, 5, 9, 9]) == [0, 1]
    assert index.match([1, 2, 9, 9, 5, 6, 7]) == [0]  # the third block's tokens, not its prefix
    assert index.match([9, 2, 3, 4, 5, 6, 7]) == [] == index.match([3, 4, 5, 6, 7])


def test_salts_never_share():
    index, draw = PrefixIndex(2), random.Random(0)
    salts = [(), ("a",), ("b",), ("a", "b"), (b"a",), (1,), (True,), (None,)]
    prompt = [draw.randrange(50) for _ in range(9)]
    for k, salt in enumerate(salts):
        assert index.match(prompt, salt) == []
        index.register(range(4 * k, 4 * k + 4), prompt, salt)
    for k, salt in enumerate(salts):
        assert index.match(prompt, salt) == list(range(4 * k, 4 * k + 4))
    index.check()


def test_equal_digests_of_different_prompts_do_not_mix(monkeypatch):
    """With a digest that says nothing, only the comparison is left."""
    import companion.paging.prefix as prefix

    class Constant:
        def __init__(self, data):
            pass

        def digest(self):
            return b"\7" * 32

    monkeypatch.setattr(prefix, "sha256", Constant)
    index = PrefixIndex(2)
    index.register([0, 1], [1, 2, 3, 4])
    index.register([2, 3], [5, 6, 3, 4])  # its second block: the same tokens, the same digest, another parent
    index.check()
    assert index.match([1, 2, 3, 4, 0]) in ([], [0], [0, 1])
    assert index.match([5, 6, 3, 4, 0]) in ([], [2], [2, 3])
    assert index.match([9, 9, 9]) == [] == index.match([5, 6, 7], ("salt",)) == index.match([3, 4, 5])
    index.remove([3, 0, 1])
    index.register([4], [7, 8])
    assert index.match([7, 8, 9]) == [4]
    assert index.match([7, 7, 9]) == [] == index.match([7, 8, 9], ("salt",))
    index.check()


# --- entries that come and go -----------------------------------------------------------------------------


def test_two_blocks_of_one_content_and_one_of_them_goes():
    index = PrefixIndex(2)
    assert index.register([0, 1], [1, 2, 3, 4]) == [0, 1]
    assert index.register([5, 6], [1, 2, 3, 4]) == [5, 6]
    assert index.match([1, 2, 3, 4, 5]) == [5, 6]  # the newest
    index.remove([6])
    assert index.match([1, 2, 3, 4, 5]) == [5, 1]  # one of each, whoever computed it
    index.remove([5])
    assert index.match([1, 2, 3, 4, 5]) == [0, 1]
    index.remove([1, 0])
    assert index.match([1, 2, 3, 4, 5]) == [] and len(index) == 0 and not index._by_digest
    index.check()


def test_an_old_entry_that_goes_takes_no_newer_one_with_it():
    """A child outlives its parent; both are registered anew; then the old child goes."""
    index = PrefixIndex(2)
    index.register([0, 1], [1, 2, 3, 4])
    index.remove([0])
    assert index.match([1, 2, 3, 4, 5]) == []
    index.register([7, 8], [1, 2, 3, 4])
    assert index.digest(8) == index.digest(1)
    assert index.match([1, 2, 3, 4, 5]) == [7, 8]
    index.check()
    index.remove([1])
    assert index.match([1, 2, 3, 4, 5]) == [7, 8]
    index.check()


def test_registering_again_changes_nothing_and_a_longer_one_adds_its_end():
    index = PrefixIndex(2)
    index.register([0, 1], [1, 2, 3, 4])
    before = index_state(index)
    assert index.register([0, 1], [1, 2, 3, 4, 5]) == [] and index_state(index) == before
    assert index.register([0, 1, 2], [1, 2, 3, 4, 5, 6], start=2) == [2]
    assert index.register([0, 1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], start=3, stop=3) == []
    whole = PrefixIndex(2)
    whole.register([0, 1, 2], [1, 2, 3, 4, 5, 6])
    assert whole.digest(2) == index.digest(2)
    index.check()


@pytest.mark.parametrize(
    "call, name",
    [
        *[
            (lambda i, t=t: i.match(t), "tokens")
            for t in ([1, -1], [2**32], [1.0], ["1"], "12", 5, None, [None])
        ],
        *[(lambda i, e=e: i.match([1, 2, 3], e), "extra") for e in ("salt", None, 5, [1.5], ([],), ({},))],
        *[(lambda i, t=t: i.register([4, 5], t), "tokens") for t in ([1, -1], [1, 2, 3, "4"], None)],
        (lambda i: i.register([4], [9, 9, 9, 9]), "blocks must .* 2 .*, got 1"),
        (lambda i: i.register([4, 5], [9, 9, 9, 9], start=3), "start"),
        (lambda i: i.register([4, 5], [9, 9, 9, 9], start=-1), "start"),
        (lambda i: i.register([4, 5], [9, 9, 9, 9], stop=3), "stop must .* to 2, got 3"),
        (lambda i: i.register([4, 5], [9, 9, 9, 9], start=2, stop=1), "start must .* to 1, got 2"),
        (lambda i: i.register([4, 5], [9, 9, 9, 9], start=1), "blocks: block 4 is not"),
        (lambda i: i.register([4, 4], [9, 9, 9, 9]), "blocks"),
        (lambda i: i.register([4, 0], [9, 9, 9, 9]), "blocks: block 0 is in the index with another"),
        (lambda i: i.register([4, 1], [9, 9, 3, 4]), "blocks: block 1 is in the index with another"),
        (lambda i: i.register([0, 1], [1, 2, 3, 4], ("salt",)), "blocks: block 0"),
        (lambda i: i.register([4, -5], [9, 9, 9, 9]), "blocks"),
        (lambda i: i.register([4, "5"], [9, 9, 9, 9]), "blocks"),
        (lambda i: i.register([4, True], [9, 9, 9, 9]), "blocks"),
        (lambda i: i.remove([0, 4]), "blocks: block 4 is not"),
        (lambda i: i.remove([0, 1, 0]), "blocks: block 0 is not"),
        (lambda i: i.remove([None]), "blocks: block None"),
        (lambda i: i.digest(4), "block"),
        (lambda i: i.content(-1), "block"),
    ],
)
def test_every_bad_call_names_its_argument_and_changes_nothing(call, name):
    index = plain.PrefixIndex(2)
    index.register([0, 1], [1, 2, 3, 4])
    before = index_state(index)
    with pytest.raises(ValueError, match=f"^{name}"):
        call(index)
    assert index_state(index) == before
    index.check()


@pytest.mark.parametrize("parent", [b"", bytes(31), "x" * 32, None, 0])
def test_a_parent_that_is_no_digest(parent):
    with pytest.raises(ValueError, match="parent"):
        plain.block_digest(parent, [1])


@pytest.mark.parametrize("size", [0, -1, 1.0, None, True])
def test_a_block_size_that_makes_no_sense(size):
    with pytest.raises(ValueError, match="block_size"):
        plain.PrefixIndex(size)


# --- check() must be able to fail -------------------------------------------------------------------------


def entry(index, block):
    return index._by_block[block]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i: entry(i, 1).blocks.clear(), "block 1 is in the index, but not in its entry"),
        (lambda i: i._by_block.update({7: entry(i, 1)}), "block 7 is in the index, but not in its entry"),
        (lambda i: entry(i, 1).blocks.update({7: None}), "block 7 leads to another entry"),
        (lambda i: i._by_block.pop(1), "block 1 leads to another entry"),
        (lambda i: (entry(i, 1).blocks.clear(), i._by_block.pop(1)), "without a block"),
        (lambda i: setattr(entry(i, 1), "tokens", bytes(8)), "has not the digest of its content"),
        (lambda i: setattr(entry(i, 1), "extra", b"s1:a"), "has not the digest of its content"),
        (lambda i: setattr(entry(i, 1), "parent_digest", bytes(32)), "has not the digest of its content"),
        (lambda i: setattr(entry(i, 1), "parent", 2), "entry 2 follows entry 2"),
        (lambda i: setattr(entry(i, 1), "number", 1) or setattr(entry(i, 1), "parent", 0), "the same number"),
        (lambda i: i._by_digest.update({bytes(32): entry(i, 1)}), "a digest leads to entry 2"),
        (lambda i: setattr(i, "block_size", 3), "is not one full block"),
    ],
)
def test_check_finds_each_kind_of_damage(change, message):
    index = PrefixIndex(2)
    index.register([0, 1], [1, 2, 3, 4])
    index.check()
    change(index)
    with pytest.raises(BrokenInvariant, match=message):
        index.check()
