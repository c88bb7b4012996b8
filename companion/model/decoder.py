"""The decoder: embed, run the blocks, project to the vocabulary."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..attend import one_pass
from ..caches.base import Attendable, row_counts
from ..checks import choice, shape
from ..cost import ModelSpec
from ..rope import Rope
from .compiled import CompiledLayers, compiled_layers, suits
from .families import block, family_of, ropes
from .products import Int8Matrix, Tensors, matrix, product


class Decoder(nn.Module):
    """A decoder-only transformer of one of the architectures in `companion.model.FAMILIES`.

    spec: its shape. weights: a mapping from Hugging Face's tensor names to tensors, or a function of a name.
    Weights keep their dtype and device.

    Attributes: `spec`, `blocks`, `rope`, `stop_ids` (tokens that end a reply; set by `load`); `local_rope`,
    the rotation of layers with a window where it is another one (Gemma 3), else None; `weight_format`, "int8"
    after `quantize_weights`, else None.
    Raises ValueError for an architecture that is not there, for a configuration that contradicts itself, and
    for a tensor that is missing or misshapen.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor] | Callable[[str], Tensor]):
        super().__init__()
        family = family_of(spec)
        take = Tensors(weights, spec.name)
        self.spec, self.stop_ids, self.weight_format = spec, (), None
        self.rope, self.local_rope = ropes(spec)
        self.embedding = matrix([take("model.embed_tokens.weight", spec.vocab, spec.d_model)])
        self.blocks = nn.ModuleList(
            block(family, spec, i, take.under(f"model.layers.{i}.")) for i in range(spec.layers)
        )
        self.norm = family.norm(take("model.norm.weight", spec.d_model), spec.norm_eps)
        self.output = self.embedding
        if not spec.tied:
            self.output = matrix([take("lm_head.weight", spec.vocab, spec.d_model)])
        self.embedding_scale = spec.d_model**0.5 if family.embedding_scaled else None
        self.logit_cap = family.logit_cap(spec)

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream, whatever the weights are stored in."""
        tied = isinstance(self.embedding, Int8Matrix)
        return self.norm.weight.dtype if tied else self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters as stored, a tied matrix counted once, a router's correction too."""
        return sum(p.nbytes for p in [*self.parameters(), *self.buffers()])

    def embed(self, ids: Int[Tensor, "B S"]) -> Float[Tensor, "B S d"]:
        """Rows of the embedding, scaled where the family does (Gemma)."""
        if isinstance(self.embedding, Int8Matrix):
            x = self.embedding.looked_up(ids, self.dtype)
        else:
            x = F.embedding(ids, self.embedding)
        if self.embedding_scale is None:
            return x
        return x * torch.tensor(self.embedding_scale).to(x.dtype)  # rounded as the model was trained with

    def head(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows V"]:
        """The last norm, then the output matrix: float32 logits (float64 for float64 weights)."""
        logits = product(self.norm(x), self.output)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits if self.logit_cap is None else self.logit_cap * torch.tanh(logits / self.logit_cap)

    def angles(self, positions: Int[Tensor, "*rows"], rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary positions, once for all layers; rope: None for `self.rope`."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return (rope or self.rope).cos_sin(positions, dtype=wide)

    def forward(
        self,
        ids: Int[Tensor, "B S"],
        cache: Attendable | None = None,
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
        choice("logits", logits, ("all", "last"))
        rows = self._rows(*ids.shape, lengths)
        x = self.embed(ids)
        with one_pass(x):
            x = self.through(x, cache, lengths=rows)
            if logits == "last":
                x = x[:, -1:] if rows is None else _last(x, rows)
            return self.head(x)

    def through(
        self,
        x: Float[Tensor, "B S d"],
        cache: Attendable | None = None,
        *,
        lengths: Int[Tensor, " B"] | Sequence[int] | None = None,
    ) -> Float[Tensor, "B S d"]:
        """The residual stream through all blocks, (B, S, d) to (B, S, d): after `embed`, before `head`.

        cache, lengths: as in `forward`, which is `head(through(embed(ids)))`; errors as there too.
        """
        B, S, _ = x.shape
        rows = self._rows(B, S, lengths)
        if cache is not None:
            self._check_cache(cache, B)
        starts = [0] * B if cache is None else cache.row_lengths()
        positions = _positions(starts, S, x.device)
        full = local = (self.rope, *self.angles(positions))
        if self.local_rope is not None:
            local = (self.local_rope, *self.angles(positions, self.local_rope))
        with one_pass(x) as by:
            alone = S == 1 and rows is None and self.local_rope is None and not self.rope.interleaved
            if by.whole_steps and alone and suits(x, cache):
                step = self.compiled()
                if step.takes(x) and (room := cache.room()) is not None:
                    return step(x, *full[1:], cache, room)
            for layer, kind in zip(self.blocks, self.spec.layer_types):
                x = layer(x, *(local if kind == "sliding" else full), cache, rows)
        return x

    def compiled(self) -> CompiledLayers:
        """The layers as one compiled call per decode step, as they are now; it says why not, if not.

        `companion.kernels.use("compiled")` makes use of it.
        """
        return compiled_layers(self.blocks)

    def _check_cache(self, cache: Attendable, B: int) -> None:
        """Here rather than in some later layer, when the first ones have been written."""
        if cache.batch != B:
            raise ValueError(f"cache must be of batch={B}, the rows of ids, got {cache.batch}")
        for name in ("layers", "heads", "kv_heads", "head_dim", "mla"):
            made_for, own = getattr(cache.spec, name), getattr(self.spec, name)
            if made_for != own:
                raise ValueError(f"cache must be made for the model's {name}={own}, got {made_for}")

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
    shape("mask", mask, *ids.shape)
    mask = mask.bool()
    lengths = mask.sum(dim=1)
    edges = (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1) + mask[:, 0]
    if (edges > 1).any():
        raise ValueError("mask must be in one piece in every row, got a gap")
    out = torch.zeros_like(ids)
    for row, (tokens, keep) in enumerate(zip(ids, mask)):
        out[row, : lengths[row]] = tokens[keep]
    return out, lengths


def _positions(starts: list[int], S: int, device: torch.device) -> Tensor:
    """Positions of S tokens per row: (S,) where all rows start alike, else (B, S)."""
    if all(s == starts[0] for s in starts):
        return torch.arange(starts[0], starts[0] + S, device=device)
    return torch.tensor(starts, device=device)[:, None] + torch.arange(S, device=device)


def _last(x: Tensor, rows: list[int]) -> Tensor:
    """x at the last real token of each row: (B, S, d) -> (B, 1, d)."""
    at = torch.tensor([max(n - 1, 0) for n in rows], device=x.device)
    return x[torch.arange(len(rows), device=x.device), at][:, None]
