"""The control messages between hub, agent, worker and operator (JSON over HTTPS; binary frames are in ledger/entry).

Every message refuses unknown fields and carries units in its names. `decode` is the only way in from outside: it
turns any malformed body into a ProtocolError.
"""

from typing import Any, Literal, TypeVar

import msgspec

from ciuic.errors import ProtocolError
from ciuic.net.keeping_messages import DiskUse
from ciuic.net.peer_messages import PeerLink, PeerOffer, SourceOutcome

API = "/v1"
T = TypeVar("T")

Role = Literal["node", "operator", "viewer", "shard"]
NodeState = Literal["idle", "assigned", "training", "draining", "left", "suspect", "dead", "evicted"]
RunState = Literal["waiting", "running", "stopping", "finished", "stopped", "failed"]
WorkerState = Literal["none", "starting", "running", "finished", "failed", "stopped"]


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of all control messages."""


# ---- joining -------------------------------------------------------------------------------------------------------


class JoinRequest(Message):
    """Sent with the token's secret, over a connection pinned to the token's authority."""

    token_id: str
    secret: str
    csr_pem: str
    """P-256 certificate signing request; the hub chooses the subject."""
    location: str
    """A name like us-west; the hub makes the node id from it (us-west, us-west-2, ...)."""
    claimed: dict[str, float] = {}
    """What the operator claims: gpu, bandwidth_gbit_s, memory_gb ..."""
    names: list[str] = []
    """Of a shard: host names and addresses by which nodes reach it. Of a node: the same, when it may be dialled."""


class JoinReply(Message):
    node_id: str
    certificate_pem: str
    names: list[str] = []
    """Under which it may be dialled."""


class CreateTokenRequest(Message):
    lifetime_s: float = 86400.0
    uses: int = 1
    role: Role = "node"


class CreateTokenReply(Message):
    token: str
    token_id: str
    expires_at: float
    uses: int


# ---- agent ---------------------------------------------------------------------------------------------------------


class WorkerFault(Message):
    """Where a worker failed, as far as its output says."""

    rank: int = -1
    """-1: not known."""
    where: str = ""
    """`file:line in function` of the program's own last frame."""
    collateral: list[int] = []
    """Ranks that failed after it."""
    log: str = ""
    """File on the node that has its whole output."""


class WorkerReport(Message):
    """What the agent knows of its worker processes."""

    run_id: str = ""
    state: WorkerState = "none"
    attempt: int = 0
    """The assignment's attempt that this is about; 0 when the agent does not say."""
    restarts: int = 0
    exit_code: int | None = None
    detail: str = ""
    """The exception line of a failed worker."""
    fault: WorkerFault | None = None
    """Of the latest failure."""


class HeartbeatRequest(Message):
    """One beat of the agent; the hub holds the reply for up to `wait_s` while nothing changes for this node."""

    agent_incarnation: str
    """Random per agent process. A newer one supersedes an older one of the same identity."""
    sequence: int
    known_revision: int
    """Revision of the desired state the agent already has."""
    wait_s: float = 2.0
    location: str = ""
    claimed: dict[str, float] = {}
    measured: dict[str, float] = {}
    """Names with units: net.measured.UNITS says which there are."""
    measured_age_s: float | None = None
    """Since links and speeds were measured; None before the first time. The rest is refreshed all the time."""
    measure_ticket: int = 0
    """The latest wish to measure (HeartbeatReply.measure_ticket) that is fulfilled."""
    facts: dict[str, str] = {}
    """host, platform, python, torch, device, ciuic version."""
    worker: WorkerReport = WorkerReport()
    draining: bool = False
    allow_code: bool = False
    offer: PeerOffer | None = None
    """Of a node that others may dial directly."""
    links: dict[str, PeerLink] = {}
    """What it measured on direct connections, by the other node."""


