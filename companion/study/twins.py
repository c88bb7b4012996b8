"""Twins: a small net with a mixture of experts, one that multiplies as much, one that stores as much.

    "moe ..."   16 experts, of which a token uses 2. Balanced by nothing, by the auxiliary loss of Switch
                Transformers, or by a bias (Wang et al. 2024); weights at the start and all else equal
    "active"    a dense feed-forward as wide as the 2 experts that a token of the mixture uses
    "total"     one as wide as all 16

Two tasks. `Reader` reads the frozen text, character by character; every tenth paragraph is for evaluation
only. The text is small, and a net that is trained for long learns it by heart: what counts is the held-out
loss, and the best along the way. `Book` is a telephone book, 4,096 pairs of names, each with one of 64
numbers drawn at random: nothing can be inferred, all has to be stored.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..checks import choice
from ..cost import RoutingSpec
from ..moe import MoE, Routing, aux_loss, gated
from ..rope import Rope
from .facts import text
from .nets import load_state, save_states

VARIANTS = ("moe bias", "moe aux", "moe none", "active", "total")
EXPERTS, TOP_K = 16, 2
AUX, RATE = 0.01, 1e-3  # the coefficients of Switch Transformers and of DeepSeek-V3
WIDTH, HEADS, LAYERS, FFN = 64, 4, 2, 64  # of a reader; FFN is the width of one expert
LENGTH, BATCH, LR, WARMUP, HELD_OUT = 64, 32, 3e-3, 50, 10
NAMES, BOOK_WIDTH, BOOK_FFN, BOOK_BATCH, BOOK_LR = 64, 32, 16, 512, 5e-3
WEIGHTS = Path(__file__).parent / "results" / "moe_twin.safetensors"


@cache
def characters() -> tuple[str, ...]:
    """The alphabet of the text, in the order of code points: the net's vocabulary."""
    return tuple(sorted(set(text())))


@cache
def split() -> tuple[Int64[Tensor, " N"], Int64[Tensor, " M"]]:
    """Ids of the training text, and of the held-out one: the paragraphs 9, 19, 29, .."""
    number = {c: i for i, c in enumerate(characters())}
    lines = text().splitlines(keepends=True)
    held = [i % HELD_OUT == HELD_OUT - 1 for i in range(len(lines))]
    return tuple(
        torch.tensor([number[c] for line, h in zip(lines, held) if h == want for c in line])
        for want in (False, True)
    )


class Reader(nn.Module):
    """ids (B, S) -> logits (B, S, V), and of each layer with experts what its router said."""

    def __init__(self, variant: str):
        super().__init__()
        self.variant = variant
        self.embed = nn.Embedding(len(characters()), WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(_Layer(variant) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, len(characters()), bias=False)

    def forward(self, ids: Int64[Tensor, "B S"]) -> tuple[Float[Tensor, "B S V"], list[Routing]]:
        x, said = self.embed(ids), []
        cos, sin = self.layers[0].rope.cos_sin(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            said += [] if routing is None else [routing]
        return self.head(self.norm(x)), said

    @property
    def mixtures(self) -> list[MoE]:
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoE)]


