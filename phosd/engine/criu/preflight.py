"""Find and name what CRIU cannot dump, before anything is stopped."""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from phosd.engine.criu import connections, file_worker, stdio
from phosd.engine.criu.driver_files import DriverDevices
from phosd.engine.criu.file_records import NOT_ON_DISK
from phosd.engine.criu.file_worker import Orders
from phosd.engine.criu.program import Owner
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import looking, procfs, sockets
from phosd.engine.system.file_status import known_status
from phosd.engine.system.procfs import Descriptor, Mapping, own_id
from phosd.errors import Busy, Reason, Unsupported

TCP_POLICIES = ("refuse", "close")

# Not the time namespace: CRIU saves it, and gives each restored program one of its own.
_NAMESPACES = ("mnt", "pid", "user", "net", "ipc", "uts", "cgroup")
_ANONYMOUS = ("eventfd", "eventpoll", "signalfd", "timerfd", "inotify", "fanotify", "pidfd")
_REMEDIES = {"io_uring": " (libuv makes none in a program that `phos run` starts)"}
_SOCKETS = ("UNIX", "TCP", "TCPv6", "UDP", "UDPv6", "UDPLITE", "RAW", "RAWv6", "NETLINK", "PACKET")
_MEMORY_DEVICES = 1
_TERMINALS = (4, 5, *range(136, 144))
_DELETED = " (deleted)"
Place = tuple[int | str, ...]
"""Where a device is in a process: a descriptor's number or addresses, and the path."""
_ONE_USER = "on a file system (FUSE) that is for its user alone"
_TUN = os.makedev(10, 200)


@dataclass(frozen=True)
class TreeResources:
    """What the processes of a tree have open and mapped."""

    tree: ProcessTree
    descriptors: list[Descriptor]
    mappings: list[Mapping]

    @cached_property
    def of_driver(self) -> list[Descriptor | Mapping]:
        """What is open and mapped of the GPU driver's devices."""
        devices = DriverDevices.here()
        return [*devices.open_in(self.descriptors), *devices.mapped_in(self.mappings)]

    @property
    def users_of_driver(self) -> frozenset[int]:
        """The processes with such a descriptor or mapping."""
        return frozenset(each.pid for each in self.of_driver)

    @cached_property
    def of_management(self) -> list[Descriptor]:
        """What processes have open of the driver's devices for NVML, which maps nothing of them.

        CUDA, OpenGL and Vulkan do; the driver's checkpoint takes CUDA's away.
        """
        mapped = {each.pid for each in self.of_driver if isinstance(each, Mapping)}
        users = {each.pid for each in self.mappings if "/libnvidia-ml.so" in each.path} - mapped
        opened = (each for each in self.of_driver if isinstance(each, Descriptor))
        return [each for each in opened if each.pid in users]

    def places_of_driver(self) -> dict[Place, int]:
        """Return a process for each descriptor and mapping of the driver's devices: by number or
        addresses, and by path. What a process inherits is where it was in its parent.
        """
        return {
            (each.number, each.target)
            if isinstance(each, Descriptor)
            else (each.start, each.end, each.path): each.pid
            for each in self.of_driver
        }

    @property
    def own_descriptors(self) -> list[Descriptor]:
        """The descriptors without those of the driver's devices."""
        without = {id(each) for each in self.of_driver}
        return [each for each in self.descriptors if id(each) not in without]

    @property
    def own_mappings(self) -> list[Mapping]:
        """The mappings without those of the driver's devices."""
        without = {id(each) for each in self.of_driver}
        return [each for each in self.mappings if id(each) not in without]

    @classmethod
    def of(cls, tree: ProcessTree) -> Self:
        """Read the descriptors and mappings of every living process of the tree.

        Raises :class:`Unsupported` for an open file that root may not look at.
        """
        found = cls(tree, [], [])
        for process in tree.living:
            # The process has ended.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                try:
                    found.descriptors.extend(procfs.descriptors(process.pid))
                except PermissionError as error:
                    raise Unsupported(
                        f"{procfs.describe(process.pid)} uses {error.filename}, {_ONE_USER}",
                        hint="close it, or mount that with the option allow_root or allow_other",
                        reason=Reason.CLOSED_MOUNT,
                    ) from error
                found.mappings.extend(procfs.mappings(process.pid))
        return found


