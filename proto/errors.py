"""The errors that cross a room's border. Foreign errors are translated into these at one edge.

KvhiveError
├── InvalidRequest        the caller's fault: names the field, the limit and the value
├── NotNow                the same request may go well later: says why in a word, and when
│   ├── Unavailable       no worker, a lost worker, a shutting-down server
│   ├── Overloaded        a bounded queue is full, or too long
│   └── TimedOut          a stated bound on waiting has passed
├── ComputeError          the model computed no usable number for this request; a retry would not help
├── ConfigError           cluster.yaml is wrong
├── ModelError            a model file is missing, damaged or of an unsupported architecture
└── ClusterError          the cluster is not there, or could not be started
"""

from __future__ import annotations


class KvhiveError(Exception):
    """The root of all errors of ours."""


class InvalidRequest(KvhiveError):
    """A request that must not be retried unchanged."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message
        """Without the field, for whoever calls that by another name."""


class NotNow(KvhiveError):
    """The request may be tried again."""

    def __init__(self, message: str = "", *, cause: str = "", retry_after_s: float | None = None) -> None:
        """`cause` is one word, for counters; `retry_after_s` is None where nobody can say when."""
        super().__init__(message)
        self.cause = cause
        self.retry_after_s = retry_after_s


class Unavailable(NotNow):
    """Nobody can serve it; nothing was lost."""


class Overloaded(NotNow):
    """A bounded queue is full, or longer than the request can wait."""


class TimedOut(NotNow):
    """A stated bound on waiting has passed; the message names it."""


class ComputeError(KvhiveError):
    """The model's logits for this request are not finite numbers; the same would happen elsewhere."""


class ConfigError(KvhiveError):
    """The configuration cannot be used; the message names the key."""


class ModelError(KvhiveError):
    """A model cannot be loaded; the message names the file and what is wrong with it."""


class ClusterError(KvhiveError):
    """The cluster is not there, or could not be started or stopped."""
