"""The job file: defaults, refusals with line numbers and did-you-mean, and the round trip through JSON."""

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.errors import JobFileError, render_error
from ciuic.job import Job, ModelSection, job_schema, load_job, parse_job
from ciuic.job_lines import key_lines, line_of

FIVE_MISTAKES = """\
name = "ds-mini"

[model]
presett = "deepseek-v3-tiny"    # a typing error

[sync]
interval = "often"
compression = { up = "2-bits", down = "1-bit" }

[optim]
lr = -1

[snyc]
interval = 4
"""


def problems_of(raw: Any) -> tuple[str, ...]:
    with pytest.raises(JobFileError) as caught:
        parse_job(raw)
    return caught.value.problems


def problems_in(text: str, folder: Path) -> tuple[str, ...]:
    path = folder / "job.toml"
    path.write_bytes(text.encode())
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert str(path) in caught.value.message
    return caught.value.problems


def test_five_mistakes_are_five_messages_with_line_numbers(tmp_path: Path) -> None:
    assert problems_in(FIVE_MISTAKES, tmp_path) == (
        "line 4: unknown key presett in [model]; did you mean preset?",
        "line 7: sync.interval must be 'auto' or a whole number, not 'often'",
        "line 8: sync.compression.up must be 'none', 'bf16', 'int8', 'int4', '2-bit', '1-bit', 'topk' or 'auto', not "
        "'2-bits'; did you mean 2-bit?",
        "line 11: optim.lr must be more than 0, not -1",
        "line 13: unknown key snyc; did you mean sync?",
    )


def test_the_same_mistakes_in_a_dict_are_the_same_messages_without_lines() -> None:
    assert problems_of({"sync": {"interval": "often"}, "optim": {"lr": -1}}) == (
        "sync.interval must be 'auto' or a whole number, not 'often'",
        "optim.lr must be more than 0, not -1",
    )


def test_a_person_reads_every_problem_under_one_error() -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job({"nam": 1})
    assert render_error(caught.value).splitlines()[:2] == [
        "error[CIUIC-101]: the job has 1 problem",
        "  unknown key nam; did you mean name?",
    ]


def test_an_empty_job_has_every_default() -> None:
    job = parse_job({})
    assert job == Job()
    assert job.model.preset == "deepseek-v3-tiny"
    assert (job.train.epochs, job.train.samples) == (1.0, None)
    assert (job.sync.codec_up, job.sync.codec_down) == ("auto", "auto")
    assert (job.sync.deadline_s, job.fault.grace_s) == (None, 10.0)


def test_a_preset_is_the_default_only_without_another_source() -> None:
    assert parse_job({"model": {"from_pretrained": "folder"}}).model.preset is None
    assert parse_job({"model": {"dtype": "bfloat16"}}).model.preset == "deepseek-v3-tiny"


def test_samples_replace_the_default_of_one_epoch() -> None:
    assert parse_job({"train": {"samples": 10}}).train.epochs is None


def test_directions_have_their_own_codecs() -> None:
    sync = parse_job({"sync": {"compression": {"up": "int4", "down": "bf16"}}}).sync
    assert (sync.codec_up, sync.codec_down) == ("int4", "bf16")


def test_durations_are_read_with_their_units() -> None:
    job = parse_job({"sync": {"deadline": "2 min"}, "fault": {"grace": 3}})
    assert (job.sync.deadline_s, job.fault.grace_s) == (120.0, 3.0)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"model": {"preset": "a", "entry": "a:b"}}, "[model] needs exactly one of"),
        ({"model": {"entry": "train.py"}}, 'must look like "module:function"'),
        ({"model": {"command": []}}, "must have at least 1 entry"),
        ({"data": {"path": "a", "hf": "b"}}, "[data] takes path or hf, not both"),
        ({"data": {"path": 5}}, "data.path must be text in quotes or a list, not 5"),
        ({"data": {"path": ["a", 2]}}, "data.path[1] must be text in quotes, not 2"),
        ({"data": {"hf": "b", "streaming": True}}, "say how many with train.samples"),
        ({"data": {"streaming": True}, "train": {"samples": 1}}, "data.streaming needs data.hf"),
        ({"nodes": {"min": 4, "max": 2}}, "nodes.max is 2, less than nodes.min, which is 4"),
        ({"train": {"samples": 1, "epochs": 1}}, "[train] takes samples or epochs, not both"),
        ({"sync": {"fragment_by": "expert"}}, "needs sync.fragments of at least 2"),
        (
            {"sync": {"fragment_by": "expert", "fragments": 4, "send": "gradient"}},
            'needs sync.send = "pseudo_gradient"',
        ),
        ({"sync": {"fragment_by": "layer"}}, "sync.fragment_by must be"),
        ({"sync": {"overlap": 1}}, "sync.overlap must be 'auto' or true or false, not 1"),
        ({"sync": {"deadline": "soon"}}, "a duration like"),
        ({"sync": {"compression": {"up": "1-bit"}}}, "sync.compression.down is missing"),
        ({"fault": {"grace": -1}}, "a duration like"),
        ({"fault": {"grace": True}}, "a duration like"),
        ({"optim": {"batch_size": "8"}}, "must be a whole number, not '8'"),
        ({"optim": {"batch_size": True}}, "must be a whole number, not true"),
        ({"optim": {"lr": float("nan")}}, "must be a finite number"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"sync": 5}, "sync must be a table, not 5"),
        ({"lr": 0.1}, "unknown key lr; it belongs in [optim]"),
        ({"sync": {"lr": 0.1}}, "unknown key lr in [sync]; it belongs in [optim]"),
        ({"name": ""}, "name must have at least 1 character"),
        ({"train": {"samples": 2**60}}, "must be at most"),
    ],
)
def test_one_mistake_is_one_sentence(raw: dict[str, Any], sentence: str) -> None:
    problems = problems_of(raw)
    assert len(problems) == 1
    assert sentence in problems[0]


