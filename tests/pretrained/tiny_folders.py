"""Tiny Hugging Face folders with random weights, for tests."""

import torch
import transformers

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64}
EXPERTS = {**SMALL, "num_local_experts": 2}
MIXTURES = {
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 11},  # the eleventh follows the tenth, not the first
    "Qwen3MoeForCausalLM": {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "OlmoeForCausalLM": {**SMALL, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {
        **SMALL, "head_dim": 8, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
"""Models with experts that are stored one by one."""
FAMILIES = {
    "LlamaForCausalLM": SMALL,
    "Qwen3ForCausalLM": {**SMALL, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": SMALL,
    "Gemma3ForCausalLM": SMALL,
    "GPT2LMHeadModel": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def make_model(name="LlamaForCausalLM", fields=None, dtype=torch.float32):
    cls = getattr(transformers, name)
    config = cls.config_class(**(fields or FAMILIES[name]))
    torch.manual_seed(7)
    return cls(config).to(dtype)


def save(folder, name="LlamaForCausalLM", dtype=torch.float32, *, fields=None, sharded=False):
    """Save a model with random weights; return the folder."""
    make_model(name, fields, dtype).save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    return folder
