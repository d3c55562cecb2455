"""Where a simulation's traffic comes from: a file of recorded requests, or a day that is made up."""

from __future__ import annotations

from pathlib import Path

from kvhive.proto.errors import ConfigError
from kvhive.scripts.sim_options import SimulateOptions
from kvhive.scripts.trace_diurnal import is_diurnal, make_trace, parse_diurnal
from kvhive.scripts.trace_format import Trace
from kvhive.scripts.trace_reader import read_trace


def load_trace(source: str, options: SimulateOptions) -> Trace:
    """Read or make the trace. Raises ConfigError, OSError."""
    if is_diurnal(source):
        day = parse_diurnal(source)
        return make_trace(day, options.cost.prefill_s, options.seed, options.limit)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"TRACE: must be a file, or diurnal[:key=value,...]; there is no file {source!r}")
    return read_trace(path, options.limit)
