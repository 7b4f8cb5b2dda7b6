"""A plain TCP stream, for `ciuic bench links`: what one connection of the kernel reaches, without TLS or HTTP.

sink     counts what arrives and answers every 8-byte number with one byte when so many bytes have come
source   sends; reads {"bytes": n, "within_s": s} per line, writes {"bits_per_s": r}
"""

import argparse
import json
import socket
import struct
import sys
import time

ORDER = struct.Struct("!Q")
BUFFER_BYTES = 1 << 20
PIECE_BYTES = 128 * 1024
PLACES = struct.Struct("<QQ")
_ACKED = 120
"""Place of tcpi_bytes_acked in struct tcp_info."""


def sink(address: str, port: int) -> None:
    """Serve one connection."""
    with socket.create_server((address, port)) as listener:
        sys.stdout.write('{"ready": true}\n')
        sys.stdout.flush()
        connection, _ = listener.accept()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with connection:
        while head := connection.recv(ORDER.size, socket.MSG_WAITALL):
            left = ORDER.unpack(head)[0]
            while left and (count := connection.recv_into(buffer, min(left, len(buffer)))):
                left -= count
            connection.sendall(b".")


def source(address: str, port: int, algorithm: str) -> None:
    """Send what is asked for on standard input."""
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in sys.stdin:
            order = json.loads(line)
            sys.stdout.write(json.dumps({"bits_per_s": send(connection, order["bytes"], order["within_s"])}) + "\n")
            sys.stdout.flush()


def send(connection: socket.socket, size_bytes: int, within_s: float) -> float:
    """Bits per second until the answer; when time is up, of what the other side has by then."""
    before, began_s = _acked(connection), time.perf_counter()
    piece = bytes(PIECE_BYTES)
    left = size_bytes
    while left:
        if time.perf_counter() - began_s > within_s:
            break
        count = min(left, PIECE_BYTES)
        connection.sendall(ORDER.pack(count) + piece[:count])
        left -= count
    if not left:
        answers = -(-size_bytes // PIECE_BYTES)
        while answers:
            answers -= len(connection.recv(answers))
        return 8 * size_bytes / (time.perf_counter() - began_s)
    took_s = time.perf_counter() - began_s
    arrived = _acked(connection) - before
    waiting = -(-(size_bytes - left) // PIECE_BYTES)
    while waiting:
        waiting -= len(connection.recv(waiting))
    return 8 * arrived / took_s


def _acked(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("<Q", info, _ACKED)[0])


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("sink", "source"))
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--algorithm", default="cubic")
    options = parser.parse_args()
    if options.side == "sink":
        sink(options.address, options.port)
    else:
        source(options.address, options.port, options.algorithm)


if __name__ == "__main__":
    main()
