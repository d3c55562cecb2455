"""Small random models of many architectures, as files, and their logits over a paged pool."""

from __future__ import annotations

import itertools
import random

import gguf
import numpy
import torch
import transformers

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.model_config import read_model_config
from kvhive.worker.model_loader import load_model

VOCABULARY = 101
BLOCK_SIZE = 8
BLOCKS = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0,
}  # fmt: skip


def tiny(family="Llama", seed=0, **changes):
    """A small random model whose biases and norms are not the identity they start as."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # Gemma's norms multiply by 1 + weight.
    center = 0.0 if family.startswith("Gemma") else 1.0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(mean=center if "norm" in name and "weight" in name else 0.0, std=0.3)
        else:
            parameter.data.normal_(std=0.15)
    return model


def text(length, seed=1):
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def own_logits(model, tokens):
    """What transformers computes with its own attention."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


class Paged:
    """A model of some files over a pool full of NaN, run part by part."""

    def __init__(self, path):
        self.config = config = read_model_config(path)
        self.model = load_model(path, config, torch.float32, "cpu")
        shape = (BLOCKS, config.layers, 2, config.kv_heads, BLOCK_SIZE, config.head_dim)
        self.pool = torch.full(shape, torch.nan)
        self.free = random.Random(0).sample(range(BLOCKS), BLOCKS)

    def table(self, length, shared=()):
        """A block table for so many tokens, after blocks that another text computed."""
        return [*shared, *(self.free.pop() for _ in range(-(-length // BLOCK_SIZE) - len(shared)))]

    def step(self, *parts):
        """Compute (tokens, start, end, table) of each part in one step; the logits of each."""
        positions = [torch.arange(start, end) for _, start, end, _ in parts]
        slots = [
            torch.tensor(table)[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
            for own, (*_, table) in zip(positions, parts, strict=True)
        ]
        lengths = [end - start for _, start, end, _ in parts]
        ends, tables = [part[2] for part in parts], [part[3] for part in parts]
        batch = ForwardBatch(
            token_ids=torch.tensor([token for tokens, start, end, _ in parts for token in tokens[start:end]]),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            attention=attention_metadata(self.pool, tables, lengths, ends, self.config.windows),
            logit_rows=torch.arange(sum(lengths)),
        )
        with torch.inference_mode():
            return self.model.forward(batch, self.pool).split(lengths)

    def logits(self, tokens, cuts=(), shared=()):
        """Logits of every position after the shared blocks, cut into steps."""
        table = self.table(len(tokens), shared)
        bounds = [len(shared) * BLOCK_SIZE, *cuts, len(tokens)]
        steps = itertools.pairwise(bounds)
        return torch.cat([self.step((tokens, start, end, table))[0] for start, end in steps])


def assert_all_ways_equal_transformers(path, model, atol=2e-4):
    """Whole, in chunks beside another text, token by token, and after a cached prefix."""
    paged, one, two = Paged(path), text(90), text(40, seed=2)
    first, second = own_logits(model, one), own_logits(model, two)

    def equal(ours, expected):
        torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
        assert torch.equal(ours.argmax(-1), expected.argmax(-1))

    equal(paged.logits(one), first)
    one_table, two_table = paged.table(90), paged.table(40)
    rows = [
        paged.step((one, 0, 37, one_table), (two, 0, 17, two_table)),
        paged.step((two, 17, 39, two_table), (one, 37, 85, one_table))[::-1],
        paged.step((one, 85, 86, one_table), (two, 39, 40, two_table)),
        *([paged.step((one, at, at + 1, one_table))[0], first[:0]] for at in range(86, 90)),
    ]
    equal(torch.cat([a for a, _ in rows]), first)
    equal(torch.cat([b for _, b in rows]), second)
    both = one[: 6 * BLOCK_SIZE] + two[:20]
    cached = paged.logits(both, cuts=(60, 67), shared=one_table[:6])
    equal(cached, own_logits(model, both)[6 * BLOCK_SIZE :])


GGUF_NAMES = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
}  # fmt: skip
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def interleave(weight, heads):
    """llama.cpp's converter: each head's rows from "rotate half" to interleaved pairs."""
    per_head = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return per_head.swapaxes(1, 2).reshape(weight.shape)


def heads_apart(weight, heads):
    """The other way round."""
    per_head = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return per_head.swapaxes(1, 2).reshape(weight.shape)


def interleaved_heads(config, name):
    """How many heads' rows the converter rearranges in a tensor; 0 where it leaves them."""
    if ARCHITECTURES.get(config.model_type, config.model_type) != "llama":
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return next((count for short, count in heads.items() if short in name), 0)


def gguf_name(config, name):
    """What the converter calls a tensor."""
    names = GEMMA_NAMES if config.model_type.startswith("gemma") else GGUF_NAMES
    (short,) = [new for old, new in names.items() if f"{old}." in name]
    layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
    return f"{layer}{short}.{name.rsplit('.', 1)[1]}"


def quantise(model, kind, pack):
    """Pack every matrix, and give the model the weights that gguf's own code makes of the packed ones.

    pack: makes blocks of such a type from values; returns those by GGUF name, for write_gguf.
    """
    packed = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            values, heads = parameter.detach().numpy(), interleaved_heads(model.config, name)
            raw = pack(numpy.ascontiguousarray(interleave(values, heads) if heads else values))
            packed[gguf_name(model.config, name)] = (raw, kind)
            plain = gguf.quants.dequantize(raw, kind).reshape(values.shape)
            parameter.data = torch.from_numpy(heads_apart(plain, heads) if heads else plain.copy())
            assert 0.01 < parameter.std() < 1
    return packed


def write_gguf(path, model, quantization=None, packed=None, write_tokenizer=None):
    """Write a model the way llama.cpp's converter does.

    quantization: the type of all matrices; packed: ready bytes and type by GGUF name;
    write_tokenizer: writes the keys of a real one with a GGUFWriter
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_keys(writer, config, architecture)
    (write_tokenizer or _placeholder_tokenizer(config))(writer)
    if (rope := getattr(config, "rope_parameters", {})).get("rope_type") == "llama3":
        base = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (base / model.model.rotary_emb.inv_freq).numpy())
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if heads := interleaved_heads(config, name):
            values = interleave(values, heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        full = gguf_name(config, name)
        values = numpy.ascontiguousarray(values)
        if packed and full in packed:
            writer.add_tensor(full, packed[full][0], raw_dtype=packed[full][1])
        elif quantization is not None and values.ndim == 2:
            writer.add_tensor(full, gguf.quants.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(full, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer, config, architecture):
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if full["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _placeholder_tokenizer(config):
    def write(writer):
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
        writer.add_token_scores([0.0] * 5000)

    return write
