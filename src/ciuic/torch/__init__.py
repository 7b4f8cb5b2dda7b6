"""The public face for training scripts that use torch: re-exports, nothing else."""

if __name__ == "torch":  # `import torch` found this folder: Python was started inside the package, src/ciuic
    raise ImportError(
        "`import torch` found ciuic/torch instead of PyTorch, because Python was started inside the ciuic package; "
        "start it in another folder, or as `python -P -m ...`"
    )

from ciuic.train.session import Run, join

__all__ = ["Run", "join"]
