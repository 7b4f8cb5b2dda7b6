"""Every job on the page about synchronisation is a job."""

import re
import tomllib
from pathlib import Path

import pytest

from ciuic.errors import JobFileError
from ciuic.hub.run.settings_source import settings_of
from ciuic.job import parse_job

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "modes.md").read_text()
JOBS = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", JOBS)
def test_a_job_of_the_page_can_be_run(text: str) -> None:
    assert settings_of(parse_job(tomllib.loads(text))).interval >= 1


def test_the_page_has_a_job_for_each_mode() -> None:
    jobs = [parse_job(tomllib.loads(text)) for text in JOBS]
    assert {job.sync.send for job in jobs} == {"pseudo_gradient", "gradient"}
    assert {job.sync.policy for job in jobs} == {"sync", "async"}
    assert max(job.sync.fragments for job in jobs) > 1


def test_one_bit_gradients_are_refused_with_the_reason() -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job({"sync": {"send": "gradient", "compression": "1-bit"}})
    assert any("2.45" in problem and "1-bit-adam" in problem for problem in caught.value.problems)
