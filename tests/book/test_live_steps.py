"""The allocator and the scheduler on their pages, in a real browser, by keyboard alone, against Python."""

import json
import random
import string

import pytest
from livewalk import FOCUSABLE, Walk, accessible

from companion.live import paging, serving
from tools import assets
from tools.browser import find

pytestmark = [
    pytest.mark.skipif(find() is None, reason="no Chromium found: the interactive parts were not tried"),
    pytest.mark.skipif(
        not assets.ready(), reason="Pyodide was not fetched from npm: the parts were not tried"
    ),
]

LISTS = 55  # of actions, and as many settings of the scheduler
PAGES = {"allocator": "notebooks/09_paged_cache.html", "scheduler": "notebooks/11_serving.html"}


class Steps(Walk):
    """A part with hidden fields and things to press that have no id."""

    def focus(self, id: str) -> None:
        """Tab or Shift+Tab to a control of the part, whichever way it is."""
        order = f"[...part.querySelectorAll({json.dumps(FOCUSABLE)})].filter(n => n.checkVisibility())"
        for _ in range(60):
            here, there, outline = self.js(f"""(() => {{
                const order = {order}, now = document.activeElement;
                return [order.indexOf(now), order.findIndex(n => n.id === {json.dumps(id)}),
                    parseFloat(getComputedStyle(now).outlineWidth)];
            }})()""")
            assert there >= 0 and here >= 0, f"{id}: {there}, the focus: {here}"
            if here == there:
                assert outline >= 2, f"{id} shows no focus"
                return
            self.tab.press(*["Tab" if here < there else "Shift+Tab"] * max(1, abs(there - here) - 1))
        raise AssertionError(f"{id} cannot be reached with Tab")

    def push(self, label: str) -> None:
        """Press a button that is named by what it says."""
        named = f"n => n.textContent === {json.dumps(label)}"
        self.js(f"[...part.querySelectorAll('.live-button')].find({named}).id = 'pushed'")
        self.focus("pushed")
        self.js("part.querySelector('#pushed').removeAttribute('id')")
        self.tab.press("Enter")
        self.settled()

    def pick(self, id: str, place: int) -> None:
        """An option of a select by its place, or a slider's place."""
        self.focus(id)
        self.tab.press("Home", *["ArrowDown" if self.js("document.activeElement.tagName") == "SELECT"
                                 else "ArrowRight"] * place)  # fmt: skip
        self.settled()

    def write(self, id: str, text: str) -> None:
        """Into a field: to come there by Tab selects what it holds."""
        self.focus(id)
        self.tab.press("Shift+Tab", "Tab", *(text or " "))

    def open(self, address: str) -> None:
        """Another setting in the same page, as when a link to it is followed; wait until it is shown."""
        # The address follows the page 0.3 s later: let it, or it would overwrite the link.
        self.tab.evaluate("new Promise(done => setTimeout(done, 500))")
        self.tab.until(f"location.href !== {json.dumps(address)}")
        self.js("part.querySelector('[role=group]').dataset.old = 1")
        self.tab.goto(address)
        self.tab.until(f"!{self.root}.querySelector('[data-old]')")
        self.running()


def ask(room, request):
    reply = json.loads(room.live(json.dumps(request)))
    return reply["result"] if reply["ok"] else reply["error"]


# --- the allocator -----------------------------------------------------------------------------------------

USAGE = "blocks_live blocks_cached slots_filled waste utilisation_tokens utilisation_blocks hit_rate".split()
VERBS = ["arrive", "append", "fork", "crop", "finish", "evict"]


def shown_of(frame):
    """What the page marks of a step."""
    shown = {key: frame[key] for key in ("free", "copies", "eviction_order")}
    shown |= {f"usage.{key}": frame["usage"][key] for key in USAGE}
    for name, one in frame["sequences"].items():
        shown |= {f"sequences.{name}.{key}": one[key] for key in ("length", "shared", "blocks")}
    for block in frame["pool"]:
        shown |= {f"pool.{block['id']}.{key}": block[key] for key in ("state", "refs", "findable", "tokens")}
    return shown


