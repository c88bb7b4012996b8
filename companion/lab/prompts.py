"""Prompts of a wanted length that share no beginning, so that no cache of a server's answers for it."""

import random

_WORDS = (
    "water stone light house river garden window table summer winter morning evening road field letter "
    "music paper silver island harbour village mountain forest bridge market kitchen doctor teacher farmer "
    "sailor walk open carry follow remember listen build begin small large quiet early heavy narrow warm"
).split()
ASK = "\n\nWrite a long story in which these words appear. Begin at once."


def prompt(words: int, seed: str) -> str:
    """About `words` words after a number that is this seed's own. The same seed gives the same prompt."""
    order = random.Random(seed)
    first = f"{order.getrandbits(64):016x}"
    return " ".join([first, *(order.choice(_WORDS) for _ in range(words))]) + ASK


def other_ending(text: str, seed: str) -> str:
    """The same prompt up to its last words."""
    return f"{text} The first name in it is {prompt(2, seed).split()[1]}."
