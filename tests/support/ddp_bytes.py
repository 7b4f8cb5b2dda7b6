"""Bytes of one step, as the hook counts them and as this process's TCP sockets sent them."""

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ciuic.bench.tcp import tcp_bytes_sent
from ciuic.train.ddp import compress_ddp


def count_bytes(rank: int, ranks: int, *, width: int, rows: int, form: str = "two-phase", codec: str = "1-bit") -> Any:
    """Bytes per step and rank: {"counted", "socket", "plain"} (plain: DDP without a hook, at the socket)."""
    steps = 3
    found = {}
    for kind in ("plain", "hook"):
        model = DistributedDataParallel(nn.Linear(width, rows, bias=False))
        handle = compress_ddp(model, codec, form=form) if kind == "hook" else None
        x = torch.ones(1, width)
        model(x).sum().backward()  # connections are made, buckets are built
        model(x).sum().backward()
        counted, at_socket = handle.bytes_sent if handle else 0, tcp_bytes_sent()
        for _ in range(steps):
            model(x).sum().backward()
        sent = (tcp_bytes_sent() - at_socket) / steps
        if handle:
            found |= {"counted": (handle.bytes_sent - counted) / steps, "socket": sent}
            handle.close()
        else:
            found["plain"] = sent
    return found
