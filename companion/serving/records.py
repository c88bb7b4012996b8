"""A request and a step as the scheduler keeps them, and what is written down of a step for a timeline."""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field

from ..paging import PagedSequence
from ..paging.prefix import Extra


@dataclass(eq=False, slots=True)
class Job:
    """One request as the scheduler keeps it; to be read, not written.

    state is "waiting", "running" or "ended". tokens: prompt and sampled ids. computed: how many of them are
    in the cache now. cached: prompt tokens that were found there when it was first admitted. work: tokens
    computed so far, those of lost blocks again each time.
    """

    id: Hashable
    number: int  # of arrival
    tokens: array
    prompt: int
    max_new_tokens: int
    extra: Extra = ()
    state: str = "waiting"
    seq: PagedSequence | None = None
    computed: int = 0
    cached: int | None = None
    work: int = 0
    preemptions: int = 0

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def most(self) -> int:
        """Tokens it may have in the cache at most: the last one is sampled and never computed."""
        return self.prompt + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """job.tokens[start : start + count] are computed in this step; samples: the last one gives a token."""

    job: Job
    start: int
    count: int
    samples: bool

    @property
    def stop(self) -> int:
        """The position behind the last one computed."""
        return self.start + self.count


@dataclass(slots=True)
class Plan:
    """One step. copies: (source, destination) blocks to copy first, as `BlockManager.append` asks for."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Job] = field(default_factory=list)
    preempted: list[Job] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens computed, over all chunks."""
        return sum(c.count for c in self.chunks)


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
