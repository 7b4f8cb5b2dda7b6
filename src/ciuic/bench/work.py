"""A folder for what a benchmark's processes write: gone when all went well, kept with its logs when not."""

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def work_folder(path: Path) -> Generator[Path]:
    """An empty folder at `path`; whatever was there is deleted first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    yield path.resolve()
    shutil.rmtree(path, ignore_errors=True)
