"""Find and name what CRIU cannot dump, before anything is stopped."""

import contextlib
from collections.abc import Collection, Iterator, Sequence

from phosd.engine.criu.kinds import registry
from phosd.engine.criu.kinds.kind import Choices
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.program import Criu
from phosd.engine.criu.run.tree_resources import Place, TreeResources
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs, unkillable_reads
from phosd.engine.system.procfs import Descriptor, Mapping
from phosd.errors import Busy, Reason, Unsupported

TCP_POLICIES = ("refuse", "close")

_OPENCL = "/libnvidia-opencl.so"
# Not the time namespace: CRIU saves it, and gives each restored program one of its own.
_NAMESPACES = ("mnt", "pid", "user", "net", "ipc", "uts", "cgroup")


class Dumpable(CriuPart):
    """Refuses a frozen tree that has what CRIU cannot save; see :func:`require_dumpable`."""

    def __init__(self, criu: Criu, tcp: str, checkpointed: Collection[int]) -> None:
        self._criu = criu
        self._tcp = tcp
        self._checkpointed = checkpointed

    def frozen(self, tree: TreeResources) -> None:
        home = self._criu.namespaces_for(tree.tree.root.pid)
        require_dumpable(tree, self._tcp, home, self._checkpointed)


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
    tree = resources.tree
    owner = Owner.of(tree)
    reasons = [
        *_of_processes(tree, home, frozen=checkpointed is not None),
        *_of_opencl(resources),
        *(_of_driver(resources, checkpointed) if checkpointed is not None else ()),
        *registry.refusals(resources, Choices.of(tcp, owner)),
    ]
    _refuse(tree, reasons)


def require_inert(resources: TreeResources, checkpointed: Collection[int]) -> None:
    """Raise :class:`Unsupported` naming the processes of a frozen tree that use the GPU driver's
    devices. Those of ``checkpointed`` have none any more.
    """
    _refuse(resources.tree, [*_of_driver(resources, checkpointed)])


def require_inherited(resources: TreeResources, known: Collection[Place]) -> None:
    """Raise :class:`Busy` if a process of a frozen tree has driver devices at a place that
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
        if not frozen and (tracer := procfs.tracer(process.pid)):
            debugger = unkillable_reads.describe(tracer)
            yield f"{name} is being traced by {debugger} (detach that debugger)"
        foreign = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            foreign = [
                kind for kind in _NAMESPACES if procfs.namespace(process.pid, kind) != home[kind]
            ]
        if foreign:
            yield f"{name} is in a container or sandbox (its own {', '.join(foreign)} namespace)"


def _of_opencl(resources: TreeResources) -> Iterator[str]:
    """Yield the processes with NVIDIA's OpenCL, which opens the GPU as soon as it is loaded."""
    for pid in sorted({each.pid for each in resources.mappings if _OPENCL in each.path}):
        yield (
            f"{procfs.describe(pid)} has NVIDIA's OpenCL loaded, of which the driver saves nothing "
            "(`phos run` keeps it from programs unless OCL_ICD_VENDORS is set)"
        )


def _of_driver(resources: TreeResources, checkpointed: Collection[int]) -> Iterator[str]:
    """Yield the processes that have GPU driver devices which they have neither inherited from a
    user of CUDA nor opened for NVML.

    For a frozen tree: before, others may be about to end. A process that has inherited them has the
    library mapped, too, and cannot use it; the driver is asked about that once the tree runs again.
    """
    loaded = {each.pid for each in resources.mappings if "/libcuda.so" in each.path}
    management = {each.pid for each in resources.of_management}
    for pid in sorted(resources.users_of_driver - management):
        name = procfs.describe(pid)
        if pid in checkpointed:
            held = {_device(each) for each in resources.of_driver if each.pid == pid}
            yield f"{name} still has {', '.join(sorted(held))} after the driver's checkpoint"
        elif pid not in loaded:
            yield f"{name} uses the GPU driver's devices without CUDA (as for OpenGL or Vulkan)"


def _device(of: Descriptor | Mapping) -> str:
    return of.path if isinstance(of, Mapping) else of.target