class Allocator(Steps):
    """The part, and beside it what it should be asked: `asked` and the step `at`."""

    def begin(self, actions, size, blocks):
        self.actions, self.size, self.blocks, self.prefix, self.at = list(actions), size, blocks, True, 1
        return self

    def frames(self):
        asked = {"num_blocks": self.blocks, "block_size": self.size, "prefix": self.prefix}
        return ask(paging, asked | {"actions": self.actions})["frames"]

    def compare(self):
        frames = self.frames()
        frame, last = frames[self.at], len(frames) - 1
        words, changed, says, fits = self.js("""[
            [...part.querySelectorAll('.steps-block')].map(b =>
                [...b.querySelectorAll('.steps-word')].map(n => n.textContent)),
            part.querySelectorAll('.steps-block[data-changed]').length,
            part.querySelector('.live-say').textContent,
            document.documentElement.scrollWidth <= innerWidth]""")
        assert self.values() == shown_of(frame), (self.actions, self.at)
        assert says == f"Step {self.at} of {last}. {frame['told']}"
        assert words == [block["tokens"] for block in frame["pool"]]
        touched = {i for ids in frame["changed"].values() for i in ids} | {
            i for c in frame["copies"] for i in c
        }
        assert changed == len(touched) and fits
        return frame

    def walk_through(self):
        """First, then Forward to the end, and with the slider back to where it was."""
        here = self.at
        self.push("First")
        for at in range(len(self.actions) + 1):
            self.at = at
            self.compare()
            if at < len(self.actions):
                self.push("Forward")
        self.focus("allocator-step")
        while self.at > here:
            self.tab.press("ArrowLeft")
            self.at -= 1
        self.compare()

    def act(self, rng):
        """A random action by keys, whether it makes sense or not."""
        names = list(self.frames()[self.at]["sequences"])
        used = {a.get(key) for a in self.actions[: self.at] for key in ("name", "new")}
        new = next(c for c in string.ascii_uppercase if c not in used)
        verb = rng.choices(VERBS, (3, 5, 3, 1, 1, 1) if len(names) < 4 else (1, 5, 1, 2, 4, 1))[0]
        if not names and verb not in ("arrive", "evict"):
            verb = "arrive"
        self.pick("allocator-what", VERBS.index(verb))
        action = {"do": verb}
        if verb == "arrive":
            action["name"] = new
        elif verb != "evict":
            place = rng.randrange(len(names))
            self.pick("allocator-who", place)
            action["name"] = names[place]
        if verb == "fork":
            action["new"] = new
        if verb in ("arrive", "append"):
            words = [rng.choice("abcd") for _ in range(rng.randint(0, 9 if verb == "arrive" else 3))]
            self.write("allocator-prompt" if verb == "arrive" else "allocator-words", " ".join(words))
            action["tokens"] = words
        if verb in ("crop", "evict"):
            action["n"] = rng.randint(0, 7)
            self.write("allocator-keep" if verb == "crop" else "allocator-count", str(action["n"]))
        if rng.random() < 0.5 and verb not in ("fork", "finish"):
            self.tab.press("Enter")  # in the field
            self.settled()
        else:
            self.push("Do it")
        self.actions[self.at :] = [action]
        self.at += 1


FOUR = [{"do": "arrive", "name": "A", "tokens": "the cat sat on the".split()}]
FOUR += [{"do": "fork", "name": "A", "new": new} for new in "BCD"]
FOUR += [{"do": "append", "name": n, "tokens": [w]} for n, w in zip("ABCD", ("mat", "roof", "sofa", "grass"))]
FOUR += [{"do": "finish", "name": name} for name in "ABCD"]
SIZES, BLOCKS = range(1, 9), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32]


