"""The job file: what is trained, from one TOML file or one Python dict. Every field is optional.

    Job                 name
    ├── model           which model
    ├── data            which text
    ├── nodes           how many nodes, and where
    ├── sync            how often and how tightly packed the nodes exchange updates
    ├── optim           the inner optimizer
    ├── train           how much
    ├── fault           how failures are met
    └── security        what is done about pushes that cannot be honest

`load_job` and `parse_job` list every problem at once (JobFileError.problems).
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from ciuic.errors import JobFileError, UsageError
from ciuic.job_lines import KeyPath, key_lines
from ciuic.job_problems import Problem, describe, explain, syntax_problem
from ciuic.units import parse_duration_s

MAX_JOB_BYTES = 1_000_000
LARGEST_COUNT = 2**53
"""Counts stay exact in JSON up to here."""
DEFAULT_PRESET = "deepseek-v3-tiny"
REPLACE_AFTER_S = 60.0
"""How long the place of a dead node is kept for it where the job says to wait, but not how long."""

CodecWish = Literal["none", "bf16", "int8", "int4", "2-bit", "1-bit", "topk", "auto"]
EntryCodecWish = Literal["none", "bf16", "int8", "int4", "2-bit", "1-bit", "auto"]
"""Entries cannot be `topk`: what it drops of the mean would reach the nodes too late."""
FragmentBy = Literal["block", "expert"]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]


def _check_duration(value: object) -> object:
    try:
        seconds = parse_duration_s(value) if isinstance(value, str | int | float) else -1.0
    except UsageError:
        seconds = -1.0
    if isinstance(value, bool) or not 0 <= seconds < float("inf"):
        raise PydanticCustomError("requirement", "{must}", {"must": 'must be a duration like 30, "30 s" or "10 min"'})
    return value


def _check_entry(value: str) -> str:
    module, separator, function = value.partition(":")
    if not (separator and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise PydanticCustomError("requirement", "{must}", {"must": 'must look like "module:function"'})
    return value


Duration = Annotated[str | float, pydantic.BeforeValidator(_check_duration)]
"""Seconds as a number, or a text that `units.parse_duration_s` reads. Kept as given."""


class Section(BaseModel):
    """Base of all tables: nothing unknown, nothing converted by guessing, nothing changed later."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Keys that do not go together: (key, sentence). Values may be of any type: they are not checked yet."""
        return []

    @pydantic.model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for _, sentence in self.conflicts({key: getattr(self, key) for key in self.model_fields_set}):
            raise PydanticCustomError("conflict", "{sentence}", {"sentence": sentence})
        return self


