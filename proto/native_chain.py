"""Chains of block hashes in C++, built at first use: a fifth of the time that hashlib takes from Python."""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

from kvhive.proto.block_hash import DIGEST_BYTES, HASH_VERSION, hash_block, root_hash
from kvhive.toolchain.build_cache import cached_library
from kvhive.toolchain.compiler import BuildError, Compiler, sources_in

log = logging.getLogger(__name__)


class NativeChain:
    """Implements ChainHash (block_chain.py). Without the GIL, so that other threads go on."""

    name = "native"

    def __init__(self, path: Path, portably: bool = False) -> None:
        """Load a library, which may be deleted then. Raises OSError when it is not one of ours, or is wrong.

        portably: without the CPU's own instructions for SHA-256, where it has them
        """
        try:
            self._call = ctypes.CDLL(str(path)).kvhive_block_chain
        except AttributeError as error:
            raise OSError(f"{path}: has no kvhive_block_chain") from error
        self._call.restype = c_int
        bytes_and_length = c_void_p, c_int64
        self._call.argtypes = (
            *bytes_and_length,
            c_void_p,
            *bytes_and_length,
            c_int64,
            *bytes_and_length,
            c_int,
            c_void_p,
        )
        self._portably = portably
        self._check(path)

    def digests(self, parent: bytes, packed: bytes, stride: int, extras: bytes) -> bytearray:
        """See ChainHash."""
        count = len(packed) // stride
        digests = bytearray(DIGEST_BYTES * count)
        if count:
            failed = self._call(
                HASH_VERSION,
                len(HASH_VERSION),
                parent,
                packed,
                stride,
                count,
                extras,
                len(extras),
                self._portably,
                ctypes.byref(ctypes.c_char.from_buffer(digests)),
            )
            if failed:
                raise MemoryError(f"no memory to hash blocks of {stride} bytes")
        return digests

    def _check(self, path: Path) -> None:
        """An identity must be right: a compiler that got it wrong must not be believed."""
        packed, stride, root = bytes(range(192)), 64, root_hash(b"check")
        first = hash_block(root, packed[:64], b"extras")
        second = hash_block(first, packed[64:128])
        right = first + second + hash_block(second, packed[128:])
        if self.digests(root, packed, stride, b"extras") != right:
            raise OSError(f"{path}: its hashes are wrong")


def native_chain() -> NativeChain | None:
    """Return it, having built the library if need be; None, and one line in the log, where there is none."""
    try:
        compiler, sources = Compiler.found(), sources_in(Path(__file__).parent)
        fingerprint = compiler.fingerprint(sources)
        with cached_library("chain", fingerprint, lambda path: compiler.build(sources, path)) as path:
            return NativeChain(path)
    except (BuildError, OSError) as error:
        log.warning("native block hashes unavailable, hashlib computes instead reason=%s", error)
        return None
