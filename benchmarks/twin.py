"""The same model in transformers, with the companion's weights: the opponent of the speed benchmarks."""

import torch

from companion.model import Decoder


def transformers_twin(model: Decoder) -> torch.nn.Module:
    """A LlamaForCausalLM that computes what `model` computes (llama architecture)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s = model.spec
    config = LlamaConfig(
        vocab_size=s.vocab,
        hidden_size=s.d_model,
        intermediate_size=s.ffn,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.max_context,
        rms_norm_eps=s.norm_eps,
        rope_theta=s.rope_theta,
        tie_word_embeddings=s.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        twin = LlamaForCausalLM(config)
    twin.load_state_dict(state_dict(model), strict=False, assign=True)
    twin.tie_weights()
    # Frequencies are computed, not stored, so the meta device left them empty.
    twin.model.rotary_emb = type(twin.model.rotary_emb)(config=config)
    return twin.eval().to(model.dtype)


def state_dict(model: Decoder) -> dict[str, torch.Tensor]:
    """The companion's weights under transformers' names, each in its own row-major memory."""
    s = model.spec
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    out = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.weight}
    if not s.tied:
        out["lm_head.weight"] = model.output
    for i, b in enumerate(model.blocks):
        wq, wk, wv = b.attention.qkv.split([q, kv, kv])
        gate, up = b.ffn.gate_up.chunk(2)
        out |= {
            f"model.layers.{i}.{name}.weight": w
            for name, w in {
                "input_layernorm": b.attention_norm.weight,
                "self_attn.q_proj": wq,
                "self_attn.k_proj": wk,
                "self_attn.v_proj": wv,
                "self_attn.o_proj": b.attention.o,
                "post_attention_layernorm": b.ffn_norm.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": b.ffn.down,
            }.items()
        }
    return {name: w.detach().clone(memory_format=torch.contiguous_format) for name, w in out.items()}
