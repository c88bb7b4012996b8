"""Training one small net on associative recall, to convergence or to the end of a budget of steps.

Used by `benchmarks.recall_trained`. All nets get the same budget of steps, optimizer, schedule and stop rule.
The seed decides the initial weights and the batches; the held-out sequences are the same for all nets.
"""

import time
from dataclasses import asdict, dataclass
from statistics import mean

import torch
import torch.nn.functional as F

from companion.study.nets import VARIANTS, RecallNet, accuracy, positions, sequences

VALIDATION_SEED, TEST_SEED = 10_001, 20_002


@dataclass(frozen=True)
class Recipe:
    """What all nets of a run share.

    pairs: of the task. A training batch has 2 to `pairs` pairs, drawn for each batch. With start < pairs, at
        most `start`, doubled whenever the last `patience` batches have a mean accuracy of `ready`.
    gap: up to so many positions are left out before the questions, drawn for each batch, so that a net meets
        the distances of longer sequences.
    warmup: steps in which the learning rate rises to `lr`; then it stays.
    A net has converged when its accuracy on `validation` held-out sequences of `pairs` pairs, looked at every
    `every` steps, is at least `target` twice in a row; training then stops.
    """

    pairs: int = 8
    start: int = 8
    patience: int = 20
    ready: float = 0.9
    gap: int = 72
    batch: int = 64
    lr: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    budget: int = 3000
    every: int = 100
    validation: int = 256
    target: float = 0.99

    def as_dict(self) -> dict:
        return {**asdict(self), "betas": list(self.betas), "optimizer": "AdamW"}


def held_out(recipe: Recipe, seed: int, count: int, pairs: int | None = None):
    """Held-out sequences: a function of seed, count and pairs alone."""
    generator = torch.Generator().manual_seed(seed)
    return sequences(count, pairs or recipe.pairs, generator, held_out=True)


def train(name: str, seed: int, recipe: Recipe, *, init=None, progress=None) -> tuple[RecallNet, dict]:
    """The net, in evaluation mode, and its record. init: a net of the same variant to go on from.

    "steps" counts the optimizer steps taken; "steps_to_0.9" and "steps_to_converge" are the step of the first
    evaluation at 0.9 or above, and of the second of two in a row at the target; None: never.
    """
    torch.manual_seed(seed)
    net = RecallNet(VARIANTS[name])
    if init is not None:
        net.load_state_dict(init.state_dict())
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        net.parameters(), recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )
    check = held_out(recipe, VALIDATION_SEED, recipe.validation)
    start, curve, steps_to_09, converged = time.process_time(), [], None, None
    losses, right, most, raised = [], [], recipe.start, []
    for step in range(1, recipe.budget + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(1.0, step / recipe.warmup)
        ids, answers, at = _batch(recipe, most, generator)
        logits = net(ids, at, last=answers.shape[1])
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.item())
        right = [*right, (logits.argmax(-1) == answers).float().mean().item()][-recipe.patience :]
        if most < recipe.pairs and len(right) == recipe.patience and mean(right) >= recipe.ready:
            most, right = min(2 * most, recipe.pairs), []
            raised.append(step)
        if step % recipe.every:
            continue
        curve.append([step, round(accuracy(net, *check), 4), round(sum(losses) / len(losses), 4)])
        losses = []
        if progress:
            progress(name, seed, *curve[-1])
        if steps_to_09 is None and curve[-1][1] >= 0.9:
            steps_to_09 = step
        if len(curve) > 1 and min(curve[-1][1], curve[-2][1]) >= recipe.target:
            converged = step
            break
    return net.eval(), {
        "net": name,
        "seed": seed,
        "parameters": sum(p.numel() for p in net.parameters()),
        "steps": step,
        "steps_to_0.9": steps_to_09,
        "steps_to_converge": converged,
        "converged": converged is not None,
        "raised": raised,
        "cpu_seconds": round(time.process_time() - start, 1),
        "curve": curve,
    }


def pooled(net: RecallNet, name: str) -> RecallNet:
    """A net with fewer key-value heads, each the mean of those it replaces (Ainslie et al. 2023, 2.1)."""
    small, d = RecallNet(VARIANTS[name]), net.spec.d_model
    had, have, state = net.spec.kv_heads, small.spec.kv_heads, net.state_dict()
    for key in state:
        if key.endswith(("key.weight", "value.weight")):
            state[key] = state[key].view(have, had // have, -1, d).mean(1).reshape(-1, d)
    small.load_state_dict(state)
    return small


def _batch(recipe: Recipe, most: int, generator: torch.Generator):
    """New training sequences of 2 to `most` pairs, their answers and positions."""
    pairs, gap = most, 0
    if most > 2:
        pairs = int(torch.randint(2, most + 1, (), generator=generator))
    if recipe.gap:
        gap = int(torch.randint(recipe.gap + 1, (), generator=generator))
    return *sequences(recipe.batch, pairs, generator, held_out=False), positions(pairs, gap)
