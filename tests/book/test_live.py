"""The interactive parts, on their pages in a real browser, by keyboard alone, against the same call here."""

import json
import random

import pytest
from livewalk import Walk, accessible

from companion.live import cost
from tools import assets
from tools.browser import find

pytestmark = [
    pytest.mark.skipif(find() is None, reason="no Chromium found: the interactive parts were not tried"),
    pytest.mark.skipif(
        not assets.ready(), reason="Pyodide was not fetched from npm: the parts were not tried"
    ),
]

K = 1024
BARS = [4 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K]
SETTINGS = 52  # of each part; the first is where it starts


def number(settings):
    """What a reader asks, without what is left empty."""
    counts = ("batch", "context", "devices", "tensor", "expert", "block_size")
    return {k: int(v) if k in counts else v for k, v in settings.items() if v}


def memory_bill(settings):
    result = ask("bill", contexts=BARS, **number(settings))
    s, shown = result["sizing"], {}
    for key in ("weights_bytes_per_device", "kv_bytes_per_device"):
        shown[key] = s[key]
        shown |= {f"{bar['context']}-{key}": bar[key] for bar in result["bars"]}
    facts = (
        "weights_bytes kv_bytes kv_bytes_per_token max_batch max_context decode_seconds ttft_seconds bound_by"
    )
    return shown | {key: s[key] for key in facts.split()}


def roofline(settings):
    result = ask("roofline", batches=[1], **number(settings))
    shown = {key: result[key] for key in ("ridge", "max_batch")}
    decode = "seconds tokens_per_second intensity flops_per_second weights_bytes kv_bytes"
    shown |= {f"decode.{key}": result["decode"][key] for key in decode.split()}
    return shown | {f"prefill.{key}": result["prefill"][key] for key in ("seconds", "intensity")}


def experts(settings):
    result = ask("experts", batches=[1], **number(settings))
    shown = {key: result[key] for key in ("held_bytes", "max_batch")} | {"touched": result["now"]["touched"]}
    rows = [(row, key) for row in ("mixture", "active", "total") for key in ("weights_bytes", "seconds")]
    return shown | {f"{row}.{key}": result["now"][row][key] for row, key in rows}


DRAWN = """Object.fromEntries([...part.querySelectorAll('select, input')].map(n => [
    n.id.replace(part.dataset.live + '-', ''), {
        label: n.labels[0].textContent,
        help: document.getElementById(n.getAttribute('aria-describedby')).textContent,
        options: n.options ? [...n.options].map(o => [o.value, o.textContent]) : null,
        last: n.type === 'range' ? +n.max : null,
        empty: n.type === 'text' ? n.placeholder : null,
        folded: !n.checkVisibility(),
    }]))"""


def described(of):
    """What a page draws of the form that Python describes."""
    first, more = (ask("form", of=of)[key] for key in ("first", "more"))
    rows = {}
    for row in first + sum(more.values(), []):
        options, text = row.get("options"), not ("options" in row or "levels" in row)
        rows[row["name"]] = {
            "label": row["label"],
            "help": row["help"],
            "options": options
            and [[o["value"], o["label"]] if isinstance(o, dict) else [o, o] for o in options],
            "last": len(row["levels"]) - 1 if "levels" in row else None,
            "empty": row["empty"] if text else None,
            "folded": row not in first,
        }
    return rows


def ask(op, **arguments):
    reply = json.loads(cost.live(json.dumps({"op": op, **arguments})))
    assert reply["ok"], reply
    return reply["result"]


PARTS = {
    "memory-bill": ("notebooks/06_memory_bill", memory_bill),
    "roofline": ("notebooks/05_roofline", roofline),
    "experts": ("notebooks/13_moe", experts),
}
FORMS = {"memory-bill": "bill", "roofline": "roofline", "experts": "experts"}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_by_keyboard_agrees_with_python(name, browser, site):
    page, expected = PARTS[name]
    rng, seen = random.Random(name), set()
    with browser.tab(f"{site}{page}.html") as tab:
        runtime = [r for r in tab.visit.requests if "/live/" in r or "pyodide" in r]
        assert runtime == [], "fetched before anybody asked"
        pictures = f"[...{cell(name)}.querySelectorAll('.cell_output img')]"
        assert tab.evaluate(f"{pictures}.length > 0 && {pictures}.every(p => p.offsetParent)")
        walk = Walk(tab, name).start()
        assert not tab.evaluate(f"{pictures}.some(p => p.offsetParent)"), "the figure is still there"
        assert walk.js("part.querySelector('[role=group]').contains(document.activeElement)"), (
            "focus was lost"
        )
        assert accessible(walk) == []
        assert walk.js(DRAWN) == described(FORMS[name])
        settings = walk.settings()
        while len(seen) < SETTINGS:
            assert walk.values() == expected(settings), settings
            assert walk.says() and "None" not in walk.says() and "NaN" not in walk.js("part.textContent")
            seen.add(json.dumps(settings))
            settings = walk.shuffle(rng)
        assert accessible(walk) == []
        assert walk.values() == expected(settings), settings

        # The address holds the setting: a link with it shows the same, without a key pressed.
        tab.until(saved(name, settings))
        address, shown = tab.evaluate("location.href"), walk.values()
        walk.focus(walk.js("part.querySelector('select').id"))
        tab.press("End", "ArrowUp")
        other = walk.settled().settings()
        assert other != settings
        tab.until(saved(name, other))
        tab.goto(address)  # the same page, another fragment: as when a link to it is followed
        first = json.dumps(next(iter(settings.values())))
        tab.until(f"{walk.root}.querySelector('select').value === {first}")
        assert walk.running().settings() == settings and walk.values() == shown

        walk.js("part.querySelector('.live-stop').focus()")
        tab.press("Enter")
        assert tab.evaluate(f"{pictures}.every(p => p.offsetParent)"), "the figure did not come back"
        assert walk.js("document.activeElement === part.querySelector('.live-start')")
        assert tab.visit.errors == []
        inside = (site, f"blob:{site}", "data:")
        assert [r for r in tab.visit.requests if not r.startswith(inside)] == []