class ModelSection(Section):
    """Which model: one of preset, from_pretrained, entry, command."""

    SOURCES: ClassVar[tuple[str, ...]] = ("preset", "from_pretrained", "entry", "command")

    preset: str | None = None
    """A built-in configuration; deepseek-v3-tiny when no other source is given."""
    from_pretrained: str | None = None
    """A local folder or a Hugging Face hub id."""
    entry: Annotated[str, pydantic.AfterValidator(_check_entry)] | None = None
    """Your own code as module:function (the node must allow code)."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Your own program and its arguments (the node must allow code)."""
    overrides: dict[str, int | float | bool | str] = {}
    """Fields of the model's configuration to change, for example num_hidden_layers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters while training."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        sources = [key for key in cls.SOURCES if given.get(key) is not None]
        if len(sources) < 2:
            return []
        return [
            (sources[-1], f"[model] needs exactly one of {', '.join(cls.SOURCES)}; here are {' and '.join(sources)}")
        ]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_preset(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and all(given.get(key) is None for key in cls.SOURCES):
            return {**given, "preset": DEFAULT_PRESET}
        return given


class DataSection(Section):
    """Which text: path or hf; neither means the standard library of this Python."""

    path: str | list[str] | None = None
    """Files, as one pattern or several (`corpus/*.txt`), found on each node."""
    hf: str | None = None
    """A Hugging Face data set: local folder or hub id."""
    split: str = "train"
    """Split of the Hugging Face data set."""
    text_field: str = "text"
    """Column of the Hugging Face data set that holds the text."""
    streaming: bool = False
    """Read the Hugging Face data set while training instead of downloading it first."""
    tokenizer: str = "byte"
    """`byte`, a local tokenizer folder or a hub id."""
    sequence_length: Count = 128
    """Tokens per sample."""
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Fraction of the data kept for evaluation, the same on every node."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        found = []
        if given.get("path") is not None and given.get("hf") is not None:
            found.append(("hf", "[data] takes path or hf, not both"))
        if given.get("streaming") is True and given.get("hf") is None:
            found.append(("streaming", "data.streaming needs data.hf: only Hugging Face data sets are streamed"))
        return found


class Requirements(Section):
    """What a node must have, compared with what was measured there (GB: 1e9 bytes, Mbit: 1e6 bit/s)."""

    gpus: Count | None = None
    """Number of GPUs."""
    cpus: Count | None = None
    """Processors that the agent may use."""
    mem_gb: Annotated[float, Field(gt=0)] | None = None
    """Free memory."""
    gpu_mem_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory of the smallest GPU."""
    disk_gb: Annotated[float, Field(gt=0)] | None = None
    """Free disk."""
    up_mbit: Annotated[float, Field(gt=0)] | None = None
    """From the node to the hub."""
    down_mbit: Annotated[float, Field(gt=0)] | None = None
    """From the hub to the node."""
    max_rtt_ms: Annotated[float, Field(gt=0)] | None = None
    """Longest round trip to the hub."""