def test_keys_that_do_not_go_together_are_reported_beside_other_mistakes() -> None:
    problems = problems_of({"train": {"samples": 1, "epochs": 1, "seed": "x"}, "nodes": {"min": 2, "max": 1}})
    assert len(problems) == 3


def test_conflicts_are_refused_without_parse_job_too() -> None:
    with pytest.raises(pydantic.ValidationError, match="exactly one"):
        ModelSection(preset="a", from_pretrained="b")


def test_a_job_does_not_change() -> None:
    with pytest.raises(pydantic.ValidationError):
        Job().name = "other"  # ty: ignore[invalid-assignment]


@pytest.mark.parametrize(
    ("text", "line"),
    [("a = 1\nb = = 2\n", 2), ("[sync]\n[sync]\n", 2), ('\nname = "x', 2), ("a = [1,\n\n", 1)],
)
def test_a_syntax_error_is_one_problem_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    problems = problems_in(text, tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith(f"line {line}: this is not TOML: ")


def test_bytes_that_are_not_text_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'name = "x"\n# \xff\n')
    with pytest.raises(JobFileError) as caught:
        load_job(path)
    assert caught.value.problems == ("line 2: byte 0xff is not UTF-8 text",)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"none\.toml cannot be read"):
        load_job(tmp_path / "none.toml")


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"#" * 2_000_000)
    with pytest.raises(JobFileError, match="too large"):
        load_job(path)


def test_windows_line_ends_do_not_shift_lines(tmp_path: Path) -> None:
    assert problems_in('name = "x"\r\n[sync]\r\ninterval = 0\r\n', tmp_path)[0].startswith("line 3: ")


def test_lines_are_found_in_all_ways_of_writing_keys() -> None:
    text = (
        '# [sync]\nname = """\n[model]\n"""\n"sync".interval = 3\n[ train ]\nsamples = [\n  1, # epochs = 2\n]\n'
        "seed = 1\n[sync.compression]\nup = '[x]'\n[data]\npath = [ { a = 1 } ]\nx = { p = 1, 'q r' = { z = 2 } }\n"
    )
    lines = key_lines(text)
    assert lines == {
        ("name",): 2,
        ("sync",): 5,
        ("sync", "interval"): 5,
        ("train",): 6,
        ("train", "samples"): 7,
        ("train", "seed"): 10,
        ("sync", "compression"): 11,
        ("sync", "compression", "up"): 12,
        ("data",): 13,
        ("data", "path"): 14,
        ("data", "x"): 15,
        ("data", "x", "p"): 15,
        ("data", "x", "q r"): 15,
    }
    assert line_of(("sync", "deadline"), lines) == 5
    assert line_of(("fault",), lines) == 0


jobs = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(min_size=1, max_size=20),
        "model": st.one_of(
            st.fixed_dictionaries({"preset": st.text()}),
            st.fixed_dictionaries({"command": st.lists(st.text(), min_size=1)}),
            st.fixed_dictionaries(
                {"overrides": st.dictionaries(st.text(), st.one_of(st.integers(), st.booleans(), st.text()))}
            ),
        ),
        "data": st.fixed_dictionaries({"path": st.one_of(st.text(), st.lists(st.text()))}),
        "sync": st.fixed_dictionaries(
            {
                "deadline": st.sampled_from(["auto", "5 s", 2, 0.5]),
                "overlap": st.sampled_from(["auto", True, False]),
                "compression": st.sampled_from(["none", {"up": "int8", "down": "1-bit"}]),
            }
        ),
        "optim": st.fixed_dictionaries({"lr": st.floats(min_value=1e-9, max_value=10)}),
        "train": st.fixed_dictionaries({"samples": st.integers(1, 2**53)}),
    },
)


@given(jobs)
def test_a_job_survives_json(raw: dict[str, Any]) -> None:
    job = parse_job(raw)
    assert parse_job(json.loads(json.dumps(job.to_dict()))) == job


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from([*Job.model_fields, "x"]),
        junk
        | st.dictionaries(
            st.sampled_from(["min", "max", "compression", "path", "entry", "command", "deadline", "samples", "epochs"]),
            junk,
        ),
    )
)
def test_junk_is_accepted_or_refused_with_sentences(raw: dict[str, Any]) -> None:
    problems: tuple[str, ...] = ("none",)
    try:
        parse_job(raw)
    except JobFileError as error:
        problems = error.problems
    assert problems
    assert all(problems)


def test_the_schema_describes_every_field() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == set(Job.model_fields)
    for definition in schema["$defs"].values():
        assert definition["description"]
        assert all("description" in field for field in definition["properties"].values())
