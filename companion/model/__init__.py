"""A real decoder, small enough to read: blocks, loading from files, and the tokenizer."""

from .decoder import Decoder, from_transformers, right_padded
from .families import FAMILIES
from .load import load
from .tokenizer import Tokenizer
from .weights import quantize_weights

__all__ = [
    "FAMILIES",
    "Decoder",
    "Tokenizer",
    "from_transformers",
    "load",
    "quantize_weights",
    "right_padded",
]
