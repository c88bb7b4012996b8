"""A tiny decoder in float64, and one whose logits are written down beforehand."""

import pytest
import torch

from companion.cost import ModelSpec
from companion.model import Decoder

V = 23


def tiny_decoder(seed=0, dtype=torch.float64, window=None, max_context=40, scale=0.4, layers=2, vocab=V):
    spec = ModelSpec(
        name="tiny",
        architecture="mistral" if window else "llama",
        layers=layers,
        d_model=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        ffn=24,
        vocab=vocab,
        window=window,
        max_context=max_context,
    )
    random = torch.Generator().manual_seed(seed)

    def take(name):
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return 1 + 0.2 * torch.randn(16, generator=random, dtype=torch.float64)
        rows = {"embed_tokens": vocab, "lm_head": vocab, "q_proj": 16, "k_proj": 8, "v_proj": 8}
        rows |= {"o_proj": 16, "gate_proj": 24, "up_proj": 24, "down_proj": 16}
        columns = 24 if part == "down_proj" else 16
        return scale * torch.randn(rows[part], columns, generator=random, dtype=torch.float64)

    return Decoder(spec, lambda name: take(name).to(dtype)).eval()


class Scripted(Decoder):
    """Says what is written: script[row][step] is the token whose logit is highest at that step."""

    def __init__(self, script, eos=()):
        real = tiny_decoder(max_context=None)
        torch.nn.Module.__init__(self)
        self.spec, self.stop_ids, self.embedding = real.spec, tuple(eos), real.embedding
        self.script, self.calls, self.fed = script, 0, []

    def forward(self, ids, cache=None, *, lengths=None, logits="all"):
        out = torch.zeros(len(ids), 1, V, dtype=torch.float64)
        for row, tokens in enumerate(self.script):
            out[row, 0, tokens[min(self.calls, len(tokens) - 1)]] = 5.0
        self.calls += 1
        self.fed.append((ids.tolist(), lengths))
        return out


@pytest.fixture(scope="session")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="session")
def make_decoder():
    return tiny_decoder


@pytest.fixture
def scripted():
    return Scripted
