"""Builds the codec kernel when Ciuic is installed. Without a C compiler the installation succeeds without it."""

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CODEC = Path("src/ciuic/codec")


class KernelBuildHook(BuildHookInterface):
    """A wheel carries the library (or the reason why there is none); an editable one finds it beside kernel.c."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = _load(Path(self.root) / CODEC / "build.py")
        source = Path(self.root) / CODEC / "kernel.c"
        if version == "editable":
            reason = build.build_kernel(source, source.parent, os.environ)
        else:
            self._folder = tempfile.TemporaryDirectory()
            reason = build.build_kernel(source, Path(self._folder.name), os.environ)
            name = build.REASON if reason else build.LIBRARY
            build_data["force_include"][str(Path(self._folder.name) / name)] = f"ciuic/codec/{name}"
        if reason:
            self.app.display_warning(f"ciuic uses the slower numpy codecs: {reason}")
        else:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def _load(path: Path) -> Any:
    """The module at this path; Ciuic is not installed yet."""
    spec = importlib.util.spec_from_file_location("ciuic_codec_build", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