class NodesSection(Section):
    """How many nodes, and where."""

    min: Count = 1
    """The run starts when so many nodes are there."""
    max: Count | None = None
    """At most so many nodes take part; no limit when left out."""
    locations: list[str] = []
    """Only nodes of these locations; any when empty."""
    require: Requirements | None = None
    """What was measured on a node must be at least this: {gpus, cpus, mem_gb, gpu_mem_gb, disk_gb, up_mbit, down_mbit,
    max_rtt_ms}."""
    replace: Literal["spare", "wait", "never"] = "spare"
    """With `max`: who gets the place of a dead node: a free node at once, after `replace_after`, or only itself."""
    replace_after: Duration | None = None
    """How long the place of a dead node is kept for it with `wait`; 60 s when left out."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Training processes per node."""
    sharding: Literal["none", "fsdp2"] = "none"
    """How a node's ranks hold the model: each a whole one (`none`), or each a part (`fsdp2`)."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        low, high = given.get("min", 1), given.get("max")
        found = []
        if isinstance(low, int) and isinstance(high, int) and 0 < high < low:
            found.append(("max", f"nodes.max is {high}, less than nodes.min, which is {low}"))
        if given.get("sharding") == "fsdp2" and given.get("ranks", 1) == 1:
            found.append(("sharding", "nodes.sharding shards a model over several ranks, but nodes.ranks is 1"))
        if given.get("replace_after") is not None and given.get("replace", "spare") != "wait":
            found.append(("replace_after", 'nodes.replace_after needs nodes.replace = "wait"'))
        return found

    @property
    def replace_after_s(self) -> float:
        """How long a place is kept, in seconds."""
        return REPLACE_AFTER_S if self.replace_after is None else parse_duration_s(self.replace_after)


class Directions(Section):
    """Codecs by direction."""

    up: CodecWish
    """What nodes push."""
    down: EntryCodecWish
    """What the ledger holds and nodes pull."""


REFUSED_GRADIENTS = {
    "1-bit": "Adam divides by their flat magnitude and learns little (measured 2.45 to 2.88 against 2.14); "
    'use int4, or optim.optimizer = "1-bit-adam", which sends 1-bit momentum',
    "2-bit": "measured 0.12 worse than int4; use int4",
    "topk": "what it leaves out would have to be kept; use int4",
}
"""Codecs that gradients into Adam cannot have, and why."""


def _compression_form(value: object) -> str:
    return "table" if isinstance(value, Mapping | Directions) else "name"


class SyncSection(Section):
    """How often, and how tightly packed, the nodes exchange updates."""

    policy: Literal["sync", "async"] = "sync"
    """When the hub appends an entry: `sync` waits for the nodes of a round, up to the deadline; `async` never waits."""
    send: Literal["pseudo_gradient", "gradient"] = "pseudo_gradient"
    """What nodes push: the movement of `interval` own steps, or each step's gradient (all nodes then step alike)."""
    fragments: Annotated[int, Field(ge=1, le=256)] = 1
    """Parts of the model that are exchanged one after the other within an interval (streaming)."""
    fragment_by: FragmentBy = "block"
    """What stays together in a fragment: a block of the model, or an expert of a mixture (`expert`).

    Fragments of experts that few tokens reach are exchanged less often."""
    interval: Literal["auto"] | Count = "auto"
    """Inner steps per push of a node of average speed: few are better for the loss, many are cheaper on slow links.

    `auto` follows links and step times."""
    compression: Annotated[
        Annotated[CodecWish, Tag("name")] | Annotated[Directions, Tag("table")], Discriminator(_compression_form)
    ] = "auto"
    """One codec for both directions, or {up = ..., down = ...}; `auto` follows links and step times."""
    overlap: Literal["auto"] | bool = "auto"
    """Train on while updates travel; `auto` blocks as long as that is cheaper."""
    deadline: Literal["auto"] | Duration = "auto"
    """How long a round waits for its last nodes; `auto` learns it from their arrivals."""
    min_fraction: Annotated[float, Field(gt=0, le=1)] = 0.67
    """A round closes at its deadline only with this fraction of its nodes."""
    max_staleness: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 4
    """A push based on a version older than this many entries is rejected (its work is pushed again)."""
    outer_lr: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the outer optimizer."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Nesterov momentum of the outer optimizer."""
    outer_delay: Count = 1
    """Entries between two steps of the outer momentum; the number of nodes with `async` (Delayed Nesterov)."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        found = []
        wish = given.get("compression")
        up, down = (wish.get("up"), wish.get("down")) if isinstance(wish, Mapping) else (wish, wish)
        if isinstance(wish, Directions):
            up, down = wish.up, wish.down
        if down == "topk":
            found.append(("compression", 'topk is for pushes only: give compression = {up = "topk", down = "int4"}'))
        if given.get("outer_delay", 1) != 1 and not given.get("outer_momentum"):
            found.append(("outer_delay", "sync.outer_delay delays the outer momentum: give sync.outer_momentum too"))
        if given.get("fragment_by") == "expert":
            found += _expert_conflicts(given)
        if given.get("send") == "gradient":
            found += _gradient_conflicts(given, (up, down))
        return found

    @property
    def codec_up(self) -> CodecWish:
        """The codec of pushes."""
        return self.compression.up if isinstance(self.compression, Directions) else self.compression

    @property
    def codec_down(self) -> CodecWish:
        """The codec of entries."""
        return self.compression.down if isinstance(self.compression, Directions) else self.compression

    @property
    def deadline_s(self) -> float | None:
        """The fixed deadline of a round, None for `auto`."""
        return None if self.deadline == "auto" else parse_duration_s(self.deadline)


def _expert_conflicts(sync: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What does not go with fragment_by = "expert"."""
    found = []
    if sync.get("fragments", 1) == 1:
        found.append(
            ("fragment_by", 'sync.fragment_by = "expert" needs sync.fragments of at least 2: the experts get fragments '
             "of their own")
        )  # fmt: skip
    if sync.get("send") == "gradient":
        found.append(
            ("fragment_by", 'sync.fragment_by = "expert" needs sync.send = "pseudo_gradient": gradients of all '
             "fragments make one step together, so none can be sent less often")
        )  # fmt: skip
    return found


