"""Run the benchmarks and write what they found, with the facts of this machine, to bench/."""

import json
import sys
from pathlib import Path

from benchmarks.codec import measure_codecs
from ciuic.cli.facts import environment
from ciuic.cli.output import Grid, plain_table
from ciuic.cli.profile import ciuic_home

FOLDER = Path("bench")


def main() -> int:
    results = measure_codecs()
    rows = [
        (
            result.name,
            f"{result.bits_per_parameter:.2f}",
            f"{result.encode_bytes_per_s / 1e9:.2f}",
            f"{result.decode_bytes_per_s / 1e9:.2f}",
            f"{result.encode_to_memcpy:.2f}",
            f"{result.decode_to_memcpy:.2f}",
        )
        for result in results
    ]
    columns = ("codec", "bits/parameter", "encode GB/s", "decode GB/s", "encode/memcpy", "decode/memcpy")
    for line in plain_table(Grid(columns=columns, rows=rows)):
        print(line)
    FOLDER.mkdir(exist_ok=True)
    facts = {key: value for key, value in environment(ciuic_home()).items() if key != "CIUIC_HOME"}
    document = {"machine": facts, "codecs": [result.as_dict() for result in results]}
    (FOLDER / "codec.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"written: {FOLDER / 'codec.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
