"""What an address and a server say, read with care: one line, without the key."""

import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, urlsplit

from .transport import Reply

ENDINGS = ("/chat/completions", "/completions")


def address(url: str) -> tuple[str, str, SplitResult]:
    """(what to show, path before /chat/completions, parts) of an address."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("endpoint: put no key, user name or query into the address; the key has a variable")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise ValueError(f"endpoint {url!r}; need an address such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/")
    for ending in ENDINGS:
        path = path.removesuffix(ending)
    path = path or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}", path, parts


def said(body: bytes, key: str) -> str:
    """The message in an error's body, in one line."""
    text = body.decode("utf-8", errors="replace")
    found = object_of(text)
    if found is not None:
        for name in ("error", "message", "detail"):
            inner = found.get(name)
            if isinstance(inner, dict):
                inner = inner.get("message")
            if inner:
                text = inner if isinstance(inner, str) else json.dumps(inner)
                break
    return one_line(text, key) or "it says nothing more"


def one_line(text: str, key: str) -> str:
    """One line of at most 200 printable characters, without the key."""
    if key:
        text = text.replace(key, "[key]")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 200 else line[:199] + "…"


def object_of(text: str) -> dict | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def seconds_to_wait(reply: Reply) -> float | None:
    """Retry-After, as seconds or as a date; None where there is none that can be read."""
    asked = reply.headers.get("retry-after", "")
    if asked.strip().isdigit():
        return float(asked)
    try:
        until = parsedate_to_datetime(asked)
        return max(0.0, (until - datetime.now(until.tzinfo or UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
