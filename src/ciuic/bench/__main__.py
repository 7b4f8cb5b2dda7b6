"""`python -m ciuic.bench NAME`: measure, print, and write what was found with the facts of this machine."""

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ciuic import __version__
from ciuic.bench.machine import machine_facts
from ciuic.bench.names import NAMES
from ciuic.errors import CiuicError, error_to_dict, render_error


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark; the exit code is the error's."""
    parser = argparse.ArgumentParser(prog="ciuic bench", description=__doc__)
    kinds = parser.add_subparsers(dest="name", required=True)
    modules = {name: importlib.import_module(f"ciuic.bench.{name}") for name in _wanted(arguments)}
    for name, module in modules.items():
        kind = kinds.add_parser(name, help=NAMES[name])
        kind.add_argument("--json", action="store_true", help="only JSON on stdout")
        kind.add_argument("--folder", type=Path, default=Path("bench"), help="where results are written")
        module.add_options(kind)
    options = parser.parse_args(arguments)
    try:
        _run(modules[options.name], options)
    except CiuicError as error:
        sys.stdout.write(json.dumps({"error": error_to_dict(error)}) + "\n" if options.json else "")
        sys.stderr.write("" if options.json else render_error(error) + "\n")
        return error.exit_code
    return 0


def _wanted(arguments: list[str] | None) -> list[str]:
    """Only the benchmark that is asked for is imported: some need torch."""
    given = sys.argv[1:] if arguments is None else arguments
    named = [name for name in given[:1] if name in NAMES]
    return named or list(NAMES)


def _run(module: Any, options: argparse.Namespace) -> None:
    began = time.monotonic()
    result: dict[str, Any] = module.measure(options)
    facts = {"ciuic": __version__, **machine_facts(), "load_average": os.getloadavg()[0]}
    document = {"benchmark": options.name, "machine": facts, "took_s": round(time.monotonic() - began, 1), **result}
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"{options.name}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    written = [path]
    if hasattr(module, "picture"):
        written.append(module.picture(result, options.folder))
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
        return
    for table in module.tables(result):
        sys.stdout.write("\n".join(table.lines()) + "\n")
    sys.stdout.write(f"written: {', '.join(str(p) for p in written)}\n")


if __name__ == "__main__":
    sys.exit(main())
