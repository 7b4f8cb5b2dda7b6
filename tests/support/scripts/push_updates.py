"""A program without a training loop: it pushes updates to the ledger of its run, and pulls what the others did."""

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np

import ciuic
from ciuic.errors import ConflictError


async def main(records: Path, node: str) -> None:
    start = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), "b": np.zeros(5, np.float32)}
    replica = {name: values.copy() for name, values in start.items()}
    pushes = 0
    async with ciuic.AsyncParameterServer("hub", start) as server:
        if server.node_versions[node]:
            replica = server.params  # it joined late: the base of then
        try:
            while True:
                await server.push_update(node, {name: 0.1 * values for name, values in replica.items()}, tokens=4)
                pushes += 1
                delta = await server.pull_update(node)
                if delta is not None:
                    delta.apply(replica)
        except ConflictError as error:
            print(error)
        delta = await server.pull_update(node)
        if delta is not None:
            delta.apply(replica)
        end = {"digest": server.digest, "version": server.version, "pushes": pushes}
        end["same"] = all(replica[name].tobytes() == values.tobytes() for name, values in server.params.items())
        end["largest"] = max(float(np.abs(values).max()) for values in server.params.values())
    write(records / f"{node}.end", end)


def write(path: Path, end: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(end))


if __name__ == "__main__":
    me = json.loads(Path(os.environ["CIUIC_RUN_FILE"]).read_text())["node_id"]
    asyncio.run(main(Path(sys.argv[2]), me))
