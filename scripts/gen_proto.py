"""Regenerate proto/v1/*_pb2* from the .proto files: `python scripts/gen_proto.py [--check]`.

protoc sees the files under a virtual kvhive/proto/v1 path, so that generated code imports
`kvhive.proto.v1`. With --check nothing is written and a difference ends with status 1.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

SOURCES = Path(__file__).resolve().parent.parent / "proto" / "v1"
PACKAGE = "kvhive/proto/v1"


def protoc_includes() -> list[str]:
    """Return the arguments that tell protoc where our files are, and Google's."""
    return [f"-I{PACKAGE}={SOURCES}", f"-I{resources.files('grpc_tools') / '_proto'}"]


def generate(target: Path) -> dict[str, str]:
    """Run protoc into `target`; return the generated text by file name. Raises RuntimeError."""
    names = sorted(path.name for path in SOURCES.glob("*.proto"))
    arguments = [
        "protoc",
        *protoc_includes(),
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        *(f"{PACKAGE}/{name}" for name in names),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed")
    return {path.name: path.read_text() for path in sorted((target / PACKAGE).iterdir())}


def main() -> int:
    """Write the generated files, or with --check compare them with what is committed."""
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(Path(folder))
    stale = [
        n for n, text in generated.items() if not (SOURCES / n).exists() or (SOURCES / n).read_text() != text
    ]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"proto/v1/{name} is not what protoc makes of the .proto files", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (SOURCES / name).write_text(generated[name])
        print(f"wrote proto/v1/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
