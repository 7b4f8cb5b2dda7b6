"""The `ciuic` program: all commands, and what happens when one fails.

Exit codes: 0 done; 1 a bug in ciuic (with a traceback); the error's own code from `ciuic.errors` (2 usage, 3 access,
4 unreachable, 5 protocol, 6 storage, 7 a run failed); 130 ctrl-c.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ciuic import __version__
from ciuic.cli import bench, doctor, follow, hub, lab, local, node, nodes, plan, runs
from ciuic.cli.output import print_error, print_line
from ciuic.errors import CiuicError, UsageError

INTERRUPTED = 130


class _InThisOrder(TyperGroup):
    """Lists the commands in the order in which a person meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = list(COMMANDS)
        return sorted(self.commands, key=order.index)


app = typer.Typer(
    name="ciuic",
    cls=_InThisOrder,
    help="Train one PyTorch model on machines scattered over slow, unreliable links.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help answers twice as fast and can be searched
)

COMMANDS: dict[str, typer.Typer | Callable[..., object]] = {
    "demo": local.demo,
    "hub": hub.app,
    "node": node.app,
    "nodes": nodes.app,
    "plan": plan.plan,
    "run": runs.run,
    "ps": runs.ps,
    "status": runs.status,
    "logs": follow.logs,
    "events": follow.events,
    "sync": runs.sync,
    "stop": runs.stop,
    "resume": runs.resume,
    "dash": local.dash,
    "doctor": doctor.app,
    "lab": lab.app,
    "bench": bench.bench,
    "schema": local.schema,
    "env": local.env,
}

for _name, _command in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        passes_on = _command is bench.bench
        context = bench.CONTEXT if passes_on else None
        app.command(_name, context_settings=context, add_help_option=not passes_on)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_line(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Errors are printed, never raised, except bugs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    try:
        code = app(args=given or ["--help"], prog_name="ciuic", standalone_mode=False)
        sys.stdout.flush()
    except CiuicError as error:
        print_error(error, as_json=as_json)
        return error.exit_code
    except typer.TyperException as error:
        usage = _usage_error(error)
        print_error(usage, as_json=as_json)
        return usage.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # `ciuic events | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _usage_error(error: typer.TyperException) -> UsageError:
    """Typer's refusal of a command line in our form."""
    nearest = getattr(error, "possibilities", None)  # of an unknown option
    message = f"{getattr(error, 'message', error)}" if nearest else error.format_message()
    message = message.strip().rstrip(".").replace(". Did you", "; did you").replace("Input should be", "must be")
    if nearest:
        message += f"; did you mean {nearest[0]}?"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ciuic"
    return UsageError(message[:1].lower() + message[1:], next=f"`{command} --help` shows what there is")


if __name__ == "__main__":
    sys.exit(main())
