"""Find the TCP connections of a tree, of which it has both ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from phosd.engine.criu.images.connection_record import MOST, first_port
from phosd.engine.system.procfs import Descriptor
from phosd.engine.system.tcp import State, TcpSocket, tcp_sockets


@dataclass(frozen=True)
class Found:
    """The connections of a tree. ``within`` are pairs; the second is None if it was closed.

    ``refused`` says of the other connected sockets, by inode, what is wrong with them.
    """

    within: tuple[tuple[TcpSocket, TcpSocket | None], ...] = ()
    refused: dict[int, str] = field(default_factory=dict)

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset(end.inode for pair in self.within for end in pair if end)


def find(descriptors: Iterable[Descriptor]) -> Found:
    """Find the connections of the processes that have these descriptors, which share a network."""
    ours = {d.file.st_ino: d.pid for d in descriptors if d.target.startswith("socket:")}
    if not ours:
        return Found()
    known = tcp_sockets(next(iter(ours.values())))
    by_places = {(each.here, each.there): each for each in known}
    within: list[tuple[TcpSocket, TcpSocket | None]] = []
    refused = {}
    for end in known:
        if not end.connected or end.inode not in ours:
            continue
        peer = by_places.get((end.there, end.here))
        if min(end.here[1], end.there[1]) < first_port():
            refused[end.inode] = "a TCP connection of a port that only root may use"
        elif peer is not None and peer.inode in ours and peer.inode != end.inode:
            if end.inode < peer.inode:
                within.append((end, peer))
        elif peer is not None and not peer.inode and end.state == State.ESTABLISHED:
            refused[end.inode] = "a TCP connection that nobody has accepted yet"
        elif (
            end.state == State.PEER_FINISHED
            and end.on_this_host
            and (peer is None or not peer.inode)
        ):
            within.append((end, None))
        else:
            refused[end.inode] = "a connected TCP socket"
    if len(within) > MOST:
        why = f"one of {len(within)} TCP connections within the program (at most {MOST} are saved)"
        refused |= {end.inode: why for pair in within for end in pair if end}
    return Found(tuple(within), refused)
