"""`ciuic doctor loss`: does the same batch give the same loss on every rank?"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ciuic.cli.output import JsonOption, print_json, print_line, print_note
from ciuic.errors import CheckFailedError, UsageError
from ciuic.units import parse_duration_s


def loss(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program as you start it: torchrun ...")
    ] = None,
    step: Annotated[int, typer.Option(min=1, max=1_000_000, help="Optimizer step whose batch is replayed.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Random numbers of the replay.")] = 0,
    own_batch: Annotated[
        bool, typer.Option("--own-batch", help="Each rank replays its own batch: when that of rank 0 cannot be sent.")
    ] = False,
    wait: Annotated[str, typer.Option(help="How long ranks wait for each other.")] = "60 s",
    listen: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Where ranks of other machines report to.")] = "",
    collector: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Report to the doctor that runs on another machine.")
    ] = "",
    token: Annotated[str, typer.Option(envvar="CIUIC_DOCTOR_TOKEN", help="Of that doctor.")] = "",
    as_json: JsonOption = False,
) -> int:
    """Replay one batch on all ranks and name the first module that differs; the program is ended then.

    Exit code: 0 when the ranks agree, 7 when they differ or the replay did not happen.
    """
    from ciuic.doctor.launch import Launch
    from ciuic.doctor.loss.launch import find_difference
    from ciuic.doctor.loss.words import verdict_lines

    if not command:
        raise UsageError("there is no program to run", next="ciuic doctor loss -- torchrun --nproc-per-node 2 train.py")
    order = {"step": step, "seed": seed, "timeout_s": parse_duration_s(wait), "share": not own_batch}

    def begun(address: str, secret: str) -> None:
        if listen:
            print_note(
                f"doctor: on other machines: CIUIC_DOCTOR_TOKEN={secret} ciuic doctor loss --collector {address} -- ..."
            )

    host, _, port = listen.partition(":")
    if port and not port.isdecimal():
        raise UsageError(f"{listen} is not HOST or HOST:PORT", next="--listen 10.0.0.1 or --listen 10.0.0.1:29700")
    with tempfile.TemporaryDirectory(prefix="ciuic-doctor-") as folder:
        options = Launch(
            command=command,
            folder=Path(folder),
            host=host or "127.0.0.1",
            port=int(port or 0),
            collector=collector,
            token=token,
            stdout_is_taken=as_json,
        )
        answer = find_difference(options, order, begun=begun)
    if collector:
        return answer.exit_code
    verdict = answer.verdict
    agreed = verdict.result in ("equal", "close")
    if as_json:
        print_json({"step": answer.step, "verdict": verdict})
        return 0 if agreed else CheckFailedError.exit_code
    for line in verdict_lines(verdict):
        print_line(line)
    if not agreed:
        where = f"optimizer step {answer.step}" if answer.step else "no step"
        raise CheckFailedError(f"the ranks do not agree on the batch of {where}", next=verdict.fix)
    return 0
