"""Where something is missing or wrong, an interactive part leaves the figure standing and says why."""

import functools
import json
import shutil
import threading
from http.server import ThreadingHTTPServer

import pytest
from livewalk import ROOT, Walk

from tools import assets
from tools.browser import find
from tools.serve import Handler, serving

pytestmark = pytest.mark.skipif(
    find() is None, reason="no Chromium found: faults of the parts were not tried"
)
fetched = pytest.mark.skipif(not assets.ready(), reason="Pyodide was not fetched from npm here")

PICTURE = "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'><rect width='9' height='9'/></svg>"
CELL = """<div class="cell"><div class="cell_output"><img src="p.svg" alt="of {0}" id="static-{0}"></div>
<pre class="cell_output">printed</pre></div><p><a href="#x">a link</a></p><div data-live="{0}"></div>"""
FIGURE = (
    '<figure data-live="{0}"><p><img src="p.svg" alt="a static figure of {0}" id="static-{0}"></p></figure>'
)
# A worker that needs no Python: it answers what it is told to.
STUB = """let left = {answers};
onmessage = ({{ data: {{ id, request }} }}) => {{
  const {{ op }} = JSON.parse(request);
  if (left-- <= 0) {failure};
  const result = op === "models" ? ["one", "two"] : op === "hardware" ? ["this", "that"] : {{}};
  postMessage({{ id, reply: JSON.stringify({{ ok: true, result }}) }});
}};"""
PART = """export const title = "A part for a test";
export async function start({ host, call, state, save, ui }) {
  const models = await call("cost", { op: "models" });
  const update = ui.latest(host, async () => { await call("cost", { op: "x" }); }, ui.say(host));
  host.append(ui.choose({ id: "NAME-model", label: "Model", options: models, value: models[0],
    onChange: (model) => { save({ model }); update(); } }));
  await update();
}"""


@pytest.fixture
def site(tmp_path):
    """A small site: one page, the scripts, and Pyodide as links to the real files."""
    folder = tmp_path / "site"
    vendor = folder  # vendor/ becomes the root of the site
    (folder / "_static").mkdir(parents=True)
    for name in ("live.js", "live.css"):
        shutil.copy(ROOT / "_static" / name, folder / "_static")
    if assets.ready():
        (folder / assets.PYODIDE).mkdir()
        for file in (assets.VENDOR / assets.PYODIDE).iterdir():
            (folder / assets.PYODIDE / file.name).symlink_to(file)
    assets.parts(vendor)
    (folder / "p.svg").write_text(PICTURE)
    page(folder, CELL.format("memory-bill"))
    return folder


def page(folder, *bodies):
    (folder / "p.html").write_text(
        "<!doctype html><html data-theme='light'><head><meta charset='utf-8'>"
        "<style>:root { --pst-color-primary: #0f5bc4; }</style>"
        "<link rel='stylesheet' href='_static/live.css'>"
        "<script src='_static/live.js'></script>"
        "<link rel='icon' href='p.svg'></head><body><a href='#y'>first</a>" + "\n".join(bodies)
    )


def stub(folder, answers=10**6, failure="0", part="memory-bill"):
    (folder / "live" / "worker.mjs").write_text(STUB.format(answers=answers, failure=failure))
    (folder / "live" / f"{part}.mjs").write_text(PART.replace("NAME", part))


def stands(tab, name="memory-bill"):
    return tab.evaluate(f"!!document.getElementById('static-{name}').offsetParent")


def wrong(path):
    """The same file with one byte more."""
    data = path.resolve().read_bytes()
    path.unlink()
    path.write_bytes(data + b"\n")


RUNTIME = assets.PYODIDE
FAULTS = {
    "no wasm": (lambda f: (f / RUNTIME / "pyodide.asm.wasm").unlink(), "pyodide.asm.wasm"),
    "no library": (lambda f: (f / RUNTIME / "python_stdlib.zip").unlink(), "python_stdlib.zip"),
    "another script": (lambda f: wrong(f / RUNTIME / "pyodide.mjs"), "pyodide.mjs"),
    "another inner script": (lambda f: wrong(f / RUNTIME / "pyodide.asm.mjs"), "pyodide.asm.mjs"),
    "another wasm": (lambda f: wrong(f / RUNTIME / "pyodide.asm.wasm"), "pyodide.asm.wasm"),
    "another library": (lambda f: wrong(f / RUNTIME / "python_stdlib.zip"), "python_stdlib.zip"),
    "no package": (lambda f: (f / "live" / "companion.zip").unlink(), "companion.zip"),
    "no part": (lambda f: (f / "live" / "memory-bill.mjs").unlink(), "memory-bill.mjs"),
    "no tools": (lambda f: (f / "live" / "ui.mjs").unlink(), "ui.mjs"),
    "no list": (lambda f: (f / "live" / "assets.json").unlink(), "assets.json"),
    "no worker": (lambda f: (f / "live" / "worker.mjs").unlink(), "worker"),
    "a worker that fails": (
        lambda f: (f / "live" / "worker.mjs").write_text("throw new Error('boom')"),
        "boom",
    ),
    "a part that fails": (
        lambda f: (f / "live" / "memory-bill.mjs").write_text(
            "export const start = () => { throw Error('oh'); };"
        ),
        "oh",
    ),
}


@fetched
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_figure_and_says_why(fault, browser, site):
    spoil, words = FAULTS[fault]
    spoil(site)
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        walk = Walk(tab, "memory-bill")
        with pytest.raises(AssertionError, match="the figure stands as printed") as said:
            walk.start()
        assert words in str(said.value)
        assert stands(tab)
        assert walk.js("!part.querySelector('.live-start').hasAttribute('aria-disabled')"), "no second try"
        assert walk.js("document.activeElement === part.querySelector('.live-start')"), "focus was lost"


