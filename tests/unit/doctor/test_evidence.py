"""The evidence of a long run, or on a full disk, ends with a reason; the findings stay."""

import json
import os
from pathlib import Path

import pytest

from ciuic.doctor import evidence as evidences
from ciuic.doctor.evidence import EVIDENCE, FINDINGS, Evidence, read_findings
from ciuic.doctor.finding import Blind
from ciuic.doctor.record import Bye

BYE = Bye(rank=0, step=3, how="end")


def test_evidence_that_reached_its_limit_ends_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evidences, "EVIDENCE_BYTES_MAX", 200)
    evidence = Evidence(tmp_path)
    for _ in range(20):
        evidence.add(BYE)
    assert evidence.ended is not None
    assert "its limit" in evidence.ended.why
    evidence.close([], [])
    lines = (tmp_path / EVIDENCE).read_bytes().splitlines()
    assert 1 < len(lines) < 20
    assert all(json.loads(line) for line in lines)


def test_a_new_run_in_an_old_folder_begins_without_findings_and_can_be_read_at_once(tmp_path: Path):
    Evidence(tmp_path).close([], [Blind(what="x", why="y")])
    assert read_findings(tmp_path)[1]
    Evidence(tmp_path)
    assert read_findings(tmp_path) == ([], [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_ends_the_evidence_and_nothing_else(tmp_path: Path):
    (tmp_path / EVIDENCE).symlink_to("/dev/full")
    evidence = Evidence(tmp_path)
    evidence.add(BYE)
    evidence.add(BYE)
    assert evidence.ended is not None
    assert "No space left" in evidence.ended.why
    evidence.close([], [evidence.ended])
    assert json.loads((tmp_path / FINDINGS).read_bytes())["could_not_look"]
