"""A tiny decoder in float64, what it says of a prompt alone, and models that fail on purpose."""

from functools import cache

import torch

from companion.cost import ModelSpec
from companion.generate import Sampler, generate, greedy
from companion.model import Decoder

V = 13
OPTIONS = {"temperature": 1.3, "top_k": 6}
PROMPTS = [
    (1,),
    (1, 2, 3),
    (1, 2, 3, 4, 5, 6),
    (1, 2, 3, 4, 5, 6, 7, 8, 9),
    (5, 5, 5, 5, 5),
    (1, 2, 3, 4, 9, 9, 1),
]


def tiny_decoder(window=None, max_context=64, seed=0, dtype=torch.float64):
    spec = ModelSpec(
        name="tiny",
        architecture="mistral" if window else "llama",
        layers=2,
        d_model=12,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn=20,
        vocab=V,
        window=window,
        max_context=max_context,
    )
    random = torch.Generator().manual_seed(seed)
    rows = {"embed_tokens": V, "lm_head": V, "q_proj": 16, "k_proj": 8, "v_proj": 8, "o_proj": 12}
    rows |= {"gate_proj": 20, "up_proj": 20, "down_proj": 12}

    def take(name):
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return (1 + 0.2 * torch.randn(12, generator=random, dtype=torch.float64)).to(dtype)
        columns = {"down_proj": 20, "o_proj": 16}.get(part, 12)
        return (0.5 * torch.randn(rows[part], columns, generator=random, dtype=torch.float64)).to(dtype)

    return Decoder(spec, take).eval()


MODEL = tiny_decoder()
WINDOWED = tiny_decoder(window=5)


@cache
def alone(prompt, n, seed=None, windowed=False, stop=()):
    """What `companion.generate` says for this prompt by itself: the oracle of every test here."""
    return generate(
        WINDOWED if windowed else MODEL,
        list(prompt),
        max_new_tokens=n,
        stop_ids=stop,
        sampler=greedy if seed is None else Sampler(**OPTIONS, seed=seed),
    )


class Letters:
    """A tokenizer: token i is the i-th letter."""

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


class Faulty(Decoder):
    """MODEL with faults: `raises(ids)` in a pass, `spoil(ids, x)` behind the blocks, `bend(logits)`."""

    def __init__(self, raises=None, spoil=None, bend=None):
        torch.nn.Module.__init__(self)
        self.raises, self.spoil, self.bend = raises, spoil, bend
        self.spec, self.stop_ids, self.embedding = MODEL.spec, (), MODEL.embedding
        self.passes = []

    def embed(self, ids):
        self.ids = ids[:, 0].tolist()
        return MODEL.embed(ids)

    def through(self, x, cache):
        self.passes.append(self.ids)
        if self.raises and self.raises(self.ids):
            MODEL.blocks[0](x, MODEL.rope, *MODEL.angles(torch.tensor(cache.row_lengths())[:, None]), cache)
            raise RuntimeError("out of luck")
        x = MODEL.through(x, cache)
        return self.spoil(self.ids, x) if self.spoil else x

    def head(self, x):
        return self.bend(MODEL.head(x)) if self.bend else MODEL.head(x)
