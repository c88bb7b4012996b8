"""One layer of a decoder: attention and a feed-forward, each behind a norm, added to the residual stream."""

from torch import nn


class Block(nn.Module):
    """One layer: two additions to the residual stream, attention's and the feed-forward's."""

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, ffn_norm: nn.Module, ffn: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        x = x + self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        return x + self.ffn(self.ffn_norm(x))


class SandwichBlock(Block):
    """The same, with a second norm on what each part adds (Gemma 2 and 3)."""

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        ffn_norm: nn.Module,
        ffn: nn.Module,
        attention_after: nn.Module,
        ffn_after: nn.Module,
    ):
        super().__init__(attention_norm, attention, ffn_norm, ffn)
        self.attention_after, self.ffn_after = attention_after, ffn_after

    def forward(self, x, rope, cos, sin, cache=None, lengths=None):
        added = self.attention(self.attention_norm(x), rope, cos, sin, cache, lengths)
        x = x + self.attention_after(added)
        return x + self.ffn_after(self.ffn(self.ffn_norm(x)))