def _gradient_conflicts(sync: Mapping[str, Any], codecs: tuple[object, object]) -> list[tuple[str, str]]:
    """What does not go with send = "gradient"."""
    refused = [str(codec) for codec in dict.fromkeys(codecs) if codec in REFUSED_GRADIENTS]
    found = [("compression", f"gradients cannot be {codec}: {REFUSED_GRADIENTS[codec]}") for codec in refused]
    if sync.get("policy") == "async":
        found.append(("policy", 'sync.send = "gradient" needs sync.policy = "sync": all nodes make the same step'))
    if sync.get("interval", "auto") not in ("auto", 1):
        found.append(
            ("interval", "gradients are sent after every step; for fewer rounds use optim.gradient_accumulation, "
             'or send = "pseudo_gradient" with this interval, which learns better')
        )  # fmt: skip
    if sync.get("overlap", "auto") is True:
        found.append(("overlap", "gradients cannot be overlapped: every step waits for the mean"))
    for key, plain in (("outer_lr", 1), ("outer_momentum", 0)):
        if sync.get(key, plain) != plain:
            found.append((key, f'sync.{key} is for send = "pseudo_gradient": gradients go into the inner optimizer'))
    return found


class OptimSection(Section):
    """The inner optimizer, on each node."""

    optimizer: Literal["adamw", "muon", "adam", "sgd", "1-bit-adam"] = "adamw"
    """Which optimizer. `muon`: Muon for the hidden matrices, AdamW for the rest."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate; with `muon` that of AdamW."""
    muon_lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of Muon; 4 x lr when left out."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], Field(strict=False)
    ] = (0.9, 0.99)
    """Decay of the first and second moment of AdamW and Adam."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of `muon` and `sgd`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay, decoupled in `adamw` and `muon`."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    batch_size: Count = 8
    """Samples per rank and micro-step."""
    gradient_accumulation: Count = 1
    """Micro-steps per optimizer step."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape of the learning rate over the run, after the warm-up."""
    warmup: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of the run in which the learning rate rises."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the cosine, as a part of its peak."""
    amp: Literal["off", "bf16", "fp16"] = "off"
    """Automatic mixed precision."""
    expert_bias_rate: Annotated[float, Field(ge=0)] = 0.001
    """Step of the auxiliary-loss-free balancing of experts; 0 switches it off."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        if given.get("muon_lr") is not None and given.get("optimizer", "adamw") != "muon":
            return [("muon_lr", 'optim.muon_lr needs optim.optimizer = "muon"')]
        return []


class TrainSection(Section):
    """How much."""

    samples: Count | None = None
    """Samples of the whole run, over all nodes."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data; 1 when neither samples nor epochs is given."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_COUNT)] = 0
    """Seed of the initial parameters and of the order of samples."""
    evaluate_every: Count = 10
    """Versions between two evaluations of the base on held-out data."""
    evaluate_samples: Count = 64
    """Held-out samples per evaluation."""

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        if given.get("samples") is not None and given.get("epochs") is not None:
            return [("epochs", "[train] takes samples or epochs, not both")]
        return []

    @pydantic.model_validator(mode="before")
    @classmethod
    def _default_epochs(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("samples") is None and given.get("epochs") is None:
            return {**given, "epochs": 1.0}
        return given


class FaultSection(Section):
    """How failures are met."""

    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of a failed worker per 10 minutes before its node gives up."""
    grace: Duration = "10 s"
    """Silence after which a node counts as dead and its samples go to others."""
    outage: Duration = "3 min"
    """How long the hub may be away while nodes train on: each leases samples for so long ahead."""
    keep_ledger: bool = True
    """Each node keeps a copy of the ledger on its disk: one base and the entries after it, to rebuild a lost hub."""

    @property
    def outage_s(self) -> float:
        """The same in seconds."""
        return parse_duration_s(self.outage)

    @property
    def grace_s(self) -> float:
        """The same in seconds."""
        return parse_duration_s(self.grace)


class SecuritySection(Section):
    """What is done about pushes that cannot be honest."""

    outliers: Literal["clip", "quarantine", "off"] = "clip"
    """A push much longer than others is shortened to the limit (`clip`), or not merged at all (`quarantine`)."""
    factor: Annotated[float, Field(gt=1, le=1e6)] = 10.0
    """The limit: so many times the median of the latest pushes, or 8 spreads of their logarithms when that is more."""
    set_aside_after: Annotated[int, Field(ge=0, le=1000)] = 5
    """Outliers in a row after which a node is taken out of the run; 0: never."""


class Job(Section):
    """What is trained. Make one with `load_job` or `parse_job`: they report all problems at once."""

    name: Annotated[str, Field(min_length=1, max_length=100)] = "run"
    """Shown wherever the run is shown."""
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    nodes: NodesSection = Field(default_factory=NodesSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    train: TrainSection = Field(default_factory=TrainSection)
    fault: FaultSection = Field(default_factory=FaultSection)
    security: SecuritySection = Field(default_factory=SecuritySection)

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> list[tuple[str, str]]:
        data, train = given.get("data"), given.get("train")
        found = []
        if _value(data, "streaming") is True and _value(train, "samples") is None:
            found.append(("data", "a streamed data set has no known end: say how many with train.samples"))
        if _value(given.get("optim"), "optimizer") == "1-bit-adam" and _value(given.get("sync"), "send") != "gradient":
            found.append(("optim", 'optim.optimizer = "1-bit-adam" needs sync.send = "gradient"'))
        if _value(given.get("sync"), "send") == "gradient":
            optimizer = _value(given.get("optim"), "optimizer")
            if optimizer in ("muon", "sgd"):
                found.append(("optim", f'sync.send = "gradient" makes AdamW\'s step, not that of {optimizer}'))
            if _value(given.get("nodes"), "sharding") == "fsdp2":
                found.append(("nodes", 'sync.send = "gradient" does not work with nodes.sharding = "fsdp2"'))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON-safe; `parse_job(job.to_dict()) == job`."""
        return self.model_dump(mode="json", exclude_none=True)


def _value(section: object, key: str) -> object:
    return section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)