class Assignment(Message):
    """What the hub wants this node to run."""

    run_id: str
    job: dict[str, Any]
    """The resolved job (job.Job as a dict)."""
    attempt: int = 1
    """Grows when the hub wants a fresh start of the workers."""


class HeartbeatReply(Message):
    boot_id: str
    epoch: int
    revision: int
    assignment: Assignment | None = None
    stop_worker: bool = False
    """Stop the worker gracefully (run stopped by its operator, or node drained)."""
    heartbeat_s: float = 2.0
    hub_time: float = 0.0
    renew: bool = False
    """The node's certificate should be renewed now (POST /v1/node/renew)."""
    measure_ticket: int = 0
    """Not 0: an operator wants the node to measure itself now. The same number again is the same wish."""
    peers: dict[str, str] = {}
    """With a wish to measure: the other nodes that may be dialled directly, and where."""
    revoked: list[str] = []
    """For a node that others may dial: serial numbers that it must refuse."""


class LogLine(Message):
    time: float
    rank: int
    stream: Literal["out", "err", "agent"]
    text: str


class LogRequest(Message):
    run_id: str
    lines: list[LogLine]


class LeaveRequest(Message):
    agent_incarnation: str


# ---- worker (rank 0) -----------------------------------------------------------------------------------------------


class AttachRequest(Message):
    """A worker takes its place in a run. A new incarnation supersedes the node's older ones."""

    layout: dict[str, Any]
    """ledger.layout.Layout as a dict; the hub compares it by digest and names the first difference."""
    frozen_digest: str = ""
    """Digest of the parameters that are not trained (they are not in the layout); empty when all are."""
    dataset_samples: int = 0
    """Samples of the node's training data set; 0 for a stream of unknown length."""
    data_digest: str = ""
    """Digest of the training data, where it is known: nodes with other data are pointed out."""
    torch_version: str = ""
    device: str = ""


class Pace(Message):
    """What a node's next pushes are like."""

    codec_up: str
    interval: int
    """Inner steps per push of this node."""


class FragmentState(Message):
    version: int
    digest: str
    snapshot_version: int
    snapshot_bytes: int
    url: str = ""
    """Where it is served; empty: at the hub."""
    sources: list[str] = []
    """Addresses that hold the snapshot, too; what comes from them is checked against the hub's list of chunks."""
    content: str = ""
    """Names the snapshot there (ledger.content)."""
    chunk_bytes: int = 0
    """Of each chunk of the snapshot but the last; 0: the list of chunks must be asked for."""
    chunks: str = ""
    """Their digests, as in net.chunks.ChunkList."""


class AttachReply(Message):
    incarnation: int
    epoch: int
    boot_id: str
    state: Literal["initialize", "wait", "ready"]
    """initialize: upload your parameters as version 0; wait: another worker does, ask again; ready: go."""
    fragments: list[FragmentState] = []
    total_samples: int = 0
    samples_committed: int = 0
    """Of the whole run, now: a joiner's progress."""
    pace: Pace | None = None


class BasesReply(Message):
    """The bases of a run that is training, by fragment; none before its start."""

    fragments: list[FragmentState]


class PushReply(Message):
    """The answer to a push frame (the frame itself is binary)."""

    status: Literal["accepted", "duplicate", "rejected"]
    reason: str = ""
    detail: str = ""
    epoch: int = 0
    hub_version: int = 0
    pace: Pace | None = None


class LeaseRequest(Message):
    incarnation: int
    count: int
    """0: only to tell."""
    request_id: int
    """Grows by one per new request of an incarnation; the same id again gets the same answer (lost replies)."""
    step: int = 1
    """Samples of one step of the node: a lease is a multiple of it while enough are free."""
    unpushed: bool = False
    """The worker still has progress to push in some fragment: the run is not complete yet."""
    behind: list[int] = []
    """The fragments in which it has progress that is not even on its way."""
    ready: int = -1
    """Samples it has leased and not started; -1: it does not say."""
    holds: list[tuple[int, int]] = []
    """Ranges it has in hand: not started, or trained and not yet with the hub."""
    returned: list[tuple[int, int]] = []
    """Ranges that it gives back: they were not started and will not be."""


