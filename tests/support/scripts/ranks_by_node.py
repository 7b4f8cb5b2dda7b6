"""train_tiny.py on fewer ranks than the job says, where a node's environment says so (CIUIC_TEST_RANKS).

A job has one number of ranks for all nodes; with this program a node of two ranks trains beside a node of one.
"""

import os
import sys
from pathlib import Path

PROGRAM = str(Path(__file__).with_name("train_tiny.py"))


def main() -> None:
    ranks = int(os.environ.get("CIUIC_TEST_RANKS", os.environ["WORLD_SIZE"]))
    if int(os.environ["RANK"]) >= ranks:
        return
    os.environ["WORLD_SIZE"] = str(ranks)
    os.execv(sys.executable, [sys.executable, PROGRAM, *sys.argv[1:]])


if __name__ == "__main__":
    main()
