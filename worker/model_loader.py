"""Make a model of its files: natively where we know the architecture, through transformers elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch

from kvhive.proto.errors import ModelError
from kvhive.worker.decoder import DecoderModel
from kvhive.worker.decoder_config import DecoderConfig
from kvhive.worker.forward_batch import LanguageModel
from kvhive.worker.model_config import ModelConfig
from kvhive.worker.rank_group import RankGroup
from kvhive.worker.shard import check_can_shard
from kvhive.worker.weights import iterate_weights


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    invariant: bool = False,
    ranks: RankGroup | None = None,
) -> LanguageModel:
    """Load the weights of the model that `config` was read of.

    invariant: give it linear layers whose rows do not depend on the batch
    ranks: those that share the model; this one loads its part

    Raises ModelError that names the files, and the architecture and the reason where it cannot be served;
    also where transformers computes it and its layers are to be invariant or shared.
    """
    if ranks is not None:
        check_can_shard(config, ranks.shard.ranks, path)
    if not isinstance(config, DecoderConfig):
        if invariant:
            raise ModelError(
                f"{path}: workers.deterministic: transformers computes this model, with its own linear layers"
            )
        # Importing transformers takes seconds, which a native model need not wait for.
        from kvhive.worker.transformers_check import checked_transformers_model

        return checked_transformers_model(path, config, dtype, device)
    try:
        with torch.inference_mode():
            return DecoderModel(config, iterate_weights(path, config), dtype, device, invariant, ranks)
    except ModelError as error:
        # The model names the tensor; only here is the file known.
        where = str(path)
        raise error if where in str(error) else ModelError(f"{where}: {error}") from error
