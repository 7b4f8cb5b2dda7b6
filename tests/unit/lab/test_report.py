"""What must hold, and the sentence that sums it up."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.demo_report import make_report

from ciuic.lab.report import DemoReport, with_verdict, write_json

FIELDS_OF_THE_ISSUE = (
    "nodes",
    "loss_first",
    "loss_last",
    "exposed_comm_share",
    "comm_cpu_s",
    "update_wire_bytes",
    "snapshot_wire_bytes",
    "ddp_fp32_ring_bytes",
    "pushes_merged",
    "base_digests_equal",
    "killed",
    "rejoined_after_s",
    "survivor_longest_stall_s",
    "survivor_step_s",
    "samples_leased",
    "samples_committed",
    "samples_duplicated",
    "samples_lost",
)


def changed(**fields: Any) -> DemoReport:
    return with_verdict(msgspec.structs.replace(make_report(), **fields))


def failing(report: DemoReport) -> list[str]:
    return [check.name for check in report.checks if not check.holds]


def test_a_good_run_holds_and_says_so_in_one_sentence() -> None:
    report = make_report()
    assert report.holds
    assert report.verdict == (
        "Three nodes on emulated intercontinental links trained one model to a held-out loss of 2.31 (from 5.55) with "
        "1/197 of DDP's traffic; ap-southeast was killed and its work counted again after 13.3 s."
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"base_digests_equal": False}, "every node ends with the hub's base, bit for bit"),
        ({"loss_equal": False}, "every node ends with the hub's base, bit for bit"),
        ({"loss_last": 0.65 * 5.547}, "held-out loss falls"),
        ({"loss_last": float("nan")}, "held-out loss falls"),
        ({"update_wire_bytes": 44_100_001}, "updates need little of the links"),
        ({"exposed_comm_share": 0.1501}, "training hardly waits for the links"),
        ({"killed": None}, "the killed node comes back"),
        ({"rejoined_after_s": None}, "the killed node comes back"),
        ({"survivor_longest_stall_s": 1.243}, "survivors hardly notice the kill"),
        ({"samples_lost": 1}, "each sample is trained exactly once"),
        ({"samples_duplicated": 1}, "each sample is trained exactly once"),
        ({"samples_committed": 9599}, "each sample is trained exactly once"),
    ],
)
def test_each_bar_fails_by_itself(fields: dict[str, Any], name: str) -> None:
    report = changed(**fields)
    assert failing(report) == [name]
    assert not report.holds
    assert report.verdict == f"One check does not hold on this machine: {name}."


@pytest.mark.parametrize("field", ["pushes_merged_before_kill", "pushes_merged_after_kill"])
def test_a_node_whose_pushes_never_merged_fails(field: str) -> None:
    nodes = make_report().nodes
    nodes[1] = msgspec.structs.replace(nodes[1], **{field: 0})
    assert failing(changed(nodes=nodes)) == ["every node's work counts, before and after the kill"]


def test_several_failures_are_counted_and_named() -> None:
    verdict = changed(samples_lost=2, exposed_comm_share=0.5).verdict
    assert verdict.startswith("2 of 8 checks do not hold on this machine: training hardly waits for the links; each")


def test_the_json_holds_every_promised_field_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(make_report(), path)
    raw = json.loads(path.read_bytes())
    assert [name for name in FIELDS_OF_THE_ISSUE if name not in raw] == []
    assert {"location", "claimed", "measured", "steps", "tokens"} <= raw["nodes"][0].keys()
    assert raw["pushes_merged"] == {"us-west": 42, "eu-central": 42, "ap-southeast": 33}
    assert msgspec.json.decode(path.read_bytes(), type=DemoReport) == make_report()
