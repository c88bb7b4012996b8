"""companion.rope against transformers, bit for bit in float32, and against its own properties."""

import copy
import inspect
import math
import pickle

import pytest
import torch
from transformers import Glm4MoeConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as glm_apply
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from companion.rope import SCALINGS, Rope

NAN, INF = math.nan, math.inf

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
CASES = {
    "default": (None, 1e4),
    "named default": (dict(rope_type="default"), 1e5),
    "linear": (dict(rope_type="linear", factor=8.0), 1e6),
    "llama-3.1": (LLAMA3, 5e5),
    "llama-3.2": ({**LLAMA3, "factor": 32.0}, 5e5),
    "yarn": (YARN, 1e4),
    "qwen2.5": ({**YARN, "original_max_position_embeddings": 32768}, 1e6),
    "gpt-oss": ({**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, 150000.0),
    "deepseek": ({**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1e4),
    "deepseek-v2-lite": ({**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2}, 1e4),
    "yarn, its own attention factor": ({**YARN, "attention_factor": 1.7}, 1e4),
    "yarn, factor below 1": ({**YARN, "factor": 0.5}, 1e4),
    "yarn, a jump": ({**YARN, "beta_fast": 8, "beta_slow": 8, "truncate": False}, 1e4),
    "yarn, no room for a ramp": ({**YARN, "original_max_position_embeddings": 6}, 1e4),
}


def hf_config(scaling, theta, head_dim):
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- against transformers -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers_bit_for_bit(case, head_dim):
    scaling, theta = CASES[case]
    rope, config = Rope(head_dim, theta=theta, scaling=scaling), hf_config(scaling, theta, head_dim)
    if rope.kind == "default":
        want, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        want, factor = ROPE_INIT_FUNCTIONS[rope.kind](config)
    assert torch.equal(rope.inv_freq, want) and rope.inv_freq.dtype == torch.float32
    assert rope.attention_factor == factor


@pytest.mark.parametrize("case", CASES)
def test_rotation_is_that_of_transformers_bit_for_bit(case):
    scaling, theta = CASES[case]
    q, k = rand(2, 4, 6, 64), rand(2, 2, 6, 64, seed=1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 1000, 8191, 8192, 131071]])
    cos, sin = LlamaRotaryEmbedding(hf_config(scaling, theta, 64))(q, positions)
    want_q, want_k = apply_rotary_pos_emb(q, k, cos, sin)
    rope = Rope(64, theta=theta, scaling=scaling)
    assert torch.equal(rope(q, positions), want_q) and torch.equal(rope(k, positions), want_k)


def test_the_old_name_of_the_type():
    new = Rope(64, theta=1e4, scaling=YARN)
    old = Rope(64, theta=1e4, scaling={**{n: x for n, x in YARN.items() if n != "rope_type"}, "type": "yarn"})
    assert torch.equal(new.inv_freq, old.inv_freq) and old.kind == "yarn"


def test_partial_rotation_is_that_of_transformers():
    config = Glm4MoeConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    )
    q, k, positions = rand(1, 4, 5, 64), rand(1, 2, 5, 64, seed=1), torch.arange(3, 8)
    want_q, want_k = glm_apply(q, k, *Glm4MoeRotaryEmbedding(config)(q, positions[None]))
    rope = Rope(64, theta=1e4, partial=0.5, scaling=config.rope_parameters)
    assert rope.rot_dim == 32
    assert torch.equal(rope(q, positions), want_q) and torch.equal(rope(k, positions), want_k)


def test_interleaved_rotation_is_that_of_transformers_in_its_own_order():
    q, k, positions = rand(1, 4, 5, 16), rand(1, 2, 5, 16, seed=1), torch.arange(5)
    rope = Rope(16, theta=1e4, interleaved=True)
    cos, sin = (torch.cat((x, x), -1)[None] for x in rope.cos_sin(positions))
    for got, want in zip(
        (rope(q, positions), rope(k, positions)), apply_rotary_pos_emb_interleave(q, k, cos, sin)
    ):
        reordered = torch.cat((got[..., 0::2], got[..., 1::2]), -1)  # transformers returns halves
        assert torch.equal(reordered, want)


# --- conventions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 7, 100])
def test_which_pair_turns(position):
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    c, s = math.cos(position), math.sin(position)  # the first pair turns one radian per token
    at = torch.tensor([position])
    assert Rope(4, theta=1e4)(x, at)[0].tolist() == pytest.approx([c, 0, s, 0], abs=1e-15)
    assert Rope(4, theta=1e4, interleaved=True)(x, at)[0].tolist() == pytest.approx([c, s, 0, 0], abs=1e-15)


