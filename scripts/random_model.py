"""A small Llama of random weights as files, for measurements and soaks that need no words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class RandomModel:
    """Its shape. With these sizes a block of 16 tokens in float32 takes 256 KiB."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 4
    vocabulary: int = 512
    context: int = 4096

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of KV in float32."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4 * block_size


def write_random_model(folder: Path, model: RandomModel, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; weights so large that logits are far from ties."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": 2 * model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

    hidden, inner = model.hidden, 2 * model.hidden
    kv = model.kv_heads * (hidden // model.heads)
    tensors = {
        "model.embed_tokens.weight": torch.randn(model.vocabulary, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(model.vocabulary, hidden, 4.0),
    }
    for layer in range(model.layers):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": torch.ones(hidden),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}self_attn.q_proj.weight": random(hidden, hidden, 2.0),
            f"{name}self_attn.k_proj.weight": random(kv, hidden, 2.0),
            f"{name}self_attn.v_proj.weight": random(kv, hidden),
            f"{name}self_attn.o_proj.weight": random(hidden, hidden),
            f"{name}mlp.gate_proj.weight": random(inner, hidden),
            f"{name}mlp.up_proj.weight": random(inner, hidden),
            f"{name}mlp.down_proj.weight": random(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
