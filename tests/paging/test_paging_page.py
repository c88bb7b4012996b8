"""The page's door: actions in, states out, as JSON; and a room that needs nothing but Python itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from companion.paging import live
from companion.paging.page import LIMITS

ROOM = Path(__file__).resolve().parents[2]


def play(*actions, num_blocks=6, block_size=2, **more):
    request = {"num_blocks": num_blocks, "block_size": block_size, "actions": actions, **more}
    reply = json.loads(live(json.dumps(request)))
    assert reply["ok"], reply
    return reply["result"]["frames"]


def do(verb, name=None, **more):
    return {"do": verb, **({"name": name} if name else {}), **more}


def tables(frame):
    return {name: seq["blocks"] for name, seq in frame["sequences"].items()}


def test_a_story_with_every_action():
    frames = play(
        do("arrive", "A", tokens="the cat sat on the"),
        do("fork", "A", new="B"),
        do("append", "B", tokens="mat"),
        do("append", "A", tokens=["hat", "today"]),
        do("finish", "A"),
        do("arrive", "C", tokens="the cat sat on a mat"),
        do("crop", "C", n=4),
        do("evict"),
    )
    start, arrive, fork, cow, grown, finish, hit, crop, evict = frames
    assert start["free"] == 6 and start["sequences"] == {} and start["action"] is None
    assert tables(arrive) == {"A": [0, 1, 2]} and arrive["usage"]["waste"] == 1
    assert arrive["pool"][2] == {"id": 2, "state": "live", "refs": 1, "tokens": ["the"], "findable": False}
    assert tables(fork) == {"A": [0, 1, 2], "B": [0, 1, 2]} and fork["pool"][2]["refs"] == 2
    assert cow["copies"] == [[2, 3]] and tables(cow)["B"] == [0, 1, 3]
    assert cow["pool"][3]["tokens"] == ["the", "mat"] and cow["pool"][3]["findable"]
    assert grown["copies"] == [] and tables(grown)["A"] == [0, 1, 2, 4]
    assert grown["usage"]["utilisation_tokens"] == 9 / 10
    assert finish["pool"][2]["state"] == "cached" and finish["pool"][4]["state"] == "empty"
    assert finish["eviction_order"] == [2] and finish["pool"][2]["tokens"] == ["the", "hat"]
    assert hit["sequences"]["C"] == {"length": 6, "blocks": [0, 1, 4], "shared": 4}
    assert hit["usage"]["hit_rate"] == 4 / 11 and hit["pool"][0]["refs"] == 2
    assert tables(crop)["C"] == [0, 1] and crop["eviction_order"] == [2, 4]
    assert evict["eviction_order"] == [] and evict["free"] == 3 and evict["pool"][2]["tokens"] == []
    assert not any(f["error"] for f in frames)


def test_a_salt_keeps_apart_and_prefix_false_finds_nothing():
    two = (do("arrive", "A", tokens="a b c"), do("arrive", "B", tokens="a b c"))
    assert play(*two)[-1]["sequences"]["B"]["shared"] == 2
    assert play(two[0], {**two[1], "salt": "me"})[-1]["sequences"]["B"]["shared"] == 0
    assert play(*two, prefix=False)[-1]["sequences"]["B"]["shared"] == 0


def test_words_and_numbers_are_different_tokens():
    frames = play(do("arrive", "A", tokens=[1, 2, 3]), do("arrive", "B", tokens=["1", "2", "3"]))
    assert frames[-1]["sequences"]["B"]["shared"] == 0 and frames[-1]["pool"][0]["tokens"] == [1, 2]


@pytest.mark.parametrize(
    "action, message",
    [
        (do("arrive", "A", tokens="x"), "name='A'"),
        (do("arrive", tokens="x"), "name"),
        (do("arrive", "B", tokens="1 2 3 4 5 6 7"), "and 3 are free"),
        (do("arrive", "B", tokens=" ".join(map(str, range(13)))), "the pool has 6"),
        (do("arrive", "B", tokens=[1.5]), "tokens"),
        (do("arrive", "B", tokens=3), "tokens"),
        (do("arrive", "B", salt=[1]), "extra"),
        (do("arrive", "B", colour="red"), "colour"),
        (do("append", "Z", tokens="x"), "name='Z'; the live sequences are A"),
        (do("fork", "A", new="A"), "name='A'"),
        (do("fork", "A"), "new"),
        (do("crop", "A", n=-1), "n=-1"),
        (do("evict", n="all"), "n='all'"),
        (do("finish", "Z"), "name='Z'"),
        (do("dance"), "`do` must be one of arrive"),
        ({"do": ["arrive"]}, ""),
        ("arrive", "`do` must be one of"),
        (None, "`do` must be one of"),
    ],
)
def test_a_refused_action_says_why_and_changes_nothing(action, message):
    before, after = play(do("arrive", "A", tokens="a b c d e"), action)[1:]
    assert message in after["error"] and "_Stage" not in after["error"] and not after["copies"]
    for key in ("sequences", "pool", "free", "eviction_order", "usage"):
        assert after[key] == before[key]


@pytest.mark.parametrize(
    "request_text",
    [
        "", "{", "[]", "3", "null", '"x"', "{}", "[" * 100_000,
        '{"num_blocks": 4}',
        '{"num_blocks": 0, "block_size": 4}',
        '{"num_blocks": "4", "block_size": 4}',
        '{"num_blocks": 4, "block_size": 0}',
        '{"num_blocks": 100000, "block_size": 4}',
        '{"num_blocks": 4, "block_size": 4, "actions": {}}',
        '{"num_blocks": 4, "block_size": 4, "action": []}',
        json.dumps({"num_blocks": 4, "block_size": 4, "actions": [0] * (LIMITS["actions"] + 1)}),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_a_request_that_makes_no_sense(request_text):
    reply = json.loads(live(request_text))
    assert reply["ok"] is False and reply["error"]


def test_too_many_tokens_are_refused():
    size = LIMITS["tokens"] // 4 + 1
    actions = [x for k in range(4) for x in (do("arrive", f"S{k}", tokens=[0] * size), do("finish", f"S{k}"))]
    errors = [f["error"] for f in play(*actions, num_blocks=8, block_size=size)]
    assert errors[:7] == [None] * 7 and "tokens: at most" in errors[7]


def test_the_room_needs_only_pythons_own_library():
    code = (
        "import companion.paging, sys; companion.paging.BlockManager(4, 4).allocate([1]); "
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOM)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['__main__', 'companion']", "['companion']")
