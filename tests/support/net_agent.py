"""Run one agent as a process: AgentConfig as JSON in the first argument, the token in the environment."""

import json
import logging
import os
import sys
from pathlib import Path

from ciuic.errors import CiuicError, render_error
from ciuic.node.agent import AgentConfig, run_agent


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    options = json.loads(sys.argv[1])
    options["home"] = Path(options["home"])
    if "direct" in options:
        options["direct"] = tuple(options["direct"])
    try:
        return run_agent(AgentConfig(token=os.environ.get("CIUIC_TOKEN"), **options))
    except CiuicError as error:
        print(render_error(error), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
