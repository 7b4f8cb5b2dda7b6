"""`ciuic doctor loss`: run a program until its ranks have replayed one batch, then end it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ciuic.doctor import environment
from ciuic.doctor.case import Case, Rule
from ciuic.doctor.finding import Blind, Finding, Revised
from ciuic.doctor.launch import Launch, run_until
from ciuic.doctor.loss.records import Verdict

NOTICE, FAILED = "replayed", "probe_failed"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of it."""

    verdict: Verdict
    step: int
    """Before which optimizer step it was replayed; 0: not at all."""
    exit_code: int
    """Of the program, when it ended before."""


class _Listener(Rule):
    """Keeps the verdict of rank 0."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self.step = 0
        self.failed = ""

    def notice(self, case: Case, notice: object) -> Iterable[Finding | Blind | Revised]:
        """The verdict, or why there is none."""
        kind, facts = getattr(notice, "kind", ""), getattr(notice, "facts", {})
        if kind == NOTICE and self.verdict is None:
            self.verdict, self.step = msgspec.convert(facts.get("verdict"), Verdict), int(facts.get("step", 0))
        elif kind == FAILED:
            self.failed = str(facts.get("error", ""))
        return ()


def find_difference(options: Launch, order: Mapping[str, object], *, begun: Callable[[str, str], None]) -> Answer:
    """Raises UsageError when there is no such program. `order`: see probe/first_batch.py."""
    listener = _Listener()
    order_text = msgspec.json.encode(order).decode()
    code, ranks = run_until(
        options,
        listener,
        until=lambda: listener.verdict is not None,
        environ={environment.REPLAY: order_text},
        begun=begun,
    )
    if listener.verdict is not None:
        return Answer(verdict=listener.verdict, step=listener.step, exit_code=code)
    if listener.failed:
        verdict = Verdict(result="unknown", cause=f"the replay failed: {listener.failed}")
    elif not ranks:
        cause = "no rank was seen: the program ended before it imported torch, or its Python has no ciuic"
        verdict = Verdict(result="unknown", cause=cause)
    else:
        cause = f"the program ended with exit code {code} before optimizer step {order['step']}"
        verdict = Verdict(result="unknown", cause=cause, fix="--step 2, or look at what the program said")
    return Answer(verdict=verdict, step=0, exit_code=code)