def test_the_angles_are_the_definition():
    rope = Rope(6, theta=100.0)
    cos, sin = rope.cos_sin(torch.tensor([[3], [5]]), dtype=torch.float64)
    assert cos.shape == sin.shape == (2, 1, 3)
    for b, position in enumerate((3, 5)):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            assert cos[b, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-6)  # inv_freq is float32
            assert sin[b, 0, i].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_permuting_the_pairs_turns_one_order_into_the_other():
    x, positions = rand(2, 3, 5, 16), torch.arange(5)
    halves = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    got = Rope(16, theta=1e4)(halves, positions)
    want = Rope(16, theta=1e4, interleaved=True)(x, positions)
    assert torch.equal(got, torch.cat((want[..., 0::2], want[..., 1::2]), -1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("case", ["default", "llama-3.1", "yarn"])
def test_scores_depend_on_differences_only(interleaved, partial, case):
    scaling, theta = CASES[case]
    rope = Rope(32, theta=theta, scaling=scaling, interleaved=interleaved, partial=partial)
    q, k = rand(1, 1, 4, 32, dtype=torch.float64), rand(1, 1, 4, 32, seed=1, dtype=torch.float64)
    at = torch.tensor([0, 1, 5, 9])
    want = rope(q, at) @ rope(k, at).transpose(-2, -1)
    for shift in (1, 17, 100_000):
        got = rope(q, at + shift) @ rope(k, at + shift).transpose(-2, -1)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    # and they do depend on the differences
    assert (rope(q, at) @ rope(k, at + 1).transpose(-2, -1) - want).abs().max() > 0.1


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_leaves_the_rest_untouched(interleaved):
    x, positions = rand(2, 3, 5, 20), torch.arange(5) + 3
    rope = Rope(20, theta=1e4, partial=0.4, interleaved=interleaved)
    got = rope(x, positions)
    assert rope.rot_dim == 8 and torch.equal(got[..., 8:], x[..., 8:])
    assert torch.equal(got[..., :8], Rope(8, theta=1e4, interleaved=interleaved)(x[..., :8], positions))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_keeps_lengths_and_position_zero(interleaved):
    x, rope = rand(1, 2, 6, 16, dtype=torch.float64), Rope(16, theta=1e4, interleaved=interleaved)
    got = rope(x, torch.arange(6))
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), rtol=1e-14, atol=0)
    assert torch.equal(got[:, :, 0], x[:, :, 0])


def test_yarn_multiplies_lengths_by_the_attention_factor():
    x, rope = rand(1, 2, 6, 16, dtype=torch.float64), Rope(16, theta=1e4, scaling=YARN)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    got = rope(x, torch.arange(6))
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1) * rope.attention_factor, rtol=1e-14, atol=0)


def test_each_row_of_a_batch_at_its_own_positions():
    x, rope = rand(2, 3, 4, 16), Rope(16, theta=1e4)
    positions = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    got = rope(x, positions)
    for b in range(2):
        assert torch.equal(got[b], rope(x[b], positions[b]))
    assert torch.equal(rope.apply_rope(x, *rope.cos_sin(positions)), got)


def test_one_token_at_a_time_equals_all_at_once():
    x, rope = rand(1, 3, 9, 64), Rope(64, theta=1e4, scaling=LLAMA3)
    want = rope(x, torch.arange(9))
    got = torch.cat([rope(x[:, :, i : i + 1], torch.tensor([i])) for i in range(9)], dim=2)
    assert torch.equal(got, want)


# --- dtypes, autograd, state ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tol", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_is_rotated_in_float32(dtype, tol, interleaved):
    x, rope = rand(1, 2, 50, 64, dtype=dtype), Rope(64, theta=1e4, interleaved=interleaved)
    got = rope(x, torch.arange(50) + 5000)
    assert got.dtype == dtype
    assert torch.equal(got, rope(x.float(), torch.arange(50) + 5000).to(dtype))  # one rounding
    want = rope(x.double(), torch.arange(50) + 5000)
    assert torch.linalg.norm(got.double() - want) <= tol * torch.linalg.norm(want)


def test_float64_uses_float64_angles():
    rope, far = Rope(64, theta=1e4), torch.tensor([100_003])
    cos, _ = rope.cos_sin(far)
    precise, _ = rope.cos_sin(far, dtype=torch.float64)
    assert cos.dtype == torch.float32 and precise.dtype == torch.float64
    for got, f in zip(precise[0].tolist(), rope.inv_freq.tolist()):
        assert got == pytest.approx(math.cos(100_003 * f), abs=1e-10)
    assert 1e-4 < (cos - precise).abs().max() < 1e-2  # what float32 angles cost so far out
    other = Rope(64, theta=1e4)  # asked in the other order
    assert torch.equal(other.cos_sin(far, dtype=torch.float64)[0], precise)
    assert torch.equal(other.cos_sin(far)[0], cos)
    x = rand(1, 1, 1, 64, dtype=torch.float64)
    assert torch.equal(rope(x, far), rope.apply_rope(x, *rope.cos_sin(far, dtype=torch.float64)))


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_and_inputs(interleaved, partial):
    rope = Rope(8, theta=1e4, interleaved=interleaved, partial=partial)
    x, positions = rand(2, 1, 3, 8, dtype=torch.float64).requires_grad_(), torch.tensor([2, 5, 11])
    before = x.detach().clone()
    assert torch.autograd.gradcheck(lambda x: rope(x, positions), (x,))
    assert torch.equal(x, before) and positions.tolist() == [2, 5, 11]


