"""What people who watch the hub are told: the whole state, then only what is new in it, and what telling costs."""

import msgspec

from ciuic.net.messages import EvaluationPoint, Event, HubInfo, RoundInfo, RunInfo


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor itself takes: about the message before this one."""

    build_s: float = 0.0
    """Time to gather and encode it."""
    build_cpu_s: float = 0.0
    """Processor time of that."""
    message_bytes: int = 0
    messages: int = 0
    """Built since the hub started."""
    viewers: int = 0
    """Open streams now."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """GET /api/state and each message of GET /api/stream."""

    time: float
    """The hub's clock, so that ages can be told whatever clock the reader has."""
    hub: HubInfo
    runs: list[RunInfo]
    """The latest runs in full, oldest first."""
    events: list[Event]
    """The latest events, oldest first."""
    cost: Cost = Cost()


class News:
    """Remembers what one reader has been told. A long run's rounds and losses are not sent again every second."""

    def __init__(self) -> None:
        self._is_new = True
        self._event_id = 0
        self._briefs: dict[str, RunInfo] = {}
        self._runs: dict[str, _Told] = {}

    def of(self, state: State) -> State:
        """The state without what this reader has already: the first time all of it.

        Afterwards `hub.runs` holds the runs that changed and are not in `runs`; a run in `runs` comes with new rounds
        and evaluations only, and without its job; `events` are the new ones.
        """
        in_full = set() if self._is_new else {run.run_id for run in state.runs}
        self._is_new = False
        changed = [run for run in state.hub.runs if self._has_changed(run) and run.run_id not in in_full]
        events = [event for event in state.events if event.id > self._event_id]
        self._event_id = max([self._event_id, *(event.id for event in events)])
        return msgspec.structs.replace(
            state,
            hub=msgspec.structs.replace(state.hub, runs=changed),
            runs=[self._runs.setdefault(run.run_id, _Told()).new_in(run) for run in state.runs],
            events=events,
        )

    def _has_changed(self, brief: RunInfo) -> bool:
        before = self._briefs.get(brief.run_id)
        self._briefs[brief.run_id] = brief
        return before != brief


class _Told:
    """What has been told of one run."""

    def __init__(self) -> None:
        self._is_new = True
        self._rounds: frozenset[RoundKey] = frozenset()
        self._evaluations: frozenset[EvaluationKey] = frozenset()

    def new_in(self, run: RunInfo) -> RunInfo:
        rounds = [(_round_key(item), item) for item in run.rounds]
        evaluations = [(_evaluation_key(item), item) for item in run.evaluations]
        told = msgspec.structs.replace(
            run,
            job=run.job if self._is_new else {},
            rounds=[item for key, item in rounds if key not in self._rounds],
            evaluations=[item for key, item in evaluations if key not in self._evaluations],
        )
        self._is_new = False
        self._rounds = frozenset(key for key, _ in rounds)
        self._evaluations = frozenset(key for key, _ in evaluations)
        return told


RoundKey = tuple[int, int]
EvaluationKey = tuple[int, str, bool, float]


def _round_key(item: RoundInfo) -> RoundKey:
    return item.fragment, item.version


def _evaluation_key(item: EvaluationPoint) -> EvaluationKey:
    return item.version, item.node_id, item.final, item.time
