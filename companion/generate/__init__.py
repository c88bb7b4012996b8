"""From logits to text: choosing a token, the loop around it, several tokens per pass, text that streams."""

from .drafts import DecoderDraft, Draft, MTPDraft, MTPHead, NgramDraft, Proposal
from .lengths import Adaptive, measure_pass_cost
from .loop import Generation, TextStream, generate
from .sampling import Sampler, greedy, probabilities
from .speculative import Speculation, accept, acceptance, speculate, verify

__all__ = [
    "Adaptive",
    "DecoderDraft",
    "Draft",
    "Generation",
    "MTPDraft",
    "MTPHead",
    "NgramDraft",
    "Proposal",
    "Sampler",
    "Speculation",
    "TextStream",
    "accept",
    "acceptance",
    "generate",
    "greedy",
    "measure_pass_cost",
    "probabilities",
    "speculate",
    "verify",
]
