"""The allocator for a page in a browser: a list of actions in, the state after each of them out, as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from typing import Any

from ..checks import choice, require, whole
from ..paging.manager import BlockManager, PagedSequence
from . import TOKENS, Words, answer, counted, known, said

# What a page can show, and how long it may take.
LIMITS = {"num_blocks": 4096, "actions": 1000, "tokens": TOKENS}
DERIVED = ("utilisation_blocks", "utilisation_tokens", "waste", "hit_rate")


class _Stage:
    """A manager, the names of its sequences, and the words that tokens stand for.

    The arguments of actions come from a request: they may be anything.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix: bool) -> None:
        self.manager = BlockManager(num_blocks, block_size, prefix=prefix)
        self.forgotten: list[int] = []  # blocks whose content was given up since this was emptied
        self.manager.pool.on_forget = self._forget
        self.named: dict[str, PagedSequence] = {}
        self.words = Words()

    # --- what a page may do: `append` returns the copies it makes -----------------------------------------

    def arrive(self, name, tokens=(), salt=None):
        """A prompt: its full blocks can be found at once."""
        self._new(name)
        seq = self.manager.allocate(self._tokens(tokens), () if salt is None else (salt,))
        self.named[name] = seq
        self.manager.register(seq)

    def append(self, name, tokens=()):
        """A token or more at the end."""
        seq = self._old(name)
        copies = self.manager.append(seq, self._tokens(tokens))
        self.manager.register(seq)
        return copies

    def fork(self, name, new):
        """A second sequence with the same beginning, under a new name."""
        self._new(new)
        self.named[new] = self.manager.fork(self._old(name))

    def crop(self, name, n):
        """Only the first n tokens stay."""
        self.manager.crop(self._old(name), whole("n", n, 0))

    def finish(self, name):
        """The sequence leaves."""
        self.manager.free(self._old(name))
        del self.named[name]

    def evict(self, n=None):
        """The n cached blocks that were freed longest ago are forgotten; without n, all."""
        self.manager.evict(None if n is None else whole("n", n, 0))

    # --- help ---------------------------------------------------------------------------------------------

    def _forget(self, ids: list[int]) -> None:
        self.forgotten += ids
        self.manager.index.remove(ids)

    def _new(self, name) -> None:
        new = isinstance(name, str) and name and name not in self.named
        require(new, "name", "a name that no live sequence has", name)

    def _old(self, name) -> PagedSequence:
        return self.named[choice("name", name, self.named)]

    def _tokens(self, tokens) -> list[int]:
        return self.words.tokens(self.words.read("tokens", tokens))

    def state(self) -> dict:
        manager, size = self.manager, self.manager.block_size
        pool, usage = manager.pool, manager.usage()
        holds: dict[int, list[int]] = {}  # what can be read in a block: by its longest table, or by the index
        for seq in manager.sequences:
            for k, block in enumerate(seq.table.ids):
                mine = list(seq.tokens[k * size : (k + 1) * size])
                holds[block] = max(holds.get(block, []), mine, key=len)
        holds |= {block: manager.index.content(block) for block in manager.index}
        blocks = []
        for i in range(pool.num_blocks):
            refs, found = pool.ref_count(i), i in manager.index
            state = "live" if refs else "cached" if found else "empty"
            tokens = [self.words.list[t] for t in holds.get(i, [])]
            blocks.append({"id": i, "state": state, "refs": refs, "tokens": tokens, "findable": found})
        return {
            "sequences": {
                name: {"length": len(seq), "blocks": seq.table.ids[:], "shared": seq.shared}
                for name, seq in self.named.items()
            },
            "pool": blocks,
            "free": manager.num_free,
            "eviction_order": pool.eviction_order(),
            "usage": asdict(usage) | {name: getattr(usage, name) for name in DERIVED},
        }


# --- what an action did, for a reader ---------------------------------------------------------------------

HEADS = {
    "arrive": "{name} arrives with {more}",
    "append": "{name} grows by {more}",
    "fork": "{new} is a second {name}",
    "crop": "{name} keeps {length}",
    "finish": "{name} leaves",
    "evict": "",
}


def _changes(before: dict, after: dict, forgotten: list[int], copies: list) -> dict[str, list[int]]:
    """Blocks by what happened to them; a block that was evicted may have been taken at once."""
    old, new = ([b["refs"] for b in frame["pool"]] for frame in (before, after))
    was = [b["state"] for b in before["pool"]]
    written = {block for pair in copies for block in pair}
    more = [i for i, (x, y) in enumerate(zip(old, new)) if x < y and i not in written]
    less = [i for i, (x, y) in enumerate(zip(old, new)) if x > y]
    found = [i for i in more if was[i] == "cached" and i not in forgotten]
    return {
        "found": found,
        "shared": [i for i in more if was[i] == "live"],
        "evicted": sorted(i for i in forgotten if was[i] == "cached"),
        "forgotten": sorted(i for i in forgotten if was[i] == "live"),  # its owner writes other tokens in it
        "taken": [i for i in more if was[i] != "live" and i not in found],
        "left": [i for i in less if new[i] and i not in written],
        "cached": [i for i in less if after["pool"][i]["state"] == "cached"],
        "emptied": [i for i in less if after["pool"][i]["state"] == "empty"],
    }