def require_dumpable(
    resources: TreeResources,
    tcp: str,
    home: dict[str, str],
    checkpointed: Collection[int] | None = None,
) -> None:
    """Raise :class:`Unsupported` naming everything in the tree that CRIU cannot save.

    ``home`` has the namespaces that CRIU runs in, by kind. If CRIU has frozen the tree, so that it
    is CRIU that traces it, ``checkpointed`` are the processes that the driver has checkpointed.
    """
    tree, descriptors = resources.tree, resources.own_descriptors
    reasons = [
        *_of_processes(tree, home, frozen=checkpointed is not None),
        *(_of_driver(resources, checkpointed) if checkpointed is not None else ()),
        *_of_descriptors(
            descriptors, None if tree.privileged or not tree.root.uid else tree.root.uid
        ),
        *_of_sockets(descriptors, tcp),
        *_of_mappings(tree, resources.own_mappings),
    ]
    _refuse(tree, reasons)


def require_inert(resources: TreeResources, checkpointed: Collection[int]) -> None:
    """Raise :class:`Unsupported` naming the processes of a frozen tree that use the GPU driver's
    devices. Those of ``checkpointed`` have none any more.
    """
    _refuse(resources.tree, [*_of_driver(resources, checkpointed)])


def require_inherited(resources: TreeResources, known: Collection[Place]) -> None:
    """Raise :class:`Busy` if a process of a frozen tree has devices of the driver's at a place that
    was not ``known`` before it was stopped (:meth:`TreeResources.places_of_driver`).

    It may be about to begin to use CUDA, of which the driver does not know yet.
    """
    for place, pid in resources.places_of_driver().items():
        if place not in known:
            raise Busy(
                f"{procfs.describe(pid)} began to use the GPU during the checkpoint, or was "
                "forked from one that uses more of it than before",
                hint="try again when the program has started all its processes",
            )


def _refuse(tree: ProcessTree, reasons: Sequence[str]) -> None:
    if reasons:
        shown = "; ".join(reasons[:5])
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        raise Unsupported(
            f"{procfs.describe(tree.root.pid)} cannot be saved: {shown}{more}",
            hint="the program goes on; close what is named, or start the program without it",
            reason=Reason.PROCESS_STATE,
        )


def _of_processes(tree: ProcessTree, home: dict[str, str], *, frozen: bool) -> Iterator[str]:
    for process in tree.living:
        name = procfs.describe(process.pid)
        if process.tracer and not frozen:
            yield f"{name} is being traced by {looking.describe(process.tracer)}"
        foreign = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            foreign = [
                kind for kind in _NAMESPACES if procfs.namespace(process.pid, kind) != home[kind]
            ]
        if foreign:
            yield f"{name} is in a container or sandbox (its own {', '.join(foreign)} namespace)"


def _of_driver(resources: TreeResources, checkpointed: Collection[int]) -> Iterator[str]:
    """Yield who has devices of the GPU driver's that they have not inherited from a user of CUDA,
    and not opened for NVML.

    For a frozen tree: before, others may be about to end. Who has inherited them has the library
    mapped, too, and cannot use it, about which the driver is asked once the tree runs again.
    """
    loaded = {each.pid for each in resources.mappings if "/libcuda.so" in each.path}
    opencl = {each.pid for each in resources.mappings if "/libnvidia-opencl.so" in each.path}
    management = {each.pid for each in resources.of_management}
    for pid in sorted(resources.users_of_driver - management):
        name = procfs.describe(pid)
        if pid in checkpointed:
            held = {_device(each) for each in resources.of_driver if each.pid == pid}
            other = (
                ", and has OpenCL loaded, of which the driver saves nothing"
                if pid in opencl
                else ""
            )
            yield f"{name} still has {', '.join(sorted(held))} after the driver's checkpoint{other}"
        elif pid not in loaded:
            yield f"{name} uses the GPU driver's devices without CUDA (as for OpenGL or Vulkan)"


def _device(of: Descriptor | Mapping) -> str:
    return of.path if isinstance(of, Mapping) else of.target


