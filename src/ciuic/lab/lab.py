"""A whole network of real processes on one machine: a hub and agents at the places of an emulated network.

    with Lab(LabConfig(profile=continents(), folder=Path("lab"), namespaces=False)) as lab:
        lab.start_all()
        lab.kill_node("us-west")

Every process stands under a guard (`ciuic.node.guard`), so all of them end with this one, however it ends.
"""

import contextlib
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ciuic.errors import CiuicError, RunFailedError, StorageError, UnreachableError, UsageError
from ciuic.lab.crew import CLI, Crew, Hand
from ciuic.lab.network import Network, RelayNetwork, SiteNetwork, check_place
from ciuic.lab.profiles import Profile
from ciuic.lab.stage import operator_client
from ciuic.lab.switch_sites import DATACENTRE_BITS_PER_S, HUB
from ciuic.net.client import HubClient
from ciuic.net.messages import CreateTokenReply, CreateTokenRequest, HubInfo, NodeInfo
from ciuic.net.tls import write_private_file

HUB_START_S = 90.0
NODES_START_S = 120.0
TOKEN_S = 3600.0
MARK = "made-by-ciuic-lab"
_MADE = ("hub", "nodes", "logs", "operator", "tokens")
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """What kind of lab."""

    profile: Profile
    folder: Path
    """For everything it keeps."""
    namespaces: bool
    """Network namespaces and a switch (root), else relays."""
    hub_bits_per_s: float = DATACENTRE_BITS_PER_S
    """The hub's own access link, each way; namespaces only."""
    seed: int = 0
    """Of losses and jitter."""
    claims: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What nodes claim, by place, instead of what the profile says."""


class Lab:
    """The network, and the processes in it. Leaving the `with` block ends them all.

    Methods may be called from several threads; those that start or end processes take turns.
    """

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.folder = config.folder
        self.network: Network = _network(config)
        self.lock = threading.RLock()
        self._crew = Crew(self.folder / "logs", owner="lab")
        self._hands: dict[str, Hand] = {}
        self._homes: dict[str, int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.network)
        try:
            self._stack.enter_context(self._crew)
            self._stack.enter_context(contextlib.closing(_Ender(self)))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            self._stack.close()

    # ---- places

    @property
    def sites(self) -> tuple[str, ...]:
        """All places but the hub's."""
        return self.config.profile.locations

    def home(self, place: str) -> Path:
        """CIUIC_HOME of what runs at a place."""
        check_place(self.network, place)
        if place == HUB:
            return self.folder / "hub"
        number = self._homes.get(place, 1)
        return self.folder / "nodes" / (place if number == 1 else f"{place}-{number}")

    def environment(self, place: str) -> dict[str, str]:
        """What a command at a place finds in its environment."""
        return {
            "CIUIC_HOME": str(self.home(place)),
            "CIUIC_LAB_PLACE": place,
            "CIUIC_LAB_HUB": self.network.hub_url(place),
        }

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` at a place, as long as this process holds the lab."""
        return self.network.command(place, argv)

    # ---- the hub

    def client(self) -> HubClient:
        """A connection with the operator's certificate; close it. Raises UnreachableError before the hub has begun."""
        try:
            return operator_client(self.folder)
        except FileNotFoundError:
            raise UnreachableError("the lab's hub has not begun yet") from None

    def start_hub(self) -> None:
        """Start the hub, also again; returns when it answers. Raises RunFailedError, UsageError when it runs."""
        with self.lock:
            self._refuse_running(HUB)
            host, port = self.network.hub_listens_at
            arguments = ["hub", "start", "--host", host, "--port", str(port), "--home", str(self.home(HUB))]
            hand = self._start(HUB, arguments)
        until = time.monotonic() + HUB_START_S
        while not self._hub_answers():
            if hand.exit_code is not None or time.monotonic() > until:
                said = "; ".join(line for line in hand.last_lines() if line.strip())[-500:]
                raise RunFailedError("the lab's hub does not answer", cause=said, next=f"read {hand.log}")
            time.sleep(_POLL_S)

    def _hub_answers(self) -> bool:
        own = self.home(HUB) / "operator" / "profile.json"
        if not own.exists():
            return False
        self._write_profile(own)
        with contextlib.suppress(UnreachableError), contextlib.closing(self.client()) as client:
            client.call("GET", "/v1/hub", None, HubInfo)
            return True
        return False

    def _write_profile(self, own: Path) -> None:
        """The operator's profile for programs of this machine, who may need another way to the hub."""
        profile = json.loads(own.read_bytes())
        files = {key: str(own.parent / profile[key]) for key in ("authority", "cert", "key")}
        target = self.folder / "operator" / "profile.json"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        write_private_file(target, json.dumps({"url": self.network.operator_url, **files}).encode())

    # ---- nodes

    def start_all(self) -> None:
        """The hub and an agent at every site; returns when all are there. Raises RunFailedError."""
        self.start_hub()
        for place in self.sites:
            self.start_node(place)
        self.await_nodes(self.sites)

    def start_node(self, place: str, *, fresh: bool = False) -> None:
        """Start an agent. One that was here before comes back as the node it was; `fresh`: with a new identity.

        Raises UsageError when it runs already, UnreachableError when it needs a token and the hub is away.
        """
        check_place(self.network, place)
        with self.lock:
            self._refuse_running(place)
            if fresh:
                self._homes[place] = self._homes.get(place, 1) + 1
            home = self.home(place)
            arguments = ["node", "join", self.network.hub_url(place), "--location", place, "--home", str(home)]
            if not (home / "nodes" / place / "identity.json").exists():
                arguments += ["--token-file", str(self._token(place))]
            claims = self.config.claims.get(place, self.config.profile.site(place).claimed)
            for name, value in claims.items():
                arguments += ["--claim", f"{name}={value:g}"]
            self._start(place, [*arguments, "--allow-code"])

    def _token(self, place: str) -> Path:
        with contextlib.closing(self.client()) as client:
            request = CreateTokenRequest(lifetime_s=TOKEN_S, uses=1)
            token = client.call("POST", "/v1/tokens", request, CreateTokenReply).token
        path = self.folder / "tokens" / place
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private_file(path, token.encode())
        return path

    def await_nodes(self, places: Sequence[str]) -> None:
        """Until the hub has heard all of them. Raises RunFailedError."""
        until = time.monotonic() + NODES_START_S
        waits: set[str] = set(places)
        while waits:
            self.check()
            with contextlib.suppress(UnreachableError), contextlib.closing(self.client()) as client:
                found = client.call("GET", "/v1/nodes", None, list[NodeInfo])
                waits -= {node.location for node in found if node.last_seen_s is not None}
            if waits and time.monotonic() > until:
                raise RunFailedError(f"{', '.join(sorted(waits))} did not join", next=f"read {self.folder / 'logs'}")
            time.sleep(_POLL_S)

    # ---- what may happen to processes

    def kill(self, place: str) -> None:
        """kill -9 of everything at a place, as when its machine loses power."""
        with self.lock:
            self._running(place)
            del self._hands[place]
            self._crew.kill(place)

    def kill_agent(self, place: str) -> None:
        """kill -9 of the agent alone; its guards end what it has started. Returns when all is gone."""
        with self.lock:
            hand = self._running(place)
            for process in _children(hand.guard_pid):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            hand.wait(time.monotonic() + NODES_START_S)
            self._forget(place)

    def kill_workers(self, place: str) -> int:
        """kill -9 of the training processes; how many there were."""
        with self.lock:
            workers = [p for p in self.processes(place) if _is_worker(p)]
            for process in workers:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            return len(workers)

    def drain(self, place: str, patience_s: float) -> int | None:
        """SIGTERM: finish the step, push, leave. Its exit code; None (and killed) when it has not ended in time."""
        with self.lock:
            hand = self._running(place)
            hand.terminate()
        ended = hand.wait(time.monotonic() + patience_s)
        with self.lock:
            if not ended:
                hand.kill()
            self._forget(place)
        return hand.exit_code if ended else None

    def suspend(self, place: str) -> None:
        """SIGSTOP to everything at a place: a machine that says nothing and is not dead."""
        for process in self.processes(place):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)

    def resume(self, place: str) -> None:
        """SIGCONT."""
        for process in reversed(self.processes(place)):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)

    # ---- looking

    def runs(self, place: str) -> bool:
        """Whether the hub or agent of this place runs."""
        hand = self._hands.get(place)
        return hand is not None and hand.exit_code is None

    def process(self, place: str) -> psutil.Process | None:
        """The hub or the agent itself, without its guard."""
        hand = self._hands.get(place)
        return next(iter(_children(hand.guard_pid)), None) if hand is not None else None

    def processes(self, place: str) -> list[psutil.Process]:
        """Everything at a place below its first guard, parents first."""
        hand = self._running(place)
        with contextlib.suppress(psutil.Error):
            return psutil.Process(hand.guard_pid).children(recursive=True)
        return []

    def log(self, place: str) -> Path:
        """What its hub or agent has said, over all starts."""
        return self.folder / "logs" / f"{place}.log"

    def ended(self) -> dict[str, int]:
        """Places whose process has ended by itself, with the exit code."""
        codes = {place: hand.exit_code for place, hand in list(self._hands.items())}
        return {place: code for place, code in codes.items() if code is not None}

    def check(self) -> None:
        """Raises RunFailedError when a process has ended by itself."""
        self._crew.check()

    # ---- inside

    def _start(self, place: str, arguments: Sequence[str]) -> Hand:
        command = self.network.command(place, [sys.executable, *CLI, *arguments])
        environment = {"OMP_NUM_THREADS": "1", **self.environment(place)}
        hand = self._crew.run(place, command, environment)
        self._hands[place] = hand
        return hand

    def _running(self, place: str) -> Hand:
        check_place(self.network, place)
        if not self.runs(place):
            raise UsageError(f"nothing runs at {place}", next="start it first")
        return self._hands[place]

    def _refuse_running(self, place: str) -> None:
        if self.runs(place):
            raise UsageError(f"{place} runs already", next="kill or drain it first")

    def _forget(self, place: str) -> None:
        self._hands.pop(place, None)
        self._crew.kill(place)


class _Ender:
    """Wakes what was suspended, so that it can end. Closed before the network and the processes are."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def close(self) -> None:
        for place in self._lab.network.places:
            if self._lab.runs(place):
                with contextlib.suppress(CiuicError, psutil.Error):
                    self._lab.resume(place)


def claim_folder(folder: Path) -> None:
    """Make the folder. Raises UsageError when it holds something else than a lab, StorageError."""
    mark = folder / MARK
    try:
        if folder.exists() and not mark.exists() and any(folder.iterdir()):
            raise UsageError(
                f"{folder} is not empty and was not made by the lab", next="choose another folder with --folder"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark.touch()
    except OSError as error:
        raise StorageError(f"{folder} cannot be used", cause=error.strerror or str(error)) from error


def clear_folder(folder: Path) -> None:
    """Remove what an earlier lab has left in a folder that is claimed. Raises StorageError."""
    try:
        for name in _MADE:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (folder / "logs").mkdir()
    except OSError as error:
        raise StorageError(f"{folder} cannot be used", cause=error.strerror or str(error)) from error


def _network(config: LabConfig) -> Network:
    if config.namespaces:
        return SiteNetwork(config.profile, hub_bits_per_s=config.hub_bits_per_s, seed=config.seed)
    return RelayNetwork(config.profile, seed=config.seed)


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children()
    return []


def _is_worker(process: psutil.Process) -> bool:
    """A training process: what an agent's guard has started, and not a guard."""
    with contextlib.suppress(psutil.Error):
        line, above = process.cmdline(), process.parent()
        parent = above.cmdline() if above is not None else []
        is_guard = any(Path(word).name == "guard.py" for word in line)
        below_guard = any(Path(word).name == "guard.py" for word in parent)
        words = " ".join(line)
        return below_guard and not is_guard and "node join" not in words and "hub start" not in words
    return False
