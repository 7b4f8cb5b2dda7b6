"""Commands for what a hub keeps: backup, restore, rebuild, tidying up, removing; and a node's copy of a ledger."""

import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ciuic.cli.output import JsonOption, print_json, print_line, print_note
from ciuic.cli.profile import ciuic_home, operator_client
from ciuic.errors import NotFoundError, UnreachableError, UsageError
from ciuic.units import format_bytes

if TYPE_CHECKING:
    from ciuic.hub.keeping.restore import Restored, RestoredRun
    from ciuic.ledger.archive import About
    from ciuic.net.client import HubClient

NO_LIMIT_BYTES = 1 << 60
SILENCE_S = 300.0
"""A hub may replay a large ledger for so long before it answers."""

HomeOption = Annotated[Path | None, typer.Option(help="Folder with the hub's or node's files [CIUIC_HOME].")]


def register_hub(app: typer.Typer) -> None:
    """Add the commands of `ciuic hub`."""
    commands = {"backup": backup, "restore": restore, "rebuild": rebuild, "gc": collect, "rm": remove}
    for name, command in commands.items():
        app.command(name)(command)


def register_node(app: typer.Typer) -> None:
    """Add the command of `ciuic node`."""
    app.command("export-ledger")(export_ledger)


# ---- backup and restore --------------------------------------------------------------------------------------------


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, like hub-monday.tar.zst.")],
    without_authority: Annotated[
        bool, typer.Option("--without-authority", help="Leave the authority's key out: nodes must join again.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Read the folder of a hub that does not run, instead of asking it.")
    ] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy everything a hub keeps into one file, while its runs go on.

    The file holds the key with which the network's certificates are made: keep it like a password.
    """
    from ciuic.ledger.archive import write_archive

    file = _named(file)
    if offline:
        with _offline_pieces(ciuic_home(home) / "hub", with_authority=not without_authority) as pieces:
            size = write_archive(file, pieces)
    else:
        client = operator_client(home)
        path = f"/v1/backup?authority={int(not without_authority)}"
        try:
            size = _download(client, path, file)
        except UnreachableError as error:
            next_step = "start the hub, or say --offline to read the folder of one that does not run"
            raise UnreachableError(error.message, cause=error.cause, next=next_step) from error
    about = _checked(file)
    if as_json:
        print_json({"file": str(file), "bytes": size, "with_authority": not without_authority, **about.facts})
        return
    runs = about.facts.get("runs", [])
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    print_line(f"{file}: {format_bytes(size)}, {count}, every file in it read again and found whole")
    for run_id, missing in sorted(about.facts.get("elsewhere", {}).items()):
        numbers = ", ".join(str(number) for number in missing)
        print_note(f"NOT in it: fragments {numbers} of {run_id}, which shards serve; copy those shards' folders too")
    if not without_authority:
        print_note(f"SECRET: {file} holds the authority's key; whoever has it can make certificates of this network")


def _named(file: Path) -> Path:
    file = file.expanduser()
    if file.exists():
        raise UsageError(f"{file} is there already", next="choose another name; nothing is overwritten")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent}", next="make it first")
    return file


def _download(client: "HubClient", path: str, file: Path) -> int:
    """Stream an answer into a new private file; a part of it never gets the file's name."""
    part = file.with_name(f".{file.name}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            client.fetch(path, out.write, limit_bytes=NO_LIMIT_BYTES, timeout_s=SILENCE_S)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
        client.close()
    return file.stat().st_size


@contextmanager
def _offline_pieces(folder: Path, *, with_authority: bool) -> Generator[Iterator[bytes]]:
    from ciuic.hub.keeping.backup import capture
    from ciuic.hub.port import locked

    if not (folder / "ciuic.db").exists():
        raise NotFoundError(f"there is no hub in {folder}", next="say --home, or set CIUIC_HOME")
    with locked(folder, "hub"):
        yield capture(folder, with_authority=with_authority).pieces()


def _checked(file: Path) -> "About":
    """Read the archive to its end. A damaged one does not keep its name."""
    from ciuic.hub.keeping.backup import ALLOWED, KIND
    from ciuic.ledger.archive import read_archive

    try:
        return read_archive(file, KIND, ALLOWED)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `ciuic hub backup` wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An empty folder: the new hub's CIUIC_HOME.")],
    as_json: JsonOption = False,
) -> None:
    """Make a hub's folder from a backup, and replay every ledger in it.

    Nothing is started. Start the hub with --home FOLDER at the address by which its nodes reach it.
    """
    from ciuic.hub.keeping.restore import restore, summary

    done = restore(file.expanduser(), folder.expanduser().resolve())
    if as_json:
        print_json(summary(done))
        return
    _tell_restored(done, folder)


def _tell_restored(done: "Restored", folder: Path) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.made_at))
    print_line(f"restored into {done.folder} as of {when}")
    for run in done.runs:
        print_line(_run_line(run))
    print_note(f"what happened after {when} is not in it:")
    print_note("  workers start again from the restored versions; what merged since then is trained again")
    print_note("  nodes that joined since then need a new token; evictions and used tokens since then are forgotten")
    if not done.with_authority:
        print_note("  it has no authority: the hub makes a new one, and every node must join again with a token")
    print_line(f"start it with: ciuic hub start --home {folder} (with the same names and port as before)")


