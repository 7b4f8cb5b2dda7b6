"""Building the kernel is optional: whatever the compiler does, the installation goes on and the reason is kept."""

import importlib.util
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ciuic.codec import build
from ciuic.codec.build import build_kernel

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(build.__file__).parent / "kernel.c"
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in build.COMPILERS), reason="needs a C compiler"
)


@needs_compiler
def test_a_compiler_builds_a_library_and_removes_an_old_reason(tmp_path: Path) -> None:
    (tmp_path / "_kernel.txt").write_text("old")
    assert build_kernel(SOURCE, tmp_path, os.environ) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["_kernel.so"]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "/nonexistent/cc"}, "did not run"),
        ({"PATH": "/nonexistent"}, "no C compiler"),
        ({"CC": "false", "PATH": os.environ["PATH"]}, "failed"),
    ],
)
def test_without_a_working_compiler_the_reason_is_kept_and_an_old_library_is_not(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "_kernel.so").write_bytes(b"old")
    assert reason in build_kernel(SOURCE, tmp_path, environment)
    assert [path.name for path in tmp_path.iterdir()] == ["_kernel.txt"]
    assert reason in (tmp_path / "_kernel.txt").read_text()


@needs_compiler
def test_a_source_that_does_not_compile_is_reported_by_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text("int f( {")
    assert "error" in build_kernel(tmp_path / "kernel.c", tmp_path, os.environ)


def test_nothing_that_rounds_otherwise_or_binds_to_one_processor_is_asked_for() -> None:
    assert "-ffp-contract=off" in build.FLAGS
    assert not [flag for flag in build.FLAGS if "march" in flag or "fast-math" in flag]


# ---- the hook, with a stand-in for hatchling (which only exists while a package is built)


@pytest.fixture
def hook_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / "hatch_build.py").exists():
        pytest.skip("not a source checkout")
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = type("BuildHookInterface", (), {})  # ty: ignore[unresolved-attribute]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build_under_test", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkout(folder: Path) -> Path:
    """A copy of what the hook needs, with a kernel that is compiled at once."""
    target = folder / "src/ciuic/codec"
    target.mkdir(parents=True)
    shutil.copy(SOURCE.parent / "build.py", target)
    (target / "kernel.c").write_text("int ciuic_nothing(void) { return 0; }\n")
    return target


def run_hook(module: Any, root: Path, version: str) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    hook = module.KernelBuildHook()
    hook.root, hook.app = str(root), types.SimpleNamespace(display_warning=warnings.append)
    build_data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    hook.initialize(version, build_data)
    for source in build_data["force_include"]:
        assert Path(source).exists()
    hook.finalize(version, build_data, "")
    return build_data, warnings


@needs_compiler
def test_a_wheel_carries_the_library_and_the_name_of_its_platform(hook_module: Any, tmp_path: Path) -> None:
    target = checkout(tmp_path)
    data, warnings = run_hook(hook_module, tmp_path, "standard")
    assert list(data["force_include"].values()) == ["ciuic/codec/_kernel.so"]
    assert data["tag"].startswith("py3-none-")
    assert data["pure_python"] is False
    assert not (target / "_kernel.so").exists()
    assert warnings == []


@needs_compiler
def test_an_editable_installation_has_the_library_beside_its_source(hook_module: Any, tmp_path: Path) -> None:
    target = checkout(tmp_path)
    data, _ = run_hook(hook_module, tmp_path, "editable")
    assert (target / "_kernel.so").exists()
    assert data["force_include"] == {}


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_without_a_compiler_the_package_is_built_and_carries_the_reason(
    version: str, hook_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = checkout(tmp_path)
    monkeypatch.setenv("CC", "/nonexistent/cc")
    data, warnings = run_hook(hook_module, tmp_path, version)
    assert data["pure_python"] is True
    assert len(warnings) == 1
    assert "numpy" in warnings[0]
    if version == "standard":
        assert list(data["force_include"].values()) == ["ciuic/codec/_kernel.txt"]
    else:
        assert (target / "_kernel.txt").exists()
