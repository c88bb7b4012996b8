"""Parameters and bytes, counted from the shape: what must be held, and what a step must read.

Biases, norms, query-key norms, sinks and routers are all counted. Multi-token-prediction layers and
vision towers are not. A tied output head is one tensor with the embedding and is counted once.

The cache, per layer: keys and values of every earlier token, `2 h_kv d_h` numbers each. A sliding
layer stops at its window; latent attention stores one vector of 576 numbers instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction

from ..checks import choice, whole
from ..formats import bytes_for
from .registry import resolve_model
from .spec import ModelSpec

SHARDINGS = ("heads", "batch")


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part; `head` is 0 where the output head is the embedding."""

    embedding: int
    attention: int
    feed_forward: int
    experts: int
    router: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All parts added up."""
        return sum(vars(self).values())

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def attention_parameters(model: ModelSpec) -> int:
    """Parameters of one layer's attention: projections, biases, sinks; norms are counted elsewhere."""
    d, h = model.d_model, model.heads
    if model.mla:
        m = model.mla
        query = d * m.q_rank + m.q_rank * h * m.qk_dim if m.q_rank else d * h * m.qk_dim
        down, up, out = d * m.width, m.kv_rank * h * (m.nope_dim + m.v_dim), h * m.v_dim * d
        bias = ((m.q_rank or 0) + m.width if model.qkv_bias else 0) + (d if model.o_bias else 0)
        return query + down + up + out + bias
    q_width, k_width = h * model.head_dim, model.kv_heads * model.head_dim
    v_width = model.kv_heads * model.v_head_dim
    count = d * (q_width + k_width + v_width) + h * model.v_head_dim * d
    count += q_width + k_width + v_width if model.qkv_bias else 0
    count += d if model.o_bias else 0
    return count + (h if model.sinks else 0)


def feed_forward_parameters(model: ModelSpec, width: int, *, bias: bool | None = None) -> int:
    """Parameters of one feed-forward of hidden `width`: three matrices if gated, else two."""
    bias = model.mlp_bias if bias is None else bias
    ups = 2 if model.gated else 1
    return (ups + 1) * model.d_model * width + ((ups * width + model.d_model) if bias else 0)


def expert_parameters(model: ModelSpec) -> int:
    """Parameters of one routed expert in one layer."""
    if model.moe is None:
        raise ValueError(f"model {model.name!r} has no experts")
    return feed_forward_parameters(model, model.moe.ffn, bias=model.moe.expert_bias)


def _norm_parameters(model: ModelSpec) -> int:
    per_vector = 2 if model.norm_bias else 1
    count = (model.norms_per_layer * model.layers + 1) * model.d_model * per_vector
    if model.mla:
        count += model.layers * ((model.mla.q_rank or 0) + model.mla.kv_rank)
    if model.qk_norm == "head":
        count += model.layers * 2 * model.head_dim
    elif model.qk_norm == "full":
        count += model.layers * (model.heads + model.kv_heads) * model.head_dim
    return count


def parameter_count(model: ModelSpec | str) -> ParameterCount:
    """Every parameter of `model`, by part."""
    model = resolve_model(model)
    embedding = (model.vocab + model.position_rows) * model.d_model
    dense = model.layers - model.moe_layers
    feed_forward, experts, router = dense * feed_forward_parameters(model, model.ffn), 0, 0
    if model.moe:
        m = model.moe
        experts = model.moe_layers * m.experts * expert_parameters(model)
        if m.shared:
            feed_forward += model.moe_layers * feed_forward_parameters(model, m.shared_ffn, bias=False)
        extra = m.experts * (m.router_bias + m.correction_bias) + model.d_model * m.shared_gate
        router = model.moe_layers * (model.d_model * m.experts + extra)
    return ParameterCount(
        embedding=embedding,
        attention=model.layers * attention_parameters(model),
        feed_forward=feed_forward,
        experts=experts,
        router=router,
        norms=_norm_parameters(model),
        head=0 if model.tied else model.vocab * model.d_model,
    )


def parameters(model: ModelSpec | str) -> int:
    """All parameters of `model`: 8,030,261,248 for Llama-3.1-8B."""
    return parameter_count(model).total


def active_parameters(model: ModelSpec | str, *, embedding: bool = True) -> int:
    """Parameters that one token uses: all of them but the experts it isn't sent to.

    embedding  count the input embedding too, as the Mixtral and DeepSeek reports do. gpt-oss's card
               leaves it out (False): there 3.61e9 and 5.13e9. Of a tied table the use as output head stays.
    """
    model = resolve_model(model)
    count = parameter_count(model)
    active = count.total
    if model.moe:
        active -= model.moe_layers * (model.moe.experts - model.moe.top_k) * expert_parameters(model)
    return active if embedding else active - _lookup_only(model, count)


def matmul_parameters(model: ModelSpec | str, *, active: bool = True) -> int:
    """P in "2P FLOPs per token": parameters that take part in a product.

    The input embedding is a lookup and is left out; the output head is in. Norm weights, a few parts
    in 100,000, are left in. active=False gives all experts: what is read once a batch touches them all.
    """
    model = resolve_model(model)
    if active:
        return active_parameters(model, embedding=False)
    count = parameter_count(model)
    return count.total - _lookup_only(model, count)


def _lookup_only(model: ModelSpec, count: ParameterCount) -> int:
    return count.embedding - (model.vocab * model.d_model if model.tied else 0)