class LeaseReply(Message):
    status: Literal["granted", "wait", "finished"]
    """granted: train these; wait: nothing free now, push what you have and ask again; finished: the run is complete."""
    ranges: list[tuple[int, int]] = []
    """Half-open [start, stop) sample numbers of the run."""
    final_versions: list[int] = []
    """With `finished`: the last version per fragment."""
    give_back: int = 0
    """Others have nothing left to train: return so many samples, last ones first, with the next request."""
    void: list[tuple[int, int]] = []
    """What of `holds` is not this worker's (any more): what it has not started of it, others train."""


class ReportRequest(Message):
    """What a worker tells about itself, about once a second."""

    incarnation: int
    step: int
    samples: int
    tokens: int
    loss: float | None = None
    base_versions: list[int] = []
    base_digests: list[str] = []
    """Of these versions here."""
    residuals: list[float] = []
    """By fragment, of the latest push: what compression left out, over the length of what was to be pushed."""
    wall_s: float = 0.0
    """Since the first step."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    """Time in which the training thread waited for or worked on communication (exposed)."""
    communication_cpu_s: float = 0.0
    """Thread processor time spent on communication, all threads."""
    data_s: float = 0.0
    longest_stall_s: float = 0.0
    """Longest time in which one step boundary was blocked on the hub."""
    step_s: float = 0.0
    """Median step time."""
    pushes: int = 0
    final_digests: list[str] = []
    """When done: digest of the base per fragment."""


class EvaluationRequest(Message):
    """Held-out loss of the base at a version: the same number on every node."""

    incarnation: int
    version: int
    loss: float
    samples: int
    final: bool = False


class SourcesReport(Message):
    """How a snapshot came that other nodes hold, too."""

    fragment: int
    version: int
    sources: list[SourceOutcome]


class DetachRequest(Message):
    incarnation: int
    reason: Literal["finished", "drained", "stopped", "failed", "behind"]
    """behind: its link is slower than the ledger grows."""
    detail: str = ""


class Ok(Message):
    ok: bool = True


# ---- operator ------------------------------------------------------------------------------------------------------


class SubmitRequest(Message):
    job: dict[str, Any]
    submit_token: str = ""
    """The same token twice gives the same run (safe retries)."""


class SyncRequest(Message):
    """Other settings for a run at work, from its next round on; what is left out stays."""

    policy: Literal["", "sync", "async"] = ""
    interval: int = 0
    codec_up: str = ""
    codec_down: str = ""


class MeasureReply(Message):
    ticket: int
    """The node has measured itself when its NodeInfo.measure_ticket is this."""


class SubmitReply(Message):
    run_id: str
    created: bool


class NodeInfo(Message):
    node_id: str
    location: str
    state: NodeState
    claimed: dict[str, float] = {}
    measured: dict[str, float] = {}
    measured_at: float | None = None
    """When links and speeds were measured, on the hub's clock (seconds since 1970)."""
    measure_ticket: int = 0
    """The latest wish to measure that the node has fulfilled."""
    facts: dict[str, str] = {}
    run_id: str = ""
    worker: WorkerReport = WorkerReport()
    last_seen_s: float | None = None
    """Age of the last heartbeat; None when not seen since the hub started."""
    allow_code: bool = False
    """Whether jobs may bring code of their own there."""
    direct_url: str = ""
    """Where other nodes may dial it; empty: they may not."""
    links: dict[str, PeerLink] = {}
    """What it measured on direct connections, by the other node."""


