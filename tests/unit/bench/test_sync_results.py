"""From lines that sites have written to rates, bytes and losses."""

import json
from pathlib import Path

import numpy as np
import pytest

from ciuic.bench import sync_results as results
from ciuic.bench.sync_modes import Plan, Watched, read_lines

NAMES = ("us", "eu")
PLAN = Plan(duration_s=60.0, warm_s=10.0, pace_s=0.5, snapshot_s=5.0, slow="", sync={}, seed=0, nice=0)


def write_site(folder: Path, name: str, begin_s: float, ends_s: list[float], tokens: int = 100) -> None:
    lines = [{"event": "begin", "at_s": begin_s}]
    for number, end_s in enumerate(ends_s, start=1):
        cpu = {"cpu_s": 0.3 * number, "main_cpu_s": 0.2 * number}
        lines.append({"event": "step", "at_s": end_s, "tokens": tokens * number, "exposed_s": 0.01, **cpu})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def seen(folder: Path, began_s: float = 1000.0) -> Watched:
    wire = [(began_s, 0), (began_s + 60, 6_000_000)]
    return Watched(mode="ddp-fp32", folder=folder, began_s=began_s, plan=PLAN, wire=wire)


def test_the_rate_counts_steps_in_progress_by_their_part(tmp_path: Path) -> None:
    write_site(tmp_path, "us", 1000.0, [1000.0 + 0.5 * n for n in range(1, 200)])
    write_site(tmp_path, "eu", 999.0, [999.0 + 16.0 * n for n in range(1, 8)])
    found = results.mode_numbers(seen(tmp_path), NAMES)
    assert found["tokens_per_s_by_site"] == {"us": 200.0, "eu": pytest.approx(100 / 16, abs=0.06)}
    assert found["tokens_per_s"] == pytest.approx(206.2, abs=0.1)
    assert found["wire_bytes_per_token"] == pytest.approx(5_000_000 / (206.25 * 50), rel=1e-3)
    assert found["longest_step_s"] == 16.0


def test_a_site_that_stalls_at_the_end_loses_that_time(tmp_path: Path) -> None:
    write_site(tmp_path, "us", 1000.0, [*(1000.5 + 0.5 * n for n in range(79)), 1080.0])
    write_site(tmp_path, "eu", 1000.0, [1000.5 + 0.5 * n for n in range(200)])
    found = results.mode_numbers(seen(tmp_path), NAMES)["tokens_per_s_by_site"]
    assert found["us"] < 0.65 * found["eu"]


def test_a_line_that_is_not_whole_yet_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "us.jsonl").write_text('{"event": "begin", "at_s": 1.0}\n{"event": "st')
    assert read_lines(tmp_path / "us.jsonl") == [{"event": "begin", "at_s": 1.0}]
    assert read_lines(tmp_path / "eu.jsonl") == []


def test_snapshots_are_judged_in_order_of_time_and_deleted(tmp_path: Path) -> None:
    for at_s, value in ((1020.0, 2.0), (1005.5, 3.0), (1100.25, 1.0)):
        np.save(tmp_path / f"us-{at_s:.3f}.npy", np.full(4, value, dtype=np.float32))
    np.save(tmp_path / "us-1110.000.part.npy", np.zeros(4))  # its writer was killed
    points = results.losses(seen(tmp_path), lambda p: float(p.mean()), np.full(4, 9.0, dtype=np.float32))
    assert points == [(0.0, 9.0), (5.5, 3.0), (20.0, 2.0), (100.25, 1.0)]
    assert list(tmp_path.glob("*.npy")) == []


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([(0, 4.0), (60, 2.0)], 15.0),
        ([(0, 6.0), (30, 4.4), (45, 2.0), (60, 2.0)], 45.0),
        ([(0, 3.0), (45, 2.0), (60, 3.5)], None),
    ],
)
def test_below_from_means_until_the_end(ours: list[tuple[float, float]], expected: float | None) -> None:
    others = [[(0.0, 5.0), (60.0, 3.0)], [(0.0, 5.0), (60.0, 3.2)]]
    assert results.below_from_s(ours, others, 60.0) == expected
