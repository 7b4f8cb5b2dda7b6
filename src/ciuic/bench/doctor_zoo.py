"""The fault zoo as the benchmark sees it: it lives beside the tests, so a source tree is needed."""

import importlib
import sys
from pathlib import Path
from typing import Any

from ciuic.errors import UsageError

ZOO = "zoo"


def load_zoo(tests: Path) -> Any:
    """Catalogue and runner, as one namespace. Raises UsageError when there is no zoo in that folder."""
    if not (tests / ZOO / "runner.py").is_file():
        raise UsageError(
            f"there is no fault zoo in {tests}",
            cause="it is part of the source tree, not of the installed package",
            next="run this in a clone of the project, or give --tests FOLDER",
        )
    sys.path.insert(0, str(tests.absolute()))
    return _Zoo(importlib.import_module(f"{ZOO}.catalogue"), importlib.import_module(f"{ZOO}.runner"))


class _Zoo:
    """FAULTS, PROGRAMS, SKIPPED, REPORTED, run_case and run_plain."""

    def __init__(self, catalogue: Any, runner: Any) -> None:
        self.faults: dict[str, Any] = catalogue.FAULTS
        self.programs: dict[str, Any] = catalogue.PROGRAMS
        self.skipped: dict[str, str] = catalogue.SKIPPED
        self.reported: tuple[str, ...] = catalogue.REPORTED
        self.run_case, self.run_plain = runner.run_case, runner.run_plain
        self.patience_s: float = runner.PATIENCE_S


def default_tests() -> Path:
    """The folder of the tests in a source tree."""
    return Path(__file__).parents[3] / "tests"
