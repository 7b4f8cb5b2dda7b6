"""The process that `warm.py` forks programs from: `python warm_server.py DESCRIPTOR light|heavy`.

It has one thread, always. A request is four descriptors (stdin, stdout, stderr, and where the exit code goes) and a
JSON object.
"""

import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import warm_worker

LOADED = ("ciuic.hub.server", "ciuic.hub.shards.server", "ciuic.node.agent", "ciuic.cli.hub", "ciuic.cli.node")
"""Not ciuic.cli.main: it is what is run."""
HEAVY = ("torch", "torch._dynamo", "torch.distributed.fsdp", "ciuic.torch")
"""For agents whose workers are forks of them."""


class WarmServer:
    """Forks on request and tells exit codes; when the line closes, it kills all and ends."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.statuses: dict[int, int] = {}
        """By process, where its exit code goes."""
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> dict[str, Any] | None:
        """Returns only in a child, with what it is to run; None in the server at its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.line, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._tell_exit_codes()
                if self.line.fileno() in ready:
                    head, descriptors, _, _ = socket.recv_fds(self.line, 4, 4)
                    if not head:
                        self._kill_all()
                        return None
                    request = self._fork(self._body(int.from_bytes(head, "little")), descriptors)
                    if request is not None:
                        return request

    def _body(self, size: int) -> dict[str, Any]:
        body = b""
        while len(body) < size:
            body += self.line.recv(size - len(body))
        return json.loads(body)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any] | None:
        pid = os.fork()
        if pid:
            *streams, self.statuses[pid] = descriptors
            for descriptor in streams:
                os.close(descriptor)
            self.line.sendall(str(pid).encode())
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, *self.statuses.values(), self._woken):
            os.close(descriptor)
        self.line.close()
        return request

    def _tell_exit_codes(self) -> None:
        while self.statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = self.statuses.pop(pid)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(line, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(line)

    def _kill_all(self) -> None:
        for pid in self.statuses:
            os.kill(pid, signal.SIGKILL)


def main() -> int:
    for name in LOADED if sys.argv[2] == "light" else (*LOADED, *HEAVY):
        __import__(name)
    request = WarmServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is None:
        return 0
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    if request["forks_workers"]:
        warm_worker.install()
    warm_worker.forget(request["arguments"], request["environment"])
    os._exit(warm_worker.run(request["arguments"][1:]))  # what the server has loaded is not taken down in each child


if __name__ == "__main__":
    sys.exit(main())
