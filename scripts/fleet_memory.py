"""What a controller must still know when it starts again and neither Ray nor Redis can tell: a small file.

Which workers there are is Ray's to say, and how they are is Redis'. How many were wanted, which ids were
given out, and who was being drained is only here.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvhive.proto.errors import ClusterError

_NAME = "fleet.json"


def was_begun(folder: Path) -> bool:
    """Say whether a fleet was ever begun there: the first save comes after Ray had no worker of its name."""
    return (folder / _NAME).exists()


@dataclass(slots=True)
class FleetMemory:
    """Saved by `save`, after each change."""

    folder: str
    wanted: int
    """Workers that there are to be; with autoscaling, as of its last decision."""
    device: str
    dtype: str
    """Both resolved once, so that all workers' blocks are alike."""
    numbered: int = 0
    """The last number that was part of a worker's id. None is used twice."""
    drains: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Worker id -> bound in seconds, and whether its chains are handed over."""

    def next_id(self) -> str:
        """Return an id that no worker of this cluster has had."""
        self.numbered += 1
        self.save()
        return f"w{self.numbered}"

    def save(self) -> None:
        """Write atomically."""
        path = Path(self.folder) / _NAME
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)

    @classmethod
    def load(cls, folder: Path) -> FleetMemory | None:
        """Return what was saved; None when nothing was. Raises ClusterError when it cannot be read."""
        path = folder / _NAME
        try:
            raw = json.loads(path.read_text())
            drains = {worker: (float(bound), bool(hands)) for worker, (bound, hands) in raw["drains"].items()}
            return cls(**{**raw, "drains": drains})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterError(f"{path}: not readable ({error})") from error
