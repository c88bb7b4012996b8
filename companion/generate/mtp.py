"""A multi-token-prediction head in the manner of DeepSeek-V3: one extra block, embedding and output shared.

    h'[i] = block(project([norm(embedding of token i + 1), norm(h[i])]))     ->  logits of token i + 2

h[i] is the residual stream of the main model at token i, or of the head itself where it guesses further. The
block attends over all earlier h', so it has keys and values of its own: one layer more in the cache. Source:
DeepSeek-V3 report (arXiv 2412.19437), section 2.2.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..caches import Cache, make_cache
from ..model import Decoder
from ..model.norms import RMSNorm
from ..model.products import matrix, product


class MTPHead(nn.Module):
    """body: a `Decoder` of the head's layers (one, in DeepSeek-V3) of the main model's width and vocabulary;
    its embedding is not used, its last norm and output matrix make the logits. Share those with the main
    model by assignment: `body.embedding, body.output = model.embedding, model.output`.

    enorm, hnorm: (d,), weights of the norms of the embedding and of the hidden state.
    project: (d, 2 d), over the two of them in this order.
    """

    def __init__(self, body: Decoder, *, enorm: Tensor, hnorm: Tensor, project: Tensor):
        super().__init__()
        d = body.spec.d_model
        for name, x, shape in (
            ("enorm", enorm, (d,)),
            ("hnorm", hnorm, (d,)),
            ("project", project, (d, 2 * d)),
        ):
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; need {shape}")
        self.body = body
        self.enorm, self.hnorm = (RMSNorm(w, body.spec.norm_eps) for w in (enorm, hnorm))
        self.project = matrix([project])

    def forward(
        self,
        hidden: Float[Tensor, "B S d"],
        embedded: Float[Tensor, "B S d"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "B S d"]:
        """hidden: of tokens i; embedded: of the tokens after them. cache: of the positions before these."""
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        return self.body.through(product(both, self.project), cache)

    def logits(self, hidden: Float[Tensor, "B S d"]) -> Float[Tensor, "B S V"]:
        """Logits of the token two after each position, from what `forward` returned."""
        return self.body.head(hidden)

    def make_cache(self, room: int) -> Cache:
        """An empty cache of the head's own layer for `room` tokens."""
        kind = "contiguous" if self.body.spec.mla is None else "latent"
        return make_cache(
            kind, self.body.spec, max_tokens=room, dtype=self.body.dtype, device=self.body.device
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes that one guess reads: the block, the projection, and the output matrix, shared or not."""
        unread = 0 if self.body.output is self.body.embedding else self.body.embedding.nbytes
        return sum(p.nbytes for p in self.parameters()) - unread
