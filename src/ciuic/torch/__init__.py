"""The public face for training scripts that use torch: re-exports, nothing else."""

if __name__ == "torch":  # `import torch` found this folder: Python was started inside the package, src/ciuic
    raise ImportError(
        "`import torch` found ciuic/torch instead of PyTorch, because Python was started inside the ciuic package; "
        "start it in another folder, or as `python -P -m ...`"
    )

from ciuic.train.ddp import DdpCompression, LinkSpeed, compress_ddp, merge_ddp_states
from ciuic.train.deterministic import Determinism, deterministic
from ciuic.train.global_metric import GlobalEarlyStopping, GlobalMetric, Verdict
from ciuic.train.joining import join
from ciuic.train.lr import DistributedCosineLR
from ciuic.train.optimizers import muon_adamw
from ciuic.train.rendezvous import World, reform, register, waiting
from ciuic.train.session import Run
from ciuic.train.two_syncs import DoubleSyncWatch, watch_double_sync

__all__ = [
    "DdpCompression",
    "Determinism",
    "DistributedCosineLR",
    "DoubleSyncWatch",
    "GlobalEarlyStopping",
    "GlobalMetric",
    "LinkSpeed",
    "Run",
    "Verdict",
    "World",
    "compress_ddp",
    "deterministic",
    "join",
    "merge_ddp_states",
    "muon_adamw",
    "reform",
    "waiting",
    "watch_double_sync",
]

register()  # ciuic:// for torch.distributed
