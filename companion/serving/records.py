"""What is written down of every step, for a timeline. Standard library only."""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """What a step computed of one request: tokens start .. start + count - 1, and whether one was sampled."""

    id: Hashable
    start: int
    count: int
    sampled: bool


@dataclass
class Step:
    """One step of an engine, for a timeline. Seconds; `start_s` on the engine's clock.

    parts: decodes first, then chunks of prompts. seconds: the whole step, of which scheduler_s decided and
    kept the books of blocks, model_s ran the model, sampler_s chose tokens; the rest is text and callbacks.
    admitted, preempted, finished: ids, the last with their reasons; finished since the step before.
    running, waiting: requests after the step. blocks_free counts the cached ones, which can still be found.
    """

    index: int
    start_s: float
    seconds: float = 0.0
    scheduler_s: float = 0.0
    model_s: float = 0.0
    sampler_s: float = 0.0
    parts: list[Part] = field(default_factory=list)
    admitted: list[Hashable] = field(default_factory=list)
    preempted: list[Hashable] = field(default_factory=list)
    finished: list[tuple[Hashable, str]] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    blocks_live: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(p.count for p in self.parts)

    @property
    def decodes(self) -> int:
        """Requests that computed one token and sampled the next."""
        return sum(p.count == 1 and p.sampled for p in self.parts)
