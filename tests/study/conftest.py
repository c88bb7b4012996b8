"""A tiny decoder over bytes, a tokenizer that is none, and a model that says what is written."""

import pytest
import torch

from companion.cost import ModelSpec
from companion.model import Decoder

SPEC = ModelSpec(
    name="tiny", architecture="llama", layers=2, d_model=16, heads=4, kv_heads=2, head_dim=32, ffn=24,
    vocab=256, max_context=None,
)  # fmt: skip


class Bytes:
    """Every byte is a token."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode()


def tiny_decoder(seed=0, scale=0.5) -> Decoder:
    random = torch.Generator().manual_seed(seed)
    s = SPEC
    rows = {"embed_tokens": s.vocab, "lm_head": s.vocab, "q_proj": 128, "k_proj": 64, "v_proj": 64}
    rows |= {"o_proj": 16, "gate_proj": 24, "up_proj": 24, "down_proj": 16}
    columns = {"o_proj": 128, "down_proj": 24}

    def take(name):
        part = name.split(".")[-2]
        if part.endswith("norm"):
            return 1 + 0.2 * torch.randn(16, generator=random)
        return scale * torch.randn(rows[part], columns.get(part, 16), generator=random)

    return Decoder(SPEC, take).eval()


class Scripted(torch.nn.Module):
    """Finds likeliest what `following(ids)` says, row by row; keeps what it was fed."""

    def __init__(self, following):
        super().__init__()
        self.following, self.fed, self.spec = following, [], SPEC

    def forward(self, ids, cache=None, *, logits="all"):
        self.fed.append((ids.tolist(), cache.row_lengths()))
        zeros = torch.zeros(1, 2, ids.shape[1], 32)
        for layer in range(SPEC.layers):
            cache.append(layer, zeros, zeros)
        out = torch.zeros(1, ids.shape[1], 256)
        for i, id in enumerate(self.following(ids[0].tolist())):
            out[0, i, id] = 5.0
        return out


@pytest.fixture(scope="session")
def tiny():
    return tiny_decoder()


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def bytes_tokenizer():
    return Bytes()