def test_the_allocator_by_keyboard(browser, site):
    rng = random.Random(7)
    with browser.tab(site + PAGES["allocator"]) as tab:
        assert not [r for r in tab.visit.requests if "/live/" in r or "pyodide" in r], "fetched before asked"
        part = Allocator(tab, "allocator").start()
        assert part.js("part.querySelector('[role=group]').contains(document.activeElement)"), (
            "focus was lost"
        )
        part.begin(FOUR, size=4, blocks=8).compare()
        assert accessible(part) == []
        part.walk_through()
        errors, copies, lists = 0, 0, set()
        while len(lists) < LISTS:
            if rng.random() < 0.15 or len(part.actions) > 14:  # back, and what follows is another list
                for _ in range(min(part.at, rng.randint(3, 9))):
                    part.push("Back")
                    part.at -= 1
                part.compare()
                part.act(rng)
            elif rng.random() < 0.2:  # the same list in another pool
                if rng.random() < 0.2:
                    part.prefix = not part.prefix
                    part.pick("allocator-prefix", 0 if part.prefix else 1)
                place = rng.randint(1, 5)
                part.size = SIZES[place]
                part.pick("allocator-size", place)
                place = rng.randint(2, 9)
                part.blocks = BLOCKS[place]
                part.pick("allocator-blocks", place)
                tab.screen(rng.choice((390, 1280)))
            else:
                part.act(rng)
            frame = part.compare()
            errors += frame["error"] is not None
            copies += len(frame["copies"])
            lists.add(json.dumps([part.actions, part.size, part.blocks, part.prefix]))
        assert errors > 3 and copies > 1, "the lists were too tame"
        assert accessible(part) == []

        # The address holds it all. The same page opened with it shows the same.
        tab.until(f"new URLSearchParams(location.hash.slice(1)).get('allocator.at') === '{part.at}'")
        address, shown = tab.evaluate("location.href"), part.values()
        part.pick("allocator-story", 2)
        assert part.values() != shown
        part.open(address)
        part.compare()
        assert part.values() == shown

        image = "%3Cimg+src%3Dx+onerror%3Dalert(1)%3E"
        hostile = f"arrive+A+{image}_dance_crop+A+-1_crop+A+{'9' * 40}_fork+A"
        hostile = f"allocator.do={hostile}&allocator.size=99&allocator.blocks=x&allocator.at=2"
        part.open(f"{site}{PAGES['allocator']}#{hostile}")
        part.begin([], size=4, blocks=8).at = 2
        part.actions = [{"do": "arrive", "name": "A", "tokens": ["<img", "src=x", "onerror=alert(1)>"]}]
        part.actions += [{"do": "dance"}, {"do": "crop", "name": "A", "n": "-1"}]
        part.actions += [{"do": "crop", "name": "A", "n": int("9" * 40)}, {"do": "fork", "name": "A"}]
        part.compare()
        assert part.js("part.querySelector('img') === null")
        assert tab.visit.errors == []
        assert [r for r in tab.visit.requests if not r.startswith((site, f"blob:{site}", "data:"))] == []


@pytest.mark.parametrize("story", ["prefix", "evict", "refuse"])
def test_a_story_shows_what_it_is_named_for(story):
    text = (assets.WEB / "live" / "allocator.mjs").read_text(encoding="utf-8")
    block = text.split(f'value: "{story}"')[1].split("\n  },")[0]
    numbers = {key: int(block.split(f"{key}: ")[1].split(",")[0]) for key in ("size", "blocks")}
    script = "".join(block.split("script:")[1].split('"')[1::2])
    frames = ask(paging, {"num_blocks": numbers["blocks"], "block_size": numbers["size"], "script": script})[
        "frames"
    ]
    changed = [{k for k, ids in f["changed"].items() if ids} for f in frames]
    if story == "prefix":
        assert sum("found" in c for c in changed) > 1 and frames[-1]["usage"]["hit_rate"] > 0.3
    elif story == "evict":
        assert any({"evicted", "taken"} <= c and not f["free"] for c, f in zip(changed, frames))
        assert any("found" in c for c in changed)
    refused = [f for f in frames if f["error"]]
    assert len(refused) == (2 if story == "refuse" else 0)
    assert all("free" in f["error"] or "blocks" in f["error"] for f in refused)


# --- the scheduler -----------------------------------------------------------------------------------------

STEP = "start_s seconds tokens blocks_live blocks_cached running waiting".split()
ROW = "prompt_tokens cached_tokens new_tokens arrival_s ttft_s itl_mean_s itl_max_s preemptions again".split()
CLOCKS = {"steps": {"step_s": 1, "token_s": 0}, "h100": {"model": "llama-3.1-8b", "hardware": "h100-sxm"}}
# How many places of each control are tried, from its first on: small numbers, that many steps are compared.
PLACES = {
    "count": 8,
    "spacing": 8,
    "prompt": 14,
    "reply": 12,
    "mix": 5,
    "blocks": 28,
    "size": 7,
    "running": 7,
}
PLACES |= {"budget": 16, "prefix": 2, "clock": 2, "step": 9}
LEFT = 34  # of the drawing's margin, in pixels


def reply_to(s):
    traffic = {k: s[k] if k == "mix" else int(s[k]) for k in ("count", "spacing", "prompt", "reply", "mix")}
    names = {
        "num_blocks": "blocks",
        "block_size": "size",
        "max_running": "running",
        "max_tokens_per_step": "budget",
    }
    numbers = {name: int(s[key]) for name, key in names.items()}
    return ask(
        serving,
        {**numbers, "prefix_caching": s["prefix"] == "on", "cost": CLOCKS[s["clock"]], "traffic": traffic},
    )


def marked_of(result, at):
    """What the page marks of a reply at a step."""
    marked = {f"totals.{key}": value for key, value in result["totals"].items()}
    marked |= {key: result[key] for key in ("seconds", "tokens_per_second")}
    for k, one in enumerate(result["requests"]):
        refused = one["refused"] is not None
        marked |= {f"requests.{k}.{key}": one[key] for key in (("refused",) if refused else ROW)}
    marked |= {f"waits.{k}.kind": wait["kind"] for k, wait in enumerate(result["waits"])}
    for k, step in enumerate(result["steps"]):
        marked |= {f"steps.{k}.parts.{i}.count": part["count"] for i, part in enumerate(step["parts"])}
    if result["steps"]:
        marked |= {f"steps.{at}.{key}": result["steps"][at][key] for key in STEP}
    return marked


