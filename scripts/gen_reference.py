"""Write docs/reference_grpc.md from proto/v1/inference.proto: `python scripts/gen_reference.py [--check]`.

What the page says are the comments of the .proto. With --check nothing is written and a difference ends with
status 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2 as dp

from kvhive.scripts.gen_proto import PACKAGE, SOURCES, protoc_includes

PAGE = SOURCES.parent.parent / "docs" / "reference_grpc.md"
SOURCE = "inference.proto"
HEAD = """# kvhive.v1: every call and every field

Made of the comments in proto/v1/inference.proto by scripts/gen_reference.py; edit those. How to call it, its
errors and its limits: [grpc.md](grpc.md).
"""

# Numbers of fields in descriptor.proto, of which the paths to comments are made.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ENUM, _MEMBER = 2, 4, 2

_FIELD = dp.FieldDescriptorProto
_SCALARS = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in _FIELD.Type.items()
    if number not in (_FIELD.TYPE_MESSAGE, _FIELD.TYPE_ENUM)
}


def reference() -> str:
    """Return the page. Raises RuntimeError when protoc refuses the source."""
    file = _parsed()
    comments = {tuple(place.path): _words(place.leading_comments) for place in file.source_code_info.location}
    lines = [HEAD]
    for number, service in enumerate(file.service):
        lines += _service(service, (_SERVICE, number), comments)
    lines.append("## Messages\n")
    for number, message in enumerate(file.message_type):
        lines += _message(message, (_MESSAGE, number), comments)
    for number, enum in enumerate(file.enum_type):
        lines += _enum(enum, "", (_ENUM, number), comments)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or with --check compare it with the one that is committed."""
    page = reference()
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"docs/{PAGE.name} is not what scripts/gen_reference.py makes of {SOURCE}", file=sys.stderr)
        return 1
    PAGE.write_text(page)
    print(f"wrote docs/{PAGE.name}")
    return 0


def _parsed() -> dp.FileDescriptorProto:
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set"
        options = ["--include_source_info", f"--descriptor_set_out={target}", f"{PACKAGE}/{SOURCE}"]
        if protoc.main(["protoc", *protoc_includes(), *options]) != 0:
            raise RuntimeError("protoc failed")
        return dp.FileDescriptorSet.FromString(target.read_bytes()).file[0]


def _service(service: Any, path: Sequence[int], comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    yield f"## Calls of {service.name}\n\n{comments[tuple(path)]}\n"
    for number, method in enumerate(service.method):
        stream = "stream of " * method.server_streaming
        yield f"### {method.name}\n"
        yield f"{_link(method.input_type)} to {stream}{_link(method.output_type)}\n"
        yield f"{comments[(*path, _MEMBER, number)]}\n"


def _message(message: Any, path: Sequence[int], comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    yield f"### {message.name}\n"
    about = comments.get(tuple(path))
    if about:
        yield f"{about}\n"
    if not message.field:
        yield "It has no fields.\n"
        return
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    yield "| field | type | |\n|---|---|---|"
    for number, field in enumerate(message.field):
        text = comments.get((*path, _MESSAGE_FIELD, number), "")
        yield f"| `{field.name}` | {_type(field, message, entries)} | {_cell(text)} |"
    yield ""
    for number, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{message.name}.", (*path, _MESSAGE_ENUM, number), comments)


def _enum(enum: Any, prefix: str, path: Sequence[int], comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    yield f"### {prefix}{enum.name}\n"
    yield "| value | number | |\n|---|---|---|"
    for number, value in enumerate(enum.value):
        text = comments.get((*path, _MEMBER, number), "")
        yield f"| `{value.name}` | {value.number} | {_cell(text)} |"
    yield ""


def _type(field: Any, message: Any, entries: dict[str, Any]) -> str:
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = entry.field
        return f"map of {_plain(key)} to {_plain(value)}"
    name = _plain(field)
    if field.label == _FIELD.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _plain(field: Any) -> str:
    return _SCALARS.get(field.type) or _link(field.type_name)


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".kvhive.v1.")
    return f"[{name}](#{name.lower().replace('.', '')})"


def _words(comment: str) -> str:
    return " ".join(comment.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
