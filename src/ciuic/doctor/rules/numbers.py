"""Class F: clipping, loss scale, skipped steps, numbers that are not finite."""

from collections.abc import Iterable, Sequence
from typing import Any

from ciuic.doctor.case import Case, Round, Rule
from ciuic.doctor.facts_training import (
    CLIP,
    EARLY_CLIP,
    FORM,
    GRADIENT_NOT_FINITE,
    HALF,
    LOSS_NOT_FINITE,
    PARTIAL_CLIP,
    PASSES,
    SCALED_STEP,
    SCALER,
    SKIPPED,
    TAKEN,
)
from ciuic.doctor.finding import Finding, Severity
from ciuic.doctor.record import Notice
from ciuic.doctor.rules.gains import clipped_apart, own_factors

CLIPS_FAR = 5
"""Calls in a row whose norm was far above the limit."""
NORMS_APART = 1e-3
"""Relative: norms of equal gradients that differ more are not the norm of the same thing."""
SKIPS_BAD_LOSS, SKIPS_BAD_GRADIENT, SKIPS_ANY = 3, 8, 12
"""Skipped in a row: with a loss that is not finite on some ranks, with such gradients on some, and for any reason. A
scale that starts at 65536 is halved a few times before it fits."""
SCALE_LOW, SCALE_GONE = 1024.0, 4.0
"""Loss scales at which finite gradients would long have fitted, for one rank's and for all ranks'."""
SHARE_SKIPPED, ATTEMPTS_SHARE = 0.3, 15
"""So many of so many attempts skipped is not a scale that finds its place."""
HALF_ZERO, HALF_SMALL, ROUNDS_HALF = 0.2, 0.5, 3
CLIPS_APART, ROUNDS_CLIPPED = 0.05, 3
"""Relative: local clipping that differs more than this, in so many samples, scales the ranks apart."""
ROUNDS_PARTIAL = 2
STEPS_SCALED = 2
"""So many steps with scaled gradients are no accident."""
WAIT_S = 1.0
"""A rank may hear of its own bad number a little later than one that got it by the reduction."""


