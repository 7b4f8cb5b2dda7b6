"""Replicas that must be equal: which steps differ, in what, and whose fault that is (classes A and D, and C4)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ciuic.doctor.case import Asked, Case, Round, Rule
from ciuic.doctor.facts import GRADIENTS, PARAMETERS
from ciuic.doctor.facts_model import MODEL, SKETCH, UNREGISTERED
from ciuic.doctor.finding import Blind, Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules import diverged, manual
from ciuic.doctor.rules.drill import Drill, drill, follow
from ciuic.doctor.rules.memory import Told, listed
from ciuic.doctor.rules.unsynchronised import BACKWARDS, SYNCED, why_differs
from ciuic.doctor.rules.view import KINDS_COMPARED, View

SKETCHED = 32
"""Tensors of one step whose distance is asked for."""
VIEWS_MAX = 12
"""Differing steps of one group that are looked into."""
VIEWS_FIRST, VIEWS_LAST = 16, 32
"""Sampled steps of a group that are remembered: how the run began, and the newest ones."""
LOCAL_STEPS = 16
"""A program that never reduces is not judged before this step: it may average parameters later."""


@dataclass(eq=False, kw_only=True)
class Track:
    """One group of replicas of one optimizer."""

    optimizer: int
    ranks: tuple[int, ...]
    views: list[View] = field(default_factory=list)
    """Sampled steps in order, the ones that are equal without leaves."""
    differing: int = 0
    gradients_done: bool = False
    parameters_done: bool = False
    is_over: bool = False
    """The ranks are not at the same step any more: nothing can be compared."""

    def add(self, view: View) -> None:
        """In order; those in the middle of a long run are forgotten, unless something is still asked about them."""
        self.views.append(view)
        self.views.sort(key=lambda each: each.step)
        if len(self.views) > VIEWS_FIRST + 2 * VIEWS_LAST:
            middle = [each for each in self.views[VIEWS_FIRST:-VIEWS_LAST] if each.is_open]
            self.views = [*self.views[:VIEWS_FIRST], *middle, *self.views[-VIEWS_LAST:]]

    def last_equal(self, view: View) -> View | None:
        """The newest step before this one at which parameters were equal."""
        return next((v for v in reversed(self.views) if v.step < view.step and not v.params_differ), None)

    @property
    def averages(self) -> bool:
        """Whether parameters were exchanged so far."""
        return any(view.exchange(2) for view in self.views[-1:])


class Replicas(Rule):
    """One for all optimizers."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, tuple[int, ...]], Track] = {}
        self._told = Told()
        self._options: dict[str, Any] = {}
        self._total = 0

    def notice(self, case: Case, notice: Notice) -> Iterable[Finding | Blind]:
        """Names and models."""
        self._told.hear(notice)
        if notice.kind == MODEL and notice.facts.get("model_kind") == "ddp":
            self._options.update({name: value for name, value in notice.facts.items() if isinstance(value, int)})
        return ()

    def round(self, case: Case, round: Round) -> Iterable[Finding | Blind]:
        """Compare roots; search where they differ."""
        for ranks in round.groups():
            track = self._tracks.setdefault((round.optimizer, ranks), Track(optimizer=round.optimizer, ranks=ranks))
            if track.is_over or len(round.values(PARAMETERS)) < 2 or any(v.step == round.step for v in track.views):
                continue
            view = View(round=round, ranks=ranks, told=self._told)
            view.is_first = not track.views
            view.params_differ = _differ(view, PARAMETERS)
            view.grads_differ = _differ(view, GRADIENTS)
            track.add(view)
            apart = _out_of_step(view)
            if apart is not None:
                track.is_over = True
                track.views.remove(view)
                yield apart
                continue
            self._search(case, track, view)
            yield from self._judge(track, final=False)

    def answered(self, case: Case, asked: Asked) -> Iterable[Finding | Blind]:
        """A level of a search, or sketches."""
        if asked.kind != SKETCH:
            yield from follow(case, self, asked)
            return
        view, track = asked.about
        view.sketches[asked.facts["of"]] = dict(asked.answers)
        view.waits -= 1
        if not view.is_open:
            yield from self._judge(track, final=bool(case.gone))

    def left(self, case: Case, rank: int, how: str) -> Iterable[Finding | Blind]:
        """What was waited for may not come any more."""
        for track in self._tracks.values():
            if rank in track.ranks:
                yield from self._judge(track, final=True)

    def end(self, case: Case) -> Iterable[Finding | Blind]:
        """With what there is."""
        for track in self._tracks.values():
            for view in track.views:
                view.waits = 0
            yield from self._judge(track, final=True)

    # ---- searching -----------------------------------------------------------------------------------------

    def _search(self, case: Case, track: Track, view: View) -> None:
        wanted = [
            kind
            for kind, differs in zip(KINDS_COMPARED, (view.params_differ, view.grads_differ), strict=True)
            if differs
        ]
        if not wanted or track.differing >= VIEWS_MAX or (track.gradients_done and track.parameters_done):
            return
        track.differing += 1
        for kind in wanted:
            view.waits += 1

            def found(case: Case, search: Drill, kind: str = kind) -> Iterator[Finding | Blind]:
                view.leaves[kind], view.equal[kind] = search.leaves, search.equal
                view.waits -= 1
                names = list(search.leaves)[:SKETCHED]
                if names:
                    view.waits += 1
                    facts = {"of": kind, "optimizer": track.optimizer, "step": view.step, "names": names}
                    case.ask(self, SKETCH, track.ranks, facts=facts, about=(view, track))
                elif not view.is_open:
                    yield from self._judge(track, final=bool(case.gone))

            drill(case, self, Drill(of=kind, round=view.round, ranks=track.ranks, found=found))

    # ---- judging -------------------------------------------------------------------------------------------

    def _judge(self, track: Track, *, final: bool) -> Iterator[Finding | Blind]:
        if any(view.is_open for view in track.views):
            return
        for view in track.views:
            if view.mode == "ledger":
                return
            kinds = [self._parameters, self._gradients]
            both = view.params_differ and view.grads_differ and not view.is_first
            if both and diverged.evident(view, track.last_equal(view)) is None:
                kinds.reverse()  # parameters that went apart leave reduced gradients equal, not the other way round
            for judge in kinds:
                yield from judge(track, view, final=final)

    def _gradients(self, track: Track, view: View, *, final: bool) -> Iterator[Finding | Blind]:
        if track.gradients_done or not view.grads_differ or view.mode == "local":
            return
        later = [each for each in track.views if each.step > view.step]
        if later and not any(each.params_differ for each in later):
            return  # the optimizer made them equal itself
        if not later and not final and not view.params_differ:
            return  # does it do harm? the next sample says
        if view.mode == "ddp":
            found = self._under_wrapper(track, view, final=final)
        elif view.mode == "plain":
            found = manual.why_differs(view, track.views, final=final)
        else:
            found = manual.beside_shards(view, track.views)
        if found is not None:
            track.gradients_done = track.parameters_done = found.severity is not Severity.NOTE
            yield found

    def _under_wrapper(self, track: Track, view: View, *, final: bool) -> Finding | None:
        never = not any(any(each.flow(SYNCED).values()) for each in track.views)
        if never and track.averages:
            return None  # local training: parameters are averaged
        first = track.views[0]
        started = first.names(PARAMETERS) if first.params_differ else ()
        local = never and not final and track.views[-1].step < LOCAL_STEPS
        return why_differs(view, self._options, started=started, local_is_possible=local)

    def _parameters(self, track: Track, view: View, *, final: bool) -> Iterator[Finding | Blind]:
        if track.parameters_done or not view.params_differ:
            return
        before = track.last_equal(view)
        if view.exchange(3) and not view.is_first and view.mode in ("plain", "local"):
            found = manual.after_average(view, track.views)
        elif view.is_first and view.mode == "plain" and manual.became_equal(track.views):
            found = diverged.at_start(view, view.names(PARAMETERS))
        elif view.mode == "local" or (view.mode == "plain" and not manual.is_synchronous(track.views)):
            found = None
        elif view.is_first or before is None:
            found = self._start(track, view)
        elif any(each.grads_differ for each in track.views if each.step < view.step):
            found = None  # follows from that
        else:
            total = len(view.names(PARAMETERS)) + view.equal.get(PARAMETERS, 0)
            found = diverged.later(view, before, total=total)
        if found is not None:
            track.parameters_done = found.severity is not Severity.NOTE
            yield found

    def _start(self, track: Track, view: View) -> Finding | None:
        first = track.views[0]
        if not first.params_differ or view is not first:
            return None
        names = view.names(PARAMETERS)
        if view.mode == "ddp":
            unregistered = set(view.told_names(UNREGISTERED))
            names = [name for name in names if name not in unregistered]
        elif view.mode == "plain":  # experts of their own on each rank are meant to differ: nobody reduces them
            apart = set(view.names(GRADIENTS)) if view.grads_differ else set()
            names = [name for name in names if name not in apart]
        if view.names(PARAMETERS) and not names:
            return None
        return diverged.at_start(view, names)


def _differ(view: View, kind: str) -> bool:
    return len(set(map(bytes, view.values(kind).values()))) > 1


def _out_of_step(view: View) -> Finding | None:
    """Some ranks step without a backward pass, or after another number of them: their steps are not the same steps."""
    backwards = view.flow(BACKWARDS)
    if not view.grads_differ and not view.params_differ:
        return None
    without = tuple(rank for rank, count in backwards.items() if count == 0)
    if not without or len(without) == len(backwards) or view.is_first:
        return None
    cause = (
        f"rank {listed(map(str, without))} stepped at step {view.step} without a new backward pass: it has made more "
        "optimizer steps than the others"
    )
    return Finding(code="CIUIC-D2", cause=cause, step=view.step, ranks=without, confidence=0.9)
