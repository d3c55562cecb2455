"""How rank 0 tells the other ranks what to compute: one message a step.

    [kind, tokens, logit rows, sequences, table width]  int64
    the batch as StepInputs has laid it out

A message has FRAME_BYTES, so that nobody has to be told its size first; what a large batch has beyond that
follows in a second one. Between steps rank 0 asks whether all are there (rank_leader.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import torch

from kvhive.worker.forward_batch import ForwardBatch
from kvhive.worker.rank_group import RankGroup
from kvhive.worker.step_inputs import StepInputs, StepShape

FRAME_BYTES = 16384
"""Holds the decodes of a usual batch, and the prompt chunks of a usual step."""
_HEADER_WORDS = 5
_HEADER_BYTES = 8 * _HEADER_WORDS


class _Kind(IntEnum):
    STEP = 0
    """Compute a batch."""
    ASK = 1
    """Answer that you are there."""
    END = 2
    """Nothing follows."""


def tell_step(ranks: RankGroup, inputs: StepInputs, batch: ForwardBatch) -> None:
    """On rank 0: tell the batch that `inputs` has just laid out. Hold `ranks.turn` until it is computed."""
    shape = StepShape(batch.attention.tokens, batch.logit_rows.shape[0], *batch.attention.block_tables.shape)
    frame = _frame(_Kind.STEP, shape.tokens, shape.logit_rows, shape.sequences, shape.table_width)
    laid_out = inputs.laid_out(shape)
    first = min(shape.nbytes, FRAME_BYTES - _HEADER_BYTES)
    frame[_HEADER_BYTES : _HEADER_BYTES + first] = laid_out[:first]
    ranks.tell(frame)
    if first < shape.nbytes:
        ranks.tell(laid_out[first:])


def ask_all(ranks: RankGroup) -> None:
    """On rank 0: return when every rank has answered. Hold `ranks.turn`. Raises Unavailable."""
    ranks.tell(_frame(_Kind.ASK))
    ranks.arrive()


def tell_end(ranks: RankGroup) -> None:
    """On rank 0: let the others go. Hold `ranks.turn`."""
    ranks.tell(_frame(_Kind.END))


def told_steps(ranks: RankGroup, inputs: StepInputs) -> Iterator[ForwardBatch]:
    """On the other ranks: yield each batch that rank 0 tells, until it ends. Raises Unavailable.

    A batch is good until the next one.
    """
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    header = frame[:_HEADER_BYTES].view(torch.int64)
    while True:
        ranks.hear(frame)
        kind, tokens, rows, sequences, width = header.tolist()
        if kind == _Kind.END:
            return
        if kind == _Kind.ASK:
            ranks.arrive()
            continue
        shape = StepShape(tokens, rows, sequences, width)
        own = inputs.room(shape)
        first = min(shape.nbytes, FRAME_BYTES - _HEADER_BYTES)
        own[:first] = frame[_HEADER_BYTES : _HEADER_BYTES + first]
        if first < shape.nbytes:
            ranks.hear(own[first:])
        yield inputs.laid_out_elsewhere(shape)


def _frame(kind: _Kind, *numbers: int) -> torch.Tensor:
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    words = [int(kind), *numbers]
    frame[:_HEADER_BYTES].view(torch.int64)[:] = torch.tensor(words + [0] * (_HEADER_WORDS - len(words)))
    return frame
