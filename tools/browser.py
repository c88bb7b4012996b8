"""Look at a page in a real browser: Chromium, driven through its DevTools protocol.

Uses the Chromium that the machine has and the websocket client of tornado, which Jupyter brings: nothing to
install. `with Browser() as b: visit = b.visit(url, width=390, dark=True)`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tornado.websocket import websocket_connect

from tools.devtools import Page, Visit

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]

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


class Browser:
    """One headless Chromium; pages are visited one after the other."""

    def __init__(self, path: str | None = None, timeout: float = 60):
        self.path, self.timeout = path or find(), timeout
        if self.path is None:
            raise FileNotFoundError(f"no Chromium: looked for {', '.join(NAMES)}")

    def __enter__(self) -> Browser:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [self.path, *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file, end = Path(self.folder.name) / "DevToolsActivePort", time.monotonic() + self.timeout
        while not (port_file.exists() and port_file.read_text().strip()):
            if time.monotonic() > end or self.process.poll() is not None:
                self.__exit__()
                raise TimeoutError("Chromium did not start")
            time.sleep(0.05)
        self.port = int(port_file.read_text().split()[0])
        return self

    def __exit__(self, *exc) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def visit(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        scripts: dict[str, str] | None = None,
        screenshot: str | Path | None = None,
        whole_page: bool = True,
    ) -> Visit:
        """Load a page, wait until it is quiet, evaluate scripts (name: expression), take a picture."""
        job = self._visit(url, width, height, dark, scripts or {}, screenshot, whole_page)
        return asyncio.run(asyncio.wait_for(job, self.timeout))

    @contextmanager
    def tab(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        """A page that stays open: press keys, evaluate, wait, look. Each of these ends within `timeout`."""
        with asyncio.Runner() as runner:
            page = runner.run(asyncio.wait_for(self._open(url, width, height, dark), self.timeout))
            try:
                yield Tab(page, runner, self.timeout)
                runner.run(page.call("Page.close"))
            finally:
                page.socket.close()

    async def _visit(self, url, width, height, dark, scripts, screenshot, whole_page) -> Visit:
        page = await self._open(url, width, height, dark)
        try:
            for name, script in scripts.items():
                page.visit.values[name] = await page.evaluate(script)
            if screenshot:
                await page.picture(screenshot, width, height, whole_page)
            await page.call("Page.close")
        finally:
            page.socket.close()
        return page.visit

    async def _open(self, url, width, height, dark) -> Page:
        new = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(new, timeout=self.timeout) as reply:
            target = json.load(reply)
        socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**28)
        page = Page(socket, Visit(url))
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
            # Workers too: what they ask for and what goes wrong in them is otherwise not reported.
            await page.call(
                "Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True
            )
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            await page.call("Emulation.setEmulatedMedia", features=scheme)
            await page.screen(width, height)
            await page.call("Page.navigate", url=url)
            await page.quiet()
        except BaseException:
            socket.close()
            raise
        return page


class Tab:
    """A page that stays open, driven from outside of asyncio."""

    def __init__(self, page: Page, runner: asyncio.Runner, timeout: float):
        self._page, self._runner, self._timeout = page, runner, timeout
        self.visit = page.visit

    def _run(self, job):
        return self._runner.run(asyncio.wait_for(job, self._timeout))

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, awaited if it is a promise."""
        return self._run(self._page.evaluate(expression))

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another: a name of KEYS or a single character."""
        self._run(self._page.press(keys))

    def until(self, condition: str, patience: float | None = None) -> None:
        """Wait until a JavaScript expression is true; TimeoutError names it."""
        try:
            self._runner.run(asyncio.wait_for(self._page.until(condition), patience or self._timeout))
        except TimeoutError:
            raise TimeoutError(f"not true in time: {condition}; {self.visit.errors}") from None

    def call(self, method: str, **params) -> dict:
        """A command of the DevTools protocol."""
        return self._run(self._page.call(method, **params))

    def goto(self, url: str) -> None:
        """Another address in the same tab. One that differs after the # alone loads nothing."""
        self._run(self._page.call("Page.navigate", url=url))
        self._run(self._page.quiet())

    def screen(self, width: int, height: int = 900) -> None:
        self._run(self._page.screen(width, height))

    def picture(
        self, path: str | Path, width: int = 1280, height: int = 900, whole_page: bool = True
    ) -> None:
        self._run(self._page.picture(path, width, height, whole_page))
