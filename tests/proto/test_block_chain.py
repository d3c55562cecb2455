"""Whoever hashes a chain, the hashes are those that block_hash.py spells out, or another one hashes."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhive.proto import native_chain as module
from kvhive.proto.block_chain import ChainHash, HashlibChain, chain_hash, chain_keys, extend_chain, hash_chain
from kvhive.proto.block_hash import BlockHash, block_key, hash_block, namespace_extras, pack_tokens, root_hash
from kvhive.proto.native_chain import NativeChain, native_chain
from kvhive.toolchain.build_cache import cached_library
from kvhive.toolchain.compiler import BuildError, Compiler, sources_in

KINDS = ("hashlib", "native", "native without instructions for SHA-256")
ROOT = root_hash(bytes(range(32)))


@pytest.fixture(scope="module")
def hashers() -> dict[str, ChainHash]:
    """Every ChainHash there is; those in C++ only where there is a compiler."""
    try:
        compiler, sources = Compiler.found(), sources_in(Path(module.__file__).parent)
    except BuildError:
        return {"hashlib": HashlibChain()}
    fingerprint = compiler.fingerprint(sources)
    with cached_library("chain", fingerprint, lambda path: compiler.build(sources, path)) as path:
        return dict(zip(KINDS, (HashlibChain(), NativeChain(path), NativeChain(path, True)), strict=True))


@pytest.fixture(params=KINDS)
def hasher(request: pytest.FixtureRequest, hashers: dict[str, ChainHash]) -> ChainHash:
    if request.param not in hashers:
        pytest.skip("no C++ compiler here")
    return hashers[request.param]


def spelt_out(parent: bytes, packed: bytes, stride: int, extras: bytes) -> bytes:
    """The meaning: one hash_block after the other."""
    chain = [BlockHash(parent)]
    for at in range(0, len(packed) - stride + 1, stride):
        chain.append(hash_block(chain[-1], packed[at : at + stride], b"" if at else extras))
    return b"".join(chain[1:])


def test_golden_chain(hasher: ChainHash) -> None:
    """As in test_block_hash.py: stored in people's Redis."""
    assert hasher.digests(ROOT, pack_tokens(range(32)), 64, b"").hex() == (
        "5726a5e9c0529bef27e581c958d45ce2c646d0e3cef9cb8222d15399bfb7fd31"
        "7de305f74c891ebd1b86f2d8e33b00490c53d697c953b1e4c3ce9d825c456f1b"
    )
    assert hasher.digests(ROOT, pack_tokens(range(16)), 64, namespace_extras("tenant")).hex() == (
        "0128bcc2ac1ec4ee7ae385dc4f415100d119fbab52c17afe05d9af4efe2c8f24"
    )


def test_thousands_of_chains(hasher: ChainHash) -> None:
    """Of all block sizes around SHA-256's own, so that every padding occurs; with and without extras."""
    rng = random.Random(1)
    for number in range(2000):
        stride = 4 * (number % 40 + 1)
        packed = rng.randbytes(rng.randrange(6 * stride))
        parent, extras = rng.randbytes(32), rng.randbytes(rng.choice((0, 0, 1, 20, 200)))
        assert bytes(hasher.digests(parent, packed, stride, extras)) == spelt_out(
            parent, packed, stride, extras
        )


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=90), size=st.integers(1, 33), salt=st.text())
def test_any_tokens_size_and_salt(
    hashers: dict[str, ChainHash], tokens: list[int], size: int, salt: str
) -> None:
    asked = ROOT, pack_tokens(tokens), 4 * size, namespace_extras(salt)
    wanted = spelt_out(*asked)
    assert {name for name, hasher in hashers.items() if hasher.digests(*asked) != wanted} == set()


def test_long_blocks_and_chains(hasher: ChainHash) -> None:
    packed = random.Random(2).randbytes(4 * 40_000)
    for stride in (64, 4 * 256, 4 * 20_000):
        assert hasher.digests(ROOT, packed, stride, b"") == spelt_out(ROOT, packed, stride, b"")


def test_threads_do_not_disturb_each_other(hasher: ChainHash) -> None:
    prompts = [random.Random(n).randbytes(64 * 200) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda packed: hasher.digests(ROOT, packed, 64, b"x"), prompts * 4))
    assert found == [spelt_out(ROOT, packed, 64, b"x") for packed in prompts] * 4


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=60), st.lists(st.integers(0, 60), max_size=4), st.binary()
)
def test_a_chain_however_it_grew(tokens: list[int], cuts: list[int], extras: bytes) -> None:
    """Extended a block or many at a time it is the chain hashed at once, and its keys are its keys."""
    chain: list[BlockHash] = []
    for end in (*sorted(cuts), len(tokens)):
        extend_chain(chain, ROOT, tokens[:end], 4, extras)
    assert chain == hash_chain(ROOT, tokens, 4, extras)
    assert b"".join(chain) == spelt_out(ROOT, pack_tokens(tokens), 16, extras)
    assert chain_keys(ROOT, pack_tokens(tokens), 4, extras) == tuple(map(block_key, chain))


def test_a_token_outside_uint32_is_refused_before_anything_is_hashed() -> None:
    for bad in (-1, 2**32):
        chain: list[BlockHash] = []
        with pytest.raises(OverflowError):
            extend_chain(chain, ROOT, [1, 2, 3, bad], 2)
        assert chain == []


def test_without_a_compiler_hashlib_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    chain_hash.cache_clear()
    try:
        assert [chain_hash().name for _ in range(2)] == ["hashlib", "hashlib"]
    finally:
        chain_hash.cache_clear()
    (record,) = caplog.records
    assert "hashlib computes instead reason=no C++ compiler: tried no-such-compiler" in record.message


def test_a_library_that_hashes_wrongly_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As a compiler with a fault would make it; it is forgotten, so that the next start builds another."""
    try:
        Compiler.found()
    except BuildError:
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wrong.cpp"
    exported = 'extern "C" __attribute__((visibility("default")))'
    source.write_text(f"{exported} int kvhive_block_chain(...) {{ return 0; }}\n")
    build = Compiler.build
    monkeypatch.setattr(Compiler, "build", lambda self, sources, path: build(self, [source], path))
    assert native_chain() is None
    assert "its hashes are wrong" in caplog.text
    assert not list((tmp_path / "kvhive").glob("chain-*.so"))


def test_where_nothing_can_be_kept_it_is_built_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory can be made below a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = native_chain()
    if found is None:
        pytest.skip("no C++ compiler here")
    assert found.digests(ROOT, bytes(64), 64, b"") == spelt_out(ROOT, bytes(64), 64, b"")


def test_two_processes_at_once_build_one_library(tmp_path: Path) -> None:
    code = "from kvhive.proto.block_chain import chain_hash; print(chain_hash().name)"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", code]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)
    ]
    names = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert len(names) == 1
    assert len(list((tmp_path / "kvhive").glob("chain-*.so"))) == (1 if names == {"native"} else 0)


def test_importing_builds_nothing(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", "import kvhive.proto.block_chain"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert not list(tmp_path.iterdir())