def experts_touched(model: ModelSpec | str, batch: int) -> float:
    """Expected number of distinct experts that a step of `batch` tokens reads, in one layer.

    E (1 - (1 - k/E)^B), for uniform and independent routing: DeepSeek-V3 (256, 8) touches 8 at B=1,
    57 at 8, 163 at 32, 222 at 64. Real routers are less even, so this is on the high side.
    """
    model = resolve_model(model)
    if model.moe is None:
        raise ValueError(f"model {model.name!r} has no experts")
    batch = whole("batch", batch, owner="experts_touched")
    experts, top_k = model.moe.experts, model.moe.top_k
    return experts * (1 - (1 - top_k / experts) ** batch)


def cached_values(model: ModelSpec | str, tokens: int, *, batch: int = 1, step: int = 1) -> int:
    """How many numbers a cache of `tokens` tokens per sequence holds, over all layers."""
    model = resolve_model(model)
    tokens = whole("tokens", tokens, 0, owner="kv_bytes")
    batch, step = whole("batch", batch, owner="kv_bytes"), whole("step", step, owner="kv_bytes")
    slots = model.full_layers * tokens
    if model.sliding_layers:
        # A step of several tokens must not overwrite what its first token still sees.
        slots += model.sliding_layers * min(tokens, model.window + step - 1)
    return batch * slots * model.cached_width


def kv_bytes(model: ModelSpec | str, tokens: int, *, batch: int = 1, dtype="bf16", step: int = 1) -> int:
    """Bytes of the key-value cache.

    model   a ModelSpec or a name
    tokens  cached tokens per sequence, at least 0
    batch   sequences, each with its own cache
    dtype   format of a stored number (see `companion.cost.dtypes`), or bits per value
    step    tokens written per step: a sliding layer holds min(tokens, window + step - 1)

    Equals the bytes of the tensors that a cache of this shape allocates. A server may allocate more:
    whole blocks, or the full length in sliding layers too.
    """
    return bytes_for(cached_values(model, tokens, batch=batch, step=step), dtype)


def kv_bytes_per_token(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that one token adds while no window is full: the sum over all layers."""
    model = resolve_model(model)
    return bytes_for(model.layers * model.cached_width, dtype)


def kv_growth_per_token(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that one more token adds once the windows are full: the sum over the full layers."""
    model = resolve_model(model)
    return bytes_for(model.full_layers * model.cached_width, dtype)


def kv_fixed_bytes(model: ModelSpec | str, *, dtype="bf16") -> int:
    """Bytes that the sliding layers hold per sequence once their windows are full; 0 without windows."""
    model = resolve_model(model)
    return bytes_for(model.sliding_layers * (model.window or 0) * model.cached_width, dtype)


def linear_state_bytes(
    model: ModelSpec | str, *, batch: int = 1, dtype="fp32", normaliser: bool = True
) -> int:
    """Bytes of the state that linear attention keeps instead of keys and values, for a text of any length.

    A matrix of d_h x d_v numbers per layer and key head, and with the normaliser another d_h.
    """
    model = resolve_model(model)
    batch = whole("batch", batch, owner="linear_state_bytes")
    per_head = model.head_dim * (model.v_head_dim + bool(normaliser))
    return bytes_for(batch * model.layers * model.kv_heads * per_head, dtype)


def weight_bytes(model: ModelSpec | str, dtype="bf16", *, experts=None) -> int:
    """Bytes of all weights, every parameter in `dtype`.

    experts  another format for the routed experts alone: gpt-oss keeps those in "mxfp4" and the rest
             in "bf16".
    """
    count = parameter_count(model)
    if experts is None:
        return bytes_for(count.total, dtype)
    rest = bytes_for(count.total - count.experts, dtype)
    return rest + bytes_for(count.experts, experts, argument="experts")


def weight_bytes_read(
    model: ModelSpec | str, batch: int = 1, dtype="bf16", *, experts=None, embedding: bool = False
) -> int:
    """Bytes of weights that one step of `batch` tokens reads.

    All of a dense model but its input embedding, of which a step reads `batch` rows (embedding=True
    counts the table whole). Of the routed experts, the expected number that the batch touches.
    """
    model = resolve_model(model)
    batch = whole("batch", batch, owner="weight_bytes_read")
    count = parameter_count(model)
    rest = (count.total if embedding else matmul_parameters(model, active=False)) - count.experts
    total = bytes_for(rest, dtype)
    if model.moe:
        touched = round(experts_touched(model, batch) * model.moe_layers * expert_parameters(model))
        total += bytes_for(touched, dtype if experts is None else experts, argument="experts")
    return total


def share_of_cache(
    model: ModelSpec | str, devices: int, kv_sharding: str = "heads", batch: int = 1
) -> Fraction:
    """Part of a batch's cache that the fullest device holds.

    "heads" (tensor parallelism) splits by key-value heads: beyond h_kv devices the heads are copied, and
    a latent, which all heads share, is copied to every device. "batch" gives each device whole sequences.
    """
    model = resolve_model(model)
    choice("kv_sharding", kv_sharding, SHARDINGS)
    if kv_sharding == "batch":
        return Fraction(-(-batch // devices), batch)
    if model.mla:
        return Fraction(1)
    return Fraction(-(-model.kv_heads // devices), model.kv_heads)
