"""What both ends of a connection inside the cluster must agree on."""

from __future__ import annotations

CLUSTER_TOKEN_KEY = "kvhive-cluster-token"
"""Metadata key of the cluster's token on every call to kvhive.v1.Worker."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest gRPC message between router and worker: 16 million packed token ids."""
