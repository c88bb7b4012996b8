"""Experts on a CPU: one grouped computation against loops over experts and against transformers' own.

    python -m benchmarks.moe_cpu [--threads N] [--rounds N] [--out FILE]

Same weights (the very tensors), same choices, float32, everything 512 wide. The paths take turns in one
run; ratios are per round, and the median round is given with the extremes. Promise: not slower than
transformers' implementations at 8, 64 and 256 experts, for 1, 16 and 256 tokens. Numbers: LEDGER.md.

"loop" is a fair one: rows sorted by expert, two products and an activation for each expert that has rows.
"whole layer" has the router too: companion.moe.MoE against Qwen3MoeSparseMoeBlock.
"""

import json
import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from companion.cost import RoutingSpec
from companion.machine import describe
from companion.moe import MoE, combine, dispatch, gated, gather, grouped_experts

from .machine import arguments, spread

WIDTH = 512
EXPERTS = ((8, 2), (64, 8), (256, 8))  # experts, top k
TOKENS = (1, 16, 256)
GATHERED = 128  # rows up to which transformers' batched_mm is run: it copies the weights of every row


def loop(x, w1, w2, ids, weights):
    """Sorted rows, one expert after the other through F.linear."""
    plan = dispatch(ids, w1.shape[0])
    rows = gather(x, plan)
    out, begin = torch.empty_like(rows), 0
    for e, size in enumerate(plan.sizes):
        if size:
            part = slice(begin, begin + size)
            out[part] = F.linear(gated(F.linear(rows[part], w1[e])), w2[e])
            begin += size
    return combine(out, weights, plan)


def twins(experts: int, top_k: int) -> tuple[MoE, Qwen3MoeSparseMoeBlock]:
    """Our layer, and transformers' around the same tensors."""
    ours = MoE(WIDTH, WIDTH, experts, top_k, routing=RoutingSpec(renormalize=True))
    config = Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    with torch.device("meta"):
        theirs = Qwen3MoeSparseMoeBlock(config)
    theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj = ours.router, ours.w1, ours.w2
    return ours, theirs


def under(theirs, implementation, run):
    theirs.experts.config._experts_implementation = implementation
    return run()


def take_turns(paths: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each path, `rounds` of them, after two that are not counted."""
    times = {name: [] for name in paths}
    for i in range(rounds + 2):
        for name, run in paths.items():
            start = time.perf_counter()
            run()
            if i >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def case(ours, theirs, tokens: int, rounds: int) -> dict:
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
    r = ours.route(x)
    w1, w2, ids, weights = ours.w1, ours.w2, r.ids, r.weights
    hf = partial(theirs.experts, x, ids, weights)
    names = ["eager", "grouped_mm"] + (["batched_mm"] if ids.numel() <= GATHERED else [])
    paths = {"grouped": lambda: grouped_experts(x, w1, w2, ids, weights)}
    paths["loop"] = lambda: loop(x, w1, w2, ids, weights)
    paths |= {f"transformers {n}": partial(under, theirs, n, hf) for n in names}
    paths["whole layer"] = lambda: ours(x)
    whole = partial(theirs, x[None])
    paths["transformers whole layer"] = partial(under, theirs, "grouped_mm", whole)
    want = paths["loop"]()
    for name, run in paths.items():
        torch.testing.assert_close(run().view(want.shape), want, atol=1e-5, rtol=1e-4, msg=name)
    times = take_turns(paths, 10 * rounds if tokens == 1 else rounds)  # one token takes a millisecond
    ratio = {
        f"{them} / {us}": spread([b / a for a, b in zip(times[us], times[them])])
        for us, them in [("grouped", n) for n in paths if n not in ("grouped", "whole layer")]
        if them != "transformers whole layer"
    }
    ratio["transformers whole layer / whole layer"] = spread(
        [b / a for a, b in zip(times["whole layer"], times["transformers whole layer"])]
    )
    return {
        "experts": ours.experts,
        "top_k": ours.top_k,
        "tokens": tokens,
        "touched": r.load.distinct,
        "busiest": int(r.load.tokens.max()),
        "ms": {n: statistics.median(t) for n, t in times.items()},
        "ratio": ratio,
    }


def main() -> None:
    args = arguments(__doc__)
    torch.manual_seed(0)
    result = {"machine": describe(), "width": WIDTH, "rounds": args.rounds, "cases": []}
    with torch.inference_mode():
        for experts, top_k in EXPERTS:
            ours, theirs = twins(experts, top_k)
            for tokens in TOKENS:
                found = case(ours, theirs, tokens, args.rounds)
                result["cases"].append(found)
                print(f"{experts:4} experts, {tokens:3} tokens, {found['touched']:3} touched", end="")
                print("".join(f"; {n} {ms:.2f} ms" for n, ms in found["ms"].items()))
                for name, r in found["ratio"].items():
                    print(f"      {name}: {r['median']:.2f} ({r['min']:.2f} to {r['max']:.2f})")
            del ours, theirs
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
