"""Look at a page in a real browser: Chromium, driven through its DevTools protocol.

Uses the Chromium that the machine has and the websocket client of tornado, which Jupyter brings: nothing to
install. `with Browser() as b: visit = b.visit(url, width=390, dark=True)`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tornado.websocket import websocket_connect

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

    async def _visit(self, url, width, height, dark, scripts, screenshot, whole_page) -> Visit:
        new = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(new, timeout=self.timeout) as reply:
            target = json.load(reply)
        socket = await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=2**28)
        page = _Page(socket, Visit(url))
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                await page.call(f"{domain}.enable")
            scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            await page.call("Emulation.setEmulatedMedia", features=scheme)
            await page.screen(width, height)
            await page.call("Page.navigate", url=url)
            await page.quiet()
            for name, script in scripts.items():
                page.visit.values[name] = await page.evaluate(script)
            if screenshot:
                tall = await page.evaluate("document.documentElement.scrollHeight") if whole_page else height
                await page.screen(width, min(tall, 16_000))
                picture = await page.call("Page.captureScreenshot", format="png")
                Path(screenshot).write_bytes(base64.b64decode(picture["data"]))
            await page.call("Page.close")
        finally:
            socket.close()
        return page.visit


class _Page:
    """One tab: sends commands, and notes what goes wrong while it waits for answers."""

    def __init__(self, socket, visit: Visit):
        self.socket, self.visit = socket, visit
        self.number, self.loaded, self.open = 0, False, {}  # open: request id -> address
        self.coming: asyncio.Future | None = None

    async def call(self, method: str, **params) -> dict:
        self.number += 1
        number = self.number
        await self.socket.write_message(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = await self.read()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    async def read(self, patience: float | None = None) -> dict:
        """The next message; TimeoutError after `patience` seconds, and then it is still to come."""
        if self.coming is None:
            self.coming = asyncio.ensure_future(self.socket.read_message())
        # Not wait_for: it would cancel the read, and a message that had just arrived would be lost.
        done, _ = await asyncio.wait({self.coming}, timeout=patience)
        if not done:
            raise TimeoutError
        text, self.coming = self.coming.result(), None
        if text is None:
            raise ConnectionError("Chromium closed the page")
        message = json.loads(text)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, method: str, p: dict) -> None:
        errors = self.visit.errors
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            detail = p["exceptionDetails"]
            errors.append(detail.get("exception", {}).get("description") or detail["text"])
        elif method == "Runtime.consoleAPICalled" and p["type"] == "error":
            errors.append(
                "console: " + " ".join(str(a.get("value", a.get("description"))) for a in p["args"])
            )
        elif method == "Log.entryAdded" and p["entry"]["level"] == "error":
            errors.append(f"{p['entry']['text']} {p['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.visit.requests.append(p["request"]["url"])
            self.open[p["requestId"]] = p["request"]["url"]
        elif method in ("Network.loadingFinished", "Network.loadingFailed"):
            url = self.open.pop(p["requestId"], "")
            if method.endswith("Failed") and not p.get("canceled"):
                errors.append(f"a request failed: {p.get('errorText')} {url}")

    async def quiet(self, still: float = 0.3) -> None:
        """Until the page is loaded, no request is open, and nothing happened for a moment."""
        while True:
            try:
                await self.read(still)
            except TimeoutError:
                if self.loaded and not self.open:
                    break
        await self.evaluate("window.MathJax?.startup?.promise?.then(() => true) ?? true")

    async def evaluate(self, expression: str):
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['text']}")
        return result["result"].get("value")

    async def screen(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
