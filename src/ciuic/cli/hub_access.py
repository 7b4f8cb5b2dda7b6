"""`ciuic hub certs | revoke | rotate | operator | audit`: who may speak to the hub, and who did what."""

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ciuic.cli.output import Grid, JsonOption, clean, print_grid, print_hanging, print_json, print_line, print_note
from ciuic.cli.profile import operator_client
from ciuic.errors import UsageError
from ciuic.units import format_duration, parse_duration_s

if TYPE_CHECKING:
    from ciuic.net.access_messages import CertificateInfo
    from ciuic.net.messages import Role

operator_app = typer.Typer(help="Certificates of people and programs that look at or operate the hub.")

AUDIT_PAGE = 1000

AUDIT_INDENT = len("2026-12-01 02:16:54  ")


def register(app: typer.Typer, token_app: typer.Typer) -> None:
    """Add these commands to `ciuic hub` and `ciuic hub token`."""
    token_app.command("list")(list_tokens)
    token_app.command("revoke")(revoke_token)
    app.command("certs")(certs)
    app.command("revoke")(revoke)
    app.command("rotate")(rotate)
    app.command("audit")(audit)
    app.add_typer(operator_app, name="operator")


def certs(
    every: Annotated[bool, typer.Option("--all", help="Also those that are no longer accepted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the certificates that the hub has issued."""
    from ciuic.net.access_messages import CertificateInfo

    found = operator_client().call("GET", "/v1/certificates", None, list[CertificateInfo])
    shown = [one for one in found if every or one.state in ("valid", "new")]
    if as_json:
        print_json(shown)
        return
    rows = [_certificate_row(one, time.time()) for one in shown]
    print_grid(Grid(columns=("name", "role", "state", "ends in", "serial"), rows=rows))


def _certificate_row(one: "CertificateInfo", now_s: float) -> tuple[str, ...]:
    left_s = one.ends_at - now_s
    ends = "not known" if not one.ends_at else _span(left_s) if left_s > 0 else "ended"
    state = f"revoked by {one.revoked_by}" if one.state == "revoked" else one.state
    return one.name, one.role, state, ends, one.serial[:16]


def _span(seconds: float) -> str:
    """In days, when it is some."""
    return f"{seconds / 86400:.0f} days" if seconds > 2 * 86400 else format_duration(seconds)


def revoke(
    name: Annotated[str, typer.Argument(help="Name in the certificate: a node, a shard, an operator or a viewer.")],
    role: Annotated[str, typer.Option(help="Which one, when the name belongs to several: node, shard, ...")] = "",
    as_json: JsonOption = False,
) -> None:
    """Refuse every certificate of this name from now on, also on open connections.

    A node is evicted with it, for good: it needs a new token to come back under another name.
    """
    from ciuic.net.access_messages import RevokeReply, RevokeRequest

    request = RevokeRequest(name=name, role=_role(role))
    done = operator_client().call("POST", "/v1/certificates/revoke", request, RevokeReply)
    if as_json:
        print_json(done)
    else:
        print_line(f"{done.name} ({done.role}) is refused from now on")


def _role(text: str) -> "Role | None":
    if text == "":
        return None
    if text == "node" or text == "operator" or text == "viewer" or text == "shard":
        return text
    raise UsageError(f"there is no role {text!r}", next="use node, operator, viewer or shard")


def list_tokens(as_json: JsonOption = False) -> None:
    """List the join tokens that are still good."""
    from ciuic.net.access_messages import TokenInfo

    found = operator_client().call("GET", "/v1/tokens", None, list[TokenInfo])
    if as_json:
        print_json(found)
        return
    now_s = time.time()
    rows = [(one.token_id, one.role, str(one.uses_left), _span(one.expires_at - now_s)) for one in found]
    print_grid(Grid(columns=("token", "role", "uses left", "expires in"), rows=rows, empty="no open tokens"))


def revoke_token(
    token: Annotated[str, typer.Argument(help="Number of the token, as `ciuic hub token list` shows it.")],
    as_json: JsonOption = False,
) -> None:
    """Let nobody join with a token any more.

    Who has joined with it stays: see `ciuic hub certs` and `ciuic hub revoke`.
    """
    from urllib.parse import quote

    from ciuic.net.messages import Ok

    operator_client().call("POST", f"/v1/tokens/{quote(token, safe='')}/revoke", None, Ok)
    if as_json:
        print_json({"token_id": token, "state": "revoked"})
    else:
        print_line(f"nobody joins with token {token} any more")


def rotate(
    clients: Annotated[bool, typer.Option("--clients", help="Let every node and shard renew its own too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give the hub a new certificate of the same authority, while it runs.

    Nodes notice nothing: they trust the authority. Open connections keep the old certificate until they end.
    """
    from ciuic.net.access_messages import RotateReply, RotateRequest

    done = operator_client().call("POST", "/v1/hub/rotate", RotateRequest(clients=clients), RotateReply)
    if as_json:
        print_json(done)
        return
    print_line(f"the hub has a new certificate, valid for {_span(done.ends_at - time.time())}")
    if clients:
        print_line(f"{done.told} nodes and shards renew theirs with their next word; see: ciuic hub certs")


@operator_app.command("create")
def create_operator(
    name: Annotated[str, typer.Argument(help="Who it is for; shown in the audit log.")],
    role: Annotated[str, typer.Option(help="viewer (may look) or operator (may change everything).")] = "viewer",
    folder: Annotated[
        Path | None, typer.Option(help="Where to put the profile; use it as CIUIC_HOME. Default: ./NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a profile for another operator or viewer.

    It holds a key: hand it over like a password, and remove your copy.
    """
    from ciuic.cli.operators import write_profile

    if role != "viewer" and role != "operator":
        raise UsageError(f"there is no role {role!r}", next="use viewer or operator")
    made, where = write_profile(name, role, folder or Path(name))
    if as_json:
        print_json({"name": made.name, "role": role, "serial": made.serial, "folder": str(where)})
        return
    print_note(f"a profile for {made.name}, {role}; hand over the folder, then: CIUIC_HOME=FOLDER ciuic hub status")
    print_line(str(where))


@operator_app.command("renew")
def renew_operator(as_json: JsonOption = False) -> None:
    """Renew the certificate of the profile in use."""
    from ciuic.cli.operators import renew_profile

    ends_at = renew_profile()
    if as_json:
        print_json({"ends_at": ends_at})
    else:
        print_line(f"renewed; valid for {_span(ends_at - time.time())}")


def audit(
    since: Annotated[str, typer.Option(help="Only what happened within this time, for example 2 h or 7 d.")] = "",
    after: Annotated[int, typer.Option(min=0, help="Only lines with a larger number.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print who did what: joins, tokens, runs, evictions, revocations, settings, moves, backups.

    Refused requests are summed up. With --json one JSON object per line.
    """
    since_s = time.time() - parse_duration_s(since) if since else 0.0
    broken = _print_audit(since_s, after, as_json=as_json)
    if broken is not None:
        print_note(f"line {broken}, or one before it, was changed or taken out after it was written: do not trust it")


def _print_audit(since_s: float, after: int, *, as_json: bool) -> int | None:
    """Page by page; the first line that is not as it was written."""
    from ciuic.net.access_messages import AuditPage

    client = operator_client()
    while True:
        page = client.call("GET", f"/v1/audit?since={since_s:.3f}&after={after}&limit={AUDIT_PAGE}", None, AuditPage)
        for line in page.lines:
            if as_json:
                print_line(_json_line(line))
            else:
                print_hanging(audit_text(line), AUDIT_INDENT)
        if len(page.lines) < AUDIT_PAGE:
            return page.broken_at
        after = int(page.lines[-1]["id"])


def _json_line(line: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(line).decode()


def audit_text(line: dict[str, Any]) -> str:
    """`2026-12-01 10:00:00  alice (operator, 1f2e3d4c) from 10.0.0.1  run.stop ds-1  done`."""
    moment = datetime.fromtimestamp(float(line["time"])).strftime("%Y-%m-%d %H:%M:%S")
    who = line["who"] or "-"
    if line["serial"]:
        who += f" ({line['role']}, {str(line['serial'])[:8]})"
    if line["address"]:
        who += f" from {line['address']}"
    what = " ".join(str(part) for part in (line["action"], line["target"]) if part)
    return clean("  ".join(str(part) for part in (moment, who, what, line["result"], line["detail"]) if part))
