"""How a router chooses experts: the rule of each family, as the fields of one frozen record.

The counts of this package do not depend on it; the layers that route do (`companion.moe`). It stands here
because there is one parser of configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

SCORES = ("softmax", "sigmoid", "topk_softmax")
GROUP_SCORES = ("top2_sum", "max")


@dataclass(frozen=True)
class RoutingSpec:
    """From a row of logits to chosen experts and their weights.

    score        "softmax" over all experts; "sigmoid" of each; "topk_softmax": choose by logits, then softmax
                 over the chosen ones (gpt-oss)
    renormalize  the weights of the chosen experts are divided by their sum
    groups       experts stand in so many equal groups, of which a token may use `topk_groups`
    group_score  what ranks a group: "max" of its scores (DeepSeek-V2), or the sum of its two best (V3)
    scaling      factor on the weights, last
    """

    score: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2_sum"
    scaling: float = 1.0

    def check(self, experts: int, top_k: int) -> None:
        """Raise a ValueError, naming the field, if this rule cannot choose `top_k` of `experts`."""
        check_routing(
            experts, top_k, self.score, self.groups, self.topk_groups, self.group_score, self.scaling
        )


def check_routing(
    experts: int, top_k: int, score: str, groups: int, topk_groups: int, group_score: str, scaling: float
) -> None:
    """Raise a ValueError, naming the argument, for a rule that cannot choose `top_k` of `experts`."""
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}; got {score!r}")
    if group_score not in GROUP_SCORES:
        raise ValueError(
            f"group_score must be one of {', '.join(map(repr, GROUP_SCORES))}; got {group_score!r}"
        )
    for name, value in (("top_k", top_k), ("groups", groups), ("topk_groups", topk_groups)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if top_k > experts:
        raise ValueError(f"top_k must be at most the number of experts, {experts}; got {top_k}")
    if experts % groups:
        raise ValueError(f"groups must divide the number of experts, {experts}; got {groups}")
    if topk_groups > groups:
        raise ValueError(f"topk_groups must be at most groups={groups}, got {topk_groups}")
    size = experts // groups
    if topk_groups * size < top_k:
        raise ValueError(
            f"topk_groups={topk_groups} groups of {size} experts are fewer than top_k={top_k}; "
            f"need at least {-(-top_k // size)}"
        )
    if groups > 1 and group_score == "top2_sum" and size < 2:
        raise ValueError(f"group_score='top2_sum' needs groups of at least 2 experts, got {groups} of {size}")
    if isinstance(scaling, bool) or not isinstance(scaling, int | float) or not math.isfinite(scaling):
        raise ValueError(f"scaling must be a finite number, got {scaling!r}")


def routing_of(read: Any, family: str, experts: int, top_k: int) -> dict[str, Any]:
    """The fields `routing`, `swiglu_limit` and `swiglu_alpha` of a MoESpec, out of a configuration.

    read    the reader of the configuration (config.py)
    family  its model type; of one that is not listed here the rule is unknown, and `routing` None

    Defaults are those of the families' classes in transformers 5. Raises ValueError naming the field where
    the file contradicts itself or states a rule that its family does not have.
    """
    more: dict[str, Any] = {}
    if family == "mixtral":
        rule = RoutingSpec()
    elif family in ("qwen2_moe", "qwen3_moe", "olmoe"):
        rule = RoutingSpec(renormalize=read.flag("norm_topk_prob", False))
    elif family == "gpt_oss":
        rule = RoutingSpec("topk_softmax")
        more["swiglu_limit"] = _number(read, "swiglu_limit", 7.0)
        more["swiglu_alpha"] = _number(read, "swiglu_alpha", 1.702)
    elif family == "deepseek_v2":
        rule = _deepseek_v2(read)
    elif family in ("deepseek_v3", "glm4_moe"):
        _only(read, "scoring_func", "sigmoid")
        _only(read, "topk_method", "noaux_tc")
        groups, topk_groups, scaling = (8, 4, 2.5) if family == "deepseek_v3" else (1, 1, 1.0)
        rule = RoutingSpec(
            "sigmoid",
            renormalize=read.flag("norm_topk_prob", True),
            groups=read.integer("n_group", groups),
            topk_groups=read.integer("topk_group", topk_groups),
            scaling=_number(read, "routed_scaling_factor", scaling),
        )
    else:
        return {}
    try:
        rule.check(experts, top_k)
    except ValueError as error:
        raise ValueError(f"{read.owner}: {error}") from None
    return {"routing": rule, **more}


def _deepseek_v2(read: Any) -> RoutingSpec:
    """Softmax, never renormalised; groups only under its own method."""
    _only(read, "scoring_func", "softmax")
    if read.flag("norm_topk_prob", False):
        raise ValueError(f"{read.owner}: norm_topk_prob must be false in this family, got True")
    scaling = _number(read, "routed_scaling_factor", 1.0)
    method = read.text("topk_method", "greedy")
    if method == "greedy":
        return RoutingSpec(renormalize=False, scaling=scaling)
    if method != "group_limited_greedy":
        raise ValueError(f"{read.owner}: topk_method must be greedy or group_limited_greedy, got {method!r}")
    groups, topk_groups = read.integer("n_group"), read.integer("topk_group")
    return RoutingSpec("softmax", False, groups, topk_groups, "max", scaling)


def _number(read: Any, field: str, default: float) -> float:
    value = read.raw(field)
    return default if value is None else read.number(field, value)


def _only(read: Any, field: str, accepted: str) -> None:
    if read.text(field, accepted) != accepted:
        raise ValueError(
            f"{read.owner}: {field} must be {accepted!r} in this family, got {read.raw(field)!r}"
        )
