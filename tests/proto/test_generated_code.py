"""What is generated is what the .proto files say, and every RPC has an implementation."""

from __future__ import annotations

import subprocess
import sys

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from kvhive.proto.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvhive.router.grpc_service import InferenceService
from kvhive.worker.service import WorkerService


@pytest.mark.parametrize("generator", ["gen_proto", "gen_reference"])
def test_what_is_committed_is_what_the_proto_files_make(generator: str) -> None:
    command = [sys.executable, "-P", "-m", f"kvhive.scripts.{generator}", "--check"]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize(
    ("service", "base", "implementation"),
    [
        (
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            inference_pb2_grpc.InferenceServicer,
            InferenceService,
        ),
        (worker_pb2.DESCRIPTOR.services_by_name["Worker"], worker_pb2_grpc.WorkerServicer, WorkerService),
    ],
)
def test_every_rpc_is_implemented(service: ServiceDescriptor, base: type, implementation: type) -> None:
    """The generated base answers UNIMPLEMENTED; none of its methods may be left."""
    names = [method.name for method in service.methods]
    assert names
    for name in names:
        assert getattr(implementation, name) is not getattr(base, name), f"{name} is not implemented"
