"""Rotary positions: a token's position becomes a rotation of pairs of numbers in its query and key.

Pair i of a head turns by the angle `position * inv_freq[i]`, with `inv_freq[i] = theta ** (-2 i / rot_dim)`:
the first pair turns a radian per token, the last one hardly at all. Rotating q by angle a and k by angle b
leaves a score that depends on a - b only, so positions are relative although each token is rotated once.

Source: Su et al. 2021, "RoFormer", section 3.2. Scalings: position interpolation (Chen et al. 2023), Llama
3.1 (Meta's configuration files), YaRN (Peng et al. 2023, section 3), with the field names and the defaults
of Hugging Face configurations.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .checks import choice, positive, require

Number = int | float

SCALINGS: dict[str, tuple[str, ...]] = {  # accepted kinds and the fields each must have
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


class Rope:
    """Rotary position embedding of one attention head.

    head_dim: width D of a head.
    theta: base of the geometric series of frequencies (`rope_theta` of a configuration); no default, because
        a wrong base gives fluent nonsense rather than an error.
    scaling: None, or a Hugging Face `rope_scaling` / `rope_parameters` dict of type "default", "linear",
        "llama3" or "yarn". Values that repeat `theta` or `partial` must agree with them.
    interleaved: False pairs dimension i with i + rot_dim/2 (half-split: Llama, Qwen, most checkpoints on
        Hugging Face); True pairs 2i with 2i + 1 (GPT-J, DeepSeek, Llama's own weight files). The order of the
        dimensions is kept, so x = [1, 0, 0, 0] turns into [cos, 0, sin, 0] or into [cos, sin, 0, 0].
    partial: fraction of the head that turns; the first `rot_dim = int(head_dim * partial)` dimensions do, the
        rest pass through unchanged.

    Attributes: `inv_freq` float32 [rot_dim / 2], radians per token; `rot_dim`; `attention_factor`, by which
    cos and sin are multiplied (YaRN; 1.0 otherwise).

    Raises ValueError for a scaling type that is not listed, a field that it lacks, a base or a factor that is
    not a positive finite number, or a rotated width that is odd or zero.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: Number,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        partial: Number = 1.0,
    ):
        positive("theta", theta)
        positive("partial", partial, 1)
        scaling = dict(scaling or {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        _check_scaling(kind, scaling, theta, partial)
        rot_dim = int(head_dim * partial)
        if rot_dim < 2 or rot_dim % 2:
            raise ValueError(
                f"head_dim={head_dim} with partial={partial} rotates {rot_dim} dimensions; "
                "need an even number, at least 2 and at most head_dim"
            )
        self.head_dim, self.rot_dim, self.interleaved = head_dim, rot_dim, interleaved
        self.theta, self.kind, self.partial = theta, kind, partial
        self.inv_freq, self.attention_factor = _frequencies(kind, rot_dim, theta, scaling)
        self._placed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __repr__(self) -> str:
        order = "interleaved" if self.interleaved else "half-split"
        return f"Rope({self.head_dim}, theta={self.theta}, {self.kind}, {order}, partial={self.partial})"

    def cos_sin(
        self, positions: Int[Tensor, "*rows"], *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "*rows half"], Float[Tensor, "*rows half"]]:
        """Cosine and sine of every angle, each of shape positions.shape + (rot_dim / 2,).

        positions: integers, (S,) or (B, S). Compute the pair once per step and reuse it in all layers.
        dtype: torch.float32, where angles are rounded exactly as transformers rounds them, or torch.float64,
            where the same float32 frequencies give angles, cosines and sines in double precision (so that a
            float64 model has one definition, of which the float32 model is the rounding).
        """
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        angle = positions.to(dtype)[..., None] * self._inv_freq(positions.device, dtype)
        cos, sin = angle.cos(), angle.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin

    def apply_rope(
        self,
        x: Float[Tensor, "*batch S D"],
        cos: Float[Tensor, "*rows half"],
        sin: Float[Tensor, "*rows half"],
    ) -> Float[Tensor, "*batch S D"]:
        """Rotate x by the angles of `cos_sin`; returns a new tensor of x's dtype.

        x: (..., S, D), most often (B, H, S, D). cos, sin: (S, rot_dim/2), the same positions for every row,
        or (B, S, rot_dim/2), with each row of the batch at its own positions. float16 and bfloat16 are
        rotated in float32 and rounded once.
        """
        half = self.rot_dim // 2
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x must be of width head_dim={self.head_dim}, got {x.shape[-1]}")
        if cos.shape[-1] != half or cos.shape != sin.shape:
            got = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            raise ValueError(f"cos and sin must be of one shape (..., {half}), got {got}")
        if cos.ndim == 3 and x.ndim == 4:
            cos, sin = cos[:, None], sin[:, None]  # one axis for the heads
        turned = x if self.rot_dim == self.head_dim else x[..., : self.rot_dim]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        out = out.to(x.dtype)
        return out if turned is x else torch.cat((out, x[..., self.rot_dim :]), dim=-1)

    def __call__(
        self, x: Float[Tensor, "*batch S D"], positions: Int[Tensor, "*rows S"]
    ) -> Float[Tensor, "*batch S D"]:
        """Rotate x (..., S, D) by its positions, (S,) or (B, S); float64 inputs use float64 angles."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return self.apply_rope(x, *self.cos_sin(positions, dtype=dtype))

    def turn(self, x: Float[Tensor, "*batch S D"], by: Int[Tensor, "*rows S"]) -> Float[Tensor, "*batch S D"]:
        """Turn what is rotated already by so many more positions; negative numbers turn it back.

        x (..., S, D), by (S,) or (B, S): x at position p becomes x at p + by. YaRN's factor, which x carries
        since its first rotation, is not applied again.
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = self.cos_sin(by, dtype=dtype)
        return self.apply_rope(x, cos / self.attention_factor, sin / self.attention_factor)

    def _inv_freq(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (device, dtype)
        if key not in self._placed:  # copied to a device once, not once per step
            self._placed[key] = self.inv_freq.to(device=device, dtype=dtype)
        return self._placed[key]


def _check_scaling(kind: Any, scaling: dict[str, Any], theta: Number, partial: Number) -> None:
    for field in SCALINGS[choice("scaling type", kind, SCALINGS)]:
        positive(f"scaling[{field!r}]", scaling.get(field))
    for field in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if kind == "yarn" and scaling.get(field):  # None and 0 mean "not given", as in transformers
            positive(f"scaling[{field!r}]", scaling[field])
    for field, name, given in (("rope_theta", "theta", theta), ("partial_rotary_factor", "partial", partial)):
        agrees = scaling.get(field, given) in (None, given)
        require(agrees, f"scaling[{field!r}]", f"the same as {name}={given}", scaling.get(field))
    if kind == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
        raise ValueError("scaling: low_freq_factor and high_freq_factor are equal; they must differ")
    require(kind != "yarn" or theta > 1, "theta", "above 1 for yarn scaling", theta)


def _frequencies(kind: str, rot_dim: int, theta: Number, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Radians per token of each pair, float32, and the factor on cos and sin.

    The order of the operations is that of transformers, so that the float32 results are equal bit for bit.
    """
    wavelength_over_2pi = theta ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim)
    inv_freq = 1.0 / wavelength_over_2pi
    if kind == "linear":
        return inv_freq / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if kind == "yarn":
        slowed = 1.0 / (scaling["factor"] * wavelength_over_2pi)
        keep = 1 - _yarn_ramp(rot_dim, theta, scaling)  # 1: as trained; 0: positions divided by the factor
        return slowed * (1 - keep) + inv_freq * keep, _yarn_attention_factor(scaling)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow pairs are divided by the factor, fast pairs kept, those between are blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq  # tokens per full turn
    is_slow, is_fast = wavelength > trained / low, wavelength < trained / high
    scaled = torch.where(is_slow, inv_freq / factor, inv_freq)
    keep = (trained / wavelength - low) / (high - low)
    blended = (1 - keep) * scaled / factor + keep * scaled
    return torch.where(is_slow | is_fast, scaled, blended)


def _yarn_ramp(rot_dim: int, theta: Number, scaling: dict[str, Any]) -> Tensor:
    """0 for pairs that turn often within the trained length, 1 for those that never finish a turn."""
    trained = scaling["original_max_position_embeddings"]

    def pair_with(turns: Number) -> float:  # the (fractional) pair that turns so often in the trained length
        return rot_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.get("beta_fast") or 32), pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    return ((torch.arange(rot_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """The temperature of YaRN, section 3.4, as a factor on cos and sin (so its square is on the scores)."""
    if scaling.get("attention_factor"):
        return float(scaling["attention_factor"])
    factor = scaling["factor"]

    def mscale(weight: Number) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
