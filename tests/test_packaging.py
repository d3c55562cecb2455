"""The wheel holds every module, and a run from the repository shadows nobody's `proto` or `kernels`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("toolchain", "proto", "kernels", "worker", "router", "scripts")
CLIENT = "router/client/"  # kvhive.client
SHIPPED = ("*.py", "*.pyi", "*.proto", "py.typed", "*.cpp", "*.h", "*.cu")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built in a copy so that no build folder is left here."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for name in listed.splitlines():
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(path.read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_that_a_room_ships(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"kvhive/{path.relative_to(ROOT)}".replace(CLIENT, "client/")
        for room in ROOMS
        for pattern in SHIPPED
        for path in (ROOT / room).rglob(pattern)
        if "typing" not in path.parts and "__pycache__" not in path.parts
    }
    assert expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_owns_no_top_level_name_but_kvhive(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvhive"}


def test_the_wheel_has_the_command_and_the_license(wheel: zipfile.ZipFile) -> None:
    (entry_points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"kvhive = kvhive.scripts.cli:main" in wheel.read(entry_points)
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_a_run_from_the_repository_root_shadows_neither_proto_nor_kernels(tmp_path: Path) -> None:
    for name in ("proto", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    code = "import sys, proto, kernels; assert sys.path[0] == ''; print(proto.OWNER, kernels.OWNER)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.split() == ["somebody", "else", "somebody", "else"], result.stderr


def test_every_lock_line_is_an_exact_pin_without_a_host() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        for line in lock.read_text().splitlines():
            if not line.startswith("#"):
                name, pin, version = line.partition("==")
                assert name and pin and version and "+" not in version and ":" not in line, line


def test_torch_is_pinned_alone_and_nowhere_else() -> None:
    locks = {path.name: path.read_text() for path in (ROOT / "requirements").glob("*.lock")}
    assert set(locks) == {"torch.lock", "runtime.lock", "test.lock"}
    for name, text in locks.items():
        assert any(line.startswith("torch==") for line in text.splitlines()) == (name == "torch.lock")