def places_of(result):
    """Where a bar begins and ends, as shares of the whole time."""
    spans = {f"waits.{k}.kind": (w["start_s"], w["end_s"]) for k, w in enumerate(result["waits"])}
    for k, step in enumerate(result["steps"]):
        end = step["start_s"] + step["seconds"]
        spans |= {f"steps.{k}.parts.{i}.count": (step["start_s"], end) for i in range(len(step["parts"]))}
    return {key: [t / result["seconds"] for t in span] for key, span in spans.items()}


class Scheduler(Steps):
    def compare(self, result):
        settings = self.settings()
        at = int(settings["step"])
        assert self.values() == marked_of(result, at), settings
        wide, bars, says, text, fits = self.js("""(() => {
            const plot = part.querySelector('svg.steps-plot');
            const bars = [...plot.querySelectorAll('rect[data-key]')];
            return [plot.viewBox.baseVal.width,
                bars.map(n => [n.dataset.key, n.x.baseVal.value, n.width.baseVal.value]),
                part.querySelector('.live-say').textContent, part.textContent,
                document.documentElement.scrollWidth <= innerWidth]; })()""")
        places = places_of(result)
        assert len(bars) == len(places)
        for key, x, width in bars:
            start, end = (LEFT + share * (wide - LEFT - 2) for share in places[key])
            assert abs(x - start) < 0.01 and -0.01 <= end - (x + width) < 1.01 or width == 0.5, key
        told = "No request could be served."
        if result["steps"]:
            told = f"Step {at + 1} of {len(result['steps'])}. {' '.join(result['steps'][at]['decided'])}"
        assert says == told and fits and "NaN" not in text and "undefined" not in text


def test_the_scheduler_by_keyboard(browser, site):
    rng, seen, refused = random.Random(11), set(), 0
    with browser.tab(site + PAGES["scheduler"]) as tab:
        assert not [r for r in tab.visit.requests if "/live/" in r or "pyodide" in r], "fetched before asked"
        part = Scheduler(tab, "scheduler").start()
        settings = part.settings()
        result = reply_to(settings)
        part.compare(result)
        assert accessible(part) == []
        part.push("Forward")
        part.focus("scheduler-step")
        for at in range(1, len(result["steps"])):  # all steps of the chapter's own four requests
            assert part.settings()["step"] == str(at)
            part.compare(result)
            tab.press("ArrowRight")  # the last one changes nothing
        part.compare(result)
        kinds, reasons = set(), set()
        while len(seen) < LISTS:
            for _ in range(rng.randint(1, 3)):
                control = rng.choice(list(PLACES))
                place = rng.randrange(PLACES[control])
                part.pick(
                    f"scheduler-{control}", place if control != "clock" else place * (rng.random() < 0.5)
                )
            settings = part.settings()
            new = reply_to(settings)
            if isinstance(new, str):  # what makes no sense is said, and the picture stays
                refused += part.says() == new
                part.pick("scheduler-running", 0)
                continue
            result = new
            part.compare(result)
            seen.add(json.dumps(settings))
            kinds |= {p["kind"] for s in result["steps"] for p in s["parts"]} | {
                w["kind"] for w in result["waits"]
            }
            reasons |= {
                d.split(" waits: ")[1][-12:] for s in result["steps"] for d in s["decided"] if " waits: " in d
            }
            if rng.random() < 0.2:
                tab.screen(rng.choice((390, 1280)))
        assert refused and len(reasons) > 3, reasons
        assert kinds == {"prefill", "decode", "again", "waiting", "back"}, "the settings were too tame"
        assert accessible(part) == []

        part.pick("scheduler-story", 1)
        settings = part.settings()
        part.compare(reply_to(settings))
        part.push("Last")
        at = part.settings()["step"]
        tab.until(f"new URLSearchParams(location.hash.slice(1)).get('scheduler.at') === '{at}'")
        address, shown = tab.evaluate("location.href"), part.values()
        part.pick("scheduler-story", 2)
        assert part.values() != shown
        part.open(address)
        assert part.settings() == settings | {"step": at}
        assert part.values() == shown
        assert tab.visit.errors == []
        assert [r for r in tab.visit.requests if not r.startswith((site, f"blob:{site}", "data:"))] == []