SAID = {
    "found": ("is found again", "are found again"),
    "shared": ("has one owner more", "have one owner more"),
    "evicted": ("is evicted", "are evicted"),
    "forgotten": ("changes and can no longer be found", "change and can no longer be found"),
    "copied": (),
    "taken": ("is taken", "are taken"),
    "left": ("stays with its other owners", "stay with their other owners"),
    "cached": ("is free and can still be found", "are free and can still be found"),
    "emptied": ("is free and empty", "are free and empty"),
}


def _told(action: dict, copies: list, before: dict, after: dict, changed: dict[str, list[int]]) -> str:
    """What happened, in one sentence."""
    name, new = action.get("name"), action.get("new")
    had, has = (frame["sequences"].get(name, {"length": 0})["length"] for frame in (before, after))
    words = {"more": counted(has - had, "token"), "length": counted(has, "token"), "name": name, "new": new}
    told = [HEADS[action["do"]].format(**words)]
    for what, verbs in SAID.items():
        if what == "copied":
            told += [f"block {a} is copied to block {b} before the write" for a, b in copies]
        elif ids := changed[what]:
            told.append(f"block{'s' * (len(ids) > 1)} {said(ids, *verbs)}")
    if action["do"] == "arrive" and after["sequences"][name]["shared"]:
        told.append(f"{counted(after['sequences'][name]['shared'], 'token')} need no computing")
    text = "; ".join(filter(None, told)) or "nothing is cached, so nothing is evicted"
    return f"{text[0].upper()}{text[1:]}."


def _script(text: Any) -> list[dict]:
    """Actions from one string, as it stands in an address: `arrive A the cat sat_fork A B_append B mat`."""
    require(isinstance(text, str), "script", "a text", text)
    actions = []
    for piece in filter(None, map(str.split, text.split("_"))):
        verb, *rest = piece
        action: dict = {"do": verb} | dict(zip(("name",) if verb != "evict" else ("n",), rest))
        rest = rest[1:]
        if verb in ("arrive", "append"):
            action["tokens"] = rest
        elif rest:
            action[{"fork": "new", "crop": "n"}.get(verb, "more")] = " ".join(rest)
        if str(action.get("n", "")).isdecimal():
            action["n"] = int(action["n"])
        actions.append(action)
    return actions


def _frames(data: dict) -> list[dict]:
    known("request", data, ("num_blocks", "block_size", "prefix", "actions", "script"))
    if "actions" in data and "script" in data:
        raise ValueError("request: give actions or a script")
    num_blocks = whole("num_blocks", data.get("num_blocks"), 1, LIMITS["num_blocks"])
    actions = _script(data["script"]) if "script" in data else data.get("actions", [])
    fits = isinstance(actions, list) and len(actions) <= LIMITS["actions"]
    require(fits, "actions", f"a list of at most {LIMITS['actions']}", actions)
    stage = _Stage(num_blocks, data.get("block_size"), bool(data.get("prefix", True)))
    verbs: dict[str, Callable] = {name: getattr(stage, name) for name in HEADS}
    state, size = stage.state(), counted(stage.manager.block_size, "token")
    told = f"An empty pool: {counted(num_blocks, 'block')} of {size}."
    frames = [{"action": None, "error": None, "copies": [], "told": told, "changed": {}, **state}]
    for action in actions:
        error, copies, stage.forgotten = None, [], []
        try:
            require(isinstance(action, dict), "action", "an object", action)
            verb = verbs[choice("do", action.get("do"), verbs)]
            given = signature(verb).bind(**{k: v for k, v in action.items() if k != "do"})
            copies = verb(*given.args, **given.kwargs) or []
        except (ValueError, TypeError) as e:  # TypeError: an argument too many or too few
            error = str(e)
        before, state = state, stage.state()
        changed = _changes(before, state, stage.forgotten, copies)
        told = f"Refused: {error}. Nothing has changed."
        frame = {"action": action, "error": error, "copies": copies, "changed": changed, **state}
        frames.append(frame | {"told": told if error else _told(action, copies, before, state, changed)})
    return frames


def live(request: str) -> str:
    """Play a list of actions on an empty pool, and tell the state before the first and after each of them.

    The request and the reply are JSON. A request, and the actions that it may list:

        {"num_blocks": 8, "block_size": 4, "prefix": true, "actions": [...]}

        {"do": "arrive", "name": "A", "tokens": "the words of a prompt", "salt": null}
        {"do": "append", "name": "A", "tokens": ["one", "two"]}
        {"do": "fork", "name": "A", "new": "B"}
        {"do": "crop", "name": "A", "n": 5}
        {"do": "finish", "name": "A"}
        {"do": "evict", "n": 1}

    Tokens are a text, split at spaces, or a list of words and integers. Instead of `actions`, a `script` has
    them in one string: "arrive A the cat sat_fork A B_append B mat_crop A 2_evict 1_finish A".

    The reply:

        {"ok": true, "result": {"frames": [...]}}
        {"ok": false, "error": "..."}

    A frame has `action`, `error` (null, or why the action was refused; it has changed nothing then), `told`
    (what happened, a sentence), `changed` (blocks by what happened to them), `copies` (pairs of source and
    destination), `sequences` by name with their tables, `pool` (every block: state live, cached or empty,
    refs, tokens, findable), `free`, `eviction_order`, and `usage` with utilisation and waste. The error of
    the second form says what in the request makes no sense.
    """
    return answer(request, lambda data: {"frames": _frames(data)})
