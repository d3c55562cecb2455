"""What a step of a simulated worker costs: the same three terms that workers measure of themselves.

    seconds(step) = base + per_token * tokens + per_attention * pairs

The defaults are a stated model, not a measurement: about an 8 B model in 16 bits on one current GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """One worker's speed; all workers are equal."""

    prefill_tokens_per_s: float = 15_000.0
    """Without attention and without the base cost."""
    step_base_s: float = 0.008
    """A step that computes nothing: reading the weights and launching."""
    per_attention_s: float = 1.3e-9
    """One (computed token, context token) pair, all layers."""
    max_step_tokens: int = 2048
    max_running: int = 256

    @property
    def per_token_s(self) -> float:
        """Seconds per computed token."""
        return 1.0 / self.prefill_tokens_per_s

    def step_s(self, tokens: int, pairs: int) -> float:
        """Seconds of one step."""
        return self.step_base_s + tokens * self.per_token_s + pairs * self.per_attention_s

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds to compute `tokens` after `context` tokens that are there, with nothing else to do."""
        steps = math.ceil(tokens / self.max_step_tokens)
        pairs = tokens * (context + tokens / 2)
        return steps * self.step_base_s + tokens * self.per_token_s + pairs * self.per_attention_s

    def decodes_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of `steps` steps that decode `batch` sequences of `context` tokens in all at first.

        Every step makes each context one token longer.
        """
        pairs = steps * context + batch * steps * (steps - 1) // 2
        return steps * (self.step_base_s + batch * self.per_token_s) + pairs * self.per_attention_s
