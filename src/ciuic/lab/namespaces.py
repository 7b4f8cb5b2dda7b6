"""Network namespaces with one TUN device each: hosts of their own on one Linux machine.

    with Namespace("10.77.0.1") as host:
        subprocess.Popen(host.command(["python", "server.py"]))
        with host.inside():
            ...  # sockets that this thread opens here belong to the host

Needs root and /dev/net/tun. A namespace has no name: it lives as long as this object, a process in it or a socket in it
does, so nothing stays behind, whatever kills the process that made it. The kernel in the namespace speaks real TCP; its
packets come out of `tun_fd`, one per read, and go in by one write each.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from ciuic.errors import CiuicError, UsageError
from ciuic.lab import switch_enter

DEVICE = "wan0"
"""Name of the TUN device in every namespace."""
MTU_BYTES = 9000
PREFIX_BITS = 24
TUN = Path("/dev/net/tun")
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000
_OWN_HOST_NAME = "/proc/thread-self/ns/uts"
_OWN_NAMESPACE = "/proc/thread-self/ns/net"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_IFF_UP = 0x1


def why_not_here() -> str:
    """Why this machine cannot make namespaces; empty when it can."""
    if sys.platform != "linux":
        return "it is not a Linux machine"
    if os.geteuid() != 0:
        return "this process is not root"
    if not TUN.exists():
        return f"there is no {TUN}"
    try:
        Namespace("10.77.0.1").close()
    except CiuicError as error:
        return error.cause or error.message
    return ""


def refuse(reason: str) -> UsageError:
    """The error for a machine without namespaces."""
    return UsageError(
        "network namespaces cannot be made here",
        cause=reason,
        next="run as root on Linux with /dev/net/tun; the relay (ciuic.lab.relay) emulates links without root",
    )


class Namespace:
    """One host: loopback, and `wan0` with an address in a /24. Raises UsageError where none can be made.

    With `host_name` the processes started there see this name as that of their machine. It stands in no /etc/hosts and
    in no DNS, as on many rented machines.
    """

    def __init__(self, address: str, *, mtu_bytes: int = MTU_BYTES, host_name: str = "") -> None:
        self.address = address
        self.host_name = host_name
        self._fd = self._name_fd = self.tun_fd = -1
        failure: list[OSError] = []
        maker = threading.Thread(target=self._make, args=(mtu_bytes, failure), name="lab-namespace")
        maker.start()
        maker.join()
        if failure:
            self.close()
            raise refuse(f"{failure[0].strerror or failure[0]}".lower()) from failure[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it; the kernel removes it when no process is left in it."""
        for fd in (self.tun_fd, self._fd, self._name_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._name_fd = self.tun_fd = -1

    def command(self, argv: Sequence[str], *, nice: int = 0) -> list[str]:
        """What to start to have `argv` run inside, as long as this process holds the namespace."""
        handle = ",".join(f"/proc/{os.getpid()}/fd/{fd}" for fd in (self._fd, self._name_fd) if fd >= 0)
        return [sys.executable, "-I", "-S", switch_enter.__file__, handle, str(nice), *argv]

    @contextmanager
    def inside(self) -> Generator[None]:
        """This thread is in the namespace; sockets keep the namespace in which they were opened."""
        home = os.open(_OWN_NAMESPACE, os.O_RDONLY)
        try:
            switch_enter.set_namespace(self._fd)
            try:
                yield
            finally:
                switch_enter.set_namespace(home)
        finally:
            os.close(home)

    def _make(self, mtu_bytes: int, failure: list[OSError]) -> None:
        """In a thread of its own: a namespace belongs to the thread that makes it, and this one ends here."""
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            _unshare(libc, _CLONE_NEWNET)
            self._fd = os.open(_OWN_NAMESPACE, os.O_RDONLY)
            if self.host_name:
                self._take_name(libc)
            self.tun_fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(self.tun_fd, _TUNSETIFF, request)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
                _bring_up(control, "lo")
                _configure(control, self.address, mtu_bytes)
                _bring_up(control, DEVICE)
        except OSError as error:
            failure.append(error)

    def _take_name(self, libc: ctypes.CDLL) -> None:
        _unshare(libc, _CLONE_NEWUTS)
        socket.sethostname(self.host_name)
        self._name_fd = os.open(_OWN_HOST_NAME, os.O_RDONLY)


def _unshare(libc: ctypes.CDLL, kind: int) -> None:
    if libc.unshare(kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _configure(control: socket.socket, address: str, mtu_bytes: int) -> None:
    mask = socket.inet_ntoa(struct.pack("!I", (0xFFFFFFFF << (32 - PREFIX_BITS)) & 0xFFFFFFFF))
    for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)):
        where = struct.pack("!H2x4s8x", 0, socket.inet_aton(value))
        body = struct.pack("16s", DEVICE.encode()) + struct.pack("H", socket.AF_INET) + where[2:] + bytes(8)
        fcntl.ioctl(control, request, body)
    fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", DEVICE.encode(), mtu_bytes))


def _bring_up(control: socket.socket, device: str) -> None:
    answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH22x", device.encode(), 0))
    flags = struct.unpack("16sH22x", answer)[1]
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags | _IFF_UP))
