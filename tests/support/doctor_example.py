"""A script of examples/doctor on two ranks, forked from a warmed process, with the probe in them."""

import os
import socket
import sys
from pathlib import Path
from typing import IO

from warm import warm_popen

from ciuic.doctor.collector import Collector, Options
from ciuic.doctor.finding import Incident

EXAMPLES = Path(__file__).parents[2] / "examples" / "doctor"
RANK = """
import runpy, sys
from ciuic.doctor.probe.attach import attach_from_environment
attach_from_environment()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_example(name: str, folder: Path, *, starts: int = 1, world: int = 2) -> list[Incident]:
    """What the doctor found in the last of so many starts; folder/rank-0.log has what rank 0 printed."""
    incidents: list[Incident] = []
    for _ in range(starts):
        collector = Collector(Options(folder=folder / "doctor"))
        host, port = collector.start()
        try:
            _run_ranks(
                EXAMPLES / name,
                folder,
                world,
                {"CIUIC_DOCTOR": f"{host}:{port}", "CIUIC_DOCTOR_TOKEN": collector.token},
            )
        finally:
            incidents = collector.close()
    return incidents


def _run_ranks(script: Path, folder: Path, world: int, doctor: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs: list[IO[str]] = []
    ranks = []
    before = os.getcwd()
    os.chdir(folder)
    try:
        for rank in range(world):
            log = (folder / f"rank-{rank}.log").open("w")
            logs.append(log)
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "MASTER_PORT": port,
            }
            environment = {**os.environ, **doctor, **{key: str(number) for key, number in numbers.items()}}
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, "-c", RANK, str(script)]
            ranks.append(warm_popen(command, env=environment, stdout=log, stderr=log, forks_workers=True))
        codes = [process.wait(120) for process in ranks]
    finally:
        os.chdir(before)
        for process in ranks:
            process.kill()
        for log in logs:
            log.close()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}: {(folder / 'rank-0.log').read_text()[-2000:]}")
