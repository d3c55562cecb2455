"""When a request's first token will come from each worker: what admission goes by.

    ttft(w) = queue_s + max(slot_s, room_s) + compute_s + decode_s

The terms are those of the cost (routing_cost.py) without its price, and one more: `slot_s`, the wait for
running sequences to end where all places in the batch are taken. They end at the rate at which a full batch
of answers of the usual length does; or of twice what the running ones are expected to generate yet, where
that is less, for many are bounded. Metrics set it beside what came true (`kvhive_ttft_ratio`).
"""

from __future__ import annotations

import numpy as np

from kvhive.router.candidate_table import CandidateTable, Column
from kvhive.router.routing_cost import CostTable


def predicted_ttft_s(prompt_tokens: int, table: CandidateTable, costs: CostTable) -> Column:
    """Return seconds to the first token of such a prompt at every worker, in the table's order."""
    # The cost takes what is queued for one long prompt. Here it is many, each about as long as this one: in a
    # long queue their attention to each other, which there is not, would be most of the time.
    queued = table.queue_tokens
    apart_s = table.per_attention_s * queued * np.maximum(queued - prompt_tokens, 0.0) / 2
    ttft_s: Column = costs.queue_s - apart_s + np.maximum(_slot_s(table), costs.room_s)
    return ttft_s + costs.compute_s + costs.decode_s


def _slot_s(table: CandidateTable) -> Column:
    """Seconds until so many sequences have ended that one more can run; 0 where the batch is not known."""
    batch = table.most_running
    ends = np.where(batch > 0, np.maximum(table.requests + 1.0 - batch, 0.0), 0.0)
    if not np.count_nonzero(ends):  # as most of the time
        return ends
    step_s = table.step_base_s + batch * table.per_token_s
    running = np.maximum(np.minimum(table.decoding, batch), 1.0)  # what waits there decodes nothing
    length = np.minimum(table.answer_tokens, 2.0 * table.growth_tokens / running)
    wait_s: Column = ends * length * step_s / np.maximum(batch, 1.0)
    return wait_s
