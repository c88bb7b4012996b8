"""What can go wrong in this room, and the check of a count that all its doors share."""


class PoolFull(ValueError):
    """Not now: fewer blocks are free than the call needs. Nothing was changed; free something and call again.

    What can never fit, however much is freed, is a plain ValueError: a scheduler that waits on PoolFull
    alone does not wait for ever.
    """


class BrokenInvariant(RuntimeError):
    """What `check()` raises: the state contradicts itself, which is a fault here and never the caller's."""


def whole(name: str, value: object, least: int = 0) -> int:
    """`value`, once it is sure that it is an integer (a bool is not) of at least `least`; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}; need an integer of at least {least}")
    return value


def must(holds: object, message: str, *values: object) -> None:
    """Raise BrokenInvariant unless it holds. The message takes the values in only then: most checks pass."""
    if not holds:
        raise BrokenInvariant(message.format(*values))
