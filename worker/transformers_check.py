"""Accept a model that transformers computes only if our attention gives what its own gives."""

from __future__ import annotations

from pathlib import Path

import torch

from kvhive.kernels.attention_metadata import attention_metadata
from kvhive.proto.errors import ModelError
from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.transformers_config import TransformersConfig
from kvhive.worker.transformers_model import ATTENTION, TransformersModel

_BLOCK_SIZE = 4
_LENGTHS = (24, 10)
_CUTS = (((0, 13), (0, 9)), ((13, 23), (9, 10)), ((23, 24), (0, 0)))
"""Steps of (start, end) of both texts: whole prompts beside each other, a resumed chunk, decodes."""
_MOST_DIFFERENCE = 1e-3
"""Of any float32 logit, relative to the largest."""
_MOST_MEAN_DIFFERENCE = 0.1
"""Mean over logits in 16 bits, relative to their mean size: rounding moves single ones, or an expert."""


def checked_transformers_model(
    path: Path, config: TransformersConfig, dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """Load a model and compare it with itself. Raises ModelError that names the architecture and why not."""
    model = TransformersModel(path, config, dtype, device)
    try:
        with torch.inference_mode():
            _compare(model, dtype, device)
    except ModelError as error:
        raise ModelError(f"{path}: architecture {config.architecture!r} is not supported: {error}") from error
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{path}: architecture {config.architecture!r} is not supported: a test run of it fails: {error}"
        ) from error
    return model


def _compare(model: TransformersModel, dtype: torch.dtype, device: torch.device | str) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(model.config.vocab_size, (min(length, model.config.max_context),), generator=generator)
        for length in _LENGTHS
    ]
    ours = _over_our_pool(model, texts, dtype, device)
    model.network.set_attn_implementation("eager")
    try:
        own = torch.cat(
            [model.network(input_ids=text[None].to(device), use_cache=False).logits[0] for text in texts]
        )
    finally:
        model.network.set_attn_implementation(ATTENTION)
    ours, own = ours.float(), own.float()
    if dtype == torch.float32:
        difference, allowed = (ours - own).abs().max() / own.abs().max().clamp(min=1), _MOST_DIFFERENCE
    else:
        difference, allowed = (ours - own).abs().mean() / own.abs().mean(), _MOST_MEAN_DIFFERENCE
    if not difference <= allowed:  # so that NaN is refused as well
        raise ModelError(f"its logits differ by {difference:.2g} from those with its own attention")


def _over_our_pool(
    model: TransformersModel, texts: list[torch.Tensor], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return the logits of all tokens, text after text, computed in the steps of _CUTS."""
    config = model.config
    blocks = [-(-len(text) // _BLOCK_SIZE) for text in texts]
    shape = (sum(blocks), config.layers, 2, config.kv_heads, _BLOCK_SIZE, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    # Neither text has its blocks in order.
    tables = [list(range(blocks[0] - 1, -1, -1)), list(range(sum(blocks) - 1, blocks[0] - 1, -1))]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    for cuts in _CUTS:
        parts = [
            (index, start, min(end, len(texts[index])))
            for index, (start, end) in enumerate(cuts)
            if start < min(end, len(texts[index]))
        ]
        if parts:
            logits, windows = model.traced(_batch(pool, texts, tables, parts, config.windows), pool)
            _check_windows(model, windows)
            for (index, _, _), own in zip(
                parts, logits.split([end - start for _, start, end in parts]), strict=True
            ):
                rows[index].append(own)
    return torch.cat([row for each in rows for row in each])


def _batch(
    pool: torch.Tensor,
    texts: list[torch.Tensor],
    tables: list[list[int]],
    parts: list[tuple[int, int, int]],
    windows: tuple[int | None, ...],
) -> ForwardBatch:
    positions = [torch.arange(start, end) for _, start, end in parts]
    slots = [
        torch.tensor(tables[index])[own // _BLOCK_SIZE] * _BLOCK_SIZE + own % _BLOCK_SIZE
        for (index, _, _), own in zip(parts, positions, strict=True)
    ]
    tokens = torch.cat([texts[index][start:end] for index, start, end in parts])
    attention = attention_metadata(
        pool,
        [tables[index] for index, _, _ in parts],
        [end - start for _, start, end in parts],
        [end for _, _, end in parts],
        windows,
    )
    return ForwardBatch(
        token_ids=tokens.to(pool.device),
        positions=torch.cat(positions).to(pool.device),
        slot_mapping=torch.cat(slots).to(pool.device),
        attention=attention,
        logit_rows=torch.arange(len(tokens), device=pool.device),
    )


def _check_windows(model: TransformersModel, asked: dict[int, int | None]) -> None:
    """Insist that layers ask for the configured windows: the texts here may be shorter than those."""
    config = model.network.config
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(asked)
    for layer, kind in enumerate(types):
        if asked.get(layer) != (window if kind == "sliding_attention" else None):
            raise ModelError(
                f"layer {layer} is {kind} with a window of {window}, but asks for {asked.get(layer)}"
            )