class Numbers(Rule):
    """Judges counters of all ranks, and remembers who had a bad number first."""

    def __init__(self) -> None:
        self._bad_losses: dict[int, list[Notice]] = {}
        self._bad_gradients: dict[int, list[Notice]] = {}
        self._in_a_row: dict[int, int] = {}
        self._began_skip: dict[int, int] = {}
        self._scales: dict[int, float] = {}
        self._bad_since_s: float | None = None
        self._is_scaled = False
        self._half: dict[int, int] = {}
        self._passes: dict[int, dict[int, tuple[int, int]]] = {}
        self._micro: dict[int, int] = {}
        self._apart: dict[tuple[int, ...], int] = {}
        self._partial = 0
        """Samples in a row in which gradients were clipped too early."""
        self._early_clips: dict[tuple[int, ...], int] = {}

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def round(self, case: Case, round: Round) -> Iterable[Finding]:
        self._is_scaled = self._is_scaled or bool(round.values(SCALER))
        yield from self._early_clip(round)
        yield from _scaled_step(round)
        yield from self._far_clip(round)
        yield from self._partial_clip(round)
        yield from self._share_skipped(case, round)
        yield from self._underflow(round)
        for ranks in round.groups():
            yield from self._norms(round, ranks)
            yield from self._steps(round, ranks)

    def _early_clip(self, round_: Round) -> Iterable[Finding]:
        found = round_.values(EARLY_CLIP)
        if found:
            times, scale = next(iter(found.values()))
            yield Finding(
                code="CIUIC-F1",
                cause=f"gradients are clipped while they are still multiplied by the loss scale {scale:.0f}: "
                f"the limit acts as one {scale:.0f} times smaller",
                step=1,
                ranks=() if set(found) == set(round_.records) else tuple(found),
                evidence={"loss_scale": scale, "clipped_scaled": times},
                confidence=0.97,
            )

    def _partial_clip(self, round_: Round) -> Iterable[Finding]:
        values = round_.values(PARTIAL_CLIP)
        self._partial = self._partial + 1 if values else 0
        if self._partial != ROUNDS_PARTIAL:
            return
        yield Finding(
            code="CIUIC-F9",
            cause="gradients are clipped before they are complete: further backward passes of the same step add to "
            "what "
            "was clipped, and the earlier micro-batches are made small again and again",
            step=round_.step,
            ranks=() if set(values) == set(round_.records) else tuple(values),
            evidence={"clipped_too_early": max(values.values())},
            confidence=0.85,
        )

    def _far_clip(self, round_: Round) -> Iterable[Finding]:
        clips = {rank: clip for rank, clip in round_.values(CLIP).items() if clip[3] >= CLIPS_FAR}
        if clips and not round_.values(EARLY_CLIP):
            _, norm, limit, times = next(iter(clips.values()))
            is_sum = any(form[2] == "sum" for form in round_.values(FORM).values())  # its norm grows with the batch
            yield Finding(
                code="CIUIC-F6",
                cause=f"every step so far is clipped to a norm of {limit:.3g} while the gradient's is about "
                f"{norm:.3g}: a step is about {norm / limit:.0f} times smaller than its gradient",
                step=1,
                evidence={"norm": norm, "limit": limit, "clipped_in_a_row": times},
                confidence=0.4 if is_sum else 0.8,
                severity=Severity.NOTE if is_sum else None,
            )

    def _norms(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        yield from self._before_reduction(round_, ranks)
        factors = own_factors(round_, ranks)
        if len(factors) < len(ranks) or len(ranks) < 2:
            return
        low, high = min(factors.values()), max(factors.values())
        if high - low <= NORMS_APART * abs(high):
            return
        key = tuple(ranks)
        self._apart[key] = self._apart.get(key, 0) + 1
        clips = {rank: round_.records[rank].facts.get(CLIP) for rank in ranks}
        clipping = [rank for rank, clip in clips.items() if clip is not None and clip[0] > 0]
        scales = ", ".join(f"{factors[rank]:.4g} on rank {rank}" for rank in list(ranks)[:4])
        if clipping and len(clipping) < len(ranks):
            cause = f"only {_ranks(clipping)} clips the gradients: they are multiplied by {scales}"
            guilty, sure = tuple(clipping), 0.95
        else:
            norms = {rank: clip[1] for rank, clip in clips.items() if clip is not None and clip[1] >= 0}
            told = ", ".join(f"{norm:.4g} on rank {rank}" for rank, norm in list(norms.items())[:4])
            what = f"norms differ: {told}; " if len(set(norms.values())) > 1 else ""
            cause = f"each rank clips by a norm of its own: {what}the gradients are multiplied by {scales}"
            guilty, sure = (), 0.9 if norms else 0.7 + 0.1 * min(2, self._apart[key] - 1)
        evidence: dict[str, Any] = {f"factor_rank_{rank}": round(value, 6) for rank, value in list(factors.items())[:8]}
        yield Finding(code="CIUIC-F2", cause=cause, step=round_.step, ranks=guilty, evidence=evidence, confidence=sure)

    def _before_reduction(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        factors = clipped_apart(round_, ranks)
        if not factors or max(factors.values()) - min(factors.values()) <= CLIPS_APART * max(factors.values()):
            return
        self._early_clips[tuple(ranks)] = self._early_clips.get(tuple(ranks), 0) + 1
        if self._early_clips[tuple(ranks)] < ROUNDS_CLIPPED:
            return
        scales = ", ".join(f"{factors[rank]:.4g} on rank {rank}" for rank in list(ranks)[:4])
        yield Finding(
            code="CIUIC-F2",
            cause="each rank clips its own gradient before they are reduced, by a norm of its own: "
            f"multiplied by {scales}; ranks with large gradients count less, and the mean is not clipped",
            step=round_.step,
            evidence={f"factor_rank_{rank}": round(value, 6) for rank, value in list(factors.items())[:8]},
            fix="reduce first, then clip: the norm is the same on all ranks then",
            confidence=0.75,
            severity=Severity.WARNING,
        )

    # ---- skipped steps -----------------------------------------------------------------------------------------------

    def _steps(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        taken = {rank: round_.records[rank].facts.get(TAKEN, 0) for rank in ranks}
        scalers = {rank: round_.records[rank].facts.get(SCALER) for rank in ranks}
        if len(set(taken.values())) > 1 and all(scalers.values()):
            behind = tuple(rank for rank in ranks if taken[rank] < max(taken.values()))
            told = ", ".join(f"{taken[rank]} of {round_.step} on rank {rank}" for rank in list(ranks)[:4])
            yield Finding(
                code="CIUIC-F4",
                cause=f"{_ranks(behind)} skipped optimizer steps that the others took ({told}): "
                "each rank's scaler decides alone",
                step=round_.step,
                ranks=behind,
                evidence={f"steps_rank_{rank}": taken[rank] for rank in list(ranks)[:8]},
                confidence=0.97,
            )
            return
        yield from self._passes_apart(round_, ranks)

    def _passes_apart(self, round_: Round, ranks: Sequence[int]) -> Iterable[Finding]:
        passes = {rank: round_.records[rank].facts.get(PASSES, 0) for rank in ranks}
        known = self._passes.setdefault(round_.optimizer, {})
        before = {rank: known.get(rank, (0, 0)) for rank in ranks}
        known.update({rank: (round_.step, passes[rank]) for rank in ranks})
        if round_.step == 1:
            self._micro[round_.optimizer] = min(passes.values())
        if len(set(passes.values())) == 1 or not all(passes.values()):
            return
        since = {rank: passes[rank] - before[rank][1] for rank in ranks}
        if len(set(since.values())) == 1:
            return  # known already
        steps = round_.step - before[ranks[0]][0]
        first = self._micro.get(round_.optimizer, 0) * steps
        if first not in since.values():
            return
        more = tuple(rank for rank in ranks if since[rank] > first)
        fewer = tuple(rank for rank in ranks if since[rank] < first)
        told = ", ".join(f"{passes[rank]} on rank {rank}" for rank in list(ranks)[:4])
        what = "left optimizer steps out" if more else "makes more optimizer steps than the others"
        yield Finding(
            code="CIUIC-F4",
            cause=f"{_ranks(more or fewer)} {what}: {told} backward passes for the same {round_.step} steps",
            step=round_.step,
            ranks=more or fewer,
            evidence={f"passes_rank_{rank}": passes[rank] for rank in list(ranks)[:8]},
            confidence=0.9 if more else 0.75,
        )

    def _share_skipped(self, case: Case, round_: Round) -> Iterable[Finding]:
        skips = {rank: scaler[1] for rank, scaler in round_.values(SCALER).items()}
        if not skips or round_.step < ATTEMPTS_SHARE or max(skips.values()) < SHARE_SKIPPED * round_.step:
            return
        guilty = self._guilty(self._bad_losses)
        if not guilty and min(self._scales.values(), default=0.0) <= SCALE_LOW:
            guilty = self._guilty(self._bad_gradients)
        if guilty and len(guilty) < max(2, case.world):
            yield self._stuck(round_.step, max(skips.values()), guilty, "of all steps so far", 0.8)

    # ---- notices -----------------------------------------------------------------------------------------------------

    def notice(self, case: Case, notice: Any) -> Iterable[Finding]:
        if notice.kind == LOSS_NOT_FINITE:
            self._bad_losses.setdefault(notice.rank, []).append(notice)
            if self._bad_since_s is None:
                self._bad_since_s = case.heard_s.get(notice.rank, 0.0)
        elif notice.kind == GRADIENT_NOT_FINITE:
            self._bad_gradients.setdefault(notice.rank, []).append(notice)
        elif notice.kind == SKIPPED:
            yield from self._skip(case, notice)

    def _skip(self, case: Case, notice: Notice) -> Iterable[Finding]:
        self._is_scaled = True
        rank, times = notice.rank, notice.facts["in_a_row"]
        self._in_a_row[rank], self._scales[rank] = times, notice.facts["scale"]
        if times == 1:
            self._began_skip[rank] = notice.facts["attempt"]
        since = min(self._began_skip.values(), default=notice.step)
        scale = notice.facts["scale"]
        lost = self._recent(self._bad_losses, since, SKIPS_BAD_LOSS)
        cut = self._recent(self._bad_gradients, since, SKIPS_BAD_LOSS)
        if times >= SKIPS_BAD_LOSS and lost and len(lost) < max(2, case.world):
            yield self._stuck(since, times, lost, "in a row", 0.95)
        elif times >= SKIPS_BAD_GRADIENT and lost:
            yield self._stuck(since, times, (), "in a row", 0.85)
        elif times >= SKIPS_BAD_GRADIENT and cut and len(cut) < max(2, case.world) and scale <= SCALE_LOW:
            yield self._stuck(since, times, cut, "in a row", 0.9)
        elif times >= SKIPS_ANY and scale <= SCALE_GONE:
            yield self._stuck(since, times, lost or cut, "in a row", 0.85)

    def _stuck(self, since: int, times: int, guilty: tuple[int, ...], how: str, sure: float) -> Finding:
        notices = [n for kind in (self._bad_losses, self._bad_gradients) for rank in guilty for n in kind.get(rank, [])]
        losses = [n for n in notices if n.kind == LOSS_NOT_FINITE and not n.facts.get("parameter")]
        module = next((str(n.facts["module"]) for n in losses if n.facts.get("module")), "")
        parameter = next((str(n.facts["parameter"]) for n in notices if n.kind == GRADIENT_NOT_FINITE), "")
        is_input = any(n.facts.get("input") for n in notices)
        scale = min(self._scales.values(), default=0.0)
        if not guilty:
            cause = f"{times} steps {how} are skipped and the loss scale is {scale:.3g}: gradients are never finite"
        else:
            what = (
                "input" if is_input else "loss" if any(rank in self._bad_losses for rank in guilty) else "own gradient"
            )
            cause = (
                f"the {what} of {_ranks(guilty)} is not finite again and again: all ranks skip, {times} steps {how}, "
                f"the loss scale is {scale:g}"
            )
        return Finding(
            code="CIUIC-F3",
            cause=cause,
            step=max(1, since),
            ranks=guilty,
            modules=tuple(name for name in (module, parameter) if name),
            evidence={"skipped": times, "loss_scale": scale},
            confidence=sure,
        )

    def _recent(self, notices: dict[int, list[Notice]], since: int, least: int) -> tuple[int, ...]:
        """Ranks with at least so many bad numbers since a step, nearly as many as the rank that has most."""
        counts = {rank: sum(n.step + 1 >= since for n in heard) for rank, heard in notices.items()}
        most = max(counts.values(), default=0)
        return tuple(sorted(rank for rank, count in counts.items() if count >= max(least, most - 1)))

    def _guilty(self, notices: dict[int, list[Notice]]) -> tuple[int, ...]:
        """Ranks that had a bad number at the earliest step."""
        firsts = {rank: min(n.step for n in heard) for rank, heard in notices.items()}
        earliest = min(firsts.values(), default=0)
        return tuple(sorted(rank for rank, step in firsts.items() if step == earliest))

    # ---- a loss that is not finite ---------------------------------------------------------------------------------

    def tick(self, case: Case, now_s: float) -> Iterable[Finding]:
        if self._bad_since_s is not None and now_s - self._bad_since_s > WAIT_S:
            yield from self._bad_loss(case)
            self._bad_since_s = now_s if case.present() else None

    def end(self, case: Case) -> Iterable[Finding]:
        yield from self._bad_loss(case)

    def _bad_loss(self, case: Case) -> Iterable[Finding]:
        if not self._bad_losses or (self._is_scaled and not self._lasts(case)):
            return
        guilty = self._guilty(self._bad_losses)
        firsts = [self._bad_losses[rank][0] for rank in guilty]
        step = firsts[0].step + 1
        facts = firsts[0].facts
        is_all = len(guilty) > 1 and len(guilty) >= case.world
        later = [n for n in self._bad_losses[guilty[0]] if n.facts.get("module") and not n.facts.get("parameter")]
        module = str(later[0].facts["module"]) if later else ""
        if facts["parameter"]:
            why = f", the parameter {facts['parameter']} is not finite already: a step or a write made it so"
        elif facts["input"]:
            why = f": the model's input {facts['input']} is not finite"
        else:
            why = f": it begins in {module}" if module else ""
        yield Finding(
            code="CIUIC-F5",
            cause=f"the loss of {'all ranks' if is_all else _ranks(guilty)} is {facts['value']} at step {step}{why}",
            step=step,
            ranks=() if is_all else guilty,
            modules=tuple(name for name in (module, str(facts["parameter"])) if name),
            evidence={"value": str(facts["value"])},
            confidence=0.7 if is_all else 0.95,
        )

    def _lasts(self, case: Case) -> bool:
        """With a scaler one bad loss is left out; it counts only when it stays."""
        return min((len(heard) for heard in self._bad_losses.values()), default=0) >= SKIPS_BAD_LOSS

    # ---- precision -------------------------------------------------------------------------------------------------

    def _underflow(self, round_: Round) -> Iterable[Finding]:
        found = round_.values(HALF)
        if not found or round_.values(SCALER):
            return
        zero, small = (max(each[at] for each in found.values()) for at in (0, 1))
        if zero < HALF_ZERO or small < HALF_SMALL:
            return
        self._half[round_.optimizer] = self._half.get(round_.optimizer, 0) + 1
        if self._half[round_.optimizer] >= ROUNDS_HALF:
            yield Finding(
                code="CIUIC-F7",
                cause=f"float16 without a loss scale: {zero:.0%} of the gradient elements looked at are zero and "
                f"{small:.0%} of the others are below float16's smallest normal number",
                step=1,
                evidence={"zero_share": round(zero, 3), "subnormal_share": round(small, 3)},
                confidence=0.8,
                severity=Severity.WARNING,
            )


def _scaled_step(round_: Round) -> Iterable[Finding]:
    found = {rank: fact for rank, fact in round_.values(SCALED_STEP).items() if fact[0] >= STEPS_SCALED}
    if found:
        times, scale = next(iter(found.values()))
        yield Finding(
            code="CIUIC-F8",
            cause=f"optimizer {round_.optimizer} steps by itself with gradients that are still multiplied by the loss "
            f"scale {scale:.0f}: nobody unscales them, and a step that is not finite is not left out",
            step=1,
            ranks=() if set(found) == set(round_.records) else tuple(found),
            evidence={"optimizer": round_.optimizer, "loss_scale": scale, "steps": times},
            confidence=0.95,
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in list(ranks)[:6])
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (" ..." if len(ranks) > 6 else "")
