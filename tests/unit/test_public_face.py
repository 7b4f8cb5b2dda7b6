"""What `import ciuic` gives, what it does not load, and the trap of a package that has a folder named torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ciuic
from ciuic import errors

PACKAGE = Path(ciuic.__file__).parent
HEAVY = ("torch", "transformers", "datasets", "numpy", "pydantic", "starlette", "cryptography")


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_import_ciuic_loads_no_torch_and_nothing_heavy(tmp_path: Path) -> None:
    done = python("-c", f"import ciuic, sys; print([n for n in {HEAVY} if n in sys.modules])", folder=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_exported_name_is_listed_and_the_errors_are_the_real_ones() -> None:
    assert list(ciuic.__all__) == sorted(ciuic.__all__)
    for name in set(ciuic.__all__) & set(vars(errors)):
        assert getattr(ciuic, name) is getattr(errors, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'jion'"):
        ciuic.jion  # noqa: B018  # ty: ignore[unresolved-attribute]


def test_join_outside_of_a_run_says_how_to_get_into_one(tmp_path: Path) -> None:
    code = (
        "import ciuic, ciuic.torch; from ciuic.errors import NotInRunError\n"
        "assert ciuic.join is ciuic.torch.join and ciuic.Run is ciuic.torch.Run\n"
        "try: ciuic.join()\n"
        "except NotInRunError as error: print(error.code)"
    )
    done = python("-c", code, folder=tmp_path)
    assert done.stdout.strip() == "CIUIC-105", done.stderr


def test_a_script_inside_the_package_with_safe_path_finds_the_real_torch() -> None:
    code = "import importlib.util, ciuic; print(importlib.util.find_spec('torch').origin)"
    done = python("-P", "-c", code, folder=PACKAGE)
    origin = Path(done.stdout.strip())
    assert origin.name == "__init__.py", done.stderr
    assert not origin.is_relative_to(PACKAGE)


def test_a_script_inside_the_package_is_told_why_its_torch_is_wrong() -> None:
    done = python("-c", "import torch", folder=PACKAGE)
    assert done.returncode == 1
    assert "found ciuic/torch instead of PyTorch" in done.stderr


def test_the_console_program_works_inside_the_package() -> None:
    done = python("-P", "-m", "ciuic.cli.main", "--version", folder=PACKAGE)
    assert done.stdout.strip() == ciuic.__version__, done.stderr
