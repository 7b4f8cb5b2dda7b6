"""Starts train_tiny.py on as many ranks as this node's environment says (CIUIC_TEST_RANKS), with torchrun above one."""

import os
import sys
from pathlib import Path

PROGRAM = str(Path(__file__).with_name("train_tiny.py"))


def main() -> None:
    ranks = int(os.environ.get("CIUIC_TEST_RANKS", "1"))
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks), "--role", "rank"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--tee", "3"]
    launcher = torchrun if ranks > 1 else []
    os.execv(sys.executable, [sys.executable, *launcher, PROGRAM, *sys.argv[1:]])


if __name__ == "__main__":
    main()