class NodeInRun(Message):
    node_id: str
    state: Literal["starting", "warming", "training", "idle", "done", "gone"]
    incarnation: int = 0
    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    base_version: int = 0
    pushes_accepted: int = 0
    pushes_merged: int = 0
    pushes_rejected: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    communication_cpu_s: float = 0.0
    data_s: float = 0.0
    longest_stall_s: float = 0.0
    step_s: float = 0.0
    interval: int = 0
    """Its inner steps per push now."""
    staleness: int = 0
    final_digests: list[str] = []


class EvaluationPoint(Message):
    version: int
    loss: float
    node_id: str
    time: float
    samples_committed: int
    final: bool = False


class RoundInfo(Message):
    version: int
    fragment: int
    time: float
    nodes: list[str]
    staleness: list[int]
    tokens: int
    push_bytes: int
    entry_bytes: int
    duration_s: float
    why: str
    """complete, deadline, pushed (async)."""


class SampleCounts(Message):
    total: int = 0
    leased: int = 0
    """Distinct samples that were ever leased."""
    committed: int = 0
    duplicated: int = 0
    lost: int = 0
    """Neither committed, nor free, nor with a node, nor in a push that waits: must be 0 always."""


class Verdict(Message):
    """What went wrong in a run, in the order in which a person wants to know it."""

    node_id: str
    line: str
    """The exception line."""
    rank: int = -1
    """-1: not known."""
    step: int = 0
    """The latest that its node told."""
    where: str = ""
    """`file:line in function`."""
    collateral: list[str] = []
    """What else failed, folded."""
    others: list[str] = []
    """What the other nodes were doing."""
    next: str = ""
    log: str = ""
    """File on the node that has its whole output."""


class RunFinding(Message):
    """Something that is wrong in a run, as the doctor's rules find it (`ciuic doctor explain CODE`)."""

    code: str
    severity: str
    """note, warning, critical."""
    cause: str
    fix: str
    nodes: list[str] = []
    version: int = 0
    """At which it was found."""


class RunInfo(Message):
    run_id: str
    name: str
    state: RunState
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    reason: str = ""
    verdict: Verdict | None = None
    """When a worker has failed for good."""
    restarts: dict[str, str] = {}
    """Nodes whose worker failed and was started again: how often, and why the last time."""
    job: dict[str, Any] = {}
    versions: list[int] = []
    digests: list[str] = []
    parameters: int = 0
    epoch: int = 0
    nodes: list[NodeInRun] = []
    evaluations: list[EvaluationPoint] = []
    rounds: list[RoundInfo] = []
    """The latest rounds (at most 200)."""
    findings: list[RunFinding] = []
    """What is wrong now, the worst first."""
    samples: SampleCounts = SampleCounts()
    push_bytes: int = 0
    entry_bytes: int = 0
    sync: str = ""
    """How the nodes synchronise now, and why so."""
    loss_consistent: bool | None = None
    """After the end: all nodes reported the same held-out loss and base digests for the final version."""
    progress: float = 0.0


class Event(Message):
    """One line of the durable story of the hub."""

    id: int
    time: float
    kind: str
    """hub.started, node.joined, node.dead, run.started, round.closed, push.rejected, worker.failed, ..."""
    run_id: str = ""
    node_id: str = ""
    text: str = ""
    data: dict[str, Any] = {}


class HubInfo(Message):
    url: str
    version: str
    boot_id: str
    started_at: float
    nodes: list[NodeInfo] = []
    runs: list[RunInfo] = []
    """Without rounds, and with the first and the last evaluation only."""
    disk_free_bytes: int = 0
    disk: DiskUse = DiskUse()


def decode(body: bytes, kind: type[T]) -> T:
    """Read one message from outside. Raises ProtocolError naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # includes ValidationError
        raise ProtocolError(
            f"this is not a valid {getattr(kind, '__name__', kind)}",
            cause=str(error),
            next="use the same version of ciuic on both sides",
        ) from error


def encode(message: msgspec.Struct) -> bytes:
    """One message as JSON."""
    return msgspec.json.encode(message)
