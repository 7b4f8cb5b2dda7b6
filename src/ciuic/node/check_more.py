"""The checks that take longer: connections side by side, congestion control, torch and its devices."""

from dataclasses import dataclass

from ciuic.errors import CiuicError, ConflictError
from ciuic.net.child import ask_child, installed_version
from ciuic.net.client import HubClient
from ciuic.net.measured_link import GivenUpError, StreamRates, StreamSet, find_streams
from ciuic.net.probe import list_gpus, measure_rate, measure_round_trips, receive, send, usable_cpus
from ciuic.net.sockets import congestion_facts
from ciuic.node.identity import NodeIdentity, held
from ciuic.node.measurements import load_measurements
from ciuic.node.speeds import DEVICE_LIMIT_S
from ciuic.units import format_bytes, format_rate

_TIMEOUT_S = 10.0
_FIX_TORCH = "install torch into the environment that runs ciuic"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report."""

    name: str
    ok: bool
    detail: str
    next: str = ""
    """What to do. A check may be ok and still have an advice."""


# ---- the link ------------------------------------------------------------------------------------------------------


def check_streams(identity: NodeIdentity | None) -> list[CheckResult]:
    """What one connection reaches, and several; while the agent runs, what it has measured last."""
    if identity is None:
        return [CheckResult(name="streams", ok=True, detail="not measured: that needs a node that has joined")]
    try:
        with held(identity.folder):
            return [_streams(*_measure(identity))]
    except ConflictError:
        return [_streams_of_agent(identity)]
    except GivenUpError:
        return []
    except CiuicError as error:
        cause = f"{error.message}: {error.cause}" if error.cause else error.message
        return [CheckResult(name="streams", ok=False, detail=cause, next=error.next)]


def _measure(identity: NodeIdentity) -> tuple[StreamRates, StreamRates, float | None]:
    client = _client(identity)
    streams = StreamSet(lambda: _client(identity), keep_going=lambda: True)
    try:
        round_trips, _ = measure_round_trips(client)
        rtt_s = min(round_trips)
        up = find_streams(streams.up, measure_rate(lambda count: send(client, count), rtt_s), rtt_s)
        down = find_streams(streams.down, measure_rate(lambda count: receive(client, count), rtt_s), rtt_s)
        return up, down, streams.loss_share(up.bits_per_s)
    finally:
        client.close()
        streams.close()


def _client(identity: NodeIdentity) -> HubClient:
    authority_pem = identity.authority.read_bytes()
    return HubClient(identity.url, authority_pem, identity.cert, identity.key, "control", _TIMEOUT_S)


def _streams(up: StreamRates, down: StreamRates, loss_share: float | None) -> CheckResult:
    lost = "" if loss_share is None else f"; {loss_share:.2%} sent again"
    return CheckResult(name="streams", ok=True, detail=f"up {_rates(up)}; down {_rates(down)}{lost}")


def _rates(rates: StreamRates) -> str:
    if rates.streams == 1:
        return f"{format_rate(rates.bits_per_s)} with 1, more bring nothing"
    return f"{format_rate(rates.one_bits_per_s)} with 1, {format_rate(rates.bits_per_s)} with {rates.streams}"


def _streams_of_agent(identity: NodeIdentity) -> CheckResult:
    known = load_measurements(identity.folder).values
    if "up_streams" not in known:
        return CheckResult(name="streams", ok=True, detail="the running agent has not measured them yet")
    up, down = (
        StreamRates(
            one_bits_per_s=known[f"{way}_1_stream_bits_per_s"],
            bits_per_s=known[f"{way}_bits_per_s"],
            streams=int(known[f"{way}_streams"]),
        )
        for way in ("up", "down")
    )
    return _streams(up, down, known.get("loss_share"))


def check_congestion() -> CheckResult:
    """BBR or not; without it the node still works, with more connections."""
    facts = congestion_facts()
    return CheckResult(name="congestion", ok=True, detail=facts.describe(), next=facts.remedy)


# ---- torch and its devices -----------------------------------------------------------------------------------------


def check_devices(limit_s: float = DEVICE_LIMIT_S) -> list[CheckResult]:
    """Import torch in a process of its own, with a time-out, and compare its GPUs with the driver's."""
    version, gpus = installed_version("torch"), list_gpus()
    if not version:
        return [CheckResult(name="torch", ok=False, detail="not installed", next=_FIX_TORCH)]
    found = ask_child("ciuic.train.device_speed", limit_s=limit_s)
    if "problem" in found:
        detail = f"{version} cannot be imported: {found['problem']}"
        return [CheckResult(name="torch", ok=False, detail=detail, next=f"{_FIX_TORCH}; try: python -c 'import torch'")]
    devices = found.get("devices")
    return [
        CheckResult(name="torch", ok=True, detail=str(found.get("torch", version))),
        *_devices([gpu.name for gpu in gpus], devices if isinstance(devices, list) else [], str(found.get("cuda"))),
    ]


def _devices(driver: list[str], torch: list[dict[str, object]], cuda: str) -> list[CheckResult]:
    if len(torch) < len(driver):
        why = f"it was built for CUDA {cuda}" if cuda else "it was built without CUDA"
        detail = f"the driver lists {len(driver)} x {driver[0]}, torch finds {len(torch)}: {why}"
        next_ = "install a torch build that fits the driver (see nvidia-smi), and check CUDA_VISIBLE_DEVICES"
        return [CheckResult(name="device", ok=False, detail=detail, next=next_)]
    if not torch:
        return [CheckResult(name="device", ok=True, detail=f"no GPU; {usable_cpus()} processors")]
    free, total = (min(float(str(device[key])) for device in torch) for key in ("free_bytes", "memory_bytes"))
    names = f"{len(torch)} x {torch[0]['name']}"
    busy = "another program holds most of it; see nvidia-smi" if free < total / 2 else ""
    return [
        CheckResult(name="device", ok=True, detail=names),
        CheckResult(
            name="gpu memory", ok=True, detail=f"{format_bytes(free)} free of {format_bytes(total)}", next=busy
        ),
    ]
