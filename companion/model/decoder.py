"""The decoder: embed, run the blocks, project to the vocabulary."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..caches.base import Cache, row_counts
from ..cost import ModelSpec
from ..rope import Rope
from .blocks import Block, RMSNorm
from .products import matrix, product

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # what these blocks compute faithfully


class Decoder(nn.Module):
    """A decoder-only transformer of the Llama family.

    spec: its shape. weights: a mapping from Hugging Face's tensor names to tensors, or a function of a name.
    Weights keep their dtype and device; matrices may be stored transposed (see `companion.model.products`).

    Attributes: `spec`, `blocks`, `rope`, `stop_ids` (tokens that end a reply; set by `load`).
    Raises ValueError for an architecture outside the family, and for a tensor that is missing or misshapen.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor] | Callable[[str], Tensor]):
        super().__init__()
        if spec.architecture not in FAMILIES:
            raise ValueError(
                f"architecture={spec.architecture!r} is not supported; accepted: {', '.join(FAMILIES)}"
            )
        if spec.rope_theta is None:
            raise ValueError(f"{spec.name}: rope_theta is missing; a default would give fluent nonsense")
        if spec.act not in ("silu", "swish"):
            raise ValueError(f"{spec.name}: activation {spec.act!r} is not supported; accepted: silu")
        take = _checked(spec, weights if callable(weights) else _taker(weights))
        self.spec, self.stop_ids = spec, ()
        self.rope = Rope(
            spec.head_dim, theta=spec.rope_theta, scaling=spec.rope_scaling, partial=spec.partial_rotary
        )
        self.embedding = matrix([take("model.embed_tokens.weight")])
        self.blocks = nn.ModuleList(
            Block(spec, i, lambda name, i=i: take(f"model.layers.{i}.{name}")) for i in range(spec.layers)
        )
        self.norm = RMSNorm(take("model.norm.weight"), spec.norm_eps)
        self.output = self.embedding if spec.tied else matrix([take("lm_head.weight")])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters as stored, a tied matrix counted once."""
        return sum(p.nbytes for p in self.parameters())

    def embed(self, ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S d"]:
        """Rows of the embedding."""
        table = self.embedding
        if table.is_contiguous():
            return F.embedding(ids, table)
        # Stored transposed for the output head; its columns are the rows that we want.
        return table.t().index_select(1, ids.flatten()).t().reshape(*ids.shape, -1)

    def head(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        """The last norm, then the output matrix: float32 logits (float64 for float64 weights)."""
        logits = product(self.norm(x), self.output)
        return logits if logits.dtype == torch.float64 else logits.float()

    def angles(self, positions: Int[Tensor, "*rows"]) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary positions, once for all layers."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return self.rope.cos_sin(positions, dtype=wide)

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        cache: Cache | None = None,
        *,
        lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
        logits: str = "all",
    ) -> Float[Tensor, "B N V"]:
        """Logits (B, S, V) for every token, or (B, 1, V) for the last one of each row (logits="last").

        ids: (B, S) token ids. cache: keys and values of the tokens before them; these are appended to it.
        lengths: (B,) how many ids of each row are real, the rest is padding on the right; None means all.
        A row's logits do not depend on the other rows, nor on the padding; those at padding mean nothing.
        float32, or float64 for float64 weights.

        Raises ValueError, with the cache unchanged, for shapes that do not fit and for a cache that is full.
        """
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ValueError(f"ids has shape {tuple(ids.shape)}; need (B, S) with S of at least 1")
        if logits not in ("all", "last"):
            raise ValueError(f"logits={logits!r}; accepted: 'all', 'last'")
        B, S = ids.shape
        rows = self._rows(B, S, lengths)
        if cache is not None:
            self._check_cache(cache, B)
        starts = [0] * B if cache is None else cache.row_lengths()
        x = self.embed(ids)
        cos, sin = self.angles(_positions(starts, S, ids.device))
        for block in self.blocks:
            x = block(x, self.rope, cos, sin, cache, rows)
        if logits == "last":
            x = x[:, -1:] if rows is None else _last(x, rows)
        return self.head(x)

    def _check_cache(self, cache: Cache, B: int) -> None:
        """Here rather than in some later layer, when the first ones have been written."""
        if cache.batch != B:
            raise ValueError(f"cache has batch={cache.batch}, ids has {B} rows")
        for name in ("layers", "heads", "kv_heads", "head_dim"):
            made_for, own = getattr(cache.spec, name), getattr(self.spec, name)
            if made_for != own:
                raise ValueError(f"cache was made for {name}={made_for}; this model has {name}={own}")

    def _rows(self, B: int, S: int, lengths) -> list[int] | None:
        if lengths is None:
            return None
        rows = row_counts(lengths, B, S)
        return None if all(n == S for n in rows) else rows


def from_transformers(hf_model: nn.Module) -> Decoder:
    """A `Decoder` with the weights of a transformers model (copied; dtype and device kept)."""
    spec = ModelSpec.from_config(hf_model.config.to_dict())
    return Decoder(spec, hf_model.state_dict()).eval()


def right_padded(
    ids: Int[Tensor, "B S"], mask: Int[Tensor, "B S"] | Bool[Tensor, "B S"]
) -> tuple[Int[Tensor, "B S"], Int[Tensor, " B"]]:
    """Turn a padded batch, left-padded ones included, into (ids padded on the right with 0, lengths).

    mask: 1 where a token is real. Each row's real tokens must be in one piece. Raises ValueError otherwise.
    """
    if mask.shape != ids.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; need {tuple(ids.shape)}, that of ids")
    mask = mask.bool()
    lengths = mask.sum(dim=1)
    edges = (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1) + mask[:, 0]
    if (edges > 1).any():
        raise ValueError("mask has a gap inside a row; real tokens must be in one piece")
    out = torch.zeros_like(ids)
    for row, (tokens, keep) in enumerate(zip(ids, mask)):
        out[row, : lengths[row]] = tokens[keep]
    return out, lengths


def _taker(weights: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    def take(name: str) -> Tensor:
        if name not in weights:
            raise ValueError(f"weights have no tensor {name!r}")
        return weights[name].detach()

    return take


def _checked(spec: ModelSpec, take: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """`take`, refusing a tensor that has not the shape that `spec` gives it."""
    d, q, kv = spec.d_model, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": d}
    rows |= {"gate_proj": spec.ffn, "up_proj": spec.ffn, "down_proj": d}
    rows |= {"embed_tokens": spec.vocab, "lm_head": spec.vocab}
    columns = {"o_proj": q, "down_proj": spec.ffn}
    vectors = {"q_norm": spec.head_dim, "k_norm": spec.head_dim}

    def checked(name: str) -> Tensor:
        x, (part, kind) = take(name), name.split(".")[-2:]
        if part in rows:
            shape = (rows[part],) if kind == "bias" else (rows[part], columns.get(part, d))
        else:
            shape = (vectors.get(part, d),)
        if tuple(x.shape) != shape:
            raise ValueError(f"{spec.name}: tensor {name!r} has shape {tuple(x.shape)}; need {shape}")
        return x

    return checked


def _positions(starts: list[int], S: int, device: torch.device) -> Tensor:
    """Positions of S tokens per row: (S,) where all rows start alike, else (B, S)."""
    if all(s == starts[0] for s in starts):
        return torch.arange(starts[0], starts[0] + S, device=device)
    return torch.tensor(starts, device=device)[:, None] + torch.arange(S, device=device)


def _last(x: Tensor, rows: list[int]) -> Tensor:
    """x at the last real token of each row: (B, S, d) -> (B, 1, d)."""
    at = torch.tensor([max(n - 1, 0) for n in rows], device=x.device)
    return x[torch.arange(len(rows), device=x.device), at][:, None]