def _run_line(run: "RestoredRun") -> str:
    if not run.versions:
        return f"  {run.run_id} ({run.state}): no ledger to replay"
    digests = ", ".join(digest[:12] for digest in run.digests)
    versions = "/".join(str(version) for version in run.versions)
    text = f"  {run.run_id} ({run.state}): version {versions}, digest {digests} replayed and right"
    text += f"; {run.committed:,} of {run.total:,} samples committed" if run.total else ""
    if run.elsewhere:
        text += f"; fragments {', '.join(str(number) for number in run.elsewhere)} are at shards"
    return text


# ---- rebuilding from a node ----------------------------------------------------------------------------------------


def rebuild(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What `ciuic node export-ledger` wrote, or a node's folder of the run."),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in the place of a stopped or failed run of that name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a run at this hub from a node's copy of its ledger, when the hub's own is lost.

    The run then has the copy's version, digest and committed samples, and waits for `ciuic resume`.
    """
    from ciuic.net.keeping_messages import RebuiltReply

    with TemporaryDirectory() as scratch:
        source = source.expanduser()
        if source.is_dir():
            file = Path(scratch) / "copy.tar.zst"
            _export(source, file)
        else:
            file = source
        client = operator_client()
        path = f"/v1/rebuild?replace={int(replace)}"
        done = client.send_frame(path, _mapped(file), RebuiltReply, method="PUT")
    if as_json:
        print_json(done)
        return
    versions, digests = "/".join(str(v) for v in done.versions), ", ".join(d[:12] for d in done.digests)
    print_line(f"{done.run_id}: version {versions}, digest {digests}, rebuilt from the copy of {done.node_id}")
    print_line(f"{done.committed:,} of {done.total:,} samples are committed")
    print_note("not rebuilt:")
    for sentence in done.lost:
        print_note(f"  {sentence}")
    print_line(f"when its nodes are here, go on with: ciuic resume {done.run_id}")


def _mapped(file: Path) -> memoryview:
    """A file as bytes without reading it into memory."""
    import mmap

    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise UsageError(f"{file} cannot be read", cause=str(error), next="give an exported copy") from error


def export_ledger(
    run: Annotated[str, typer.Argument(help="The run.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, like tiny-1.tar.zst.")],
    location: Annotated[str, typer.Option(help="Which node, when this machine has several.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write this node's copy of a run's ledger into one file, also while it trains.

    Take the file to a hub that has lost the run: `ciuic hub rebuild FILE`.
    """
    file = _named(file)
    found = sorted(path.parent for path in (ciuic_home(home) / "nodes").glob(f"{location or '*'}/runs/{run}/ledger"))
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} nodes of this machine keep a copy of {run}",
            cause=f"looked in {ciuic_home(home) / 'nodes'}",
            next="name the node with --location" if found else "look on another node of the run",
        )
    size, version = _export(found[0], file)
    if as_json:
        print_json({"file": str(file), "run_id": run, "version": version, "bytes": size})
    else:
        print_line(f"{file}: {run} at version {version}, {format_bytes(size)}")


def _export(folder: Path, file: Path) -> tuple[int, int]:
    """(bytes, version of fragment 0) of the newest copy in a run's folder, or in a copy's own."""
    from ciuic.ledger.archive import archive_pieces, write_archive
    from ciuic.ledger.copy import KIND, export_items, newest_copy, newest_version

    root = folder / "ledger" if (folder / "ledger").is_dir() else folder
    copy = newest_copy(root)
    version = newest_version(copy)
    return write_archive(file, archive_pieces(KIND, {"version": version}, export_items(copy))), version


# ---- tidying up ----------------------------------------------------------------------------------------------------


def collect(as_json: JsonOption = False) -> None:
    """Forget now what is older than the hub keeps; it does so by itself every hour.

    Nothing of a run that is not over goes, and of a finished run the last snapshot stays.
    """
    from ciuic.net.keeping_messages import Collected

    done = operator_client().call("POST", "/v1/gc", None, Collected, timeout_s=SILENCE_S)
    if as_json:
        print_json(done)
        return
    freed = format_bytes(done.freed_bytes)
    print_line(f"forgotten: {done.events:,} events, {done.log_lines:,} log lines; {freed} freed")
    for run_id in done.ledgers:
        print_line(f"  of {run_id} only the last snapshot is left")


def remove(
    run: Annotated[str, typer.Argument(help="The run.")],
    yes: Annotated[bool, typer.Option("--yes", help="I mean it: its last snapshot goes too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a run that is over, with its ledger, logs and snapshots. Its events stay."""
    from ciuic.net.keeping_messages import Removed

    if not yes:
        raise UsageError(
            f"{run} was not removed",
            cause="its last snapshot, the trained model, would be gone",
            next=f"ciuic hub rm {run} --yes",
        )
    done = operator_client().call("DELETE", f"/v1/runs/{run}?yes=1", None, Removed, timeout_s=SILENCE_S)
    if as_json:
        print_json(done)
    else:
        print_line(f"{done.run_id} is removed; {format_bytes(done.freed_bytes)} freed")
