"""How many slots a sequence takes in each kind of engine: what its layers need, and what pages make of it.

A slot is the room for one token in one layer.

| pages | a sliding layer holds | which engine |
|---|---|---|
| "exact" | min(n, window) tokens | a cache per layer; with a block size, n rounded up to whole blocks |
| "grouped" | the blocks that its window can touch, and padding | vLLM's hybrid manager: one pool of pages |
| "unified" | every token | one block table for all layers (vLLM with --disable-hybrid-kv-cache-manager) |

"grouped": layers are put into groups of equal size, so that a page of any group has the same bytes. The size
is the number of layers of the rarer kind (or of the commoner one, where that is less than half as many
again); a group that is not full is padded. A sliding group keeps the window and the tokens of a step, and
one block more, since a window seldom begins where a block does.
Source: vLLM, docs/design/hybrid_kv_cache_manager.md; `_get_kv_cache_groups_uniform_page_size` and
`SlidingWindowSpec.max_admission_blocks_per_request` of version 0.32.0. Other versions pad otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import ModelSpec, whole

PAGES = ("exact", "grouped", "unified")
BLOCK = 16  # tokens per block where an engine has pages and no other number is given: vLLM's default


@dataclass(frozen=True)
class Pages:
    """How an engine stores the cache of `model`.

    kind   what a layer with a window holds:
           "exact"    min(n, window) tokens; with a block size, n rounded up to whole blocks
           "grouped"  the blocks that its window can touch, in equal groups of layers over one pool of
                      pages (vLLM's hybrid manager)
           "unified"  every token: one block table for all layers (vLLM without that manager)
    block  tokens per block; 1 for a cache without blocks
    step   tokens that a step may write (vLLM's --max-num-batched-tokens): while a long prompt is read, a
           sliding group holds them beside its window. Used by "grouped" only
    """

    model: ModelSpec
    kind: str = "exact"
    block: int = 1
    step: int = 1

    def __post_init__(self) -> None:
        if self.kind not in PAGES:
            raise ValueError(f"pages must be one of {', '.join(PAGES)}, got {self.kind!r}")
        whole("size", "block_size", self.block)
        whole("size", "step_tokens", self.step)

    def rounded(self, context: int) -> int:
        """`context` in whole blocks, in tokens."""
        return -(-context // self.block) * self.block

    def slots(self, context: int) -> int:
        """Slots that one sequence of `context` tokens takes, over all layers."""
        model, tokens = self.model, self.rounded(context)
        if self.kind == "unified" or not model.sliding_layers:
            return model.layers * tokens
        if self.kind == "exact":
            return model.full_layers * tokens + model.sliding_layers * min(tokens, model.window)
        layers = group_layers(model.full_layers, model.sliding_layers)
        held = -(-min(model.window - 1 + self.step, context) // self.block) + 1 if context else 0
        blocks = -(-model.full_layers // layers) * (tokens // self.block)
        blocks += -(-model.sliding_layers // layers) * held
        return blocks * layers * self.block

    def most_tokens(self, slots: int) -> int | None:
        """The longest context, in whole blocks, whose cache fits in `slots`; None: any context does."""
        model = self.model
        if self.kind != "grouped" or not model.sliding_layers:
            every = self.kind == "unified" or not model.sliding_layers
            tokens = slots // model.layers
            if not every and tokens >= model.window:
                if not model.full_layers:
                    return None
                tokens = (slots - model.sliding_layers * model.window) // model.full_layers
            return tokens // self.block * self.block
        if not model.full_layers and self.slots(model.window + self.step) <= slots:
            return None
        low, high = 0, 1  # in blocks; `slots` grows with the context
        while self.slots(high * self.block) <= slots:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slots(middle * self.block) <= slots else (low, middle)
        return low * self.block


def group_layers(full: int, sliding: int) -> int:
    """Layers of a group, for so many layers of each kind.

    >>> group_layers(12, 12), group_layers(10, 52), group_layers(13, 12)
    (12, 10, 13)
    """
    kinds = [n for n in (full, sliding) if n]
    return max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)
