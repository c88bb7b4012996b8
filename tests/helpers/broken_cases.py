"""Kernels that must be found wanting, each for one reason; and one that is well."""

import os

import triton
import triton.language as tl

from companion.kernels.aot.case import Case, Expect


@triton.jit
def add_rows(X, Y, OUT, stride, D: tl.constexpr, M: tl.constexpr):
    """Row sums of x y', by a product: M rows of D numbers each."""
    m, d = tl.arange(0, M), tl.arange(0, D)
    x = tl.load(X + m[:, None] * stride + d[None, :])
    y = tl.load(Y + m[:, None] * stride + d[None, :])
    tl.store(OUT + m[:, None] * M + m[None, :], tl.dot(x, tl.trans(y)))


@triton.jit
def elementwise(X, Y, OUT, stride, D: tl.constexpr, M: tl.constexpr):
    """The same arguments without a product."""
    at = tl.arange(0, M)[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(OUT + at, tl.load(X + at) + tl.load(Y + at))


@triton.jit
def does_not_compile(X, Y, OUT, stride, D: tl.constexpr, M: tl.constexpr):
    tl.store(OUT + tl.arange(0, M), tl.arange(0, 2 * D))


def __getattr__(name):
    if name == "takes_the_compiler_along":
        os._exit(7)
    raise AttributeError(name)


def _of(name, fn=add_rows, out="*fp32", **more):
    signature = {"X": "*fp16", "Y": "*fp16", "OUT": out, "stride": "i32"}
    constants = {"D": 64, "M": 64} | more.pop("constants", {})
    return Case(name, fn, signature, constants, **{"expect": Expect(matrix=True), **more})


CASES = [
    _of("good"),
    _of("no_hints", aligned=()),
    _of("no_stride_hint", aligned=("X", "Y", "OUT")),
    _of("too_many_registers", constants={"D": 128, "M": 128}, num_warps=1),
    _of("too_much_shared", constants={"D": 1024}, expect=Expect(spills=None), num_warps=8),
    _of("no_product", elementwise, out="*fp16"),
    _of("error", does_not_compile),
    _of("crash", "broken_cases:takes_the_compiler_along"),
    _of("wrong_arguments", constants={"EXTRA": 1}),
    _of("good_again"),
    _of("not_offered", adapt=lambda s, target: None),
]
