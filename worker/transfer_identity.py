"""What two workers must have in common before a block of one may be a block of the other. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TransferIdentity:
    """Everything that the bytes of a block depend on, besides its tokens.

    The hashes of a chain say most of it already, because their root is made of it; who asks for a hash says
    it again in plain words, so that a mismatch is refused by name and not just never found.
    """

    model: str
    """Hex digest of weights, configuration and KV format (worker/model_identity.py)."""
    namespace: str
    """Hex digest of the root of all hashes: the model and the cluster's salt."""
    kv_dtype: str
    layout: str
    """The shape of one block, as text."""
    block_size: int
    tp: int = 1
    """Ranks that a worker's heads are spread over."""

    def mismatch(self, other: TransferIdentity) -> str:
        """Name the first field that differs and both values; empty when all agree."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return f"{field.name}: this worker has {ours!r}, the other one {theirs!r}"
        return ""
