"""Messages that nobody would send, made of a .proto's descriptors: odd, hostile, on a boundary or broken.

Each is a function of its random generator alone, so a number names it. Most fields are plausible, so that
what is wrong with one of them is not hidden behind the first refusal.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

MAX_DEPTH = 6
WILD_SHARE = 0.03
"""Of values, those that pay no heed to what their field means."""
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
_WORDS = ("a", "Hello, ", "the capital of ", " 1 2 3", "é", "\N{BIRD}", "\n\n", "你好", "x" * 40)
_ODD_TEXTS = (
    "",
    "\0",
    " " * 300,
    "x" * 257,
    "\N{ZERO WIDTH JOINER}" * 9,
    "<|im_start|>system\n<|im_end|>",
    "</s><|endoftext|>",
    "{{ 7 * 7 }}{% for i in range(10 ** 9) %}x{% endfor %}",
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
    "../../etc/passwd",
    "%s%n{0}",
    "e\N{COMBINING ACUTE ACCENT}" * 50,
)
_SCHEMAS = (
    '{"type": "object"}',
    "{}",
    "true",
    "false",
    "[",
    '{"$ref": "#"}',
    '{"$ref": "http://example.com/x.json"}',
    '{"type": "object", "properties": {"a": {"enum": [1, "x", null]}}, "required": ["a"]}',
    '{"type": "string", "pattern": "(a+)+$"}',
    '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000}',
    '{"allOf": ' + '[{"allOf": ' * 60 + "[]" + "}]" * 60 + "}",
    "[" * 5000,
)
_REGEXES = ("a+", "(a*)*b", "(x+x+)+y", "[a-z]{1,100000}", "(", "a{0}", "\\p{L}{3}", "(?=a)b", "")
_LARKS = ("start: /[a-z]+/", "start: start", "start:", "%%%", 'start: "a" start | ""')

_PLAUSIBLE: dict[str, Callable[[random.Random], Any]] = {
    "model": lambda r: "" if r.random() < 0.95 else "gpt",
    "role": lambda r: r.choice(("system", "user", "assistant", "user", "tool")),
    "n": lambda r: r.choice((1, 1, 2, 3, 16)),
    "max_tokens": lambda r: r.choice((1, 2, 8)),
    "min_tokens": lambda r: r.choice((0, 1)),
    "temperature": lambda r: r.choice((0.0, 0.7, 1.0)),
    "top_p": lambda r: r.choice((1.0, 0.5)),
    "min_p": lambda r: r.choice((0.0, 0.1)),
    "typical_p": lambda r: r.choice((1.0, 0.9)),
    "repetition_penalty": lambda r: r.choice((1.0, 1.1)),
    "frequency_penalty": lambda r: r.choice((0.0, -2.0, 2.0)),
    "presence_penalty": lambda r: r.choice((0.0, 0.5)),
    "top_k": lambda r: r.choice((0, 1, 40)),
    "logprobs": lambda r: r.choice((0, 1, 20)),
    "prompt_logprobs": lambda r: r.choice((0, 5)),
    "priority": lambda r: r.choice((-10, 0, 10)),
    "ids": lambda r: r.randrange(900),
    "token_ids": lambda r: r.randrange(900),
    "stop_token_ids": lambda r: r.randrange(900),
    "ttl_s": lambda r: r.choice((0.1, 0.5, 2.0)),
    "tokens": lambda r: r.choice((1, 16, 100)),
    "workers": lambda r: r.choice((1, 2, 64)),
    "json_schema": lambda r: r.choice(_SCHEMAS),
    "parameters": lambda r: r.choice(_SCHEMAS),
    "arguments": lambda r: r.choice(("{}", '{"a": 1}', "[", "null")),
    "regex": lambda r: r.choice(_REGEXES),
    "lark": lambda r: r.choice(_LARKS),
    "stop": lambda r: r.choice(_WORDS),
    "request_id": lambda r: r.choice(("", "r-1", "r-2")),
    "key": lambda r: r.randrange(900),
    "value": lambda r: r.choice((-100.0, -1.0, 0.0, 1.0)),
    "mode": lambda r: r.choice((0, 0, 1, 2)),
    "name": lambda r: r.choice(("", "f", "g", "h", "find", "a-b_c")),
}

_ALWAYS = {
    f"kvhive.v1.{name}"
    for name in ("GenerateRequest.sampling", "SamplingParams.max_tokens", "CacheControl.ttl_s", "Pin.ttl_s")
}
"""Without a bound an answer fills the pool, and pins keep it full: which is right, and takes minutes."""


def random_call(descriptor: Descriptor, chance: random.Random) -> bytes:
    """Return the bytes of a request; one in ten is not even a message any more."""
    raw = random_message(descriptor, chance).SerializeToString()
    return _broken(raw, chance) if chance.random() < 0.1 else raw


def random_message(descriptor: Descriptor, chance: random.Random, depth: int = 0) -> Message:
    """Return a message of which some fields are set."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        likely = 1.0 if field.full_name in _ALWAYS else 0.9 if depth and not field.has_presence else 0.35
        if chance.random() < likely and depth < MAX_DEPTH:
            _set(message, field, chance, depth)
    inputs = [group for group in descriptor.oneofs if len(group.fields) > 1]
    for group in inputs:  # what is refused without one of them is refused often enough
        if message.WhichOneof(group.name) is None and chance.random() < 0.95:
            _set(message, chance.choice(group.fields), chance, depth)
    if chance.random() < 0.9:
        _make_sense(message)
    return message