def load_job(path: Path) -> Job:
    """Read a job file. Raises JobFileError with every problem and its line."""
    try:
        with path.open("rb") as file:
            body = file.read(MAX_JOB_BYTES + 1)
    except OSError as error:
        raise JobFileError(
            f"{path} cannot be read", cause=(error.strerror or str(error)).lower(), next="give the path of a job file"
        ) from error
    if len(body) > MAX_JOB_BYTES:
        raise JobFileError(f"{path} is too large", cause=f"a job file has at most {MAX_JOB_BYTES} bytes")
    try:
        text = body.decode().replace("\r\n", "\n")
        raw = tomllib.loads(text)
    except RecursionError as error:
        raise JobFileError(f"{path} is not a job file", cause="it is nested too deeply") from error
    except ValueError as error:
        raise _refusal(str(path), (syntax_problem(error, body),)) from error
    return _parse(raw, source=str(path), lines=key_lines(text))


def parse_job(raw: Mapping[str, Any]) -> Job:
    """The job of a dict with the same keys as the file. Raises JobFileError with every problem."""
    return _parse(raw, source="the job", lines={})


def job_schema() -> dict[str, Any]:
    """JSON schema of the job file, for editors."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Ciuic job file"}


def _parse(raw: Mapping[str, Any], *, source: str, lines: dict[KeyPath, int]) -> Job:
    try:
        return Job.model_validate(raw)
    except pydantic.ValidationError as error:
        wrong = [detail for detail in error.errors(include_url=False) if detail["type"] != "conflict"]
    problems = [*explain(wrong, raw, Job), *_conflicts(raw)]
    raise _refusal(source, describe(problems, lines))


def _conflicts(raw: Mapping[str, Any]) -> list[Problem]:
    """Pydantic reports keys that do not go together only when everything else is right; here they come always."""
    found = [Problem((key,), sentence) for key, sentence in Job.conflicts(raw)]
    for name, field in Job.model_fields.items():
        section, given = field.annotation, raw.get(name)
        if isinstance(section, type) and issubclass(section, Section) and isinstance(given, Mapping):
            found += [Problem((name, key), sentence) for key, sentence in section.conflicts(given)]
    return found


def _refusal(source: str, problems: tuple[str, ...]) -> JobFileError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return JobFileError(
        f"{source} has {count}", problems=problems, next="`ciuic schema` prints every field with its default"
    )
