"""What the agents of the program `ledger` start: `python ledger_worker.py CASE_FILE`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' folder is not on an agent's path
    from zoo.programs import ledger

    ledger.work(Path(sys.argv[1]))