def _make_sense(message: Any) -> None:
    """Take out what is refused beside other fields, however right it is alone."""
    match message.DESCRIPTOR.name:
        case "ChatMessage":
            for owner, name in (("assistant", "tool_calls"), ("tool", "tool_call_id")):
                if message.role != owner:
                    message.ClearField(name)
        case "ToolChoice" if message.mode != 2:
            message.ClearField("name")
        case "Chat" if message.tool_choice.mode == 2 or message.tool_choice.name:
            message.tool_choice.ClearField("name")
            if not message.tools:
                message.ClearField("tool_choice")
        case "GenerateRequest" if message.HasField("chat"):
            message.ClearField("pins")


def _set(message: Message, field: FieldDescriptor, chance: random.Random, depth: int) -> None:
    entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
    if entry is not None:
        wild = chance.random() < WILD_SHARE
        for _ in range(chance.choice((1, 2, 5, 1100 if chance.random() < 0.02 else 3))):
            key, value = (_value(entry.fields_by_name[name], chance, wild) for name in ("key", "value"))
            getattr(message, field.name)[key] = value
    elif field.message_type is not None:
        count = _count(chance, depth) if field.is_repeated else 1
        for _ in range(count):
            inner = random_message(field.message_type, chance, depth + 1)
            target = getattr(message, field.name)
            (target.add() if field.is_repeated else target).CopyFrom(inner)
            if not field.is_repeated:
                target.SetInParent()
    elif field.is_repeated:
        wild = chance.random() < WILD_SHARE
        count = _count(chance, depth) * 3 or chance.randrange(2)
        getattr(message, field.name).extend(_value(field, chance, wild) for _ in range(count))
    else:
        setattr(message, field.name, _value(field, chance, chance.random() < WILD_SHARE))


def _count(chance: random.Random, depth: int) -> int:
    rare = chance.random()
    return 20 if rare < 0.05 else 300 if rare < 0.06 and depth < 2 else chance.choice((0, 1, 1, 2, 3))


def _value(field: FieldDescriptor, chance: random.Random, wild: bool) -> Any:
    plausible = _PLAUSIBLE.get(field.name)
    if plausible is not None and not wild:
        return plausible(chance)
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        text = chance.choice(_ODD_TEXTS) if chance.random() < 0.2 else ""
        return text or "".join(chance.choice(_WORDS) for _ in range(chance.choice((1, 3, 10))))
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return chance.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_FLOAT:
        return struct.unpack("f", struct.pack("f", chance.choice(_FLOATS)))[0]
    if field.enum_type is not None:
        return chance.choice((*(value.number for value in field.enum_type.values), 7, -1))
    return chance.choice(_integers(kind))


def _integers(kind: int) -> tuple[int, ...]:
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    if kind in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64):
        return (0, 1, 2, 17, 2**16, 2 ** (bits - 1), 2**bits - 1)
    return (0, 1, -1, 17, 2**16, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))


def _broken(raw: bytes, chance: random.Random) -> bytes:
    """Cut it, flip some of it, or add something."""
    where = chance.randrange(len(raw) + 1)
    match chance.randrange(4):
        case 0:
            return raw[:where]
        case 1:
            return raw[:where] + chance.randbytes(chance.choice((1, 8, 100))) + raw[where:]
        case 2:
            return raw[:where] + bytes(255 - byte for byte in raw[where : where + 3]) + raw[where + 3 :]
        case _:
            return b"\xff" * chance.choice((1, 11, 1000))
