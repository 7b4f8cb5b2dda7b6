"""Python imports this at its start, because `ciuic doctor run` puts this folder first on PYTHONPATH.

A sitecustomize of the user's own is run first. Then the import of torch is waited for; only after it does the doctor
attach, and only in processes that train (see `ciuic.doctor.probe.attach`). Nothing else is imported here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


def _run_the_users_own() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # noqa: BLE001 - Python itself goes on after an error there, too
            print(f"Error in sitecustomize: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets torch be loaded as usual, and attaches when that is done."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                _attach()

            spec.loader.exec_module = exec_module
        return spec


def _attach() -> None:
    try:
        from ciuic.doctor.probe.attach import attach_from_environment

        attach_from_environment()
    except Exception as error:  # noqa: BLE001 - the program runs on, with or without a doctor
        print(f"ciuic doctor: cannot look into this process: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


_run_the_users_own()
if os.environ.get("CIUIC_DOCTOR"):
    sys.meta_path.insert(0, _AfterTorch())
