"""A small mixture of experts against its dense twins of as many active and of as many total parameters.

    python -m benchmarks.moe_twin [--seeds N] [--threads N] [--smoke]

Trains each variant of companion.study.twins with every seed, on both tasks. Nets of one seed see the same
batches, and mixtures of one seed start equal. A reader is trained until its held-out loss has not fallen for
PATIENCE evaluations, and its best one counts. Prints a table; stores
companion/study/results/moe_twin.json after every reader, and the weights of two readers beside it. Started
again, it goes on from what is stored. --smoke: tiny, in seconds, stores nothing.
"""

import argparse
import time

import torch

from companion.machine import describe
from companion.moe import load
from companion.study import store, stored
from companion.study.twins import (
    EXPERTS,
    VARIANTS,
    Reader,
    held_out,
    learn,
    load_reader,
    pieces,
    read,
    save_readers,
    split,
)

STEPS, EVERY, PATIENCE = 3000, 125, 3
BOOK_STEPS = 1200
BOOK_VARIANTS = ("moe aux", "active", "total")
EARLY = 100  # steps whose training loss a reader can compare with
KEPT = ("moe bias", "moe none")  # of seed 0


def parameters(net: torch.nn.Module) -> dict[str, int]:
    """Stored, and used by one token; the router counts in both."""
    total = sum(p.numel() for p in net.parameters())
    unused = sum((m.w1.numel() + m.w2.numel()) * (m.experts - m.top_k) // m.experts for m in net.mixtures)
    return {"total": total, "active": total - unused}


def loads(chosen) -> list[dict]:
    """Per layer: choices per expert over the held-out text, and how even they are."""
    found = [load(ids, EXPERTS) for ids in chosen]
    return [
        {
            "tokens": f.tokens.tolist(),
            "max_over_mean": round(f.max_over_mean, 4),
            "entropy": round(f.entropy, 4),
        }
        for f in found
    ]


def reader(variant: str, seed: int, steps: int, every: int) -> tuple[dict, dict]:
    """The record of one reader, and its weights where its held-out loss was lowest."""
    curve, best, start = [], {}, time.process_time()

    def tell(net: Reader, step: int) -> bool:
        loss, chosen = held_out(net)
        curve.append([step, round(loss, 5)])
        if not best or curve[-1][1] < best["loss"]:
            state = {k: v.detach().clone() for k, v in net.state_dict().items()}
            best.update(step=step, loss=curve[-1][1], load=loads(chosen), state=state)
        return step - best["step"] >= PATIENCE * every

    net, losses = read(variant, seed, steps, every=every, tell=tell)
    state = best.pop("state")
    record = {
        "variant": variant,
        "seed": seed,
        **parameters(net),
        **best,
        "steps": len(losses),
        "curve": curve,
        "early_losses": [round(x, 4) for x in losses[:EARLY]],
        "cpu_seconds": round(time.process_time() - start, 1),
    }
    return record, state


def book(variant: str, seed: int, steps: int) -> dict:
    start = time.process_time()
    net, right, loss = learn(variant, seed, steps)
    return {
        "variant": variant,
        "seed": seed,
        **parameters(net),
        "right": round(right, 5),
        "loss": round(loss, 5),
        "steps": steps,
        "cpu_seconds": round(time.process_time() - start, 1),
    }


def show(r: dict) -> None:
    uneven = ", ".join(f"{x['max_over_mean']:.2f}" for x in r["load"])
    print(f"reader {r['variant']:9} seed {r['seed']} {r['active']:8,} of {r['total']:8,}", end=" ")
    print(
        f"best {r['loss']:.4f} at step {r['step']:4} of {r['steps']:4} {r['cpu_seconds']:6} s  {uneven}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> dict:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--seeds", type=int, default=4)
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--smoke", action="store_true")
    args = parse.parse_args(argv)
    torch.set_num_threads(args.threads)
    steps, every, book_steps = (2, 1, 4) if args.smoke else (STEPS, EVERY, BOOK_STEPS)
    result = {
        "machine": describe(),
        "complete": False,
        "task": {
            "text": {"training": len(split()[0]), "held_out": pieces()[:, 1:].numel()},
            "evaluated_every": every,
            "patience": PATIENCE,
            "at_most": steps,
        },
        "seeds": list(range(args.seeds)),
        "kept": {},
    }
    before = {} if args.smoke else earlier()
    result["kept"] = before.get("kept", {})
    books = before.get("books", [])
    books += [
        book(v, s, book_steps) for s in result["seeds"] for v in BOOK_VARIANTS if not found(books, v, s)
    ]
    for b in books:
        print(f"book {b['variant']:9} seed {b['seed']} {b['active']:7,} of {b['total']:7,}: ", end="")
        print(f"{b['right']:.1%} right, {b['loss']:.3f} nats, {b['cpu_seconds']} s", flush=True)
    readers = [r for r in before.get("readers", []) if r["steps"] - r["step"] >= PATIENCE * every]
    for r in readers:
        show(r)
    kept = {}
    for seed in result["seeds"]:
        for variant in VARIANTS:
            if not found(readers, variant, seed):
                record, state = reader(variant, seed, steps, every)
                readers.append(record)
                show(record)
                if variant in KEPT and seed == 0 and not args.smoke:
                    kept[variant] = state
                    save_readers(kept)
                    # What a reader of the book recomputes: the stored weights are rounded to 16 bits.
                    loss, chosen = held_out(load_reader(variant))
                    result["kept"][variant] = {"seed": seed, "loss": round(loss, 5), "load": loads(chosen)}
            done = len(readers) == args.seeds * len(VARIANTS)
            readers.sort(key=lambda r: (r["seed"], VARIANTS.index(r["variant"])))
            result |= {"complete": done, "books": books, "readers": readers}
            if not args.smoke:
                store("moe_twin", result)
    return result


def earlier() -> dict:
    """What an earlier run has stored; a reader that the end of the steps cut off is trained again."""
    try:
        return stored("moe_twin")
    except ValueError:
        return {}


def found(records: list[dict], variant: str, seed: int) -> bool:
    return any((r["variant"], r["seed"]) == (variant, seed) for r in records)


if __name__ == "__main__":
    main()
