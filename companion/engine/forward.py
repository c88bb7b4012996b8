"""The model's part of a step: logits for every request that needs them, and the tokens chosen from them.

A fault belongs to somebody. What goes wrong for one request comes back in its place, as an exception, and the
others get their results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attend import one_pass
from ..attend.step import Workspace
from ..caches.paged import PagedStorage
from ..generate import greedy
from ..generate.sampling import check_logits
from ..model import Decoder
from ..serving.records import Chunk
from .packed import PackedStep, Span

Sample = Callable[[Any], Any]  # logits (B, V) -> ids (B,)


@torch.inference_mode()
def compute(
    model: Decoder, storage: PagedStorage, chunks: Sequence[Chunk], workspace: Workspace
) -> list[Tensor | Exception | None]:
    """Logits (V,) of each chunk that samples, None of the others, or what went wrong with it.

    One pass over the tokens of all chunks. If the model raises, each chunk is computed again alone, so that
    only those fail that fail by themselves; their slots are the same, so nothing is written twice.
    """
    try:
        ids = torch.tensor([[t] for c in chunks for t in c.job.tokens[c.start : c.stop]], device=model.device)
        spans = [Span(c.job.seq.table, c.start, c.stop) for c in chunks]
        x = model.embed(ids)
        with one_pass(x):
            x = model.through(x, PackedStep(storage, spans, workspace))[:, 0]  # (T, d)
            ends = torch.tensor([c.count for c in chunks]).cumsum(0) - 1
            asked = [i for i, c in enumerate(chunks) if c.samples]
            logits = model.head(x[ends[asked].to(x.device)]) if asked else ()
    except Exception as error:
        if len(chunks) == 1:
            return [error]
        return [result for c in chunks for result in compute(model, storage, [c], workspace)]
    results: list[Tensor | Exception | None] = [None] * len(chunks)
    for i, row in zip(asked, logits):
        results[i] = row
    bad = ~torch.isfinite(x.sum(dim=-1, dtype=torch.float64))
    if bad.any():  # before anybody can find it in the prefix cache
        for i, part in enumerate(bad.split([c.count for c in chunks])):
            if part.any():
                results[i] = ValueError("the model's residual stream holds NaN or infinity")
    return results


@torch.inference_mode()
def choose(rows: Sequence[tuple[Sample, Tensor | Exception]]) -> list[tuple[int | Exception, float]]:
    """(token, logprob) from each (sampler, logits (V,)), or (what went wrong, 0): greedy ones together."""
    said: list[int | Exception | None] = []
    for sampler, row in rows:
        try:
            said.append(row if isinstance(row, Exception) else _own_choice(sampler, row))
        except Exception as error:
            said.append(error)
    good = [i for i, id in enumerate(said) if not isinstance(id, Exception)]
    out: list[tuple[int | Exception, float]] = [(id, 0.0) for id in said]
    if good:
        logits = torch.stack([rows[i][1] for i in good])
        ids = [best if said[i] is None else said[i] for i, best in zip(good, greedy(logits).tolist())]
        picked = logits.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
        for i, id, logprob in zip(good, ids, (picked - logits.logsumexp(dim=-1)).tolist()):
            out[i] = (id, logprob)
    return out


def _own_choice(sampler: Sample, row: Tensor) -> int | None:
    """The id that a request's own sampler chooses from its logits (V,); None for greedy, done for all."""
    check_logits(row[None])
    if sampler is greedy:
        return None
    id = int(sampler(row[None])[0])
    if not 0 <= id < len(row):
        raise ValueError(f"sampler chose {id}; the vocabulary has ids 0 to {len(row) - 1}")
    return id