@pytest.mark.parametrize("failure", ["throw new Error('boom')", "return postMessage({ fatal: 'boom' })"])
def test_a_worker_that_fails_later_brings_all_figures_back(failure, browser, site):
    page(site, CELL.format("memory-bill"), CELL.format("roofline"))
    for name in ("memory-bill", "roofline"):
        stub(site, 4, failure, name)  # two answers for each part to start with
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        first, second = Walk(tab, "memory-bill").start(), Walk(tab, "roofline").start()
        assert not stands(tab) and not stands(tab, "roofline")
        second.focus("roofline-model")
        tab.press("ArrowDown")
        for walk in (first, second):
            tab.until(f"{walk.root}.querySelector('.live-note').textContent.includes('boom')")
            assert walk.js("part.querySelector('.live-host').hidden")
        assert stands(tab) and stands(tab, "roofline")
        assert second.js("document.activeElement === part.querySelector('.live-start')"), "focus was lost"


def test_a_second_try_may_succeed(browser, site):
    stub(site)
    file = site / "live" / "assets.json"
    said = file.read_text()
    file.unlink()
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        with pytest.raises(AssertionError, match="assets.json"):
            Walk(tab, "memory-bill").start()
        file.write_text(said)
        Walk(tab, "memory-bill").start()
        assert not stands(tab) and tab.evaluate("document.querySelector('.live-note').textContent") == ""


def test_a_refusal_of_pythons_is_told_and_the_part_goes_on(browser, site):
    refusal = """if (JSON.parse(request).op === "x" && left < 1e6 - 2)
      return postMessage({ id, reply: JSON.stringify({ ok: false, error: "batch must be 1 or more" }) })"""
    stub(site, failure="0")
    worker = site / "live" / "worker.mjs"
    worker.write_text(worker.read_text().replace("if (left-- <= 0) 0", f"left--; {refusal}"))
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        walk = Walk(tab, "memory-bill").start()
        assert walk.says() == ""
        walk.focus("memory-bill-model")
        tab.press("ArrowDown")
        walk.settled()
        assert walk.says() == "batch must be 1 or more"
        assert walk.js("part.querySelector('.live-say').classList.contains('live-wrong')")
        assert not stands(tab) and tab.visit.errors == []


def test_a_file_offers_no_button(browser, site):
    with browser.tab(f"file://{site}/p.html") as tab:
        assert stands(tab) and tab.evaluate("document.querySelectorAll('.live').length") == 0


def test_printing_shows_the_figure(browser, site):
    stub(site)
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        Walk(tab, "memory-bill").start()
        tab.evaluate("""addEventListener('beforeprint', () => (window.printed =
            [!!document.getElementById('static-memory-bill').offsetParent,
             document.querySelector('.live-host').hidden]))""")
        assert not stands(tab)
        tab.call("Page.printToPDF")
        assert tab.evaluate("window.printed") == [True, True]
        tab.until("!document.getElementById('static-memory-bill').offsetParent")  # and back again


def test_in_a_figure_element_too(browser, site):
    page(site, FIGURE.format("memory-bill"))
    stub(site)
    with serving(site) as address, browser.tab(address + "p.html") as tab:
        assert stands(tab)
        Walk(tab, "memory-bill").start()
        assert not stands(tab) and tab.visit.errors == []


PARTS = ("memory-bill", "roofline", "experts")


def share(tab, walks):
    """Several parts of a page have one worker and one address, and do not disturb each other."""
    for walk in walks:
        walk.focus(f"{walk.name}-batch")
        tab.press("End")
    batches = [walk.settled().settings()["batch"] for walk in walks]
    assert batches == ["4096", "4096", "4096"]
    told = "[...new URLSearchParams(location.hash.slice(1))].filter(([key]) => key.endsWith('.batch'))"
    tab.until(f"{told}.map(([, value]) => value).join() === '4096,4096,4096'")
    assert len([r for r in tab.visit.requests if "pyodide.asm.wasm" in r]) == 1
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(n => n.id)")
    assert len(ids) == len(set(ids)), "two elements have one id"
    assert walks[0].values()["weights_bytes"] == 141_107_412_992 and tab.visit.errors == []


class Elsewhere(Handler):
    """Another host that lets its files be read from everywhere, as a CDN does."""

    def end_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")
        super().end_headers()


@fetched
def test_several_parts_from_a_cdn_with_hashes(browser, site, tmp_path):
    """Where Pyodide was not fetched, its files come from another host, and only the right ones are run."""
    for name in ("right", "wrong"):
        shutil.copytree(site / RUNTIME, tmp_path / "cdn" / name, symlinks=True)
    shutil.rmtree(site / RUNTIME)
    wrong(tmp_path / "cdn/wrong/pyodide.mjs")
    cdn = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Elsewhere, directory=str(tmp_path / "cdn")))
    threading.Thread(target=cdn.serve_forever, daemon=True).start()
    said = json.loads((site / "live/assets.json").read_text())

    def take(name):
        base = f"http://127.0.0.1:{cdn.server_port}/{name}/"
        (site / "live/assets.json").write_text(json.dumps({**said, "base": base, "version": name}))

    try:
        take("wrong")
        with serving(site) as address, browser.tab(address + "p.html") as tab:
            with pytest.raises(AssertionError, match="pyodide.mjs"):
                Walk(tab, "memory-bill").start()
        take("right")
        page(site, *map(CELL.format, PARTS))
        with serving(site) as address, browser.tab(address + "p.html") as tab:
            share(tab, [Walk(tab, name).start() for name in PARTS])
            assert [r for r in tab.visit.requests if RUNTIME in r] == []
    finally:
        cdn.shutdown()
        cdn.server_close()
