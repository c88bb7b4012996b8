"""What ranks hold of a split model, and the third bill: what they say to each other, in bytes.

The shape of a rank's part is a ModelSpec again, so every count of this package works on it:
`kv_bytes(rank_spec("llama-3.1-8b", tensor=4), 8192)` is the cache of one rank.

Payload is what a rank hands to a collective: the bytes of the tensor that it calls with. What then goes over
the wire depends on the algorithm. For a payload of p bytes and n ranks:

| collective | payload p of a rank | algorithm | a rank sends | steps |
|---|---|---|---|---|
| all_reduce | the whole tensor | ring | 2 (n-1)/n p | 2 (n-1) |
| | | doubling | log2(n) p | log2(n) |
| | | direct | (n-1) p | 1 |
| reduce_scatter | the whole tensor | ring, direct | (n-1)/n p | n-1, 1 |
| all_gather | its own piece | ring, direct | (n-1) p | n-1, 1 |
| all_to_all | pieces for all ranks, its own too | direct | (n-1)/n p, if they are equal | 1 |
| broadcast | the tensor, on one rank | chain | p, but for the last | n-1 |

A ring all-reduce is a reduce-scatter and an all-gather of the n pieces: no algorithm sends fewer bytes, and
none of those here takes more steps, which is why a decode step, with messages of some KiB, wants another.
Sources: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), section 4;
Shoeybi et al. 2019 (Megatron-LM), section 3, for the two all-reduces per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from ..checks import choice, require, whole
from ..formats import bits_per_value, bytes_for
from .memory import expert_parameters, parameters
from .registry import resolve_model
from .spec import ModelSpec


def rank_spec(
    model: ModelSpec | str, *, tensor: int = 1, expert: int = 1, split_vocab: bool = False
) -> ModelSpec:
    """The shape of one rank's part of `model`.

    tensor  ranks among which heads, and the widths of feed-forwards and experts, are divided. Key-value heads
            are too while they last; with more ranks than heads, each is kept by tensor / kv_heads ranks.
            A latent is kept by all.
    expert  ranks (or groups of `tensor` ranks) among which the experts are divided. The result still says
            `moe.experts` of them: that is what its router chooses from.
    split_vocab  the rows of the embedding and of the head are divided over the tensor ranks too, rounded up,
            as vLLM and SGLang do; `companion.parallel` keeps both whole

    Raises ValueError, naming what does not divide.
    """
    model = resolve_model(model)
    tensor, expert = whole("tensor", tensor, owner="rank_spec"), whole("expert", expert, owner="rank_spec")
    moe = model.moe
    _divides(model, "tensor", tensor, "heads", model.heads)
    if model.mla is None and model.kv_heads % tensor and tensor % model.kv_heads:
        fits = f"a divisor or a multiple of kv_heads={model.kv_heads}"
        require(False, "tensor", fits, tensor, owner=model.name)
    if model.moe_layers < model.layers:
        _divides(model, "tensor", tensor, "ffn", model.ffn)
    if moe is None:
        require(expert == 1, "expert", "1 for a model without experts", expert, owner=model.name)
    else:
        _divides(model, "tensor", tensor, "moe.ffn", moe.ffn)
        _divides(model, "tensor", tensor, "moe.shared_ffn", moe.shared_ffn)
        _divides(model, "expert", expert, "moe.experts", moe.experts)
        moe = replace(moe, ffn=moe.ffn // tensor, shared_ffn=moe.shared_ffn // tensor)
    heads = model.heads // tensor
    kv_heads = heads if model.mla else max(1, model.kv_heads // tensor)
    width = model.ffn // tensor if model.moe_layers < model.layers else model.ffn
    vocab = -(-model.vocab // tensor) if split_vocab else model.vocab
    return replace(model, heads=heads, kv_heads=kv_heads, ffn=width, moe=moe, vocab=vocab)


def rank_parameters(
    model: ModelSpec | str, *, tensor: int = 1, expert: int = 1, split_vocab: bool = False
) -> int:
    """Parameters that one rank holds: norms and routers whole, the embedding and the head too unless
    `split_vocab`, the rest divided.

    Biases behind a divided product count on every rank: those that must not be added twice are zeros there.
    """
    part = rank_spec(model, tensor=tensor, expert=expert, split_vocab=split_vocab)
    count = parameters(part)
    if part.moe is not None:
        gone = part.moe.experts - part.moe.experts // expert
        count -= part.moe_layers * gone * expert_parameters(part)
    return count


def cache_copies(model: ModelSpec | str, tensor: int) -> Fraction:
    """How many times the cache is stored over `tensor` ranks that share a sequence: 1 is each number once.

    kv_heads ranks are the most that hold different heads; from there on the caches are copies, and memory
    for tokens no longer grows with the ranks. Latent attention has one vector for all heads, so every rank
    holds all of it: `tensor` copies from the start.

    >>> [int(cache_copies("llama-3.1-8b", n)) for n in (1, 8, 16)], int(cache_copies("deepseek-v3", 8))
    ([1, 1, 2], 8)
    """
    model = resolve_model(model)
    return Fraction(tensor * rank_spec(model, tensor=tensor).cached_width, model.cached_width)


def _divides(model: ModelSpec, argument: str, ranks: int, field: str, size: int) -> None:
    require(size % ranks == 0, argument, f"a divisor of {field}={size}", ranks, owner=model.name)


COUNT_BYTES = 8  # rows per expert are announced as int64


@dataclass(frozen=True)
class Wire:
    """Bytes that leave a rank, for all ranks of a collective together and for the busiest one; messages that
    must follow one another."""

    total: int
    busiest: int
    steps: int


# (kind, algorithm): bytes sent by all ranks and by the busiest one, in units of p / n; steps.
_ALGORITHMS = {
    ("all_reduce", "ring"): lambda n: (2 * (n - 1) * n, 2 * (n - 1), 2 * (n - 1)),
    ("all_reduce", "doubling"): lambda n: (_log2(n) * n * n, _log2(n) * n, _log2(n)),
    ("all_reduce", "direct"): lambda n: ((n - 1) * n * n, (n - 1) * n, 1),
    ("reduce_scatter", "ring"): lambda n: ((n - 1) * n, n - 1, n - 1),
    ("reduce_scatter", "direct"): lambda n: ((n - 1) * n, n - 1, 1),
    ("all_gather", "ring"): lambda n: ((n - 1) * n * n, (n - 1) * n, n - 1),
    ("all_gather", "direct"): lambda n: ((n - 1) * n * n, (n - 1) * n, 1),
    ("all_to_all", "direct"): lambda n: ((n - 1) * n, n - 1, 1),
    ("broadcast", "chain"): lambda n: ((n - 1) * n, n, n - 1),
}
KINDS = tuple(dict.fromkeys(kind for kind, _ in _ALGORITHMS))


def on_wire(kind: str, payload: int, ranks: int, algorithm: str | None = None) -> Wire:
    """What a collective of `payload` bytes per rank puts on the wire.

    kind, algorithm: these pairs, of which an algorithm of None takes the first:
        "all_reduce"      "ring", "doubling" or "direct"; the payload is the whole tensor
        "reduce_scatter"  "ring" or "direct"; the whole tensor
        "all_gather"      "ring" or "direct"; a rank's own piece
        "all_to_all"      "direct"; the pieces for all ranks, its own too
        "broadcast"       "chain"; the tensor, on one rank

    `total` is exact, and so is `busiest` where the ranks divide the payload; else it is rounded up. One rank
    sends nothing. Raises ValueError for another name.

    >>> on_wire("all_reduce", 1024, 4)
    Wire(total=6144, busiest=1536, steps=6)
    """
    payload, n = whole("payload", payload, 0, owner="on_wire"), whole("ranks", ranks, owner="on_wire")
    choice("kind", kind, KINDS)
    known = [a for k, a in _ALGORITHMS if k == kind]
    algorithm = known[0] if algorithm is None else algorithm
    choice(f"algorithm of {kind}", algorithm, known)
    if n == 1:
        return Wire(0, 0, 0)
    total, busiest, steps = _ALGORITHMS[kind, algorithm](n)
    return Wire(-(-total * payload // n), -(-busiest * payload // n), steps)


@dataclass(frozen=True)
class Exchange:
    """One purpose for which ranks speak in a step.

    what     "attention", "feed-forward", `"query-key norms"`: sums of partial results; "counts", "dispatch",
             "combine": rows to experts and back
    kind     the collective; ranks: how many take part in a call; calls: per step
    payload  bytes that one rank hands in, over all calls
    """

    what: str
    kind: str
    ranks: int
    calls: int
    payload: int

    def wire(self, algorithm: str | None = None) -> Wire:
        """On the wire for all calls; all_to_all is taken as even, so its bytes are what to expect."""
        once = on_wire(self.kind, self.payload, self.ranks, algorithm)
        return Wire(once.total, once.busiest, once.steps * self.calls)


@dataclass(frozen=True)
class ParallelBytes:
    """All exchanges of one step. Sizes are per rank."""

    tokens: int
    exchanges: tuple[Exchange, ...]

    @property
    def payload(self) -> int:
        """Bytes that one rank hands in."""
        return sum(e.payload for e in self.exchanges)

    @property
    def wire(self) -> int:
        """Bytes that leave one rank, each collective by the first algorithm of `on_wire`."""
        return sum(e.wire().busiest for e in self.exchanges)

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """kind of collective -> (calls, payload)."""
        table: dict[str, tuple[int, int]] = {}
        for e in self.exchanges:
            calls, payload = table.get(e.kind, (0, 0))
            table[e.kind] = calls + e.calls, payload + e.payload
        return table

    def __getitem__(self, what: str) -> Exchange:
        """The exchange of that name; KeyError if this step has none."""
        for e in self.exchanges:
            if e.what == what:
                return e
        raise KeyError(f"{what!r}; this step has {', '.join(e.what for e in self.exchanges) or 'none'}")


def parallel_bytes(
    model: ModelSpec | str,
    *,
    tokens: int,
    tensor: int = 1,
    expert: int = 1,
    dtype="bf16",
    dispatch_dtype=None,
) -> ParallelBytes:
    """What one rank hands to collectives in one step.

    tokens          that the rank runs: a decode step's batch, or batch times prompt in a prefill. 0 is a rank
                    without work in a step of others
    tensor          ranks that share these tokens, each with a part of every head count and width: two
                    all-reduces per layer, of tokens x d_model numbers each, behind attention and feed-forward
    expert          ranks with tokens of their own that share the experts: in each layer that has some, every
                    token goes to its top_k experts and back, in rows of d_model numbers. A row is sent for
                    each expert, also where two of them live on one rank
    dtype           of activations; dispatch_dtype: of the rows on their way to the experts, if it is another
                    (DeepSeek-V3 sends them in fp8 and takes them back in bf16)

    Both at once: `expert` groups of `tensor` ranks; each rank exchanges rows with its like in other groups.

    Exact per rank, but for "combine": how many rows a rank sends back depends on the routing. It gets back as
    many bytes as stated, so over all ranks that sum is exact too. The embedding and the head are whole on
    every rank, and cost nothing here.

    Raises ValueError for a number of ranks that does not divide what it must.
    """
    model = resolve_model(model)
    rank_spec(model, tensor=tensor, expert=expert)
    tokens = whole("tokens", tokens, 0, owner="parallel_bytes")
    stream, L = tokens * model.d_model, model.layers
    exchanges = []
    if tensor > 1:
        reduced = L * bytes_for(stream, dtype)
        if model.qk_norm == "full":  # the mean square over heads of all ranks: two float32 per token
            wide = bytes_for(2 * tokens, max(bits_per_value("fp32"), bits_per_value(dtype)))
            exchanges.append(Exchange("query-key norms", "all_reduce", tensor, 2 * L, L * wide))
        exchanges.append(Exchange("attention", "all_reduce", tensor, L, reduced))
        exchanges.append(Exchange("feed-forward", "all_reduce", tensor, L, reduced))
    if expert > 1:
        layers, rows = model.moe_layers, stream * model.moe.top_k
        out = layers * bytes_for(rows, dtype if dispatch_dtype is None else dispatch_dtype)
        counts = layers * model.moe.experts * COUNT_BYTES
        exchanges.append(Exchange("counts", "all_to_all", expert, layers, counts))
        exchanges.append(Exchange("dispatch", "all_to_all", expert, layers, out))
        exchanges.append(Exchange("combine", "all_to_all", expert, layers, layers * bytes_for(rows, dtype)))
    return ParallelBytes(tokens, tuple(exchanges))


def _log2(n: int) -> int:
    require(not n & (n - 1), "ranks", "a power of two for algorithm='doubling'", n)
    return n.bit_length() - 1
