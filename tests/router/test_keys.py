"""The list of API keys: what a line may say, who holds a key, and a file that changes under a router."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvhive.proto.errors import ConfigError
from kvhive.router.auth.cluster_secret import Namespaces, operator_key
from kvhive.router.auth.key_file import KeyFile, read_keys
from kvhive.router.auth.key_list import MAX_KEYS, key_digest, key_line, new_key, parse_keys
from kvhive.router.auth.principal import Principal

DIGEST = "a" * 64


def line(**fields: object) -> str:
    return json.dumps({"name": "alice", "sha256": DIGEST, **fields})


def test_a_key_is_known_by_its_digest_alone() -> None:
    key, other = new_key(), new_key()
    alice = Principal("alice", "team", -3, True)
    text = f"# who may ask\n\n{key_line(key_digest(key), alice)}\n{key_line(DIGEST, Principal('bob'))}\n"
    keys = parse_keys(text)
    assert keys.holder(key) == alice and len(keys) == 2
    assert key not in text
    for stranger in (other, "", key[:-1], key + " ", key_digest(key), "x" * 10_000, "\udc80"):
        assert keys.holder(stranger) is None


def test_keys_are_long_and_random() -> None:
    assert len({new_key() for _ in range(100)}) == 100
    assert all(len(new_key()) >= 43 for _ in range(10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "line 1: must be a JSON object"),
        ("[]", "line 1: must be a JSON object"),
        ("[" * 100_000, "line 1: must be a JSON object"),
        ("\n\n" + line(sha256="A" * 64), "line 3: sha256: must be 64 hex digits"),
        (line(sha256=None), "line 1: sha256: must be"),
        (line(name=""), "line 1: name: must be 1 to 64 of"),
        (line(name="a:b"), "line 1: name: must be 1 to 64 of"),
        (line(name=7), "line 1: name: must be 1 to 64 of"),
        (line(namespace="a b"), "line 1: namespace: must be 1 to 64 of"),
        (line(max_priority=11), "line 1: max_priority: must be a whole number between -10 and 10, is 11"),
        (line(max_priority=True), "line 1: max_priority: must be a whole number"),
        (line(admin="yes"), "line 1: admin: must be true or false"),
        (line(adnim=True), "line 1: 'adnim': unknown field"),
        (line() + "\n" + line(sha256="b" * 64), "line 2: name: 'alice' is another key's already"),
        (line() + "\n" + line(name="bob"), "line 2: sha256: is the key of 'alice' already"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message.replace("(", r"\(")):
        parse_keys(text)


def test_there_are_at_most_so_many_keys() -> None:
    text = "\n".join(line(name=f"n{i}", sha256=f"{i:064x}") for i in range(MAX_KEYS + 1))
    with pytest.raises(ConfigError, match=f"line {MAX_KEYS + 1}: there must be at most {MAX_KEYS} keys"):
        parse_keys(text)


def replace_file(path: Path, text: str) -> None:
    """As an editor does: the new one has another inode."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path, key = tmp_path / "keys", new_key()
    path.write_text(key_line(key_digest(key), Principal("alice")))
    file = KeyFile(path)
    assert file.keys.holder(key) is not None
    before = file.keys
    file.look()
    assert file.keys is before, "nothing has changed"
    replace_file(path, "nonsense")
    file.look()
    file.look()
    assert file.keys.holder(key) is not None and file.failures == 1
    path.unlink()
    file.look()
    assert file.keys.holder(key) is not None and file.failures == 2
    path.write_text("# nobody")
    file.look()
    assert file.keys.holder(key) is None and len(file.keys) == 0 and file.failures == 2


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "must be UTF-8"),
        (b" " * (4 << 20) + b"x", "must have at most 4194304 bytes"),
        (b"{", "line 1: must be a JSON object"),
    ],
)
def test_a_router_does_not_start_with_a_file_it_cannot_read(
    tmp_path: Path, raw: bytes | None, message: str
) -> None:
    path = tmp_path / "keys"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(ConfigError, match=f"access.keys_file: {path}: {message}"):
        read_keys(path)


def test_salts_are_a_namespaces_own() -> None:
    """Same namespace and same salt of the caller's: same salt. Anything else differs, and nothing of the
    secret or of the caller's salt can be read in it."""
    ours, theirs = Namespaces("token"), Namespaces("another token")
    alice, bob, carol = Principal("alice"), Principal("bob", "team"), Principal("carol", "team")
    assert ours.salt(bob, "s") == ours.salt(carol, "s") == Namespaces("token").salt(bob, "s")
    others = [
        ours.salt(alice, "s"),
        ours.salt(alice, ""),
        ours.salt(Principal("team"), "s"),
        ours.salt(Principal("eve", "alice"), "s"),
        ours.salt(bob, "s"),
        ours.salt(bob, ""),
        theirs.salt(bob, "s"),
        ours.salt(Principal("bobs"), ""),
    ]
    assert len(set(others)) == len(others)
    assert all(len(salt) == 64 for salt in others)


def test_the_operators_key_follows_from_the_token_and_not_the_token_from_it() -> None:
    assert operator_key("token") == operator_key("token") != operator_key("tokens")
    assert "token" not in operator_key("token").removeprefix("kvh-operator-")
