"""Look at a page in a real browser: the Chromium that the machine has, driven by Playwright.

    with Browser() as b:
        visit = b.visit(url, width=390, dark=True)

Nothing is downloaded: Playwright is told where the machine's Chromium is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright import sync_api as playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ["--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars"]

# How every page is looked at: the width in pixels, and whether it is dark.
SCREENS = {
    "phone-light": (390, False),
    "phone-dark": (390, True),
    "wide-light": (1280, False),
    "wide-dark": (1280, True),
}


def find() -> str | None:
    """The path of a Chromium on this machine, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Visit:
    """What the browser saw."""

    url: str
    errors: list[str] = field(default_factory=list)  # console errors, exceptions, failed requests
    requests: list[str] = field(default_factory=list)
    values: dict = field(default_factory=dict)  # results of the scripts

    def watch(self, page: playwright.Page) -> None:
        """Note what the page and its workers ask for and what goes wrong in them."""
        page.on("request", lambda r: self.requests.append(r.url))
        page.on("requestfailed", self._failed)
        page.on("pageerror", lambda e: self.errors.append(f"{e.message}\n{e.stack or ''}"))
        page.on("console", self._said)

    def _failed(self, request: playwright.Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page itself gave it up
            self.errors.append(f"a request failed: {request.failure} {request.url}")

    def _said(self, message: playwright.ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"console: {message.text} {message.location.get('url', '')}")


class Browser:
    """One headless Chromium; pages are visited one after the other, with one cache."""

    def __init__(self, path: str | None = None, timeout: float = 60):
        self.path, self.timeout = path or find(), timeout
        if self.path is None:
            raise FileNotFoundError(f"no Chromium: looked for {', '.join(NAMES)}")

    def __enter__(self) -> Browser:
        self._driver = playwright.sync_playwright().start()
        try:
            chromium = self._driver.chromium.launch(
                executable_path=self.path, args=FLAGS, timeout=1e3 * self.timeout
            )
            self._context = chromium.new_context()
        except BaseException:
            self._driver.stop()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self._context.browser.close()
        self._driver.stop()

    def visit(self, url: str, *, scripts: dict[str, str] | None = None, screenshot=None, **how) -> Visit:
        """Load a page, wait until it is quiet, evaluate scripts (name: expression), take a picture of it all.

        how: `width`, `height` and `dark`, as `tab` takes them.
        """
        with self.tab(url, **how) as tab:
            for name, script in (scripts or {}).items():
                tab.visit.values[name] = tab.evaluate(script)
            if screenshot:
                tab.picture(screenshot)
        return tab.visit

    @contextmanager
    def tab(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        """A page that stays open: press keys, evaluate, wait, look."""
        page = self._context.new_page()
        try:
            page.set_default_timeout(1e3 * self.timeout)
            page.emulate_media(color_scheme="dark" if dark else "light")
            tab = Tab(page, Visit(url))
            tab.visit.watch(page)
            tab.screen(width, height)
            tab.goto(url)
            yield tab
        finally:
            page.close()


class Tab:
    """A page that stays open."""

    def __init__(self, page: playwright.Page, visit: Visit):
        self.page, self.visit = page, visit

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, awaited if it is a promise."""
        return self.page.evaluate(expression)

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another: names such as `ArrowUp`, or single characters."""
        for key in keys:
            self.page.keyboard.press(key)

    def until(self, condition: str, patience: float | None = None) -> None:
        """Wait until a JavaScript expression is true; TimeoutError names it."""
        limit = {} if patience is None else {"timeout": 1e3 * patience}
        try:
            self.page.wait_for_function(f"!!({condition})", polling=20, **limit)
        except playwright.TimeoutError:
            raise TimeoutError(f"not true in time: {condition}; {self.visit.errors}") from None

    def call(self, method: str, **params) -> dict:
        """A command of the DevTools protocol."""
        return self.page.context.new_cdp_session(self.page).send(method, params)

    def goto(self, url: str) -> None:
        """An address, until no request is open. One that differs after the # alone loads nothing."""
        self.page.goto(url, wait_until="networkidle")
        self.evaluate("window.MathJax?.startup?.promise?.then(() => true) ?? true")

    def screen(self, width: int, height: int = 900) -> None:
        self.page.set_viewport_size({"width": width, "height": height})

    def picture(self, path: str | Path) -> None:
        """The whole page as a PNG."""
        self.page.screenshot(path=path, full_page=True)
