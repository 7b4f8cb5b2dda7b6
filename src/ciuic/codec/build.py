"""Compile kernel.c. Used by the build hook when Ciuic is installed; as a program it compiles beside the source.

Standard library only and no imports from Ciuic: the hook loads this file by its path, before Ciuic exists.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LIBRARY = "_kernel.so"
REASON = "_kernel.txt"
"""Beside where the library would be: why it could not be built."""
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
"""No -march: the level is chosen at run time. No -ffast-math: every back end must round alike."""
COMPILERS = ("cc", "gcc", "clang")
LIMIT_S = 300.0


def source_hash(source: Path) -> str:
    """What ties a library to its source; a library from another source is not used."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def build_kernel(source: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Compile `source` to folder/_kernel.so. Returns "" or why there is no library; that is also written beside it.

    The compiler is $CC, or the first of cc, gcc and clang. Never raises for a missing or failing compiler.
    """
    reason = _compile(source, folder, environment)
    note = folder / REASON
    if reason:
        (folder / LIBRARY).unlink(missing_ok=True)
        note.write_text(reason + "\n")
    else:
        note.unlink(missing_ok=True)
    return reason


def _compile(source: Path, folder: Path, environment: Mapping[str, str]) -> str:
    compiler = _compiler(environment)
    if not compiler:
        return "no C compiler (cc, gcc or clang) was found when ciuic was installed"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        target = Path(temporary) / LIBRARY
        command = [*compiler, *FLAGS, f'-DSOURCE_HASH="{source_hash(source)}"', str(source), "-o", str(target), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"the C compiler {compiler[0]} did not run when ciuic was installed ({type(error).__name__})"
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            return f"{compiler[0]} failed when ciuic was installed: {first.strip()[:200]}"
        target.replace(folder / LIBRARY)  # at once: a running process keeps the library it has
    return ""


def _compiler(environment: Mapping[str, str]) -> list[str]:
    named = shlex.split(environment.get("CC", ""))
    if named:
        return named
    found = (shutil.which(name, path=environment.get("PATH")) for name in COMPILERS)
    return [path for path in found if path][:1]


def main() -> int:
    """Build beside the source, for a checkout that is used without being installed."""
    here = Path(__file__).resolve().parent
    reason = build_kernel(here / "kernel.c", here, os.environ)
    sys.stdout.write((reason or f"built: {here / LIBRARY}") + "\n")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
