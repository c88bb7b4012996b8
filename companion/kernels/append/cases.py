"""`append` as it is launched, for the offline compiler."""

from ...formats import INT4
from ..aot.case import Case, Expect
from . import tiles


def _case(kind: str, kv_format: str, where: str, *, stored="", more="", latent=False) -> Case:
    """As it is launched for D = 128, or for a latent of 576. where: which of the ways to say it.

    stored: the cache's type if it is not that of the format. more: "scale" or "zero" beside the codes.
    """
    index = {"slots": ["Slots"], "lengths": ["Seqlens"], "table": ["Seqlens", "New", "Table"]}[where]
    code = stored or {"none": kind, "int8": "u8" if more == "zero" else "i8"}.get(kv_format, "u8")
    sides = "K" if latent else "KV"
    types = {x: f"*{kind}" for x in sides} | {f"{x}_cache": f"*{code}" for x in sides}
    fields = {"": [], "scale": ["scale"], "zero": ["scale", "zero"]}[more or "scale" * (kv_format[0] == "i")]
    types |= {f"{x}_{f}": "*fp16" for x in sides for f in fields} | {name: "*i32" for name in index}
    sizes = ("T", "S", "num_blocks", "block_size", "max_blocks")
    moves = [f"stride_{x}_{axis}" for x in ("kc", "vc") for axis in ("block", "token", "head")]
    moves += ["stride_kb", "stride_ks", "stride_kh", "stride_vb", "stride_vs", "stride_vh"]
    scales = [f"stride_{x}_{axis}" for x in ("ks", "vs") for axis in ("block", "token", "head")]
    ints = {name: "i32" for name in (*sizes, *moves, *scales, "stride_tb")}
    pointers = ("V", "V_cache", "K_scale", "K_zero", "V_scale", "V_zero", "Slots", "Seqlens", "New", "Table")
    absent = {name: None for name in pointers if name not in types}
    widths = tiles(576, 1) if latent else tiles(128, 128)
    return Case(
        name=f"append.{kv_format}.{kind}.{where}" + f".{more}" * bool(more) + ".latent" * latent,
        fn="companion.kernels.append.kernel:append_kernel",
        signature=types | ints | {"k_unit": "fp32", "v_unit": "fp32"},
        constexprs=absent | widths | {"FORMAT": kv_format},
        aligned=(*types, *moves),
        expect=Expect(wide=0.4 if where == "table" else 0.5),  # lengths and block numbers are narrow
    )


CASES = [
    _case("fp16", "none", "slots"),
    _case("fp16", "none", "table"),
    _case("bf16", "none", "lengths"),
    _case("bf16", "none", "slots", latent=True),
    _case("fp32", "none", "slots", stored="bf16"),
    _case("bf16", "int8", "slots"),
    _case("fp16", "int8", "lengths", more="zero"),
    _case("bf16", INT4.kernel, "slots"),
    _case("fp16", INT4.kernel, "table", more="zero"),
    _case("bf16", "fp8_e4m3", "slots"),
    _case("bf16", "fp8_e5m2", "slots", more="scale"),
]