def test_no_tokens():
    rope = Rope(8, theta=1e4)
    assert rope(rand(2, 3, 0, 8), torch.arange(0)).shape == (2, 3, 0, 8)
    assert rope(rand(0, 3, 4, 8), torch.arange(4)).shape == (0, 3, 4, 8)


def test_copies_and_pickles():
    rope = Rope(8, theta=1e4, scaling=YARN)
    x, positions = rand(1, 1, 3, 8), torch.arange(3)
    for twin in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert torch.equal(twin(x, positions), rope(x, positions))


def test_the_scaling_dict_is_left_as_it_was():
    scaling = dict(YARN)
    Rope(8, theta=1e4, scaling=scaling)
    assert scaling == YARN


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theta", [0, 0.0, -1e4, NAN, INF, True])
def test_bad_theta(theta):
    with pytest.raises(ValueError, match="theta must"):
        Rope(64, theta=theta)


def test_theta_has_no_default():
    with pytest.raises(TypeError):
        Rope(64)


@pytest.mark.parametrize("head_dim, partial", [(7, 1.0), (0, 1.0), (-2, 1.0), (64, 0.01), (6, 0.5)])
def test_a_rotated_width_that_cannot_be(head_dim, partial):
    with pytest.raises(ValueError, match="head_dim="):
        Rope(head_dim, theta=1e4, partial=partial)


@pytest.mark.parametrize("partial", [0, 0.0, -0.5, 1.5, NAN])
def test_bad_partial(partial):
    with pytest.raises(ValueError, match="partial must"):
        Rope(64, theta=1e4, partial=partial)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "YARN", None, 3])
def test_unknown_scaling_lists_the_known(kind):
    with pytest.raises(ValueError, match="scaling type must be one of default, linear, llama3, yarn, got"):
        Rope(64, theta=1e4, scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("kind, field", [(kind, field) for kind in SCALINGS for field in SCALINGS[kind]])
def test_a_missing_or_bad_field_is_named(kind, field):
    full = {"linear": dict(rope_type="linear", factor=2.0), "llama3": LLAMA3, "yarn": YARN}[kind]
    Rope(64, theta=1e4, scaling=full)
    without = {n: x for n, x in full.items() if n != field}
    for scaling in (without, {**full, field: None}):
        with pytest.raises(ValueError, match=f"{field}.* must .* got None"):
            Rope(64, theta=1e4, scaling=scaling)
    for bad in (0, -1.0, NAN, INF, "8", True):
        with pytest.raises(ValueError, match=field):
            Rope(64, theta=1e4, scaling={**full, field: bad})


@pytest.mark.parametrize("field", ["attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"])
@pytest.mark.parametrize("bad", [-1.0, NAN, INF])
def test_a_bad_optional_field_of_yarn_is_named(field, bad):
    with pytest.raises(ValueError, match=field):
        Rope(64, theta=1e4, scaling={**YARN, field: bad})


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({**LLAMA3, "low_freq_factor": 4.0}, "high_freq_factor"),
        ({**YARN, "rope_theta": 5e5}, "rope_theta"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_values_that_contradict_each_other(scaling, message):
    with pytest.raises(ValueError, match=message):
        Rope(64, theta=1e4, scaling=scaling)


def test_yarn_needs_a_base_above_one():
    with pytest.raises(ValueError, match="theta"):
        Rope(64, theta=1.0, scaling=YARN)


def test_shapes_that_do_not_fit():
    rope = Rope(8, theta=1e4)
    cos, sin = rope.cos_sin(torch.arange(3))
    apply = inspect.unwrap(Rope.apply_rope)  # past the shape check that the tests install
    with pytest.raises(ValueError, match="x must .* head_dim=8, got 6"):
        apply(rope, torch.zeros(1, 1, 3, 6), cos, sin)
    with pytest.raises(ValueError, match="cos and sin"):
        apply(rope, torch.zeros(1, 1, 3, 8), cos[:, :2], sin[:, :2])
    with pytest.raises(ValueError, match="cos and sin"):
        apply(rope, torch.zeros(1, 1, 3, 8), cos, sin[:2])
    with pytest.raises(ValueError, match="dtype"):
        rope.cos_sin(torch.arange(3), dtype=torch.float16)
