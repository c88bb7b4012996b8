"""The kernels for experts as they are launched, for the offline compiler."""

from ..aot.case import Case, Expect, Target
from .gemm import launch_of
from .kernel import combine_kernel, grouped_kernel
from .plan import gemm_tile

_INT32 = dict.fromkeys(("ORDER", "EXPERT", "OFFSETS", "TILES"), "*i32")


_SIZES = dict.fromkeys(("N", "K", "stride_xm", "stride_wn", "stride_be", "stride_om"), "i32")


_FAR = dict.fromkeys(("stride_we", "stride_up"), "i64")


_OFF = dict.fromkeys(("GATHER", "SCATTER", "GATED", "CLAMP", "HAS_BIAS", "UPCAST"), False)


_STEPS = {  # what the wrappers turn on, and the rows of 128 experts
    "grouped_gemm": {},
    "moe_up": {"GATHER": True, "GATED": True},
    "moe_down": {"SCATTER": True},
}


_LOADS = {"decode": 8, "chunk": 128 * 32, "prefill": 128 * 256}


def _case(step: str, load: str, dtype: str) -> Case:
    """A launch for 128 experts, 8 to a token, with sizes divisible by 16."""
    floats = dict.fromkeys(("X", "W", "BIAS", "OUT"), f"*{dtype}")
    if step == "moe_down":
        floats["OUT"] = "*fp32"
    hinted = floats | {"SCALE": "*fp32"} | _INT32 | _SIZES | _FAR

    def on(s: Case, target: Target) -> Case | None:
        if dtype == "bf16" and not target.has_bf16:
            return None  # the wrapper refuses it
        size, known = (4 if dtype == "fp32" else 2), target.capability or (9, 4)
        tile = gemm_tile(_LOADS[load], 128, element_bytes=size, gated=step == "moe_up", capability=known)
        launch = launch_of(tile)
        options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
        return s.but(constexprs=launch, **options, expect=Expect(matrix=size == 2 and target.has_matrix))

    return Case(
        f"{step}.{load}.{dtype}",
        grouped_kernel,
        hinted | {"limit": "fp32", "alpha": "fp32"},
        {"TOP_K": 8, **_OFF, **_STEPS[step]},
        aligned=tuple(hinted),
        adapt=on,
    )


CASES = [
    _case(step, load, dtype) for step in _STEPS for load in _LOADS for dtype in ("fp16", "bf16", "fp32")
] + [
    Case(
        f"moe_combine.{dtype}",
        combine_kernel,
        {
            "Y": "*fp32",
            "SENT": "*i8",
            "OUT": f"*{dtype}",
            **dict.fromkeys(("T", "D", "stride_ym", "stride_om"), "i32"),
        },
        {"TOP_K": 8, "BLOCK_T": 4, "BLOCK_D": 512},
        aligned=("Y", "SENT", "OUT", "D", "stride_ym", "stride_om"),
        adapt=lambda s, target: s if target.has_bf16 or "*bf16" not in s.signature.values() else None,
    )
    for dtype in ("fp16", "bf16", "fp32")
]
