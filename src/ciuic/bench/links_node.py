"""A node without a model for `ciuic bench links`: does what it reads (attach, push, pull), one line of JSON each."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ciuic.bench.hub_load import LoadNode
from ciuic.ledger.layout import Layout, Tensor, make_layout

WIDTH = 1024


def layout_of(size_bytes: int) -> Layout:
    """One matrix whose uncompressed push has about so many bytes."""
    rows = max(1, round(size_bytes / 4 / WIDTH))
    return make_layout([Tensor(name="matrix", shape=(rows, WIDTH), dtype="float32", section="coded")], 1)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--run", "--place"):
        parser.add_argument(name, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    options = parser.parse_args()
    token = options.token_file.read_text().strip()
    node = LoadNode(options.url, token, options.folder, name=options.place)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_do(node, json.loads(line)["do"], options)) + "\n")
        sys.stdout.flush()


def _do(node: LoadNode, what: str, options: argparse.Namespace) -> dict[str, Any]:
    if what == "attach":
        node.attach(options.run, layout_of(options.bytes), "none", seed=0)
        return {}
    if what == "pull":
        node.pull()
        return {}
    sent = node.sent_bytes
    took_s = node.push()
    return {
        "bits_per_s": 8 * (node.sent_bytes - sent) / took_s,
        "streams": node.streams,
        "repeated_share": round(node.repeated_share, 5),
    }


if __name__ == "__main__":
    main()
