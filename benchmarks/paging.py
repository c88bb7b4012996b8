"""The allocator of the paged cache: operations per second, and whether they know how large the pool is.

    python -m benchmarks.paging [--pools 10000,100000,1000000] [--blocks 16,256] [--rounds N] [--out FILE]

Two tables. The manager: 1,000 prompts of 1 to 2,048 random tokens with at most 100 alive (the oldest are
freed), every full block registered, then 32 decode steps of the last 100, then one prompt of 2,049 tokens,
again and again: its blocks are found live and, after all have left, cached. The pool alone: all of its blocks
cached, in random order, and 1,000 of them wanted from the middle; beside it what the same costs in a plain
queue, `deque.remove`.

Times are the processor time of this thread. Pools take turns within a round and the best round is reported:
other programs can only make one slower. Promise: a hit on a freed block costs the same in a pool of a million
as in one of ten thousand, up to what the processor's caches make of a larger table. Needs no torch.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from companion.machine import describe
from companion.paging import BlockManager, BlockPool

PROMPTS, ALIVE, BATCH = 1000, 100, 50
LONGEST, STEPS = 2048, 32  # tokens of a prompt, decode steps
WANTED, REPEATS = 1000, 20


def seconds(run: Callable, each: Iterable) -> tuple[float, list]:
    """The processor time of run(x) for every x, and the results."""
    each = list(each)
    start = time.thread_time()
    results = [run(x) for x in each]
    return time.thread_time() - start, results


def manager_round(num_blocks: int, block_size: int, seed: int) -> dict[str, float]:
    """One pass over everything that a manager does. Rates in 1/s, times in seconds (of hits: per block)."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(50_000), k=draw.randint(1, LONGEST)) for _ in range(PROMPTS)]
    build, (manager,) = seconds(lambda n: BlockManager(n, block_size), [num_blocks])

    allocate = register = free = 0.0
    blocks = full = freed = 0
    alive = []
    for at in range(0, PROMPTS, BATCH):
        if len(alive) == ALIVE:
            gone, alive = alive[:BATCH], alive[BATCH:]
            freed += sum(len(seq.table.ids) for seq in gone)
            free += seconds(manager.free, gone)[0]
        took, new = seconds(manager.allocate, prompts[at : at + BATCH])
        allocate += took
        blocks += sum(len(seq.table.ids) for seq in new)
        took, registered = seconds(manager.register, new)
        register += took
        full += sum(map(len, registered))
        alive += new

    def step(seq):
        manager.append(seq, 7)
        manager.register(seq)

    decode, _ = seconds(step, alive * STEPS)

    long = draw.choices(range(50_000), k=LONGEST + 1)
    first = manager.allocate(long)
    manager.register(first)
    hit_live, again = seconds(lambda _: manager.allocate(long), range(REPEATS))
    assert all(seq.shared == LONGEST for seq in again)
    for seq in [*again, first]:
        manager.free(seq)
    hit_freed = 0.0
    for _ in range(REPEATS):
        took, (seq,) = seconds(manager.allocate, [long])
        hit_freed += took
        assert seq.shared == LONGEST and manager.pool.ref_count(seq.table.ids[0]) == 1
        manager.free(seq)
    hits = REPEATS * (LONGEST // block_size)
    return {
        "build_s": build,
        "allocate_seq_per_s": PROMPTS / allocate,
        "allocate_blocks_per_s": blocks / allocate,
        "register_blocks_per_s": full / register,
        "decode_steps_per_s": ALIVE * STEPS / decode,
        "free_seq_per_s": (PROMPTS - ALIVE) / free,
        "free_blocks_per_s": freed / free,
        "hit_live_s": hit_live / hits,
        "hit_freed_s": hit_freed / hits,
    }


def pool_round(num_blocks: int, seed: int) -> dict[str, float]:
    """The pool with every block cached, in random order, and a queue of the same. Seconds per block."""
    draw = random.Random(seed)
    pool = BlockPool(num_blocks, 16)
    first_use, (ids,) = seconds(pool.allocate, [num_blocks])
    pool.keep(ids)
    draw.shuffle(ids)
    pool.free(ids)
    wanted = draw.sample(ids, WANTED)
    take, _ = seconds(lambda i: pool.take([i]), wanted)
    free, _ = seconds(pool.free, [wanted])
    evict, _ = seconds(pool.allocate, [WANTED])
    queue, searched = deque(ids), wanted[:REPEATS]
    remove, _ = seconds(queue.remove, searched)
    return {
        "first_use_s": first_use / num_blocks,
        "take_one_s": take / WANTED,
        "free_s": free / WANTED,
        "evict_s": evict / WANTED,
        "deque_remove_s": remove / REPEATS,
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
    gc.freeze()  # what describing imported is not to be collected again and again beside the measure

    managers = {(size, n): [] for size in map(int, options.blocks.split(",")) for n in pools}
    alone = {n: [] for n in pools}
    for seed in range(options.rounds):
        for (size, n), rounds in managers.items():
            rounds.append(manager_round(n, size, seed))
        for n, rounds in alone.items():
            rounds.append(pool_round(n, seed))
    managers = {key: best(rounds) for key, rounds in managers.items()}
    alone = {n: best(rounds) for n, rounds in alone.items()}

    print("manager: block      pool  build us  allocate seq/s  (blocks/s)  register blocks/s")
    for (size, n), r in managers.items():
        print(
            f"{size:14} {n:9,} {r['build_s'] * 1e6:9.0f} {r['allocate_seq_per_s']:15,.0f}"
            f"{r['allocate_blocks_per_s']:12,.0f} {r['register_blocks_per_s']:18,.0f}"
        )
    print("         block      pool  decode steps/s  free seq/s  (blocks/s)  hit live us/block   hit freed")
    for (size, n), r in managers.items():
        print(
            f"{size:14} {n:9,} {r['decode_steps_per_s']:15,.0f} {r['free_seq_per_s']:11,.0f}"
            f"{r['free_blocks_per_s']:12,.0f} {r['hit_live_s'] * 1e6:18.2f} {r['hit_freed_s'] * 1e6:15.2f}"
        )
    print("pool, all cached, ns per block: first use  take from the middle   free  evict  deque.remove")
    for n, r in alone.items():
        print(
            f"{n:24,} {r['first_use_s'] * 1e9:16.0f} {r['take_one_s'] * 1e9:21.0f} {r['free_s'] * 1e9:6.0f}"
            f"{r['evict_s'] * 1e9:7.0f} {r['deque_remove_s'] * 1e9:13,.0f}"
        )
    if options.out:
        record = {
            "machine": machine,
            "rounds": options.rounds,
            "manager": [{"block_size": s, "num_blocks": n, **r} for (s, n), r in managers.items()],
            "pool": [{"num_blocks": n, **r} for n, r in alone.items()],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
