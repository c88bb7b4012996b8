"""What a configuration may say that is not counted here: each is an error that names the field.

A field with a familiar name in a model that is made otherwise would give a figure that looks right. So the
names under which such models say what they are stand here: layers that keep a state instead of keys and
values, that share a cache, that have heads of their own, that keep an index beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .families import NOT_COUNTED

# Fields that are refused if they are set, whatever the family.
_STATES = "layers without a cache of their own aren't supported"
_PER_LAYER = "its layers differ in their heads, which is not counted"
_BESIDE = "its layers keep more than keys and values"
_FIELDS = {
    "attn_layer_indices": _STATES,
    "attn_layer_offset": _STATES,
    "attn_layer_period": _STATES,
    "block_types": _STATES,
    "full_attention_interval": _STATES,
    "hybrid_layer_ids": _STATES,
    "hybrid_override_pattern": _STATES,
    "layer_group_size": _STATES,
    "layers_block_type": _STATES,
    "state_size": _STATES,
    "attention_k_eq_v": _PER_LAYER,
    "block_configs": _PER_LAYER,
    "global_head_dim": _PER_LAYER,
    "hybrid_layer_pattern": _PER_LAYER,
    "num_global_key_value_heads": _PER_LAYER,
    "compress_ratios": _BESIDE,
    "index_topk": _BESIDE,
    "add_cross_attention": _BESIDE,
    "cross_attention_layers": _BESIDE,
    "use_bidirectional_attention": "its windows look ahead, which is not counted",
    "attention_out_bias": "a bias that is not counted",
}
_NAMES = re.compile(
    r"(^|_)(mamba|mamba2|ssm|rwkv|lru|xlstm|conv_l|linear_attn|linear_attention|linear_num)(_|$)"
)
_SHARED = re.compile(r"kv_shar|shared_kv|cross_layer")
_OWN_HEADS = re.compile(r"^swa_.*head|heads_per_layer|per_layer")


def refuse(config: Mapping[str, Any], family: str, owner: str) -> None:
    """Raise a ValueError for a configuration whose layers are not those that are counted here.

    config  the part that describes the language model; family: its model type, renamed ones resolved
    owner   how an error calls it
    """
    if family in NOT_COUNTED:
        raise ValueError(
            f"{owner}: model_type {family!r} is not counted: its layers differ from what its fields say"
        )
    for field, value in config.items():
        if not isinstance(field, str) or not _set(value):
            continue
        why = _FIELDS.get(field)
        if why is None and (_NAMES.search(field.lower()) or _SHARED.search(field)):
            why = _STATES
        if why is None and _OWN_HEADS.search(field):
            why = _PER_LAYER
        if why is None and "head" in field and isinstance(value, list | tuple) and field not in _INTEGERS:
            why = _PER_LAYER
        if why is not None:
            raise ValueError(f"{owner}: {field} is set; {why}")
    kinds = config.get("attn_type_list")  # MiniMax: 1 is attention, 0 a state
    if isinstance(kinds, list) and any(k != 1 for k in kinds):
        raise ValueError(f"{owner}: attn_type_list holds another type than 1; {_STATES}")
    if config.get("is_encoder_decoder") is not None:
        if not isinstance(config["is_encoder_decoder"], bool):
            raise ValueError(f"{owner}: is_encoder_decoder must be true or false")
        if config["is_encoder_decoder"]:
            raise ValueError(f"{owner}: is_encoder_decoder must be false; only decoders are counted")
    if config.get("multi_query") is True and config.get("num_key_value_heads") not in (None, 1):
        raise ValueError(
            f"{owner}: multi_query is true, but num_key_value_heads is {config['num_key_value_heads']!r}"
        )


# Read as integers elsewhere: a list there is refused with the field's own message.
_INTEGERS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head", "head_dim", "v_head_dim")


def _set(value: Any) -> bool:
    return (
        value is not None
        and value is not False
        and value != 0
        and value != []
        and value != {}
        and value != ""
    )
