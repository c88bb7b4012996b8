"""The precisions of keys and values that the study compares: name -> (codec, residual) of QuantizedCache."""

import torch

from companion.quantize import codec
from companion.study.divergence import prompt

EXACT = codec("fp32")


def token(name: str, group: int = 32, **options):
    """A scale (and a minimum) for `group` channels of each token."""
    return codec(name, group=group, **options)


def channel(name: str):
    """A scale and a minimum for 32 tokens of each channel."""
    return codec(name, group=32, group_dim=-2)


def settings(nvfp4) -> dict:
    """Everything compared, the usual ones first. nvfp4: from `calibrated`."""
    return {
        "bf16": ("bf16", 0),
        "fp16": ("fp16", 0),
        "int8": ("int8", 0),
        "fp8_e4m3": ("fp8_e4m3", 0),
        "kivi4 r0": ("kivi4", 0),
        "int4 token asym g32": (token("int4"), 0),
        "kivi2 r0": ("kivi2", 0),
        "nvfp4": (nvfp4, 0),
        "keys int2 channel": ((channel("int2"), EXACT), 0),
        "values int2 token": ((EXACT, token("int2")), 0),
        "kivi2 r128": ("kivi2", 128),
        "keys int4 channel": ((channel("int4"), EXACT), 0),
        "values int4 token": ((EXACT, token("int4")), 0),
        "values int4 channel": ((EXACT, channel("int4")), 0),
        "keys int4 token": ((token("int4"), EXACT), 0),
        "mxfp4": ("mxfp4", 0),
        "kivi4 r128": ("kivi4", 128),
        "int2 token g32": (token("int2"), 0),
        "int4 token sym g32": (token("int4", symmetric=True), 0),
        "int4 token asym g64": (token("int4", 64), 0),
        "int4 token sym g64": (token("int4", 64, symmetric=True), 0),
        "kivi4 r32": ("kivi4", 32),
        "kivi2 r32": ("kivi2", 32),
        "keys int2 token": ((token("int2"), EXACT), 0),
        "values int2 channel": ((EXACT, channel("int2")), 0),
    }


def calibrated(model, ids: list[int]) -> list:
    """nvfp4 for keys and values of each layer, tensor scales fixed by the largest numbers of a trial text."""
    held = prompt(model, torch.tensor([ids]))
    peaks = [[float(x.abs().amax()) for x in held.read(i)] for i in range(model.spec.layers)]
    return [tuple(codec("nvfp4", tensor_scale=p / (6 * 448)) for p in pair) for pair in peaks]
