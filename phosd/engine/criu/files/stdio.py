"""Find where a tree's output leads, so that a restore can replace ends outside of the tree.

A program whose output is a pipe, a terminal or the journal's socket would fail at its first print
after a restore, because the other end is gone. So the dump records each such end, and the restore
gives CRIU a new end of the same kind, whose other end the restore shim holds.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from phosd.engine.image.cpu_manifest import Endpoint, EndpointKind
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import sockets
from phosd.engine.system.procfs import PROC, Descriptor

_PSEUDOTERMINALS = range(136, 144)
_CONSOLES = (4, 5)
_MASTER = os.makedev(5, 2)
_CONTROLLING = os.makedev(5, 0)
STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class StdioPlan:
    """The tree's ends that lead outside, and CRIU's options to dump the tree with them."""

    endpoints: tuple[Endpoint, ...]
    words: tuple[str, ...]
    shell_job: bool


def plan(tree: ProcessTree, descriptors: Iterable[Descriptor]) -> StdioPlan:
    """Plan the ends of a tree from all its descriptors."""
    every = list(descriptors)
    terminals = _terminals(every)
    shell_job = not tree.own_session
    found = {e.key: e for e in (*_pipes(every), *_unix(every), *terminals)}
    words = ["--shell-job"] if shell_job else [f"--external={e.key}" for e in terminals]
    for endpoint in found.values():
        if endpoint.kind is EndpointKind.SOCKET:
            words.append(f"--external=unix[{_inode(endpoint.key)}]")
    words += [f"--external=unix[{inode}]" for inode in _datagrams(every)]
    return StdioPlan(tuple(found.values()), tuple(dict.fromkeys(words)), shell_job)


def _inode(key: str) -> int:
    return int(re.sub(r"\D", "", key))


def _endpoint(kind: EndpointKind, key: str, descriptor: Descriptor) -> Endpoint:
    return Endpoint(kind, key, descriptor.pid, descriptor.number)


def _pipes(descriptors: list[Descriptor]) -> list[Endpoint]:
    """Return the pipes that the tree only writes to, and a process outside reads."""
    pipes = [d for d in descriptors if d.target.startswith("pipe:[")]
    read_here = {d.target for d in pipes if d.flags & os.O_ACCMODE != os.O_WRONLY}
    outgoing = [d for d in pipes if d.target not in read_here]
    return [_endpoint(EndpointKind.PIPE, d.target, d) for d in outgoing]


def is_terminal(descriptor: Descriptor) -> bool:
    """Return whether it is a terminal of somebody, as ``/dev/tty`` and ``/dev/ptmx`` are not."""
    device = descriptor.file.st_rdev
    known = os.major(device) in (*_CONSOLES, *_PSEUDOTERMINALS)
    return stat.S_ISCHR(descriptor.file.st_mode) and known and device not in (_MASTER, _CONTROLLING)


def _terminals(descriptors: list[Descriptor]) -> list[Endpoint]:
    """Return the terminals whose other end is not in the tree."""
    devices = [d for d in descriptors if stat.S_ISCHR(d.file.st_mode)]
    masters = {_terminal_index(d) for d in devices if d.file.st_rdev == _MASTER}
    found = []
    for d in filter(is_terminal, devices):
        major, minor = os.major(d.file.st_rdev), os.minor(d.file.st_rdev)
        own = major in _PSEUDOTERMINALS and minor in masters
        if not own:
            key = f"tty[{d.file.st_rdev:x}:{d.file.st_dev:x}]"
            found.append(_endpoint(EndpointKind.TERMINAL, key, d))
    return found


def _terminal_index(master: Descriptor) -> int:
    info = (PROC / str(master.pid) / "fdinfo" / str(master.number)).read_text()
    found = re.search(r"^tty-index:\s*(\d+)", info, re.MULTILINE)
    return int(found.group(1)) if found else -1


def unix_peers_outside(
    descriptors: Iterable[Descriptor],
) -> list[tuple[Descriptor, sockets.UnixSocket, sockets.UnixSocket | None]]:
    """Return unix sockets connected to the outside of the tree: (descriptor, socket, peer)."""
    known = sockets.unix_sockets()
    ours = [d for d in descriptors if stat.S_ISSOCK(d.file.st_mode) and d.file.st_ino in known]
    inodes = {d.file.st_ino for d in ours}
    found = []
    for descriptor in ours:
        socket = known[descriptor.file.st_ino]
        if socket.peer is not None and socket.peer not in inodes:
            found.append((descriptor, socket, known.get(socket.peer)))
    return found


def _unix(descriptors: list[Descriptor]) -> list[Endpoint]:
    """Return standard outputs on a connected unix socket, of the journal or another supervisor."""
    return [
        _endpoint(EndpointKind.SOCKET, descriptor.target, descriptor)
        for descriptor, socket, _ in unix_peers_outside(descriptors)
        if descriptor.number in STANDARD and not socket.datagram
    ]


def _datagrams(descriptors: list[Descriptor]) -> list[int]:
    """Return datagram sockets connected to a named one outside (syslog): CRIU reconnects them."""
    return [
        socket.inode
        for _, socket, peer in unix_peers_outside(descriptors)
        if socket.datagram and peer is not None and peer.name.startswith("/")
    ]
