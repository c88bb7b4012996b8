"""A target at the other end of a wire: one model behind an OpenAI-compatible endpoint."""

import statistics

from .answers import Answer
from .client import Endpoint
from .points import Point, Run, Shape, other_ending, prompt

MEANT = 64  # tokens that a chat's template has in common with every other; more of a cold prompt is a cache's


class EndpointTarget:
    """Measures through `endpoint`. Lengths are the server's own count of tokens.

    shape: the model's, if it is known; with a device it gives predictions.
    session: makes the prompts differ from those of any other session, an earlier one of this study included.
    """

    def __init__(self, endpoint: Endpoint, *, shape: Shape | None = None, session: str = ""):
        self.endpoint, self.session = endpoint, session
        self.shapes = {} if shape is None else {"base": shape}
        self._per_word, self._fixed = 1.0, 0.0  # tokens per word of a prompt, and beside its words
        self._sent = 0

    def describe(self) -> dict:
        """Facts about what is measured, for the study's file: its kind, device and variants."""
        facts = {"kind": "endpoint", "url": self.endpoint.url, "model": self.endpoint.model}
        return facts | {"variants": {name: shape.to_dict() for name, shape in self.shapes.items()}}

    def warm_up(self) -> None:
        """Choose the model and count the tokens of two prompts, to aim at lengths. ValueError on a fault."""
        self.endpoint.choose_model()
        found = []
        for words in (16, 144):
            answer = self.endpoint.ask(self._prompt(words), max_tokens=2)
            if answer.fault:
                raise ValueError(f"endpoint {self.endpoint.url}: {answer.fault}")
            found.append(answer.prompt_tokens)
        if None not in found and found[1] > found[0]:
            self._per_word = (found[1] - found[0]) / 128
            self._fixed = found[0] - 16 * self._per_word

    def measure(self, point: Point) -> Run:
        """One run of `point`; where there is none, the run's `fault` says why."""
        if not point.prompt:
            return Run(fault="a server's cache cannot be filled from outside: points need prompt=True")
        if point.batch > self.endpoint.limit:
            return Run(fault=f"batch {point.batch} is more than the {self.endpoint.limit} requests allowed")
        words = max(1, round((point.context - self._fixed) / self._per_word))
        prompts = [self._prompt(words) for _ in range(point.batch)]
        if point.variant == "warm":
            known = self.endpoint.ask_all(prompts, max_tokens=1, concurrency=point.batch)
            if fault := next((a.fault for a in known if a.fault), None):
                return Run(fault=str(fault))
            prompts = [other_ending(p, f"{self.session}{self._sent}") for p in prompts]
        answers = self.endpoint.ask_all(prompts, max_tokens=point.new_tokens + 1, concurrency=point.batch)
        return summary(point, answers)

    def _prompt(self, words: int) -> str:
        self._sent += 1
        return prompt(words, f"{self.session}/{self._sent}")


def summary(point: Point, answers: list[Answer]) -> Run:
    """One run out of the answers of a batch: medians of times, the rate while all of them were writing."""
    if fault := next((a.fault for a in answers if a.fault), None):
        return Run(fault=str(fault))
    cached = [a.cached_tokens for a in answers if a.cached_tokens is not None]
    prompts = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    if point.variant != "warm" and cached and max(cached) > max(MEANT, point.context // 10):
        return Run(fault=f"the server's prefix cache answered for {max(cached)} tokens of a new prompt")
    steps = [a.itl_s for a in answers if a.itl_s is not None]
    notes = []
    if len(prompts) < len(answers):
        notes.append("the server reports no usage: lengths are the ones aimed at, tokens are events")
    if any(a.merged for a in answers):
        notes.append("the server merges tokens: times per token are averages")
    if point.variant == "warm" and not cached:
        notes.append("the server does not say what it had cached")
    return Run(
        ttft_s=statistics.median(a.ttft_s for a in answers),
        itl_s=statistics.median(steps) if steps else None,
        steps_s=[g for a in answers for g in a.gaps_s],
        context=round(statistics.fmean(prompts)) if prompts else None,
        tokens=sum(a.tokens for a in answers),
        tokens_per_second=together(answers),
        cached_tokens=max(cached) if cached else None,
        note="; ".join(notes),
    )


def together(answers: list[Answer]) -> float | None:
    """Tokens per second of all answers in the time when each of them was being written; None without such."""
    if any(len(a.arrivals_s) < 2 for a in answers):
        return None
    begin = max(a.sent_s + a.arrivals_s[0] for a in answers)
    end = min(a.finished_s for a in answers)
    if end <= begin:
        return None
    tokens = 0.0
    for a in answers:
        inside = sum(begin < a.sent_s + t <= end for t in a.arrivals_s)
        tokens += inside * a.tokens / len(a.arrivals_s) if a.merged else inside
    return tokens / (end - begin)
