"""What a decoder refuses: shapes, caches of other models, tensors that are missing or misshapen."""

import itertools

import jaxtyping
import pytest
import torch
import transformers
from tinymodels import tiny

from companion.caches import make_cache
from companion.cost import ModelSpec
from companion.model import Decoder, from_transformers, right_padded
from tests.model.test_decoder import VARIANTS, cache_for, ids


@pytest.fixture(scope="module")
def decoder():
    return from_transformers(tiny("llama", torch.float64))


# --- refusals -------------------------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    "x, options, message",
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, r"ids has shape \(1, 0\)"),
        (torch.zeros(3, dtype=torch.long), {}, r"ids has shape \(3,\)"),
        (ids(2, 3), {"logits": "first"}, "logits must be one of all, last, got 'first'"),
        (ids(2, 3), {"lengths": [3]}, r"lengths must be 2 counts from 0 to S=3, got \[3\]"),
        (ids(2, 3), {"lengths": [4, 1]}, "lengths must"),
        (ids(2, 3), {"lengths": [-1, 1]}, "lengths must"),
        (ids(2, 3), {"lengths": torch.tensor([1.5, 1.0])}, "lengths must"),
        (ids(3, 3), {}, "cache must be of batch=3, .* got 2"),
        (ids(2, 5), {}, "max_tokens=4"),
    ],
)
def test_forward_refuses_and_leaves_the_cache_alone(decoder, unchecked, x, options, message):
    cache = cache_for(decoder, 2, 4)
    with pytest.raises(ValueError, match=message):
        decoder(x, cache, **options)
    assert all(cache.row_lengths(i) == [0, 0] for i in range(3)) and cache.nbytes_used == 0


@pytest.mark.parametrize("change", [{"layers": 2}, {"layers": 4}, {"kv_heads": 4}, {"heads": 8}])
def test_a_cache_of_another_shape_is_refused_before_it_is_touched(decoder, change):
    s = decoder.spec
    shape = {n: getattr(s, n) for n in ("layers", "d_model", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    other = ModelSpec(name="other", architecture="llama", **(shape | change))
    cache = make_cache("contiguous", other, max_tokens=4, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"cache must be made for .* {next(iter(change))}="):
        decoder(ids(1, 3), cache)
    assert cache.nbytes_used == 0
    assert all(cache.row_lengths(i) == [0] for i in range(other.layers))


def test_a_cache_of_another_dtype_is_refused(decoder):
    cache = make_cache("contiguous", decoder.spec, max_tokens=4, dtype=torch.float32)
    with pytest.raises(ValueError, match="dtype"):
        decoder(ids(1, 3), cache)
    assert cache.nbytes_used == 0


@pytest.mark.parametrize(
    "config, message",
    [
        (transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2), "gpt2"),
        (transformers.Olmo2Config(hidden_size=64, num_hidden_layers=1, pad_token_id=0), "olmo2"),
        (transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, hidden_act="gelu"), "gelu"),
    ],
)
def test_what_these_blocks_do_not_compute_is_refused(config, message):
    spec = ModelSpec.from_config(config.to_dict())
    with pytest.raises(ValueError, match=message):
        Decoder(spec, {})


@pytest.mark.parametrize("name", ["llama", "llama biases", "qwen2", "qwen3"])
def test_every_tensor_is_needed_and_its_shape_is_checked(name):
    kind, config = VARIANTS[name]
    hf = tiny(kind, num_hidden_layers=1, **config)
    spec, weights = ModelSpec.from_config(hf.config.to_dict()), dict(hf.state_dict())
    Decoder(spec, weights)
    for tensor in weights:
        with pytest.raises(ValueError, match=tensor):
            Decoder(spec, {k: v for k, v in weights.items() if k != tensor})
        for axis, grow in itertools.product(range(weights[tensor].ndim), (0, 1)):
            size = list(weights[tensor].shape)
            size[axis] += 1 if grow else -1
            with pytest.raises(ValueError, match=tensor):
                Decoder(spec, weights | {tensor: torch.zeros(size)})


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.inference_mode()
def test_every_tensor_matters(name):
    """No weight is read and then forgotten: changing any of them changes the logits."""
    kind, config = VARIANTS[name]
    hf = tiny(kind, num_hidden_layers=1, **config)
    spec, weights = ModelSpec.from_config(hf.config.to_dict()), dict(hf.state_dict())
    x = ids(1, 6)
    base = Decoder(spec, weights)(x)
    for tensor, value in weights.items():
        other = value + 0.3 * torch.randn(value.shape)  # a factor alone would be undone by qwen3's norms
        assert not torch.allclose(Decoder(spec, weights | {tensor: other})(x), base, atol=1e-3), tensor


@pytest.mark.parametrize(
    "mask, message",
    [
        ([[1, 0, 1]], "gap"),
        ([[0, 1, 0, 1]], "gap|shape"),
        ([[1, 1]], "shape"),
        ([[1, 1, 1], [1, 1, 1]], "shape"),
    ],
)
def test_masks_that_are_refused(unchecked, mask, message):
    with pytest.raises(ValueError, match=f"mask.*({message})"):
        right_padded(ids(1, 3), torch.tensor(mask))


def test_masks_that_are_accepted():
    x, n = right_padded(ids(3, 4), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))
    want = ids(3, 4)
    assert n.tolist() == [2, 0, 4]
    assert x.tolist() == [[*want[0, 1:3].tolist(), 0, 0], [0] * 4, want[2].tolist()]