class _Layer(nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.rope = Rope(WIDTH // HEADS, theta=10_000.0)
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn = feed_forward(variant, WIDTH, FFN)

    def forward(self, x, cos, sin):
        B, S, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rope.apply_rope(q, cos, sin), self.rope.apply_rope(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(B, S, WIDTH))
        y, routing = self.ffn(self.norm2(x), return_routing=True)
        return x + y, routing


class Book(nn.Module):
    """Names (B, 2) -> logits (B, 64) of the number, and [what the router said], [] of a dense one."""

    def __init__(self, variant: str):
        super().__init__()
        self.variant = variant
        self.first, self.last = nn.Embedding(NAMES, BOOK_WIDTH), nn.Embedding(NAMES, BOOK_WIDTH)
        self.norm1, self.norm2 = nn.RMSNorm(BOOK_WIDTH, eps=1e-5), nn.RMSNorm(BOOK_WIDTH, eps=1e-5)
        self.ffn = feed_forward(variant, BOOK_WIDTH, BOOK_FFN)
        self.head = nn.Linear(BOOK_WIDTH, NAMES, bias=False)

    def forward(self, names: Int64[Tensor, "B 2"]) -> tuple[Float[Tensor, "B V"], list[Routing]]:
        x = self.first(names[:, 0]) + self.last(names[:, 1])
        y, routing = self.ffn(self.norm1(x), return_routing=True)
        return self.head(self.norm2(x + y)), [] if routing is None else [routing]

    @property
    def mixtures(self) -> list[MoE]:
        return [self.ffn] if isinstance(self.ffn, MoE) else []


class Dense(nn.Module):
    """One gated feed-forward of `width`: an expert's formula, and a mixture's signature."""

    def __init__(self, d: int, width: int):
        super().__init__()
        self.w1 = nn.Linear(d, 2 * width, bias=False)
        self.w2 = nn.Linear(width, d, bias=False)

    def forward(self, x, *, return_routing=True):
        return self.w2(gated(self.w1(x))), None


def feed_forward(variant: str, d: int, width: int) -> MoE | Dense:
    """The mixture of EXPERTS of `width`, or the dense twin of TOP_K or of EXPERTS times that width."""
    if not choice("variant", variant, VARIANTS).startswith("moe"):
        return Dense(d, width * (TOP_K if variant == "active" else EXPERTS))
    rule = RoutingSpec("softmax", renormalize=True)
    return MoE(d, width, EXPERTS, TOP_K, routing=rule, correction_bias=variant == "moe bias")


def read(
    variant: str, seed: int, steps: int, *, every: int = 0, tell: Callable[[Reader, int], bool] | None = None
) -> tuple[Reader, list[float]]:
    """A reader after `steps` steps, and the training loss of each step, in nats per character.

    The seed decides the weights at the start and the batches: readers of one seed read the same characters in
    the same order. every > 0: tell(net, step) every so many steps; training ends early if it returns True.
    """
    torch.manual_seed(seed)
    net, losses = Reader(variant), []
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    for step in range(1, steps + 1):
        ids = windows(split()[0], BATCH, generator)
        batch = ids[:, :-1], ids[:, 1:].flatten()
        losses.append(_step(net, optimizer, batch, LR * min(1.0, step / WARMUP)))
        if every and step % every == 0 and tell(net, step):
            break
    return net.eval(), losses


def learn(variant: str, seed: int, steps: int) -> tuple[Book, float, float]:
    """A book after `steps` steps, the share of its numbers that it knows, and its loss in nats per number.

    The seed decides the numbers, the weights at the start and the batches. The learning rate falls to 0.
    """
    numbers = torch.randint(NAMES, (NAMES**2,), generator=torch.Generator().manual_seed(100 + seed))
    names = torch.cartesian_prod(torch.arange(NAMES), torch.arange(NAMES))
    torch.manual_seed(seed)
    net = Book(variant)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), BOOK_LR, weight_decay=0.0, fused=True)
    for step in range(steps):
        i = torch.randint(NAMES**2, (BOOK_BATCH,), generator=generator)
        _step(net, optimizer, (names[i], numbers[i]), BOOK_LR * (1 - step / steps))
    with torch.no_grad():
        logits = net.eval()(names)[0]
        right = (logits.argmax(1) == numbers).float().mean().item()
        return net, right, F.cross_entropy(logits, numbers).item()


def _step(net, optimizer, batch, lr: float) -> float:
    """One step of training; the loss without what the balancing adds to it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    logits, said = net(batch[0])
    loss = alone = F.cross_entropy(logits.flatten(0, -2), batch[1])
    if net.variant == "moe aux":
        loss = loss + AUX * sum(aux_loss(r.probs, r.ids) for r in said)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if net.variant == "moe bias":
        for mixture, routing in zip(net.mixtures, said):
            mixture.rebalance(routing.ids, rate=RATE)
    return alone.item()


def windows(ids: Int64[Tensor, " N"], count: int, generator: torch.Generator) -> Int64[Tensor, "count S"]:
    """`count` pieces of LENGTH + 1 characters from random places."""
    start = torch.randint(len(ids) - LENGTH, (count, 1), generator=generator)
    return ids[start + torch.arange(LENGTH + 1)]


def pieces() -> Int64[Tensor, "P S"]:
    """The held-out text in pieces of LENGTH + 1 characters; neighbours share one."""
    return split()[1].unfold(0, LENGTH + 1, LENGTH)


@torch.no_grad()
def held_out(net: Reader, chunk: int = 64) -> tuple[float, Int64[Tensor, "L P S k"]]:
    """Nats per character of the held-out text; and the experts chosen for each, (layers, pieces, LENGTH, k).
    Of a dense reader the latter has no layers.
    """
    total, chosen, ids = 0.0, [], pieces()
    for part in ids.split(chunk):
        logits, said = net(part[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        shape = (len(said), len(part), LENGTH, TOP_K)
        chosen.append(torch.stack([r.ids for r in said]).view(shape) if said else part.new_empty(shape))
    return total / (ids.shape[0] * LENGTH), torch.cat(chosen, 1)


def save_readers(readers: dict[str, dict[str, Tensor]], path: Path = WEIGHTS) -> None:
    """Write state dicts of readers, by name of their variant, in float16."""
    save_states(readers, path)


def load_reader(variant: str, path: Path = WEIGHTS) -> Reader:
    """A stored trained reader, in float32; ValueError for a variant that is not stored."""
    state = load_state("reader", variant, path)
    net = Reader(variant)
    net.load_state_dict(state)
    return net.eval()
