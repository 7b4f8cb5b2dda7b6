"""A TLS server that only moves bytes: what `ciuic bench hub` compares the hub with.

Each connection repeats: 16 bytes with two big-endian numbers, `in` and `out`; then `in` bytes arrive, and `out` bytes
are sent back. One blocking thread per connection and large buffers: the cheapest that Python's ssl module offers.
"""

import argparse
import socket
import ssl
import struct
import sys
import threading
from pathlib import Path

from ciuic.net.tls import server_context

ORDER = struct.Struct("!QQ")
BUFFER_BYTES = 1 << 20
_LARGEST_BYTES = 1 << 32


def receive(connection: ssl.SSLSocket, count: int, buffer: memoryview) -> bool:
    """Take `count` bytes in and forget them; False when the other side has closed."""
    while count:
        got = connection.recv_into(buffer, min(count, len(buffer)))
        if not got:
            return False
        count -= got
    return True


def _serve(connection: ssl.SSLSocket) -> None:
    buffer, answer = memoryview(bytearray(BUFFER_BYTES)), memoryview(bytes(BUFFER_BYTES))
    with connection:
        while receive(connection, ORDER.size, head := memoryview(bytearray(ORDER.size))):
            expected, wanted = ORDER.unpack(head)
            if max(expected, wanted) > _LARGEST_BYTES or not receive(connection, expected, buffer):
                return
            while wanted:
                part = answer[: min(wanted, len(answer))]
                connection.sendall(part)
                wanted -= len(part)


def main() -> None:
    """Serve until killed; prints the port."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("cert", "key", "authority"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    context = server_context(options.cert, options.key, options.authority.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            plain, _ = listener.accept()
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = context.wrap_socket(plain, server_side=True)
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
