"""Going on where a script was stopped."""

from typing import Any

from companion.study import stored


def resumed(name: str, head: dict[str, Any]) -> dict[str, Any]:
    """What is stored under this name, if it was measured as `head` says; else {}."""
    try:
        old = stored(name)
    except ValueError:
        return {}
    return old if all(old.get(key) == value for key, value in head.items()) else {}
