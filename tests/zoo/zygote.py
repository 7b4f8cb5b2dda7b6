"""`python -m zoo.zygote FD`: a process that has loaded torch and forks the ranks of one case after the other.

Requests and answers are lines of JSON on the socket FD. A request is a `Start`; the answer tells how each rank ended.
While a case runs, any further line ends it early.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from zoo.world import Zoo

PRELOAD = ("torch", "torch._dynamo", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.nn", "numpy")
PR_SET_PDEATHSIG = 1
DUMP_AT = 0.8
"""Of the collectives' time-out: when torch's Flight Recorder is dumped, as its watchdog does with NCCL."""
GRACE_S = 0.5
"""Time that the other ranks have after one has failed, as torchrun's agent gives them little."""


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOAD:
        importlib.import_module(name)
    _one_thread()
    lines = channel.makefile("r", encoding="utf-8")
    for line in lines:
        if not line.strip():
            continue  # an early end that came too late
        request = json.loads(line)
        for name in [*request["needs"], f"zoo.programs.{request['program']}"]:
            importlib.import_module(name)
        gc.freeze()  # children must not copy pages only to look for garbage in them
        channel.sendall(json.dumps(_run(request, channel)).encode() + b"\n")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _run(request: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    began = time.monotonic()
    alive: dict[int, int] = {}
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            channel.close()
            _as_rank(request, rank)
        alive[pid] = rank
    ended: dict[int, dict[str, Any]] = {}
    deadline = began + request["timeout_s"]
    while alive and time.monotonic() < deadline:
        for rank, code, cpu_s in _reap(alive):
            ended[rank] = {"exit": code, "wall_s": time.monotonic() - began, "cpu_s": cpu_s}
            if code != 0:
                deadline = min(deadline, time.monotonic() + request.get("grace_s", GRACE_S))
        if select.select([channel], [], [], 0.01)[0]:
            deadline = 0.0
            channel.recv(1024)
    for pid in alive:
        os.kill(pid, signal.SIGUSR2)  # where is it? its log will say
    time.sleep(0.1 if alive else 0.0)
    for pid, rank in alive.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, _, used = os.wait4(pid, 0)
        cpu_s = used.ru_utime + used.ru_stime
        ended[rank] = {"exit": None, "wall_s": time.monotonic() - began, "cpu_s": cpu_s}
    return {"ranks": [ended[rank] for rank in range(request["world"])]}


def _reap(alive: dict[int, int]) -> list[tuple[int, int, float]]:
    """(rank, exit code or minus the signal, processor seconds) of those that have ended; they leave `alive`."""
    found = []
    for pid in list(alive):
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            cpu_s = used.ru_utime + used.ru_stime
            found.append((alive.pop(pid), os.waitstatus_to_exitcode(status), cpu_s))
    return found


def _as_rank(request: dict[str, Any], rank: int) -> NoReturn:
    """Be a rank as torchrun would have started it, up to the end of the process."""
    code, dump = 1, bool
    with contextlib.suppress(OSError):
        os.setsid()
    try:
        atexit._clear()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the zygote
        folder = Path(request["folder"])
        _speak_to(folder / f"rank-{request['generation']}-{rank}.log")
        faulthandler.register(signal.SIGUSR2, file=2)
        _set_environment(request, rank)
        _forget_seeds()
        _clock(request["clock_offset_s"] if rank == 1 else 0.0)
        names = ("fault", "variant", "steps", "world", "generation", "patience_s")
        zoo = Zoo(rank=rank, folder=folder, **{name: request[name] for name in names})
        if request["doctor"]:
            from zoo.hookup import attach_rank

            attach_rank(request["doctor"], rank, request["world"])
        if request.get("recorder"):
            dump = _record(Path(request["recorder"]) / f"rank_{rank}", at_s=DUMP_AT * request["patience_s"])
        importlib.import_module(f"zoo.programs.{request['program']}").main(zoo)
        _leave_group()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - a program may raise anything; its last words are in the log
        sys.excepthook(*sys.exc_info())
        dump()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads would hold the interpreter's end


def _record(file: Path, *, at_s: float) -> Callable[[], Any]:
    """Let torch record collectives, and dump what it has after a time if this rank still lives; what dumps now."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"

    def dump() -> None:
        from torch._C import _distributed_c10d

        if not file.exists():
            file.write_bytes(_distributed_c10d._dump_fr_trace())

    timer = threading.Timer(at_s, dump)
    timer.daemon = True
    timer.start()
    return dump


def _leave_group() -> None:
    """After the program's frame is gone: a DDP that outlives its group joins threads under the interpreter's lock."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _speak_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _set_environment(request: dict[str, Any], rank: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["world"]),
        LOCAL_WORLD_SIZE=str(request["world"]),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
        TORCHELASTIC_RUN_ID="zoo",
        GLOO_SOCKET_IFNAME="lo",
    )
    os.environ.update(request["env"])
    os.chdir(request["folder"])


def _forget_seeds() -> None:
    """A forked rank would share the zygote's random state; a process of its own has a state of its own."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()


def _clock(offset_s: float) -> None:
    """Let this process see a wall clock that is ahead."""
    if offset_s:
        true_time = time.time
        time.time = lambda: true_time() + offset_s


if __name__ == "__main__":
    main()
