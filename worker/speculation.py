"""The drafter that the configuration asks for."""

from __future__ import annotations

from kvhive.proto.errors import ModelError
from kvhive.worker.draft_model import DraftModel
from kvhive.worker.drafter import Drafter
from kvhive.worker.model_path import resolve_model
from kvhive.worker.model_runner import ModelShape
from kvhive.worker.ngram_drafter import NgramDrafter
from kvhive.worker.options import WorkerOptions, pool_blocks
from kvhive.worker.runner_loader import load_runner
from kvhive.worker.vocabulary import check_same_vocabulary


def make_drafter(options: WorkerOptions, target: ModelShape, num_blocks: int) -> Drafter | None:
    """Return what drafts for a model of this shape over so many blocks; None when speculation is off.

    Raises ModelError when the draft model cannot be loaded, has another vocabulary, or has no room because
    the target's pool took the whole device.
    """
    speculation = options.speculation
    if speculation.mode == "ngram":
        return NgramDrafter(speculation.ngram_min, speculation.ngram_max)
    if speculation.mode != "draft":
        return None
    if not pool_blocks(options):
        raise ModelError("workers.pool_tokens: must be set where speculation.mode is draft, to leave it room")
    path = resolve_model(speculation.draft_model)
    check_same_vocabulary(resolve_model(options.model_path), path)
    runner = load_runner(
        model_path=path,
        dtype=options.dtype,
        device=options.device,
        num_blocks=num_blocks,
        block_size=options.block_size,
        max_context=options.max_context,
        kv_dtype=options.kv_dtype,
    )
    try:
        return DraftModel(runner, target, num_blocks, options.block_size, options.max_step_tokens)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
