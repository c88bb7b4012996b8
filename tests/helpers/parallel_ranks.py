"""What the ranks of the tests do. Imported by spawned processes, so it imports no more than they need."""

import os
import signal
import threading
import time

import torch

from companion.caches import make_cache
from companion.moe import grouped_experts
from companion.parallel import Group, exchanged_experts, mesh, shard

STEPS = (5, 1, 1, 2)
DTYPES = (torch.float64, torch.float32)


def ids(seed):
    return torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def logits(spec, weights, *, dtype, seed, tensor=None, expert=None):
    """(all at once, in steps over a cache) for two texts of 9 tokens; (2, 9, V) each."""
    weights = {n: w.to(dtype) for n, w in weights.items()}
    decoder, x = shard(spec, weights, tensor=tensor, expert=expert), ids(seed)
    kind, options = "contiguous" if spec.mla is None else "latent", {}
    if spec.sliding_layers:
        kind, options = "sliding", {"step": max(STEPS)}
    cache = make_cache(kind, decoder.spec, batch=2, max_tokens=9, dtype=dtype, **options)
    full = decoder(x)
    steps = torch.cat([decoder(part, cache) for part in x.split(STEPS, dim=1)], dim=1)
    return full, steps


def everything(group, models, sparse):
    """{"tensor" | "expert" | "mesh": {(name, dtype): (full, steps)}, ...} and what was counted in each."""
    out = {"tensor": {}, "expert": {}, "mesh": {}, "counted": {}, "held": {}}
    for name, (spec, weights) in models.items():
        for dtype in DTYPES:
            before = len(group.calls)
            out["tensor"][name, dtype] = logits(spec, weights, dtype=dtype, seed=0, tensor=group)
            out["counted"]["tensor", name, dtype] = group.calls[before:]
            if name in sparse:
                before = len(group.calls)
                out["expert"][name, dtype] = logits(spec, weights, dtype=dtype, seed=group.rank, expert=group)
                out["counted"]["expert", name, dtype] = group.calls[before:]
        decoder = shard(spec, weights, tensor=group)
        own = all(p.untyped_storage().nbytes() == p.nbytes for p in decoder.parameters())
        out["held"]["tensor", name] = decoder.weights_bytes, own
        if name in sparse:
            out["held"]["expert", name] = shard(spec, weights, expert=group).weights_bytes, own
    if group.size == 4:
        tensor, expert = mesh(group, 2)
        for name in sparse:
            spec, weights = models[name]
            args = dict(dtype=torch.float64, seed=expert.rank, tensor=tensor, expert=expert)
            out["mesh"][name] = logits(spec, weights, **args)
        out["mesh counted"] = list(tensor.calls), list(expert.calls), (tensor.rank, expert.rank)
        out["two"] = everything(tensor, models, sparse)  # ranks 0 and 1, and beside them 2 and 3
    out["experts"] = {name: experts(group, *case) for name, case in CASES.items()}
    out["collectives"] = collectives(group)
    return out


# tokens of each rank (the rest have none), what the ids are
CASES = {
    "even": ([5, 5, 5, 5], "random"),
    "uneven": ([3, 9, 1, 4], "random"),
    "one rank has none": ([4, 0, 2, 3], "random"),
    "only one rank has any": ([0, 6, 0, 0], "random"),
    "no tokens at all": ([0, 0, 0, 0], "random"),
    "all to the last rank": ([4, 3, 2, 1], "last"),
    "all to one expert": ([4, 3, 2, 1], "same"),
    "some slots not sent": ([4, 3, 2, 1], "holes"),
    "nothing sent": ([4, 3, 2, 1], "nowhere"),
    "NaN in one token": ([4, 3, 2, 1], "nan"),
}


class Silent(Group):
    """Rank `rank` of `size`, none of whom may be spoken to."""

    def __init__(self, size, rank=0):
        super().__init__()
        self.size, self.rank = size, rank

    def _do(self, *args, **options):
        raise AssertionError("something was said")


def expert_case(size, rank, tokens, how, E=8, K=6, N=5, k=2):
    """(x, w1, w2, ids, weights, b1, b2) of a rank; the experts are all of them, alike on every rank."""
    g = torch.Generator().manual_seed(3)
    shapes = (E, 2 * N, K), (E, K, N), (E, 2 * N), (E, K)
    w1, w2, b1, b2 = (torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes)
    T = tokens[rank]
    g = torch.Generator().manual_seed(100 + rank)
    x, weights = (torch.randn(T, w, generator=g, dtype=torch.float64) for w in (K, k))
    chosen = torch.rand(T, E, generator=g).argsort(1)[:, :k]
    if how == "last":
        chosen = E - 1 - torch.arange(k).expand(T, k) % (E // size)
    elif how == "same":
        chosen = torch.full((T, k), 3)
    elif how == "holes":
        chosen = torch.where(torch.rand(T, k, generator=g) < 0.5, chosen, -1)
    elif how == "nowhere":
        chosen = torch.full((T, k), -1)
    elif how == "nan" and rank == 0:
        x[1] = float("nan")
    return x, w1, w2, chosen, weights, b1, b2


def experts(group, tokens, how):
    """(exchanged, by one process) outputs of this rank's tokens, and the calls."""
    x, w1, w2, chosen, weights, b1, b2 = expert_case(group.size, group.rank, tokens, how)
    own = len(w1) // group.size
    mine = slice(group.rank * own, (group.rank + 1) * own)
    before = len(group.calls)
    options = {"limit": 1.0, "alpha": 1.5}
    got = exchanged_experts(
        x, w1[mine], w2[mine], chosen, weights, group=group, b1=b1[mine], b2=b2[mine], **options
    )
    want = grouped_experts(x, w1, w2, chosen, weights, b1=b1, b2=b2, **options)
    return got, want, group.calls[before:]


def collectives(group):
    """name -> (result, the call that was counted)."""
    r, n = group.rank, group.size
    results = {
        "reduce": group.all_reduce(torch.full((3, 5), float(r + 1), dtype=torch.float64), "a"),
        "reduce, strided": group.all_reduce(torch.arange(6.0).view(2, 3).t() * (r + 1), "b"),
        "reduce, bf16": group.all_reduce(torch.ones(7, dtype=torch.bfloat16), "c"),
        "gather": group.all_gather(torch.tensor([[r, r]], dtype=torch.int32), "d"),
        "broadcast": group.broadcast(torch.full((4,), r, dtype=torch.int64), 1, "e"),
        # rank r sends s rows to rank s, each saying who it is from
        "exchange": group.all_to_all(
            torch.full((n * (n - 1) // 2, 2), r, dtype=torch.int16), list(range(n)), [r] * n, "f"
        ),
        "scalar, bool": group.broadcast(torch.tensor(r == 1), 1, "h"),
        "nothing": group.all_to_all(torch.empty(0, 3), [0] * n, [0] * n, "g"),
    }
    return results, group.calls[-len(results) :]


def dies(group, how):
    """Rank 1 goes away in the middle; the others say how long it took them to notice."""
    group.all_reduce(torch.ones(2))
    if group.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1 and how == "stuck":
        threading.Event().wait()  # for what never comes
    if group.rank == 1 and how == "raises":
        raise ValueError("rank 1 has had enough")
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(2), "attention")
        group.all_reduce(torch.ones(2), "attention")
    finally:
        # In one piece: print writes its newline apart, and the ranks share the pipe.
        os.write(1, f"noticed after {time.monotonic() - start:.2f} s\n".encode())
