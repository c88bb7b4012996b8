"""The allocator of the paged cache: operations per second, and whether they know how large the pool is.

    python -m benchmarks.paging [--pools 10000,100000,1000000] [--blocks 16,256] [--rounds N] [--out FILE]

Two tables. The manager: 1,000 prompts of 1 to 2,048 random tokens with at most 100 alive (the oldest is freed),
every full block registered, then 32 decode steps of the last 100, then the same prompts again: hits on live
blocks and, after they were freed, on cached ones. The pool alone: all of its blocks cached, in random order, and
1,000 of them wanted from the middle. Pools take turns within a round; the best round is reported, since other
programs can only make a round slower. Promises: a hit on a freed block costs the same in a pool of a million as
in one of ten thousand, and the other columns reach those of a manager with a plain queue. Needs no torch.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from companion.paging import BlockManager, BlockPool

PROMPTS, ALIVE, LONGEST, STEPS = 1000, 100, 2048, 32
WANTED = 1000


def describe() -> dict[str, object]:
    """The machine, as benchmarks.machine has it; by hand where torch is not installed."""
    try:
        from .machine import describe as full

        return full()
    except ImportError:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load,
        }


def seconds(run: Callable, each: Iterable) -> tuple[float, list]:
    """The time of run(x) for every x, and the results."""
    each = list(each)
    start = time.perf_counter()
    results = [run(x) for x in each]
    return time.perf_counter() - start, results


def manager_round(num_blocks: int, block_size: int, seed: int) -> dict[str, float]:
    """One pass over everything that a manager does. Rates in 1/s, times in seconds per block."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(50_000) for _ in range(draw.randint(1, LONGEST))] for _ in range(PROMPTS)]
    start = time.perf_counter()
    manager = BlockManager(num_blocks, block_size)
    build = time.perf_counter() - start

    spent = dict.fromkeys(("allocate", "register", "free"), 0.0)
    alive, blocks, hashed, freed_blocks = [], 0, 0, 0
    clock = time.perf_counter
    for prompt in prompts:
        if len(alive) == ALIVE:
            oldest = alive.pop(0)
            freed_blocks += len(oldest.table.ids)
            start = clock()
            manager.free(oldest)
            spent["free"] += clock() - start
        start = clock()
        seq = manager.allocate(prompt)
        spent["allocate"] += clock() - start
        blocks += len(seq.table.ids)
        start = clock()
        hashed += len(manager.register(seq))
        spent["register"] += clock() - start
        alive.append(seq)

    def step(seq, token=7):
        manager.append(seq, token)
        manager.register(seq)

    decode, _ = seconds(step, alive * STEPS)

    # One prompt of many blocks, again while it lives and again after it was freed.
    long = [draw.randrange(50_000) for _ in range(LONGEST + 1)]
    first = manager.allocate(long)
    manager.register(first)
    hits, repeats = LONGEST // block_size, 20
    live, again = seconds(lambda _: manager.allocate(long), range(repeats))
    assert all(seq.shared == LONGEST for seq in again)
    for seq in [*again, first]:
        manager.free(seq)
    cached = 0.0
    for _ in range(repeats):
        start = clock()
        seq = manager.allocate(long)
        cached += clock() - start
        assert seq.shared == LONGEST and manager.pool.ref_count(seq.table.ids[0]) == 1
        manager.free(seq)
    return {
        "build_s": build,
        "allocate_seq_per_s": PROMPTS / spent["allocate"],
        "allocate_blocks_per_s": blocks / spent["allocate"],
        "register_blocks_per_s": hashed / spent["register"],
        "decode_steps_per_s": ALIVE * STEPS / decode,
        "free_seq_per_s": (PROMPTS - ALIVE) / spent["free"],
        "free_blocks_per_s": freed_blocks / spent["free"],
        "hit_live_s": live / repeats / hits,
        "hit_freed_s": cached / repeats / hits,
    }


def pool_round(num_blocks: int, seed: int) -> dict[str, float]:
    """The pool with every block cached, in random order. Seconds per block."""
    draw = random.Random(seed)
    pool = BlockPool(num_blocks, 16)
    start = time.perf_counter()
    ids = pool.allocate(num_blocks)
    first_use = time.perf_counter() - start
    for i in ids:
        pool._kept[i] = 1  # `keep` in a loop would take most of the run
    draw.shuffle(ids)
    pool.free(ids)
    wanted = draw.sample(ids, WANTED)
    take, _ = seconds(lambda i: pool.take([i]), wanted)
    start = time.perf_counter()
    pool.free(wanted)
    free = time.perf_counter() - start
    start = time.perf_counter()
    pool.allocate(WANTED)
    evict = time.perf_counter() - start
    return {
        "first_use_s": first_use / num_blocks,
        "take_one_s": take / WANTED,
        "free_s": free / WANTED,
        "evict_s": evict / WANTED,
    }


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The highest rate and the shortest time of each column."""
    return {k: (max if k.endswith("per_s") else min)(r[k] for r in rounds) for k in rounds[0]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pools", default="10000,100000,1000000")
    parser.add_argument("--blocks", default="16,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pools = [int(x) for x in options.pools.split(",")]
    machine = describe()

    managers = {(size, n): [] for size in map(int, options.blocks.split(",")) for n in pools}
    alone = {n: [] for n in pools}
    for seed in range(options.rounds):
        for (size, n), rounds in managers.items():
            rounds.append(manager_round(n, size, seed))
        for n, rounds in alone.items():
            rounds.append(pool_round(n, seed))

    print(
        "manager   block      pool  build us  allocate seq/s  (blocks/s)  register blocks/s  decode steps/s"
    )
    for (size, n), rounds in managers.items():
        r = best(rounds)
        print(
            f"          {size:5} {n:9,} {r['build_s'] * 1e6:9.1f} {r['allocate_seq_per_s']:15,.0f}"
            f"{r['allocate_blocks_per_s']:12,.0f} {r['register_blocks_per_s']:18,.0f}"
            f"{r['decode_steps_per_s']:16,.0f}"
        )
    print("          block      pool   free seq/s  (blocks/s)  hit live us/block  hit freed us/block")
    for (size, n), rounds in managers.items():
        r = best(rounds)
        print(
            f"          {size:5} {n:9,} {r['free_seq_per_s']:12,.0f}{r['free_blocks_per_s']:12,.0f}"
            f"{r['hit_live_s'] * 1e6:19.2f}{r['hit_freed_s'] * 1e6:20.2f}"
        )
    print("pool, all cached     pool  first use ns  take one ns  free ns  evict ns   (per block)")
    for n, rounds in alone.items():
        r = best(rounds)
        print(
            f"                {n:9,} {r['first_use_s'] * 1e9:13.0f}{r['take_one_s'] * 1e9:13.0f}"
            f"{r['free_s'] * 1e9:9.0f}{r['evict_s'] * 1e9:10.0f}"
        )
    if options.out:
        record = {
            "machine": machine,
            "rounds": options.rounds,
            "manager": [{"block_size": s, "num_blocks": n, **best(r)} for (s, n), r in managers.items()],
            "pool": [{"num_blocks": n, **best(r)} for n, r in alone.items()],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
