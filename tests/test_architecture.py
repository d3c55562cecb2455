"""The arrows between rooms, and the rules of the house that a reader cannot check by eye."""

import ast
import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kvhive.proto.config import ClusterConfig

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("toolchain", "proto", "kernels", "worker", "router", "client", "scripts")
FOLDERS = {room: ROOT / room for room in ROOMS} | {"client": ROOT / "router" / "client"}

MAY_IMPORT = {
    "toolchain": {"toolchain"},
    "proto": {"proto", "toolchain"},
    "kernels": {"kernels", "toolchain"},
    "worker": {"worker", "proto", "kernels"},
    "router": {"router", "proto"},
    "client": {"client", "proto"},
    "scripts": set(ROOMS),
}
FORBIDDEN_THIRD_PARTY = {
    "toolchain": {"torch", "ray", "redis", "grpc", "starlette", "transformers", "numpy"},
    "proto": {"torch", "ray", "redis", "starlette", "transformers", "numpy"},
    "kernels": {"ray", "redis", "grpc", "transformers"},
    "worker": {"starlette", "tokenizers", "click"},
    "router": {"torch", "ray", "transformers", "accelerate", "click"},
    "client": {"torch", "ray", "redis", "starlette", "transformers", "tokenizers", "numpy", "click"},
    "scripts": set(),
}
# (third-party package, room) -> the only modules of the room that may import it
ONLY_IMPORTERS = {
    ("ray", "worker"): {"worker.actor"},
    ("transformers", "worker"): {"worker.transformers_model"},
    ("grpc", "worker"): {"worker.service", "worker.server", "worker.transfer_peers"},
    ("redis", "worker"): {"worker.index_connection", "worker.kv_event_publisher", "worker.server"},
}
TORCH_FREE = {
    "worker.block_desk",
    "worker.block_moves",
    "worker.block_pool",
    "worker.engine",
    "worker.event_delta",
    "worker.kv_cache_manager",
    "worker.model_identity",
    "worker.model_runner",
    "worker.scheduler",
    "worker.sequence",
    "worker.shard",
    "worker.simulated_runner",
    "worker.step_time",
    "worker.transfer_identity",
    "worker.transfer_rate",
}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc", "core", "types"}
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
EXCUSED_FUNCTIONS: dict[str, str] = {}


def module_files() -> dict[str, Path]:
    """Return `room.module` -> file, generated code left out."""
    files = {}
    for room in ROOMS:
        for path in sorted(FOLDERS[room].rglob("*.py")):
            parts = (room, *path.relative_to(FOLDERS[room]).with_suffix("").parts)
            elsewhere = parts[:2] == ("router", "client") or "typing" in parts
            if not elsewhere and not path.stem.endswith(("_pb2", "_pb2_grpc")):
                files[".".join(parts).removesuffix(".__init__")] = path
    return files


MODULES = module_files()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports_of(tree: ast.AST) -> set[str]:
    """Return the dotted names of all imports: lazy ones and those under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(names: set[str]) -> set[str]:
    """Return our own modules among the imported names, without `kvhive.`."""
    found = set()
    for name in names:
        if name.startswith("kvhive."):
            inner = name.removeprefix("kvhive.")
            found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return found


def third_party(names: set[str]) -> set[str]:
    """Return the top-level packages of imports that are neither ours nor Python's."""
    tops = {name.partition(".")[0] for name in names}
    return tops - {"kvhive"} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", MODULES)
def test_a_room_imports_only_the_rooms_it_may(name: str) -> None:
    room = name.partition(".")[0]
    reached = {module.partition(".")[0] for module in ours(imports_of(TREES[name]))}
    assert reached <= MAY_IMPORT[room]


@pytest.mark.parametrize("name", MODULES)
def test_a_room_keeps_foreign_packages_out(name: str) -> None:
    room = name.partition(".")[0]
    used = third_party(imports_of(TREES[name]))
    assert not used & FORBIDDEN_THIRD_PARTY[room]
    for (package, owner), importers in ONLY_IMPORTERS.items():
        if room == owner and package in used:
            assert name in importers


@pytest.mark.parametrize("name", sorted(TORCH_FREE & set(MODULES)))
def test_the_torch_free_zone_reaches_no_torch_even_indirectly(name: str) -> None:
    reached, todo = set(), [name]
    while todo:
        module = todo.pop()
        if module not in reached and module in TREES:
            reached.add(module)
            imports = imports_of(TREES[module])
            assert "torch" not in third_party(imports), f"{name} reaches torch through {module}"
            todo += ours(imports)


