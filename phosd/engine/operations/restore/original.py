"""Check that the program of an image has ended.

In a pid namespace of its own the ids of an image are free even while the program runs. Restored
beside that, it would write to the same files, and could not have the sockets that the program has.
"""

import time
from collections.abc import Iterator

from phosd.engine.criu.run.owned_processes import ENDING_TIMEOUT
from phosd.engine.image.manifest import Manifest
from phosd.engine.node.node import Node
from phosd.engine.program.name import CLONES_KEEPER, first_of, is_named, processes_of
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS, describe
from phosd.errors import Busy, PhosError

_LOOK_SECONDS = 0.01


def require_ended(node: Node, manifest: Manifest) -> None:
    """Raise :class:`Busy`, naming a process, unless all processes that the image was made of have
    ended, and those of its restores, and no other program of its user has its name. One that is
    ending is waited for. Clones may run.
    """
    give_up = time.monotonic() + ENDING_TIMEOUT
    while (pid := next(_living(node, manifest), None)) is not None:
        if not procfs.ending(pid) or time.monotonic() > give_up:
            raise Busy(
                f"the program of image {manifest.id} runs: {describe(pid)}",
                hint="end it, or wait until it has ended, and try again; a clone (`--clone`) is"
                " restored beside it",
            )
        time.sleep(_LOOK_SECONDS)


def _living(node: Node, manifest: Manifest) -> Iterator[int]:
    """Yield processes of the program that are there."""
    if manifest.host.boot_id == procfs.boot_id():
        for process in manifest.processes:
            saved = ProcessId(process.known_as, process.start_time)
            if procfs.process_id(saved.pid) == saved:
                yield saved.pid
    for namespace in pid_namespaces.living(node.config.runtime_dir):
        if _is_restored(node, manifest, namespace):
            there = namespace.members()
            if there:
                yield there.get(manifest.trees[0].root, min(there.values()))
    if manifest.name and (pid := _first_named(manifest)) is not None:
        yield pid


def _first_named(manifest: Manifest) -> int | None:
    """Return the first process of a program of the image's user that has the image's name."""
    looks = ABANDONABLE_THREADS.each(
        processes_of(manifest.owner), lambda pid: is_named(pid, manifest.name)
    )
    return first_of({pid for pid, named in looks if named})


def _is_restored(node: Node, manifest: Manifest, namespace: PidNamespace) -> bool:
    """Return whether the program was restored into a namespace, from this image or from another one
    of the same name. A clone is another program.
    """
    keeper = procfs.stat(namespace.keeper.pid)
    if not namespace.image or namespace.apart or keeper is None or keeper.name == CLONES_KEEPER:
        return False
    if namespace.image == manifest.id:
        return True
    try:
        other = node.store.get(namespace.image)
    except PhosError:  # it was deleted, or is damaged: nothing tells what it was made of
        return False
    return bool(manifest.name) and (other.name, other.owner) == (manifest.name, manifest.owner)
