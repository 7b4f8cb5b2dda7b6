"""The supervisor's decisions, without processes; a simulated worker and clock drive it."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ciuic.net.messages import Assignment
from ciuic.node.supervisor import Supervisor

GRACE_S = 20.0


def _assignment(run: int = 1, attempt: int = 1) -> Assignment:
    return Assignment(run_id=f"run-{run}", job={}, attempt=attempt)


def _running(restarts: int = 3) -> Supervisor:
    supervisor = Supervisor(grace_s=GRACE_S)
    supervisor.want(_assignment(), stop=False, now=0.0)
    assert supervisor.tick(0.0) == ["launch"]
    supervisor.grant(restarts)
    supervisor.launched()
    return supervisor


def test_an_assignment_is_started_and_reported() -> None:
    supervisor = _running()
    report = supervisor.report
    assert (report.run_id, report.attempt, report.state) == ("run-1", 1, "running")
    assert supervisor.tick(1.0) == []


def test_the_same_wish_again_changes_nothing() -> None:
    supervisor = _running()
    for now in range(10):
        supervisor.want(_assignment(), stop=False, now=float(now))
        assert supervisor.tick(float(now)) == []


def test_success_is_final_for_the_attempt() -> None:
    supervisor = _running()
    supervisor.exited(0, "", 1.0)
    supervisor.want(_assignment(), stop=False, now=2.0)
    assert supervisor.tick(2.0) == []
    assert supervisor.report.state == "finished"


def test_a_new_attempt_starts_afresh() -> None:
    supervisor = _running()
    supervisor.exited(0, "", 1.0)
    supervisor.want(_assignment(attempt=2), stop=False, now=2.0)
    assert supervisor.tick(2.0) == ["launch"]
    assert (supervisor.report.attempt, supervisor.report.state, supervisor.report.restarts) == (2, "starting", 0)


def test_a_failure_restarts_after_a_growing_pause_until_the_budget_is_spent() -> None:
    supervisor, now, pauses = _running(restarts=3), 0.0, []
    for restart in range(1, 4):
        supervisor.exited(1, "ValueError: x", now)
        assert supervisor.report.restarts == restart
        due = supervisor.next_due()
        assert due is not None
        pauses.append(due - now)
        assert supervisor.tick(due - 0.01) == []
        now = due
        assert supervisor.tick(now) == ["launch"]
        supervisor.launched()
    supervisor.exited(1, "ValueError: x", now)
    assert pauses == [0.5, 1.0, 2.0]
    assert supervisor.report.state == "failed"
    assert (supervisor.report.exit_code, supervisor.report.detail) == (1, "ValueError: x")
    assert supervisor.tick(now + 1000) == []


def test_old_failures_do_not_count() -> None:
    supervisor, now = _running(restarts=1), 0.0
    for _ in range(5):
        supervisor.exited(1, "ValueError: x", now)
        assert supervisor.tick(now + 10) == ["launch"]
        supervisor.launched()
        now += 601.0
    assert supervisor.report.state == "running"


def test_no_restarts_granted_means_failed_at_once() -> None:
    supervisor = _running(restarts=0)
    supervisor.exited(1, "ValueError: x", 1.0)
    assert supervisor.report.state == "failed"


def test_an_error_in_the_job_is_not_tried_again() -> None:
    supervisor = _running(restarts=3)
    supervisor.exited(2, "error[CIUIC-103]: the data set is too small; cause: 10 bytes", 1.0)
    assert supervisor.report.state == "failed"


def test_a_lost_hub_is_tried_again() -> None:
    supervisor = _running(restarts=3)
    supervisor.exited(4, "error[CIUIC-300]: the hub does not answer", 1.0)
    assert supervisor.report.state == "starting"


def test_stop_is_gentle_then_not() -> None:
    supervisor = _running()
    supervisor.want(_assignment(), stop=True, now=5.0)
    assert supervisor.tick(5.0) == ["terminate"]
    assert supervisor.tick(5.0 + GRACE_S - 0.1) == []
    assert supervisor.tick(5.0 + GRACE_S) == ["kill"]
    assert supervisor.tick(5.0 + GRACE_S + 5) == ["kill"]
    supervisor.exited(137, "killed", 40.0)
    assert supervisor.report.state == "stopped"
    assert supervisor.next_due() is None


def test_a_run_that_is_gone_is_forgotten_when_its_worker_has_ended() -> None:
    supervisor = _running()
    supervisor.want(None, stop=False, now=1.0)
    assert supervisor.tick(1.0) == ["terminate"]
    assert supervisor.report.state == "running"
    supervisor.exited(0, "", 2.0)
    assert supervisor.report.state == "none"


def test_another_run_waits_until_the_first_has_ended() -> None:
    supervisor = _running()
    supervisor.want(_assignment(run=2), stop=False, now=1.0)
    assert supervisor.tick(1.0) == ["terminate"]
    assert supervisor.report.run_id == "run-1"
    supervisor.exited(0, "", 2.0)
    assert supervisor.tick(2.0) == ["launch"]
    assert supervisor.report.run_id == "run-2"


def test_a_stopped_run_can_be_resumed() -> None:
    supervisor = _running()
    supervisor.want(_assignment(), stop=True, now=1.0)
    supervisor.exited(0, "", 2.0)
    supervisor.want(_assignment(), stop=False, now=3.0)
    assert supervisor.tick(3.0) == ["terminate", "launch"]


def test_stop_during_the_pause_before_a_restart() -> None:
    supervisor = _running()
    supervisor.exited(1, "ValueError: x", 1.0)
    supervisor.want(_assignment(), stop=True, now=1.1)
    assert supervisor.tick(100.0) == []
    assert supervisor.report.state == "stopped"


def test_a_refused_job_is_failed_with_the_reason() -> None:
    supervisor = Supervisor(grace_s=GRACE_S)
    supervisor.want(_assignment(), stop=False, now=0.0)
    assert supervisor.tick(0.0) == ["launch"]
    supervisor.refused("error[CIUIC-204]: this node does not run code from jobs")
    supervisor.want(_assignment(), stop=False, now=1.0)
    assert supervisor.tick(1.0) == []
    assert supervisor.report.state == "failed"
    assert "CIUIC-204" in supervisor.report.detail


def test_vacating_uses_its_own_grace_and_can_lose_patience() -> None:
    supervisor = _running()
    supervisor.vacate(1.0, grace_s=60.0)
    assert supervisor.tick(1.0) == ["terminate"]
    assert supervisor.next_due() == 61.0
    supervisor.vacate(2.0, grace_s=0.0)
    assert supervisor.tick(2.0) == ["kill"]


@given(restarts=st.integers(min_value=0, max_value=5), gap_s=st.floats(min_value=0, max_value=300))
def test_never_more_restarts_in_ten_minutes_than_granted(restarts: int, gap_s: float) -> None:
    supervisor, now, launches = _running(restarts), 0.0, list[float]()
    for _ in range(20):
        now += gap_s
        supervisor.exited(1, "ValueError: x", now)
        due = supervisor.next_due()
        if due is None:
            break
        now = due
        assert supervisor.tick(now) == ["launch"]
        launches.append(now)
        supervisor.launched()
    for first in launches:
        assert sum(first <= at < first + 590 for at in launches) <= restarts


class SupervisorMachine(RuleBasedStateMachine):
    """Random wishes, exits and time; the simulated processes check that orders make sense."""

    def __init__(self) -> None:
        super().__init__()
        self.supervisor = Supervisor(grace_s=GRACE_S)
        self.now = 0.0
        self.alive = False
        self.wanted: Assignment | None = None

    def _carry_out(self) -> None:
        for order in self.supervisor.tick(self.now):
            if order == "launch":
                assert not self.alive, "two workers at once"
                self.supervisor.grant(3)
                self.supervisor.launched()
                self.alive = True

    @rule(run=st.integers(0, 2), attempt=st.integers(1, 2), stop=st.booleans())
    def want(self, run: int, attempt: int, stop: bool) -> None:
        self.wanted = _assignment(run, attempt) if run else None
        self.supervisor.want(self.wanted, stop=stop, now=self.now)
        self._carry_out()

    @precondition(lambda self: self.alive)
    @rule(code=st.sampled_from([0, 1, 137]))
    def exit(self, code: int) -> None:
        self.alive = False
        self.supervisor.exited(code, "ValueError: x", self.now)
        self._carry_out()

    @rule(seconds=st.floats(min_value=0, max_value=100))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._carry_out()

    @invariant()
    def the_report_fits_the_process(self) -> None:
        state = self.supervisor.report.state
        assert self.alive == (self.supervisor.phase in ("up", "stopping"))
        assert (state == "running") == self.alive
        assert self.supervisor.next_due() is None or self.supervisor.phase in ("waiting", "stopping")

    @invariant()
    def what_is_wanted_is_what_runs_or_it_is_being_ended(self) -> None:
        if self.supervisor.phase == "up" and self.supervisor.current is not None:
            assert self.wanted is not None
            assert self.supervisor.current.run_id == self.wanted.run_id


TestSupervisorMachine = SupervisorMachine.TestCase
