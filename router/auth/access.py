"""All that keys need in one router, put together; and what it counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvhive.router.auth.cluster_secret import Namespaces, operator_key
from kvhive.router.auth.guard import Guard
from kvhive.router.auth.key_file import KeyFile
from kvhive.router.auth.keyed_frontend import KeyedFrontend
from kvhive.router.frontend import TokenizingFrontend


@dataclass(frozen=True, slots=True)
class Access:
    """Of a cluster that has keys."""

    file: KeyFile
    guard: Guard
    namespaces: Namespaces

    @classmethod
    def by_keys(cls, keys_file: str, cluster_token: str) -> Access:
        """Read the keys. Raises ConfigError."""
        file = KeyFile(Path(keys_file))
        guard = Guard(lambda: file.keys, operator_key(cluster_token))
        return cls(file, guard, Namespaces(cluster_token))

    def keyed(self, inner: TokenizingFrontend) -> KeyedFrontend:
        """Return a Frontend for whom the guard lets in."""
        return KeyedFrontend(inner, self.namespaces)

    def collect(self) -> Iterator[Metric]:
        """Yield every family. See prometheus_client's Collector."""
        refused = CounterMetricFamily(
            "kvhive_callers_refused", "Calls of those who are not let in, by why", labels=["cause"]
        )
        for cause, count in sorted(self.guard.refused.items()):
            refused.add_metric([cause], count)
        yield refused
        yield GaugeMetricFamily("kvhive_api_keys", "API keys in force", value=len(self.file.keys))
        yield CounterMetricFamily(
            "kvhive_keys_file_failures",
            "Changes of the file of keys that could not be taken over",
            value=self.file.failures,
        )
