"""The evaluation text: prose of this book's chapters, frozen.

Nine of the first ten chapters as they stood in November 2026, without code, tables, figures and mark-up, one
paragraph a line; formulas are left in. Written after the model was trained, so the model has not read it.
The text stays as it is when the chapters change, or numbers measured on it could not be compared.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from ..caches import Cache
from ..checks import whole

LICENCE = "CC BY 4.0: text of the book What a Token Costs, frozen"
SHA256 = "c90d5ca910be694adbc56d01276c020eff969a29faca8b9f810f273c377376af"
PATH = Path(__file__).parent / "data" / "text.txt"


@cache
def text() -> str:
    """The frozen text. Raises ValueError if the file is not the one that the results were measured on."""
    raw = PATH.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if found != SHA256:
        raise ValueError(f"{PATH.name} has sha256 {found}; results were measured on {SHA256}")
    return raw.decode("utf-8")


FACT = "\n\nThe secret number of the {name} is "  # and behind the number:
AFTER = ". Remember it.\n\n"
QUESTION = (
    "\n\nQuestion: What is the secret number of the {name}?\nAnswer: The secret number of the {name} is "
)
DIGITS = 5
# None of these stands in the frozen text; with SmolLM2's tokenizer each is one token.
NAMES = (
    "falcon", "rocket", "marble", "violin", "dragon", "pepper", "rabbit", "saddle", "candle", "helmet",
    "monkey", "basket", "lemon", "turtle", "guitar", "hammer",
)  # fmt: skip


@runtime_checkable  # so that the annotation can be checked
class Encodes(Protocol):
    """What a haystack needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Haystack:
    """A text of exactly `length` tokens with facts in it.

    ids: the tokens. queries: for each fact, in their order, (prompt ids, answer ids); the answer is the
    digits of the number. positions: index of each answer's first token in ids; depths: the same as a fraction
    of the length. names: what each fact is about.
    """

    ids: list[int]
    queries: list[tuple[list[int], list[int]]]
    depths: list[float]
    positions: list[int]
    names: list[str]


def haystack(tokenizer: Encodes, length: int, *, needles: int = 8, seed: int = 0) -> Haystack:
    """The frozen text from a place that `seed` chooses, with `needles` facts in it.

    The facts stand at evenly spread depths: the text is cut into as many pieces of equal length (up to a
    token), and each has a fact in its middle. The same seed gives the same haystack; another one gives
    another place in the text, other names and other numbers.

    Raises ValueError for a length that the facts alone exceed or that the text does not fill, for more
    needles than names, and for a tokenizer to which an answer is not the same tokens in place.
    """
    whole("length", length)
    whole("needles", needles, 1, len(NAMES))
    rng = random.Random(seed)
    names = rng.sample(NAMES, needles)
    numbers = ["".join(rng.choice("0123456789") for _ in range(DIGITS)) for _ in names]
    bos = tokenizer.encode("")  # some tokenizers begin every text with a token; inside a text it is none
    encode = lambda s: tokenizer.encode(s)[len(bos) :]  # noqa: E731
    facts, queries, offsets = [], [], []  # offsets: of each answer in its fact
    for name, number in zip(names, numbers):
        said, asked = FACT.format(name=name), QUESTION.format(name=name)
        before, prompt, fact = encode(said), encode(asked), encode(said + number + AFTER)
        answer = encode(asked + number)[len(prompt) :]
        if fact[: len(before) + len(answer)] != before + answer or encode(asked + number) != prompt + answer:
            raise ValueError(f"tokenizer cuts {number!r} differently in its place in the text")
        facts.append(fact)
        queries.append((prompt, answer))
        offsets.append(len(before))
    filler = encode(text())
    body = length - len(bos) - sum(map(len, facts))
    whole("length", length, length - body, length - body + len(filler))
    start = rng.randint(0, len(filler) - body)
    cuts = [0, *(body * (2 * i + 1) // (2 * needles) for i in range(needles)), body]
    ids, positions = list(bos), []
    for i, fact in enumerate(facts):
        ids += filler[start + cuts[i] : start + cuts[i + 1]]
        positions.append(len(ids) + offsets[i])
        ids += fact
    ids += filler[start + cuts[-2] : start + body]
    return Haystack(ids, queries, [p / length for p in positions], positions, names)


@torch.inference_mode()
def recall(model: torch.nn.Module, cache: Cache, haystack: Haystack) -> list[tuple[bool, float]]:
    """(right, nll) for each fact of a haystack that `cache`, of one row, already holds.

    Teacher-forced: question and answer are read in one pass over a fork of the cache. right: the likeliest
    token is the answer's, for all of its tokens, which is what greedy decoding would write. nll: negative
    log-likelihood of the whole answer in nats, summed over its tokens. `cache` stays as it was.

    Raises ValueError for a cache that holds another number of tokens.
    """
    if cache.row_lengths() != [len(haystack.ids)]:
        wanted = f"one row, the {len(haystack.ids)} tokens of the haystack"
        raise ValueError(f"cache must hold {wanted}, got rows of {cache.row_lengths()}")
    found = []
    for prompt, answer in haystack.queries:
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=cache.device)
        logits = model(ids, cache.fork())[0, len(prompt) - 1 :].double()
        target = torch.tensor(answer, device=logits.device)
        right = bool((logits.argmax(-1) == target).all())
        found.append((right, float(F.cross_entropy(logits, target, reduction="sum"))))
    return found
