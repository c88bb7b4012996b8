"""What speculation promises: tokens per pass, the price of a pass, and the draft length that pays best.

A pass of the target over gamma drafted tokens and one more yields 1 to gamma + 1 tokens. If each draft is
accepted with probability alpha, independently of the others, it yields

    E = 1 + alpha + ... + alpha**gamma = (1 - alpha**(gamma + 1)) / (1 - alpha)

tokens (Leviathan et al. 2023, equation 1). Whether that is a gain depends on what a pass of gamma + 1 rows
costs beside a pass of one: nearly nothing where reading the weights is all that counts, more on a processor
whose products slow down from the second row on, and for experts, of which more rows touch more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from ..checks import whole
from .registry import HardwareSpec
from .spec import ModelSpec
from .step import StepCost, prefill

PassCost = Callable[[int], Real]  # rows -> time of a pass, in passes of one row


def expected_tokens(alpha: Real, gamma: int) -> float:
    """Tokens per pass, 1 to gamma + 1, at acceptance alpha (0 to 1) of each of gamma drafts.

    >>> expected_tokens(0.8, 4)
    3.3616
    """
    gamma = whole("gamma", gamma, 0, owner="expected_tokens")
    if not isinstance(alpha, Real) or not 0 <= alpha <= 1:
        raise ValueError(f"expected_tokens: alpha must be a number from 0 to 1, got {alpha!r}")
    return float(math.fsum(alpha**i for i in range(gamma + 1)))  # the sum has no 0 / 0 at alpha = 1


def speculative_speedup(
    alpha: Real, gamma: int, *, pass_cost: PassCost | Real = 1.0, draft_cost: Real = 0.0
) -> float:
    """How many times faster than plain decoding: tokens per pass over the price of a pass.

    pass_cost   time of the target's pass of gamma + 1 rows, in its passes of one row: a number, or a
                function of the rows. 1 is the ideal of the papers
    draft_cost  time of one drafted token in the same unit; 0 for a look-up

    With pass_cost 1 this is theorem 3.8 of Leviathan et al. 2023.
    """
    rows = whole("gamma", gamma, 0, owner="speculative_speedup") + 1
    price = pass_cost(rows) if callable(pass_cost) else pass_cost
    for name, value, least in (("pass_cost", price, 0), ("draft_cost", draft_cost, -1)):
        if not isinstance(value, Real) or not least < value < math.inf or value < 0:
            raise ValueError(f"speculative_speedup: {name} must be a positive finite number, got {value!r}")
    return expected_tokens(alpha, gamma) / (price + gamma * draft_cost)


def best_draft_length(
    alpha: Real, *, pass_cost: PassCost | Real = 1.0, draft_cost: Real = 0.0, longest: int = 8
) -> int:
    """The draft length, 0 to `longest`, of the largest speed-up; the shortest among equals."""
    lengths = range(whole("longest", longest, 0, owner="best_draft_length") + 1)
    price = pass_cost if callable(pass_cost) else lambda rows: 1.0 if rows == 1 else pass_cost
    gains = [speculative_speedup(alpha, n, pass_cost=price, draft_cost=draft_cost) for n in lengths]
    return gains.index(max(gains))


def verify_pass(
    model: ModelSpec | str, hardware: HardwareSpec | str, rows: int, context: int, **options
) -> StepCost:
    """One pass of the target over `rows` tokens of one sequence, all of whose logits are wanted.

    context  tokens in the cache behind it, these included. options: those of `prefill`, which this is:
             weights and cache are read once, products are made for every row, and with experts the weights
             are those that so many tokens are expected to touch.
    """
    rows = whole("rows", rows, owner="verify_pass")
    if whole("context", context, owner="verify_pass") < rows:
        raise ValueError(f"verify_pass: context must be at least rows={rows}, got {context}")
    return prefill(model, hardware, rows, cached=context - rows, logits="all", **options)


def predicted_pass_cost(
    model: ModelSpec | str, hardware: HardwareSpec | str, context: int, **options
) -> PassCost:
    """The price of a pass as a function of its rows, from bytes and FLOPs: `verify_pass` over that of one."""
    one = verify_pass(model, hardware, 1, context, **options).seconds
    return lambda rows: verify_pass(model, hardware, rows, max(context, rows), **options).seconds / one