def _of_descriptors(descriptors: Iterable[Descriptor], user: int | None) -> Iterator[str]:
    """Yield what is open and cannot be saved, by root's CRIU or that of ``user``."""
    for descriptor in descriptors:
        where = f"descriptor {descriptor.number} of pid {descriptor.pid} ({descriptor.target})"
        mode, device = descriptor.file.st_mode, descriptor.file.st_rdev
        if descriptor.target.startswith("anon_inode:"):
            kind = descriptor.target.removeprefix("anon_inode:").strip("[]")
            if kind not in _ANONYMOUS:
                remedy = _REMEDIES.get(kind, "")
                yield f"{where} is of a kind that cannot be saved{remedy}"
            elif descriptor.watches and user is not None:
                # It names files by handles, and to open those would be to open any file.
                yield f"{where} watches files, which only a program of root's may have saved"
        elif stat.S_ISBLK(mode):
            yield f"{where} is a block device"
        elif stat.S_ISCHR(mode) and not _known_device(device):
            yield f"{where} is a device that cannot be saved"
        elif user is not None and stdio.is_terminal(descriptor) and descriptor.file.st_uid != user:
            # CRIU gives the new terminal to the owner of the old one.
            owner = descriptor.file.st_uid
            yield f"{where} is a terminal of user {owner}, which only root may give back"
        elif stat.S_ISSOCK(mode):
            protocol = sockets.protocol(descriptor)
            if not protocol.startswith("UNIX") and protocol not in _SOCKETS:
                yield f"{where} is a socket of a kind that cannot be saved ({protocol})"


def _known_device(device: int) -> bool:
    major = os.major(device)
    return major == _MEMORY_DEVICES or major in _TERMINALS or device == _TUN


def _foreign_device(path: str) -> bool:
    own = ("/dev/shm/", "/dev/hugepages/", "/dev/zero", "/dev/mem")
    return path.startswith("/dev/") and not path.startswith(own)


def _of_sockets(descriptors: list[Descriptor], tcp: str) -> Iterator[str]:
    for descriptor, socket, peer in stdio.unix_peers_outside(descriptors):
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
    if tcp == "refuse":
        refused = connections.find(descriptors).refused
        for descriptor in descriptors:
            if why := refused.get(descriptor.file.st_ino):
                yield (
                    f"descriptor {descriptor.number} of pid {descriptor.pid} is {why} "
                    "(the option tcp=close has it closed in the restored program)"
                )


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
    hooks = socket.name.endswith(f"/hook/{pid}.sock")
    return asking or hooks or socket.name.startswith(f"@phos-softgpu-{pid}-")


def _of_mappings(tree: ProcessTree, mappings: Iterable[Mapping]) -> Iterator[str]:
    in_memory = procfs.memory_devices()
    deleted = []
    for mapping in mappings:
        name = f"pid {mapping.pid} maps {mapping.path}"
        if mapping.path.startswith("/SYSV"):
            yield f"{name}, which is System V shared memory"
        elif mapping.path.startswith("anon_inode:") or _foreign_device(mapping.path):
            yield f"{name}, which cannot be saved"
        elif (
            mapping.shared
            and mapping.writable
            and mapping.device not in in_memory
            and not mapping.path.startswith(NOT_ON_DISK)
            and not mapping.path.endswith(_DELETED)
        ):
            yield f"{name}, a file on disk, shared and writable"
        elif mapping.path.endswith(_DELETED) and not mapping.path.startswith(NOT_ON_DISK):
            deleted.append(mapping)
    for mapping in {mapping.device: mapping for mapping in mappings}.values():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # unmapped meanwhile
            try:
                known_status(mapping.link)
            except PermissionError:
                yield f"pid {mapping.pid} maps {mapping.path}, {_ONE_USER}"
                return
    for mapping in _not_to_be_put_back(tree, deleted):
        yield (
            f"pid {mapping.pid} maps {mapping.path}, which was replaced since "
            "(start the program anew to use the new one)"
        )


def _not_to_be_put_back(tree: ProcessTree, mappings: Iterable[Mapping]) -> Iterator[Mapping]:
    """Yield those of the mapped files that were deleted that their owner may not recreate.

    CRIU does so for a moment during the restore, at the old path and with the old owner.
    """
    owners = {process.pid: process for process in tree.living}
    by_owner: dict[Owner, list[Mapping]] = {}
    for mapping in mappings:
        owner = owners[mapping.pid]
        if owner.uid != 0:
            by_owner.setdefault(Owner(owner.uid, owner.gid, owner.groups), []).append(mapping)
    for user, theirs in by_owner.items():
        folders = {str(_folder(mapping)) for mapping in theirs}
        orders = Orders(user.uid, user.gid, user.groups, mark="", folders=tuple(folders))
        closed = file_worker.work(orders, file_worker.IMPATIENCE).closed
        for mapping in theirs:
            file = known_status(mapping.link)
            own = file.st_uid == user.uid and file.st_gid in (user.gid, *user.groups)
            if not own or str(_folder(mapping)) in closed:
                yield mapping


def _folder(mapping: Mapping) -> Path:
    return Path(mapping.path.removesuffix(_DELETED)).parent
