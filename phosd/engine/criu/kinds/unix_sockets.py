"""Unix sockets. The GPU driver has some, whose names are other ones in a clone."""

import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from phosd.engine.criu.files import stdio
from phosd.engine.criu.images.fields import FileEntry, UnixSkEntry
from phosd.engine.criu.images.image_file import Field, changed, with_bytes
from phosd.engine.criu.images.saved_files import SavedFiles, number_in, text_in
from phosd.engine.criu.kinds.kind import Choices, CloneNames, FileKind
from phosd.engine.criu.kinds.stand_ins import StandIns
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.system import sockets
from phosd.engine.system.procfs import own_id

OUTSIDE = 1 | 8
"""CRIU's flags of a socket that is another program's, or inherited."""
DRIVERS = re.compile(
    rb"\0(?:phos-softgpu-\d{1,10}-(?P<software>[0-9a-f]{16})"
    rb"|cuda-uvmfd-(?P<cuda>\d{1,20})-\d{1,10}\0*)"
)
"""The name of a socket that the GPU's driver has in each process, with the part that may be another
one. The software GPU follows its socket to any name. NVIDIA's driver has the inode of the pid
namespace there, and the pid.
"""
_DIGITS = 16
_OF_A_PATH = (UnixSkEntry.FILE_PERMS, UnixSkEntry.NAME_DIR, UnixSkEntry.DELETED)
"""A socket's permissions, folder, and whether its path was deleted."""


class UnixSockets(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        for descriptor, socket, peer in stdio.unix_peers_outside(tree.own_descriptors):
            if _of_ours(socket, peer, own_id(descriptor.pid)):
                continue
            named = peer is not None and peer.name.startswith("/")
            reconnectable = socket.datagram and named
            if descriptor.number not in stdio.STANDARD and not reconnectable:
                end = peer.name if peer is not None and peer.name else "another process"
                yield (
                    f"descriptor {descriptor.number} of pid {descriptor.pid} is a unix socket "
                    f"connected to {end}, outside the process tree{_remedy(end)}"
                )

    def taken(
        self, files: SavedFiles, details: CpuDetails, moved: Collection[int]
    ) -> Iterator[str]:
        bound = (
            each
            for each in files.of(FileEntry.USK)
            if not number_in(each, UnixSkEntry.UFLAGS) & OUTSIDE
        )
        wanted = {text_in(each, UnixSkEntry.NAME) for each in bound} - {b""}
        shown = {
            os.fsdecode(name.rstrip(b"\0").replace(b"\0", b"@"))
            for name in wanted
            if not DRIVERS.fullmatch(name)
        }
        there = {each.name for each in sockets.unix_sockets().values()} if shown else set()
        for name in sorted(shown & there):
            yield f"the unix socket {name}"

    def in_clone(self, entry: Field, names: CloneNames) -> Field:
        if entry.number != FileEntry.USK or not entry.value:
            return entry

        def renamed(name: bytes) -> bytes:
            match = DRIVERS.fullmatch(name)
            if match is None:
                return name
            first, last = match.span(match.lastgroup or 0)
            token = f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}}".encode()
            return names.sockets.setdefault(name, name[:first] + token + name[last:])

        return changed(entry, partial(with_bytes, UnixSkEntry.NAME, renamed))

    def in_rehearsal(self, entry: Field, stand_ins: StandIns) -> Field:
        if entry.number != FileEntry.USK or not entry.value:
            return entry
        return changed(entry, _abstract)


def _abstract(entry: list[Field]) -> Iterable[Field]:
    """Give a socket with a path an abstract name; CRIU knows its peers by number."""
    values = {field.number: field.value for field in entry}
    name = values.get(UnixSkEntry.NAME)
    flags, number = values.get(UnixSkEntry.UFLAGS), values.get(UnixSkEntry.ID)
    outside = isinstance(flags, int) and flags & OUTSIDE
    if outside or not isinstance(name, bytes) or name[:1] in (b"", b"\0"):
        return entry
    abstract = b"\0rehearsed-%d" % (number if isinstance(number, int) else 0)
    kept = (each for each in entry if each.number not in _OF_A_PATH)
    return with_bytes(UnixSkEntry.NAME, lambda _: abstract, kept)


def _remedy(end: str) -> str:
    """Say what to do without a connection to a bus: mostly it is there to ask phosd for this."""
    if "dbus" not in end and not end.endswith("/bus"):
        return ""
    return " (a program that wants itself saved asks by phosd.program or phos.h)"


def _of_ours(socket: sockets.UnixSocket, peer: sockets.UnixSocket | None, pid: int) -> bool:
    """Return whether it is a socket of the hook or the software GPU, to us or an earlier job.

    The hook closes its own when it detaches, also the one on which a thread asks for a checkpoint;
    the software GPU has one while it is queried, which is never inside the stop.
    """
    asking = peer is not None and peer.name.endswith("/program.sock")
    hooks = re.search(rf"/hook/([0-9]+/)?{pid}\.sock$", socket.name) is not None
    return asking or hooks or socket.name.startswith(f"@phos-softgpu-{pid}-")
