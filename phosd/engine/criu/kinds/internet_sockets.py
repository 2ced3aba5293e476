"""Sockets of other families: those of the internet, and those that CRIU knows nothing of."""

import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from phosd.engine.criu.files import tcp_pairs
from phosd.engine.criu.images import connection_record
from phosd.engine.criu.images.fields import FileEntry, InetSkEntry
from phosd.engine.criu.images.image_file import Field, changed
from phosd.engine.criu.images.ports import PortsTakenBack
from phosd.engine.criu.images.saved_files import Message, SavedFiles, number_in
from phosd.engine.criu.kinds.connections import Connections
from phosd.engine.criu.kinds.kind import (
    Choices,
    CloneNames,
    FileKind,
    Restoring,
    Sizes,
    place,
)
from phosd.engine.criu.kinds.reconnection import TcpReconnection
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import Connection, CpuDetails
from phosd.engine.system import sockets, tcp

_SAVED = ("TCP", "TCPv6", "UDP", "UDPv6", "UDPLITE", "RAW", "RAWv6", "NETLINK", "PACKET")
_BOUND = (tcp.State.LISTENING, tcp.State.CLOSED)
"""States of a TCP socket that CRIU binds; it makes connected ones in other ways, or not at all."""


class InternetSockets(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        descriptors = tree.own_descriptors
        for descriptor in descriptors:
            if stat.S_ISSOCK(descriptor.file.st_mode):
                protocol = sockets.protocol(descriptor)
                if not protocol.startswith("UNIX") and protocol not in _SAVED:
                    yield (
                        f"{place(descriptor)} is a socket of a kind that cannot be saved "
                        f"({protocol})"
                    )
        if choices.tcp != "refuse":
            return
        refused = tcp_pairs.find(descriptors).refused
        for descriptor in descriptors:
            if why := refused.get(descriptor.file.st_ino):
                yield (
                    f"descriptor {descriptor.number} of pid {descriptor.pid} is {why} "
                    "(`--tcp close` closes it in the restored program)"
                )

    def dump_parts(self, folder: Path, choices: Choices) -> Iterator[CriuPart]:
        yield Connections(folder, close_others=choices.tcp == "close")

    def restore_parts(self, restoring: Restoring) -> Iterator[CriuPart]:
        if restoring.rehearsed:
            return
        # Their addresses may be the original's; without new ones CRIU makes closed sockets.
        connections = restoring.details.connections
        yield PortsTakenBack(restoring.folder, connections)
        yield TcpReconnection(connections, restoring.folder, restoring.owner)

    def require_sound(self, details: CpuDetails, sizes: Sizes) -> None:
        unread = sizes.get(connection_record.UNREAD)
        connection_record.require_sound(details.connections, unread)

    def taken(
        self, files: SavedFiles, details: CpuDetails, moved: Collection[int]
    ) -> Iterator[str]:
        for protocol, (address, port) in _taken(files):
            if protocol != "TCP" or port not in moved:
                yield f"the {protocol} port {port} of {address}"
        yield from _connected(details.connections)

    def in_clone(self, entry: Field, names: CloneNames) -> Field:
        if entry.number != FileEntry.ISK or not entry.value or not names.ports:
            return entry
        return changed(entry, partial(_moved, names.ports))


def listening_ports(files: SavedFiles) -> frozenset[int]:
    """Return the TCP ports on which a saved tree listens."""
    return frozenset(
        number_in(each, InetSkEntry.SRC_PORT)
        for each in files.of(FileEntry.ISK)
        if number_in(each, InetSkEntry.STATE) == tcp.State.LISTENING
    )


def listening_ports_taken(files: SavedFiles) -> frozenset[int]:
    """Return those of them that another program has now."""
    taken = {port for protocol, (_, port) in _taken(files) if protocol == "TCP"}
    return listening_ports(files) & taken


def _taken(files: SavedFiles) -> Iterator[tuple[str, tcp.Place]]:
    """Yield the protocol, address and port of each socket that another program has bound now."""
    here = os.getpid()
    there = {
        socket.IPPROTO_TCP: [s for s in tcp.tcp_sockets(here) if s.state != tcp.State.ENDED],
        socket.IPPROTO_UDP: tcp.udp_sockets(here),
    }
    for each in files.of(FileEntry.ISK):
        protocol = number_in(each, InetSkEntry.PROTO)
        port = number_in(each, InetSkEntry.SRC_PORT)
        if protocol == socket.IPPROTO_TCP and number_in(each, InetSkEntry.STATE) not in _BOUND:
            continue
        address = _address(each)
        if port and any(
            other.here[1] == port and _overlap(other.here[0], address)
            for other in there.get(protocol, ())
        ):
            yield "TCP" if protocol == socket.IPPROTO_TCP else "UDP", (address, port)


def _moved(ports: Mapping[int, int], entry: list[Field]) -> Iterator[Field]:
    """Give a TCP socket that CRIU binds the port that it is to have instead."""
    values = {field.number: field.value for field in entry}
    tcp_bound = (
        values.get(InetSkEntry.PROTO) == socket.IPPROTO_TCP
        and values.get(InetSkEntry.STATE) in _BOUND
    )
    for each in entry:
        if tcp_bound and each.number == InetSkEntry.SRC_PORT and each.value in ports:
            yield Field.of(each.number, ports[int(each.value)])
        else:
            yield each


def _connected(connections: Iterable[Connection]) -> Iterator[str]:
    ends = {
        tcp.place(str(end.address[0]), int(end.address[1]))
        for connection in connections
        for end in connection.ends
    }
    if not ends:
        return
    living = (s for s in tcp.tcp_sockets(os.getpid()) if s.state != tcp.State.ENDED)
    for host, port in sorted({each.here for each in living} & ends):
        yield f"the end {host}:{port} of a TCP connection"


def _address(entry: Message) -> str:
    words = [each for each in entry.get(InetSkEntry.SRC_ADDR, ()) if isinstance(each, int)]
    packed = struct.pack(f"={len(words)}I", *(word & 0xFFFFFFFF for word in words))
    family = {4: socket.AF_INET, 16: socket.AF_INET6}.get(len(packed))
    return tcp.place(socket.inet_ntop(family, packed), 0)[0] if family else "::"


def _overlap(one: str, other: str) -> bool:
    return one == other or any(ipaddress.ip_address(each).is_unspecified for each in (one, other))
