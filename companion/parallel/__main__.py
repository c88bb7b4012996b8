"""Split a model over processes, decode with it, and set the bytes counted beside the bytes predicted.

    torchrun --standalone --nproc-per-node 4 -m companion.parallel
    torchrun --standalone --nproc-per-node 4 -m companion.parallel --tensor 2 --experts 8
    python -m companion.parallel                    # one process, which says nothing to anyone

The weights are random: what is counted does not depend on them, and every rank can make its own.
"""

import argparse
import sys

import torch

from ..caches import make_cache
from ..cost import ModelSpec
from ..cost.wire import parallel_bytes
from .collectives import Group, join, leave, mesh
from .layers import shard
from .weights import RandomWeights


def tiny(experts: int) -> ModelSpec:
    """A small Llama, or a small Mixtral if it has experts."""
    config = {
        "model_type": "mixtral" if experts else "llama", "num_hidden_layers": 4, "hidden_size": 128,
        "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    return ModelSpec.from_config(config, name="tiny")


@torch.inference_mode()
def decode(
    spec: ModelSpec, tensor: Group, expert: Group, *, batch: int, prompt: int, steps: int
) -> list[int]:
    """Greedy tokens of the first sequence: a prompt of this expert rank's own, then `steps` - 1 steps."""
    decoder = shard(spec, RandomWeights(spec), tensor=tensor, expert=expert)
    cache = make_cache("contiguous", decoder.spec, batch=batch, max_tokens=prompt + steps)
    generator = torch.Generator().manual_seed(expert.rank)  # alike within a tensor group
    ids, tokens = torch.randint(spec.vocab, (batch, prompt), generator=generator), []
    for _ in range(steps):
        ids = decoder(ids, cache, logits="last").argmax(-1)
        tokens.append(int(ids[0, 0]))
    return tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="companion.parallel", description=__doc__.splitlines()[0])
    a = parser.add_argument
    a("--tensor", type=int, help="ranks that share tokens; by default all, or 1 with experts")
    a("--experts", type=int, default=0, help="experts per layer; 0 is a dense model")
    a("--batch", type=int, default=2)
    a("--prompt", type=int, default=16)
    a("--steps", type=int, default=8)
    a("--timeout", type=float, default=60.0, help="seconds to wait for another rank")
    given = parser.parse_args(argv)
    spec, world = tiny(given.experts), join(timeout=given.timeout)
    try:
        tensor, expert = mesh(world, given.tensor or (1 if given.experts else world.size))
        tokens = decode(spec, tensor, expert, batch=given.batch, prompt=given.prompt, steps=given.steps)
        row = torch.tensor([tensor.payload, expert.payload])
        counted = world.all_gather(row).sum(dim=0).tolist()
    except ValueError as e:
        print(f"companion.parallel: {e}", file=sys.stderr)
        return 2
    finally:
        leave()
    if world.rank == 0:
        report(spec, given, tensor.size, expert.size, tokens, counted)
    return 0


def report(spec: ModelSpec, given, tensor: int, expert: int, tokens: list[int], counted: list[int]) -> None:
    """Print what was generated, and bytes counted beside bytes predicted."""
    sizes = {"tensor": tensor, "expert": expert, "dtype": "fp32"}
    steps = [given.batch * given.prompt] + [given.batch] * (given.steps - 1)
    predicted = [parallel_bytes(spec, tokens=n, **sizes) for n in steps]
    print(f"{tensor * expert} ranks, tensor {tensor} x expert {expert}; tokens {tokens}")
    print(f"{sum(steps)} tokens per rank; payload of all ranks, counted and predicted:")
    for kind, bytes_counted in zip(("all_reduce", "all_to_all"), counted):
        needed = tensor * expert * sum(p.by_kind.get(kind, (0, 0))[1] for p in predicted)
        print(f"  {kind} {bytes_counted:,} {needed:,}")
    last = predicted[-1]
    print(f"a decode step: {last.payload:,} bytes of payload per rank, {last.wire:,} on the wire")


if __name__ == "__main__":
    sys.exit(main())
