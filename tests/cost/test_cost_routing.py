"""The router's rule, as read from configurations: defaults of the classes, and contradictions refused."""

import pytest

from companion.cost import ModelSpec, MoESpec, RoutingSpec, models

SHAPE = dict(num_hidden_layers=2, num_attention_heads=2, vocab_size=8, hidden_size=8)
SHAPE |= dict(num_key_value_heads=2, intermediate_size=8)
EXPERTS = dict(n_routed_experts=16, num_experts_per_tok=3, moe_intermediate_size=4)
MLA = dict(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)


def moe(kind, **fields):
    return ModelSpec.from_config({**SHAPE, **EXPERTS, **MLA, "model_type": kind, **fields}).moe


@pytest.mark.parametrize(
    "name, rule",
    [
        ("mixtral-8x7b", RoutingSpec("softmax", True)),
        ("qwen3-30b-a3b", RoutingSpec("softmax", True)),
        ("deepseek-v2", RoutingSpec("softmax", False, 8, 3, "max", 16.0)),
        ("deepseek-v3", RoutingSpec("sigmoid", True, 8, 4, "top2_sum", 2.5)),
        ("kimi-k2", RoutingSpec("sigmoid", True, 1, 1, "top2_sum", 2.827)),
        ("glm-4.5", RoutingSpec("sigmoid", True, 1, 1, "top2_sum", 2.5)),
        ("gpt-oss-120b", RoutingSpec("topk_softmax")),
    ],
)
def test_known_models(name, rule):
    assert models[name].moe.routing == rule


def test_what_a_file_leaves_out():
    assert moe("deepseek_v3").routing == RoutingSpec("sigmoid", True, 8, 4, "top2_sum", 2.5)
    assert moe("glm4_moe").routing == RoutingSpec("sigmoid", True, 1, 1, "top2_sum", 1.0)
    assert moe("deepseek_v2").routing == RoutingSpec("softmax", False)
    assert moe("qwen3_moe").routing == moe("olmoe").routing == RoutingSpec("softmax", False)
    assert moe("gpt_oss").swiglu_limit == 7.0 and moe("gpt_oss").swiglu_alpha == 1.702
    assert moe("gpt_oss", swiglu_limit=1.5).swiglu_limit == 1.5
    assert moe("mixtral").swiglu_limit is None
    assert moe("some_other_moe").routing is None


def test_groups_of_deepseek_v2_hold_under_their_method_only():
    fields = dict(n_group=4, topk_group=2)
    assert moe("deepseek_v2", topk_method="greedy", **fields).routing.groups == 1
    assert moe("deepseek_v2", topk_method="group_limited_greedy", **fields).routing.groups == 4


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("deepseek_v3", dict(n_group=5), "groups must be a divisor of 16 experts, got 5"),
        ("deepseek_v3", dict(n_group=4, topk_group=5), "topk_groups must be an integer from 1 to 4, got 5"),
        (
            "deepseek_v3",
            dict(n_group=8, topk_group=1),
            "topk_groups must be at least 2 for top_k=3, got 1",
        ),
        ("deepseek_v3", dict(n_group=16), "groups must be of at least 2 experts"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func must be 'sigmoid' in this family"),
        ("deepseek_v3", dict(topk_method="greedy"), "topk_method must be 'noaux_tc' in this family"),
        ("deepseek_v3", dict(routed_scaling_factor="2"), "routed_scaling_factor must be a positive"),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob must be false in this family"),
        ("deepseek_v2", dict(topk_method="random"), "topk_method must be one of greedy, group_"),
        ("deepseek_v2", dict(topk_method="group_limited_greedy"), "n_group is missing"),
        ("qwen3_moe", dict(norm_topk_prob="yes"), "norm_topk_prob must be true or false"),
        ("qwen3_moe", dict(num_experts_per_tok=17), "num_experts_per_tok must be an integer from 1 to 16"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(kind, fields, message):
    with pytest.raises(ValueError) as caught:
        moe(kind, **fields)
    assert message in str(caught.value) and "config of" in str(caught.value)


def test_a_spec_checks_its_rule():
    with pytest.raises(ValueError, match="groups must be a divisor of 8"):
        MoESpec(experts=8, top_k=2, ffn=4, routing=RoutingSpec(groups=3))
    assert MoESpec(experts=8, top_k=2, ffn=4).routing is None
