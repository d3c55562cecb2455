"""What architectures differ in, as configurations of small models: (family, changes) by name."""

from __future__ import annotations

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS = {
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral, sliding": ("Mistral", {"sliding_window": 20}),
    "mistral, own head_dim": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2, qkv bias": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3, q and k norms": ("Qwen3", {"head_dim": 24}),
    "gemma2, soft caps": (
        "Gemma2",
        {
            "head_dim": 24,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3, two ropes": (
        "Gemma3Text",
        {
            "head_dim": 24,
            "num_hidden_layers": 7,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
ONLY_SAFETENSORS = {
    "llama, dynamic rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama, yarn with every option": (
        "Llama",
        {
            "rope_parameters": YARN
            | {"beta_fast": 20, "beta_slow": 2, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9}
        },
    ),
    "qwen2, upper layers slide": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3, attention bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma3, its own pattern and soft cap": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": GEMMA3_LAYERS,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 50,
        },
    ),
}