def saved(name, settings):
    """Whether the address has these settings and no others."""
    told = json.dumps(sorted([f"{name}.{key}", value] for key, value in settings.items()))
    return (
        f"JSON.stringify([...new URLSearchParams(location.hash.slice(1))].sort()) === JSON.stringify({told})"
    )


def cell(name):
    """The code cell whose picture a part takes the place of."""
    return f"""(() => {{
        let cell = document.querySelector('[data-live={json.dumps(name)}]');
        do cell = cell.previousElementSibling; while (!cell.matches('.cell'));
        return cell;
    }})()"""


def test_an_address_with_a_setting_starts_the_part(browser, site):
    page, expected = PARTS["roofline"]
    asked = {"model": "gemma-3-27b", "hardware": "b200", "batch": "96", "context": "131072", "kv": "fp8"}
    state = "&".join(f"roofline.{k}={v}" for k, v in asked.items())
    hostile = "&roofline.weights=%3Cimg%20src=x%20onerror=alert(1)%3E&roofline.colour=red"
    with browser.tab(f"{site}{page}.html#{state}{hostile}", width=390, dark=True) as tab:
        walk = Walk(tab, "roofline").running()
        assert walk.settings() == {**asked, "weights": "bf16"}
        assert walk.values() == expected(walk.settings())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        tab.until(
            f"(r => r.top < innerHeight && r.bottom > 0)({walk.root}.getBoundingClientRect())"
        )  # in sight
        assert tab.visit.errors == []


def test_what_is_folded_away_is_written_by_keyboard(browser, site):
    page, expected = PARTS["memory-bill"]
    with browser.tab(f"{site}{page}.html") as tab:
        walk = Walk(tab, "memory-bill").start()
        start, before = walk.settings(), walk.values()
        rest = "getComputedStyle([...part.querySelectorAll('.live-legend li')].at(-1)).display !== 'none'"
        assert not walk.js(rest)

        def put(name, text):
            walk.focus(f"memory-bill-{name}")
            tab.press("Control+a", "Delete")
            tab.page.keyboard.type(text)
            tab.press("Tab")
            walk.settled()

        walk.focus("memory-bill-more")
        tab.press("Enter")
        assert accessible(walk) == []
        put("overhead_bytes", "10GB")
        walk.focus("memory-bill-pages")
        tab.press("End")
        asked = start | {"overhead_bytes": "10GB", "pages": "unified"}
        assert walk.settled().settings() == asked and walk.values() == expected(asked)
        assert walk.values()["max_batch"] < before["max_batch"] and walk.js(rest)

        put("tensor", "three")
        assert "tensor" in walk.says() and "'three'" in walk.says() and walk.values() == expected(asked)
        put("tensor", "8")
        put("link_bandwidth", "450 GB/s")
        asked |= {"tensor": "8", "link_bandwidth": "450 GB/s"}
        assert walk.values() == expected(asked)
        tab.until(saved("memory-bill", asked))
        address, shown = tab.evaluate("location.href"), walk.values()
        tab.goto("about:blank")
        tab.goto(address)
        assert walk.running().settings() == asked and walk.values() == shown
        assert walk.js("part.querySelector('details').open")
        walk.js("part.querySelector('summary').focus()")
        put("tensor", "")
        assert walk.settings() == {k: v for k, v in asked.items() if k != "tensor"}
        assert accessible(walk) == [] and tab.visit.errors == []


FORMATS = """import(new URL('live/ui.mjs', SITE)).then(({ format }) =>
    NUMBERS.map(n => [format.binary(n), format.decimal(n), format.seconds(n / 1e9)]))"""


def test_numbers_are_written_as_in_the_figures(browser, site):
    from companion.figures import format_bytes, format_seconds

    rng = random.Random(1)
    numbers = [0, 1, 999, 1000, 1023, 1024, 1e9, 2**30, 80e9, 141e9]
    numbers += [int(10 ** rng.uniform(0, 14)) for _ in range(300)]
    script = FORMATS.replace("SITE", json.dumps(site)).replace("NUMBERS", json.dumps(numbers))
    with browser.tab(f"{site}genindex.html") as tab:
        for n, (binary, decimal, seconds) in zip(numbers, tab.evaluate(script), strict=True):
            assert binary == format_bytes(n)
            assert decimal == format_bytes(n, binary=False)
            # Beyond 1,000 s a figure writes 1.7e+04 s, a page 17,000 s.
            assert n >= 1e12 or seconds == format_seconds(n / 1e9)
