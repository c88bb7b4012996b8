"""The page's door: actions in, states out, as JSON; and a room that needs nothing but Python itself."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from companion.live.paging import LIMITS, live

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
        (do("append", "Z", tokens="x"), "name must be one of A='Z'"),
        (do("fork", "A", new="A"), "name='A'"),
        (do("fork", "A"), "new"),
        (do("crop", "A", n=-1), "n=-1"),
        (do("evict", n="all"), "n='all'"),
        (do("finish", "Z"), "name='Z'"),
        (do("dance"), "do must be one of arrive"),
        ({"do": ["arrive"]}, ""),
        ("arrive", "action='arrive'"),
        (None, "action=None"),
    ],
)
def test_a_refused_action_says_why_and_changes_nothing(action, message):
    before, after = play(do("arrive", "A", tokens="a b c d e"), action)[1:]
    assert (
        all(part in after["error"] for part in message.split("="))
        and "_Stage" not in after["error"]
        and not after["copies"]
    )
    for key in ("sequences", "pool", "free", "eviction_order", "usage"):
        assert after[key] == before[key]


# --- what a reader is told ----------------------------------------------------------------------------


def script(text, **options):
    request = {"num_blocks": 6, "block_size": 2, **options, "script": text}
    reply = json.loads(live(json.dumps(request)))
    assert reply["ok"], reply
    return reply["result"]["frames"]


def test_a_script_is_the_same_actions():
    text = "arrive A the cat sat on the_fork A B_append B mat_crop A 3_evict 1_finish A_evict__  arrive C  1 "
    words = ["the", "cat", "sat", "on", "the"]
    assert script(text) == play(
        do("arrive", "A", tokens=words),
        do("fork", "A", new="B"),
        do("append", "B", tokens=["mat"]),
        do("crop", "A", n=3),
        do("evict", n=1),
        do("finish", "A"),
        do("evict"),
        do("arrive", "C", tokens=["1"]),
    )
    assert len(script("")) == len(script("_ _")) == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("dance", "do must be one of arrive"),
        ("arrive", "missing a required argument: 'name'"),
        ("append Z x", "name='Z'"),
        ("fork A", "missing a required argument: 'new'"),
        ("fork A A", "name='A'"),
        ("crop A", "missing a required argument: 'n'"),
        ("crop A -1", "n='-1'"),
        ("crop A two", "n='two'"),
        ("crop A 1 2", "n='1 2'"),
        ("finish A now", "unexpected keyword argument 'more'"),
        ("evict all", "n='all'"),
        ("evict 1 2", "unexpected keyword argument 'more'"),
        ("arrive B 1 2 3 4 5 6 7", "and 3 are free"),
    ],
)
def test_a_refused_piece_of_a_script(text, message):
    before, after = script("arrive A a b c d e_" + text)[1:]
    assert all(part in after["error"] for part in message.split("="))
    assert after["told"] == f"Refused: {after['error']}. Nothing has changed."
    assert after["pool"] == before["pool"] and not any(after["changed"].values())


def test_a_script_is_a_text_and_the_only_one():
    for more in (
        {"script": 3},
        {"script": ["arrive A"]},
        {"script": "", "actions": []},
        {"script": "_x" * 1001},
    ):
        reply = json.loads(live(json.dumps({"num_blocks": 4, "block_size": 2, **more})))
        assert not reply["ok"] and ("script" in reply["error"] or "actions" in reply["error"])


def test_sentences():
    text = "arrive A the cat sat on the_fork A B_fork A C_append B mat_append A rug_append C_crop A 5"
    text += "_append A on_finish C_finish B_finish A_evict 1_evict_evict_arrive D_fork D E"
    told = [f["told"] for f in script(text)]
    assert told == [
        "An empty pool: 6 blocks of 2 tokens.",
        "A arrives with 5 tokens; blocks 0, 1 and 2 are taken.",
        "B is a second A; blocks 0, 1 and 2 have one owner more.",
        "C is a second A; blocks 0, 1 and 2 have one owner more.",
        "B grows by 1 token; block 2 is copied to block 3 before the write.",
        "A grows by 1 token; block 2 is copied to block 4 before the write.",
        "C grows by 0 tokens.",
        "A keeps 5 tokens.",
        "A grows by 1 token; block 4 changes and can no longer be found.",
        "C leaves; blocks 0 and 1 stay with their other owners; block 2 is free and empty.",
        "B leaves; blocks 0 and 1 stay with their other owners; block 3 is free and can still be found.",
        "A leaves; blocks 0, 1 and 4 are free and can still be found.",
        "Block 3 is evicted.",
        "Blocks 0, 1 and 4 are evicted.",
        "Nothing is cached, so nothing is evicted.",
        "D arrives with 0 tokens.",
        "E is a second D.",
    ]
    full = script("arrive A a b c d_finish A_arrive B a b c e f g h i j k l_finish B_arrive C a b x")
    assert [f["told"] for f in full[3:]] == [
        "B arrives with 11 tokens; block 0 is found again; block 1 is evicted; "
        "blocks 1, 2, 3, 4 and 5 are taken; 2 tokens need no computing.",
        "B leaves; blocks 0, 2, 3, 4 and 5 are free and can still be found; block 1 is free and empty.",
        "C arrives with 3 tokens; block 0 is found again; block 1 is taken; 2 tokens need no computing.",
    ]
    both = script("arrive A a b_fork A B_crop B 1_append B c_crop A 1_finish B")
    assert [f["told"] for f in both[3:]] == [
        "B keeps 1 token.",
        "B grows by 1 token; block 0 is copied to block 1 before the write.",
        "A keeps 1 token.",
        "B leaves; block 1 is free and can still be found.",
    ]


def any_script(rng):
    pieces, names, words = [], [], 0
    for _ in range(30):
        verb = rng.choice(
            ("arrive", "arrive", "append", "append", "append", "fork", "crop", "finish", "evict")
        )
        name = rng.choice(names) if names else "A"
        if verb in ("arrive", "fork"):
            new = rng.choice("ABCDEF")
            names = [*{*names, new}]
            pieces.append(f"fork {name} {new}" if verb == "fork" else f"arrive {new}")
        else:
            pieces.append({"evict": f"evict {rng.randint(0, 2)}"}.get(verb, f"{verb} {name}"))
        if verb == "crop":
            pieces[-1] += f" {rng.randint(0, 9)}"
        for _ in range({"arrive": rng.randint(0, 7), "append": rng.randint(1, 3)}.get(verb, 0)):
            words += 1
            pieces[-1] += f" {rng.choice(('a', 'b', words))}"
    return "_".join(pieces)


@pytest.mark.parametrize("seed", range(40))
def test_what_changed_is_what_changed(seed):
    rng = random.Random(seed)
    frames = script(any_script(rng), num_blocks=rng.randint(2, 9), block_size=rng.randint(1, 3))
    for before, after in zip(frames, frames[1:]):
        changed, old, new = after["changed"], before["pool"], after["pool"]
        if after["error"]:
            assert not any(changed.values()) and new == old
            continue
        copied = {block for pair in after["copies"] for block in pair}
        moves = [k for k in changed if k not in ("evicted", "forgotten")]
        for i, (was, now) in enumerate(zip(old, new)):
            named = [k for k in moves if i in changed[k]]
            assert len(named) <= 1
            if was["refs"] != now["refs"]:
                assert named or i in copied
            for kind, holds in {
                "taken": not was["refs"] and now["refs"],
                "found": was["state"] == "cached" and was["tokens"] == now["tokens"] and now["refs"] == 1,
                "shared": was["refs"] and now["refs"] == was["refs"] + 1,
                "left": was["refs"] > now["refs"] > 0,
                "cached": was["refs"] and now["state"] == "cached",
                "emptied": was["refs"] and now["state"] == "empty",
            }.items():
                assert kind not in named or holds, (kind, i, after["action"])
            gone = was["findable"] and not (
                now["findable"] and now["tokens"][: len(was["tokens"])] == was["tokens"]
            )
            if gone:
                assert i in changed["evicted"] + changed["forgotten"]
            assert i not in changed["forgotten"] or (was["refs"] == now["refs"] == 1)
            assert i not in changed["evicted"] or was["state"] == "cached"
        length = {k: f["sequences"].get(after["action"].get("name"), {"length": 0})["length"]
                  for k, f in (("old", before), ("new", after))}  # fmt: skip
        if after["action"]["do"] == "append":
            assert f"grows by {length['new'] - length['old']} token" in after["told"]


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
    assert errors[:7] == [None] * 7 and f"tokens must be at most {LIMITS['tokens']}" in errors[7]


def test_the_room_needs_only_pythons_own_library():
    code = (
        "import companion.paging, sys; companion.paging.BlockManager(4, 4).allocate([1]); "
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOM)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("['__main__', 'companion']", "['companion']")
