"""From logits to text: choosing a token, the loop around it, and text that streams whole characters."""

from .loop import Generation, generate
from .sampling import Sampler, greedy, probabilities
from .text import TextStream

__all__ = ["Generation", "Sampler", "TextStream", "generate", "greedy", "probabilities"]
