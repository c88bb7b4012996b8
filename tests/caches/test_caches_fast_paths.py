"""The fast paths against torch's kernels, and latent attention in its absorbed and its naive form."""

import pytest
import torch
import torch.nn.functional as F

from companion.attend.by_torch import decode_packed, reads_ahead
from companion.attention import sdpa
from companion.caches import make_cache
from companion.cost import MLASpec, models
from tests.caches.test_caches_edges import rand, spec

# --- the fast paths against kernels and the other form of the mathematics -------------------------


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (7, 1), (9, 3)])
@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_decode_packed_equals_torch(heads, kv_heads, dtype, atol, scale):
    q = rand(2, heads, 1, 8, dtype=dtype)
    room = rand(2, kv_heads, 20, 8, seed=1, dtype=dtype), rand(2, kv_heads, 20, 5, seed=2, dtype=dtype)
    for n in (1, 2, 13, 20):
        k, v = room[0][:, :, :n], room[1][:, :, :n]  # the views that a cache hands over
        want = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        torch.testing.assert_close(decode_packed(q, k, v, softmax_scale=scale), want, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "heads, kv_heads, width, n, ahead",
    [(16, 2, 64, 2048, True), (16, 2, 64, 2047, False), (6, 2, 64, 2048, False), (8, 1, 65, 2048, False)],
)
def test_keys_are_read_ahead_for_eight_rows_of_narrow_keys_alone(heads, kv_heads, width, n, ahead):
    q, room = rand(1, heads, 1, width), rand(1, kv_heads, n + 3, width, seed=1)
    q, k, v = q.float(), room.float()[:, :, :n], room.float().flip(2)[:, :, :n]
    for dtype, want in ((torch.float32, ahead), (torch.float64, False)):
        assert reads_ahead(q.to(dtype).view(kv_heads, -1, width), n) is want
        got = decode_packed(q.to(dtype), k.to(dtype), v.to(dtype))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
        torch.testing.assert_close(
            got.double(), exact, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-13
        )


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [3, 3, 1], [1, 6]])
def test_absorbed_and_naive_latent_attention_are_one(chunks):
    """KV-11. Naive: every head's key and value are projected up. Scale: width of the unabsorbed head."""
    mla = MLASpec(kv_rank=12, nope_dim=5, rope_dim=4, v_dim=3)
    H, n = 3, 7
    s = spec(heads=H, kv_heads=H, head_dim=9, mla=mla, layers=2)
    up_k, up_v = rand(H, 5, 12), rand(H, 3, 12, seed=1)
    latent, k_rope = rand(2, n, 12, seed=2), rand(2, n, 4, seed=3)
    q_nope, q_rope = rand(2, H, n, 5, seed=4), rand(2, H, n, 4, seed=5)

    k = torch.cat([torch.einsum("hdr,bnr->bhnd", up_k, latent), k_rope[:, None].expand(2, H, n, 4)], dim=-1)
    v = torch.einsum("hdr,bnr->bhnd", up_v, latent)
    naive = F.scaled_dot_product_attention(torch.cat([q_nope, q_rope], -1), k, v, is_causal=True)

    cache = make_cache("latent", s, batch=2, max_tokens=n, dtype=torch.float64)
    stored = torch.cat([latent, k_rope], dim=-1)[:, None]
    absorbed = torch.cat([torch.einsum("bhnd,hdr->bhnr", q_nope, up_k), q_rope], dim=-1)
    at, outs = 0, []
    for size in chunks:
        part = slice(at, at + size)
        cache.append(1, stored[:, :, part], None)
        outs.append(torch.einsum("bhnr,hdr->bhnd", cache.attend(1, absorbed[:, :, part]), up_v))
        at += size
    torch.testing.assert_close(torch.cat(outs, dim=2), naive, rtol=1e-11, atol=1e-12)


def test_the_scale_of_deepseek_v3_is_that_of_192_numbers():
    s = models["deepseek-v3"]
    cache = make_cache("latent", s, max_tokens=2, dtype=torch.float64)
    latent, q = rand(1, 1, 2, 576), rand(1, 128, 1, 576, seed=1)
    cache.append(0, latent, None)
    want = sdpa(q, latent, latent[..., :512], softmax_scale=192**-0.5)
    torch.testing.assert_close(cache.attend(0, q), want, rtol=1e-11, atol=1e-12)