def test_the_torch_free_zone_exists() -> None:
    assert set(MODULES) >= TORCH_FREE


def test_nothing_imports_scripts_but_scripts() -> None:
    for name, tree in TREES.items():
        if not name.startswith("scripts"):
            assert not any(module.startswith("scripts") for module in ours(imports_of(tree))), name


def test_modules_form_no_cycle() -> None:
    graph = {name: ours(imports_of(tree)) & set(MODULES) - {name} for name, tree in TREES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_a_file_says_what_it_is_and_can_be_held_in_mind(name: str) -> None:
    assert ast.get_docstring(TREES[name]), "a docstring says the file's one idea"
    assert len(MODULES[name].read_text().splitlines()) <= MOST_LINES
    assert name.rpartition(".")[2] not in VAGUE_NAMES
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES or f"{name}.{node.name}" in EXCUSED_FUNCTIONS, node.name


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.name)
def test_a_test_file_can_be_held_in_mind_too(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_excuses_are_still_needed() -> None:
    functions = {
        f"{name}.{node.name}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_FUNCTION_LINES
    }
    assert set(EXCUSED_FUNCTIONS) <= functions


def test_folders_whose_names_other_packages_own_are_no_packages_of_ours() -> None:
    for folder in ("proto", "proto/v1", "kernels", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join({{n.partition('.')[0] for n in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


def test_importing_the_router_brings_neither_torch_nor_ray() -> None:
    names = [f"kvhive.{name}" for name in MODULES if name.startswith("router.")]
    loaded = modules_after(f"import {', '.join(names)}")
    assert not loaded & {"torch", "ray", "transformers"}


def test_importing_the_client_brings_nothing_that_serves() -> None:
    heavy = {"torch", "ray", "transformers", "redis", "starlette", "uvicorn", "tokenizers", "numpy", "yaml"}
    assert not modules_after("import kvhive.client") & heavy


def test_importing_the_torch_free_zone_brings_no_torch() -> None:
    loaded = modules_after(f"import {', '.join(f'kvhive.{name}' for name in sorted(TORCH_FREE))}")
    assert not loaded & {"torch", "ray"}


def test_the_command_line_starts_without_ray_torch_or_grpc() -> None:
    assert not modules_after("import kvhive.scripts.cli") & {"torch", "ray", "grpc", "redis", "rich"}


def test_importing_what_a_status_needs_brings_neither_torch_nor_ray() -> None:
    loaded = modules_after(
        "import kvhive.scripts.cli, kvhive.client, kvhive.scripts.completion, kvhive.scripts.teardown"
    )
    assert not loaded & {"torch", "ray"}


def test_who_makes_workers_and_ends_them_waits_for_no_torch() -> None:
    """It would take longer than all else that a controller does before its workers start."""
    loaded = modules_after("import kvhive.scripts.control, kvhive.scripts.fleet_actors")
    assert "ray" in loaded and "torch" not in loaded


def test_the_readme_has_a_line_for_every_file() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].partition("##")[0]
    listed = {line.split()[0] for line in tree.splitlines() if line.startswith("    ")}
    wanted = {path.name for path in MODULES.values() if path.name != "__init__.py"}
    assert wanted - listed == set(), "files without a line"
    assert {name for name in listed if name.endswith(".py")} - wanted == set(), "lines without a file"


def field_docstrings(tree: ast.Module) -> dict[tuple[str, str], str]:
    """Return (class, field) -> the string that stands below the field."""
    found = {}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node, after in itertools.pairwise(cls.body):
            match node, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[cls.name, name] = text
    return found


def test_the_readme_says_of_every_configuration_key_what_the_code_says() -> None:
    """One row per key, with the default and the meaning that the dataclasses have; no row without a key."""
    meanings = field_docstrings(TREES["proto.config"]) | field_docstrings(TREES["proto.autoscaling_config"])
    rows = []

    def describe(owner: object, prefix: str) -> None:
        for field in dataclasses.fields(owner):  # type: ignore[arg-type]
            value = getattr(owner, field.name)
            if dataclasses.is_dataclass(value):
                describe(value, f"{prefix}{field.name}.")
                continue
            shown = "empty" if value == "" else f"`{value}`"
            meaning = meanings[type(owner).__name__, field.name]
            rows.append(f"| `{prefix}{field.name}` | {shown} | {meaning} |")

    describe(ClusterConfig(), "")
    table = (ROOT / "README.md").read_text().partition("| key | default | meaning |")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == rows
