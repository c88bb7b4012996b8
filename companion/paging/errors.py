"""What can go wrong in this room."""


class PoolFull(ValueError):
    """Not now: fewer blocks are free than the call needs. Nothing was changed; free something and call again.

    What can never fit, however much is freed, is a plain ValueError: a scheduler that waits on PoolFull
    alone does not wait for ever.
    """


class BrokenInvariant(RuntimeError):
    """What `check()` raises: the state contradicts itself, which is a fault here and never the caller's."""


def must(holds: object, message: str, *values: object) -> None:
    """Raise BrokenInvariant unless it holds. The message takes the values in only then: most checks pass."""
    if not holds:
        raise BrokenInvariant(message.format(*values))
