"""What a worker tells about itself: reports about once a second, held-out losses when there are any."""

import logging
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from ciuic.ledger.node import NodeMachine
from ciuic.net import messages as m
from ciuic.net.client import HubClient
from ciuic.train.courier import Courier, persistently, post
from ciuic.train.meter import Meter

REPORT_S = 1.0
_log = logging.getLogger("ciuic.train")


@dataclass(kw_only=True)
class Telling:
    """Collects on the training thread, sends on a thread of the courier's."""

    run_id: str
    machine: NodeMachine
    meter: Meter
    courier: Courier
    loss: Callable[[], float | None]
    """The latest training loss (read from its device only when it is sent)."""
    other_cpu_s: Callable[[], float]
    """Thread processor time on communication that neither meter nor courier count."""
    _evaluations: "queue.Queue[m.EvaluationRequest]" = field(default_factory=queue.Queue)

    def evaluated(self, version: int, result: tuple[float, int], *, final: bool) -> None:
        """The held-out loss (mean, samples) of the base at a version; one that is not finite is only logged."""
        loss, samples = result
        if not math.isfinite(loss):
            _log.warning("the held-out loss of version %d is %s; it is not reported", version, loss)
            return
        incarnation = self.machine.place.incarnation
        self._evaluations.put(
            m.EvaluationRequest(incarnation=incarnation, version=version, loss=loss, samples=samples, final=final)
        )

    def loop(self, client: HubClient) -> None:
        """Until the courier stops."""
        while not self.courier.stop.wait(REPORT_S):
            self._send_evaluations(client)
            self.send(client, "report", self.report(final=False))
            self.courier.cpu_s["reports"] = time.thread_time()

    def last_words(self, client: HubClient, *, final: bool) -> None:
        """What is left to say; `final`: the run is complete here."""
        self._send_evaluations(client)
        self.send(client, "report", self.report(final=final))

    def _send_evaluations(self, client: HubClient) -> None:
        while True:
            try:
                evaluation = self._evaluations.get_nowait()
            except queue.Empty:
                return
            self.send(client, "evaluation", evaluation)

    def send(self, client: HubClient, what: str, message: msgspec.Struct) -> None:
        """One control message, again and again until the hub has it."""
        persistently(lambda: post(client, self.run_id, what, message), stop=self.courier.stop, what=what)

    def report(self, *, final: bool) -> m.ReportRequest:
        """The worker in numbers."""
        meter, replicas = self.meter, self.machine.replicas
        versions = [r.version for r in replicas]
        digests = [r.digest for r in replicas]
        if versions != [r.version for r in replicas]:  # the training thread is moving a base just now
            digests = []
        courier_cpu_s = sum(self.courier.cpu_s.values()) + self.other_cpu_s()
        return m.ReportRequest(
            incarnation=self.machine.place.incarnation,
            step=meter.steps,
            samples=meter.samples,
            tokens=meter.tokens,
            loss=self.loss(),
            base_versions=versions,
            base_digests=digests,
            residuals=[r.residual for r in replicas],
            wall_s=meter.wall_s,
            compute_s=meter.compute_s,
            communication_s=meter.communication_s,
            communication_cpu_s=meter.communication_cpu_s + courier_cpu_s,
            data_s=meter.data_s,
            longest_stall_s=meter.longest_stall_s,
            step_s=meter.step_s,
            pushes=meter.pushes,
            final_digests=[r.digest for r in replicas] if final else [],
        )
