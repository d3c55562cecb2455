"""Chains of blocks between workers: hashes, and what keeps their beginning, as the wire carries them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvhive.proto.block_hash import BlockHash
from kvhive.proto.errors import InvalidRequest
from kvhive.proto.limits import MAX_PIN_TTL_S, MAX_TENANT_CHARS
from kvhive.proto.v1 import worker_pb2
from kvhive.worker.hot_chains import MAX_CHAINS, HotChain
from kvhive.worker.pins import ChainPin

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class WantedChain:
    """A chain that is to be copied."""

    hashes: list[BlockHash]
    pin: ChainPin | None
    """What is to keep its beginning where it comes to."""


def wire_chain(chain: HotChain, leaving: bool) -> worker_pb2.Chain:
    """Return a chain; its pin goes along where its worker is leaving, else that keeps it."""
    pin = None
    if leaving and chain.pin is not None:
        pin = worker_pb2.ChainPin(blocks=chain.pin.blocks, ttl_s=chain.pin.ttl_s, tenant=chain.pin.tenant)
    return worker_pb2.Chain(hashes=b"".join(chain.hashes), pin=pin)


def wanted_chains(wire: Iterable[worker_pb2.Chain]) -> list[WantedChain]:
    """Read chains that are to be copied. Raises InvalidRequest."""
    chains = list(wire)
    if not 1 <= len(chains) <= MAX_CHAINS:
        raise InvalidRequest("chains", f"must be 1 to {MAX_CHAINS}, are {len(chains)}")
    return [_wanted(f"chains[{index}]", chain) for index, chain in enumerate(chains)]


def _wanted(where: str, chain: worker_pb2.Chain) -> WantedChain:
    packed, pin = chain.hashes, chain.pin
    if not packed or len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"{where}.hashes", f"must be whole hashes of {HASH_BYTES} bytes, are {len(packed)} bytes"
        )
    hashes = [BlockHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]
    if not chain.HasField("pin"):
        return WantedChain(hashes, None)
    if not 1 <= pin.blocks <= len(hashes):
        raise InvalidRequest(f"{where}.pin.blocks", f"must be 1 to {len(hashes)}, is {pin.blocks}")
    if not 0 < pin.ttl_s <= MAX_PIN_TTL_S:
        raise InvalidRequest(
            f"{where}.pin.ttl_s", f"must be above 0 and at most {MAX_PIN_TTL_S:g}, is {pin.ttl_s:g}"
        )
    if len(pin.tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest(
            f"{where}.pin.tenant", f"must have at most {MAX_TENANT_CHARS} characters, has {len(pin.tenant)}"
        )
    return WantedChain(hashes, ChainPin(pin.blocks, pin.ttl_s, pin.tenant))
