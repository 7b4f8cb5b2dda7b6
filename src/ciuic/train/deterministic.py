"""`ciuic.torch.deterministic(seed)`: the same numbers each time, as far as this machine can, and what it cannot.

Call it first thing in the program, before a model, a DataLoader or anything on a GPU is made. Some switches are read
only once: what was too late is told, and so is what no switch can settle.
"""

import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.deterministic

from ciuic.errors import UsageError

CUBLAS, HASH_SEED = "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED"
CUBLAS_VALUES = (":4096:8", ":16:8")
MOST_SEED = 2**32
_OWN_ENVIRONMENT = Path("/proc/self/environ")
_log = logging.getLogger("ciuic.train")


@dataclass(frozen=True, kw_only=True)
class Determinism:
    """What `deterministic` did. `print(...)` it: three short lists."""

    seed: int
    done: tuple[str, ...]
    """What is set from now on."""
    too_late: tuple[str, ...]
    """What had to be set earlier, and how to do that."""
    remains: tuple[str, ...]
    """What may still differ from run to run or from machine to machine."""

    def __str__(self) -> str:
        parts = [("set", self.done), ("too late", self.too_late), ("may still differ", self.remains)]
        lines = [f"deterministic, seed {self.seed}"]
        for title, entries in parts:
            lines += [f"{title}:", *(f"  - {entry}" for entry in entries)] if entries else []
        return "\n".join(lines)

    def generator(self, rank: int | None = None) -> torch.Generator:
        """For `DataLoader(generator=...)`: the order of samples, and the seeds of its workers.

        The same on all ranks, as a distributed sampler needs it; give `rank` where each rank shuffles for itself.
        """
        return torch.Generator().manual_seed(self.seed if rank is None else _mixed(self.seed, rank))

    def worker_init(self, worker: int) -> None:
        """For `DataLoader(worker_init_fn=...)`: Python's and numpy's generators follow torch's seed of the worker."""
        seed = torch.initial_seed() % MOST_SEED
        random.seed(seed)
        np.random.seed(seed)

    def loader_options(self, rank: int | None = None) -> dict[str, Any]:
        """`DataLoader(dataset, **options)`: both of the above."""
        return {"generator": self.generator(rank), "worker_init_fn": self.worker_init}

    def differ_by_rank(self, rank: int | None = None) -> int:
        """Seed all generators again, differently on each rank; returns that seed.

        For after the model is made: equal seeds give equal parameters, but also equal dropout on all ranks. `rank`: by
        default that of torch.distributed, or RANK.
        """
        mine = _mixed(self.seed, _rank() if rank is None else rank)
        _seed_all(mine)
        return mine


def deterministic(seed: int, *, warn_only: bool = False, tf32: bool = False) -> Determinism:
    """Seed everything, choose repeatable algorithms, and report what that leaves open.

    `seed`: 0 up to 2**32. `warn_only`: operations without a repeatable algorithm warn instead of raising. `tf32`: leave
    TF32 as it is (it is repeatable on one kind of GPU, but other kinds do not have it). Raises UsageError.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MOST_SEED:
        raise UsageError(f"{seed!r} is not a seed", next="give a whole number from 0 up to 4294967295")
    done: list[str] = []
    too_late = _environment(seed, done)
    _seed_all(seed)
    done.append(f"random, numpy, torch and all devices start at seed {seed}, the same on every rank")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    done.append("operations without a repeatable algorithm " + ("warn" if warn_only else "raise an error"))
    torch.utils.deterministic.fill_uninitialized_memory = True  # ty: ignore[missing-attribute]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    done.append("cuDNN takes repeatable algorithms and does not choose by timing")
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not tf32:
        _no_tf32()
        done.append("TF32 is off: float32 products keep 24 bits")
    report = Determinism(seed=seed, done=tuple(done), too_late=tuple(too_late), remains=tuple(_remains(warn_only)))
    for entry in report.too_late:
        _log.warning("deterministic: %s", entry)
    return report


def _environment(seed: int, done: list[str]) -> list[str]:
    """Set what libraries read from the environment; returns what came too late."""
    late = []
    wish = os.environ.get(CUBLAS)
    if wish not in CUBLAS_VALUES:
        os.environ[CUBLAS] = CUBLAS_VALUES[0]
        if torch.cuda.is_initialized():
            late.append(f"CUDA has been used already, without {CUBLAS}: start with {CUBLAS}={CUBLAS_VALUES[0]}")
    done.append(f"{CUBLAS}={os.environ[CUBLAS]}: cuBLAS keeps to one workspace")
    if not _started_with(HASH_SEED).isdigit():
        late.append(f"sets of texts have another order in each process: start with {HASH_SEED}={seed} python ...")
        os.environ[HASH_SEED] = str(seed)
        done.append(f"{HASH_SEED}={seed} for processes that this one starts anew")
    return late


def _started_with(name: str) -> str:
    """A variable as this process found it: setting it later changes nothing here."""
    try:
        entries = _OWN_ENVIRONMENT.read_bytes().split(b"\0")
    except OSError:
        return os.environ.get(name, "")
    found = [entry.partition(b"=")[2] for entry in entries if entry.startswith(name.encode() + b"=")]
    return found[0].decode(errors="replace") if found else ""


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # every device: those that are not initialised get it when they are


def _mixed(seed: int, rank: int) -> int:
    """A seed of its own for each rank, far from those of neighbouring seeds."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])


def _no_tf32() -> None:
    """By the switches that every version has; torch refuses to mix them with the newer ones if those are in use."""
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
    except RuntimeError:
        backends: Any = torch.backends
        for place in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            place.fp32_precision = "ieee"


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


# ---- what stays open: each entry has a condition, so that the list is about this process


def _remains(warn_only: bool) -> list[str]:
    entries: list[tuple[Callable[[], bool], str]] = [
        (lambda: warn_only, "operations that warn: the warning names each (scatter and index sums by atomic adds)"),
        (_in_world, "sums over ranks: repeatable with the same number of ranks, buckets and algorithm only"),
        (_over_nccl, "NCCL may choose another algorithm: fix NCCL_ALGO=Ring and NCCL_PROTO=Simple to compare runs"),
        (lambda: True, f"sums on this machine are split over {torch.get_num_threads()} threads: fix OMP_NUM_THREADS"),
        (lambda: True, "another processor or GPU model rounds differently, and draws other random numbers on a GPU"),
        (lambda: True, "another version of torch or its libraries may use other algorithms"),
        (lambda: True, "DataLoader: only with generator and worker_init_fn of this report, and in_order=True"),
        (lambda: True, "samples in another order or number per rank: after a change of ranks or of elastic nodes"),
        (lambda: True, "what uses time, process numbers, threads of its own, or the order of files in a folder"),
        (lambda: torch.cuda.is_available(), "torch.compile with max-autotune chooses kernels by timing"),
    ]
    return [text for holds, text in entries if holds()]


def _in_world() -> bool:
    return dist.is_available() and (dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") not in ("", "1"))


def _over_nccl() -> bool:
    return _in_world() and (torch.cuda.is_available() or (dist.is_initialized() and "nccl" in dist.get_backend()))
