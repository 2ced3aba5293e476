"""Holds sockets beside its GPU state: listening and connected TCP, UDP. It uses the listening ones
at each step; the connected pair only as long as it lives, and says so when it was closed.
"""

import socket

from gpu import Device, Report, State


class Sockets:
    """Everything on the loopback interface, both ends in this process."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._client = socket.create_connection(self._listener.getsockname())
        self._server, _ = self._listener.accept()
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))

    def listener_echo(self, data: bytes) -> bytes:
        """``data``, through a new connection to the listening socket, and back by UDP."""
        with socket.create_connection(self._listener.getsockname()) as client:
            server, _ = self._listener.accept()
            with server:
                client.sendall(data)
                data = server.recv(len(data), socket.MSG_WAITALL)
        self._udp.sendto(data, self._udp.getsockname())
        return self._udp.recv(len(data))

    def pair_lives(self, data: bytes) -> bool:
        """Whether the old connection still carries ``data``."""
        try:
            self._client.sendall(data)
            return self._server.recv(len(data), socket.MSG_WAITALL) == data
        except OSError:
            return False


def main() -> None:
    report = Report()
    state = State(Device(), cold_block=64 << 10)
    sockets = Sockets()
    connected = True
    for step in report.steps():
        computed = state.step(step, report.seed)
        if connected and not sockets.pair_lives(computed):
            connected = False
            print("connection closed", flush=True)
        report.tell(step, sockets.listener_echo(computed))


if __name__ == "__main__":
    main()
