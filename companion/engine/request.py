"""What goes into an engine and what comes out of it: a request, its events, its completion."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..checks import require
from ..generate import Generation, Sampler

Sample = Callable[[Any], Any]  # logits (B, V) -> ids (B,)


@dataclass
class Request:
    """One prompt to continue.

    prompt_ids: token ids, at least one. id: any hashable name; None takes the next free integer.
    sampler: as in `companion.generate.generate`; None is the engine's. A `Sampler` is started afresh for each
        request, from its seed: so the tokens are those that `generate` gives for this prompt alone.
    stop_ids: ids that end it; None means the model's own, () none. stop: strings that end it; they need a
        tokenizer.
    salt: requests share cached prefixes only with requests of the same salt (a tenant, a user).
    on_token: called with each `Event` of this request, within `step`. It may add and cancel requests. If it
        raises, this request ends with "error"; the engine and the others go on.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 128
    id: Hashable | None = None
    sampler: Callable[[Any], Any] | None = None
    stop_ids: Sequence[int] | None = None
    stop: Sequence[str] = ()
    salt: str | bytes | int | None = None
    on_token: "Callable[[Event], object] | None" = None

    def check(self) -> None:
        """Raise a ValueError for what is wrong in itself, whatever the model."""
        require(hasattr(self.prompt_ids, "__iter__"), "prompt_ids", "token ids", self.prompt_ids)
        for name in ("sampler", "on_token"):
            value = getattr(self, name)
            require(value is None or callable(value), name, "something to call, or None", value)
        for name in ("id", "stop_ids", "salt"):
            value = getattr(self, name)
            try:
                hash(tuple(value) if name == "stop_ids" and value is not None else value)
            except TypeError:
                raise ValueError(f"{name} must be hashable, or a list of such, got {value!r}") from None


@dataclass(frozen=True)
class Event:
    """One token of one request; or, with token None, that it ended by an error.

    text: what became certain with this token, where the engine has a tokenizer. finish_reason: None while it
    goes on. index: of the token in the reply, from 0.
    """

    id: Hashable
    token: int | None
    text: str = ""
    finish_reason: str | None = None
    index: int = 0


@dataclass
class Completion(Generation):
    """A `Generation` with what only an engine knows. Times are seconds.

    finish_reason: "stop", "length", "cancelled", or "error", with the exception in `error`.
    number: of arrival, from 0.
    arrival_s, finished_s: on the engine's clock, which starts at 0.
    queue_s: from arrival to the first step that computed something of it.
    ttft_s: from arrival to the first token. Like queue_s, None if it never came so far.
    cached_tokens: prompt tokens found in the cache when it was first admitted.
    computed_tokens: tokens that went through the model for it; more than prompt - cached + tokens - 1 if it
        was preempted and computed again.
    preemptions: how often it gave up its blocks.
    """

    ttft_s: float | None = None
    id: Hashable = None
    number: int = 0
    error: Exception | None = None
    arrival_s: float = 0.0
    queue_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0


def fresh(sampler: Sample) -> Sample:
    """A `Sampler` as it was before its first draw, so that requests do not share one's randomness."""
    if not isinstance(sampler, Sampler):
        return sampler
    one = sampler.seed is None or hasattr(sampler.seed, "__index__")
    require(one, "seed", "one, for a request is one row", sampler.seed)
    return Sampler(**sampler.options, seed=sampler.seed)
