"""Real Redis servers for this room's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Tests have no packages (importlib mode), so what two rooms share is loaded by path, once.
_spec = importlib.util.spec_from_file_location(
    "kvhive_redis_fixtures", Path(__file__).parents[1] / "redis_fixtures.py"
)
assert _spec is not None and _spec.loader is not None
if _spec.name not in sys.modules:
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])
_fixtures = sys.modules[_spec.name]

redis_server = _fixtures.redis_server
index_redis = _fixtures.index_redis
own_redis = _fixtures.own_redis
