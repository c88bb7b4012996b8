"""One tab of a Chromium, through its DevTools protocol: commands, answers, and what goes wrong meanwhile.

The other half of tools/browser.py. Everything here is asynchronous; a test uses `Browser`.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Visit:
    """What the browser saw."""

    url: str
    errors: list[str] = field(default_factory=list)  # console errors, exceptions, failed requests
    requests: list[str] = field(default_factory=list)
    values: dict = field(default_factory=dict)  # results of the scripts


# name: code, number, text. What a keyboard sends; letters and digits need no entry.
KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    " ": ("Space", 32, " "),
    "PageUp": ("PageUp", 33, ""),
    "PageDown": ("PageDown", 34, ""),
    "End": ("End", 35, ""),
    "Home": ("Home", 36, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
}
SHIFT = "Shift+"


class Page:
    """One tab: sends commands, and notes what goes wrong while it waits for answers."""

    def __init__(self, socket, visit: Visit):
        self.socket, self.visit = socket, visit
        self.number, self.loaded, self.open = 0, False, {}  # open: request id -> address
        self.coming: asyncio.Future | None = None

    async def send(self, method: str, params: dict, **more) -> int:
        self.number += 1
        await self.socket.write_message(
            json.dumps({"id": self.number, "method": method, "params": params, **more})
        )
        return self.number

    async def call(self, method: str, **params) -> dict:
        return await self.answer(await self.send(method, params), method)

    async def answer(self, number: int, method: str) -> dict:
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
        if message.get("method") == "Target.attachedToTarget":
            await self.attach(message["params"]["sessionId"])
        return message

    async def attach(self, session: str) -> None:
        """Listen to a worker, which waits until it is told to run."""
        for method in ("Runtime.enable", "Log.enable", "Network.enable", "Runtime.runIfWaitingForDebugger"):
            await self.send(method, {}, sessionId=session)

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

    async def press(self, keys) -> None:
        method, last = "Input.dispatchKeyEvent", None
        for key in keys:
            shift, name = key.startswith(SHIFT), key.removeprefix(SHIFT)
            code, number, text = KEYS.get(name) or (f"Key{name.upper()}", ord(name.upper()), name)
            event = {
                "key": name,
                "code": code,
                "windowsVirtualKeyCode": number,
                "modifiers": 8 if shift else 0,
            }
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            await self.send(method, {**event, **down})
            last = await self.send(method, {**event, "type": "keyUp"})
        if last is not None:  # they are handled in order
            await self.answer(last, method)

    async def until(self, condition: str) -> None:
        while not await self.evaluate(f"!!({condition})"):
            try:
                await self.read(0.02)
            except TimeoutError:
                pass

    async def picture(self, path, width: int, height: int, whole_page: bool) -> None:
        tall = await self.evaluate("document.documentElement.scrollHeight") if whole_page else height
        await self.screen(width, min(tall, 16_000))
        picture = await self.call("Page.captureScreenshot", format="png")
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    async def screen(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
