"""Holds sockets beside its GPU state: listening and connected TCP, UDP. It uses the listening ones
at each step; the connections only as long as they live, and says so when one was closed.

With a port as argument it also holds a connection to the echoing server there.
"""

import socket
import sys

from gpu import Device, Report, State


class Sockets:
    """Everything on the loopback interface. All but ``outside`` have both ends in this process."""

    def __init__(self, outside: int | None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._client = socket.create_connection(self._listener.getsockname())
        self._server, _ = self._listener.accept()
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self.living = {"inner": (self._client, self._server)}
        if outside is not None:
            connected = socket.create_connection(("127.0.0.1", outside))
            self.living["outer"] = (connected, connected)

    def listener_echo(self, data: bytes) -> bytes:
        """``data``, through a new connection to the listening socket, and back by UDP."""
        with socket.create_connection(self._listener.getsockname()) as client:
            server, _ = self._listener.accept()
            with server:
                client.sendall(data)
                data = server.recv(len(data), socket.MSG_WAITALL)
        self._udp.sendto(data, self._udp.getsockname())
        return self._udp.recv(len(data))

    def closed(self, data: bytes) -> list[str]:
        """Return which connections no longer carry ``data``, and forget them."""
        names = [name for name, ends in self.living.items() if not _carries(*ends, data)]
        for name in names:
            del self.living[name]
        return names


def _carries(sender: socket.socket, receiver: socket.socket, data: bytes) -> bool:
    try:
        sender.sendall(data)
        return receiver.recv(len(data), socket.MSG_WAITALL) == data
    except OSError:
        return False


def main() -> None:
    report = Report()
    state = State(Device(), cold_block=64 << 10)
    sockets = Sockets(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    for step in report.steps():
        computed = state.step(step, report.seed)
        for name in sockets.closed(computed):
            print(f"{name} connection closed", flush=True)
        report.tell(step, sockets.listener_echo(computed))


if __name__ == "__main__":
    main()
