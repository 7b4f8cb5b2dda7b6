"""The programs of the page on the DDP hook run as they are printed, on two ranks."""

from pathlib import Path

from ddp_world import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ddp-hook.md"


def test_each_program_of_the_page_runs(tmp_path: Path) -> None:
    told = run_ranks(2, "ddp_more.run_page", page=str(PAGE), folder=str(tmp_path))
    assert told == [{"programs": 5, "form": "all-gather", "steps": 10}] * 2
