"""Check what a restore of a tree needs, without changing anything."""

import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial

from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.pagemap import require_no_rings
from phosd.engine.criu.restore.options import TreeRestoreOptions, in_own_namespace
from phosd.engine.criu.restore.restored_rights import saved_rights
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.criu.run.cgroup_place import place_of
from phosd.engine.criu.run.owned_processes import ENDING_TIMEOUT
from phosd.engine.criu.run.program import Criu
from phosd.engine.image.manifest import Process
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checks import Check, require_all
from phosd.engine.system import procfs
from phosd.engine.system.unkillable_reads import describe
from phosd.errors import Busy, Internal, Reason, Unsupported

_KEEPER = 1
"""The pid of the first process of a pid namespace."""
_LEFT_SECONDS = 1.0
"""How long what the program started just before its end may take to end as well."""


def admission(
    criu: Criu,
    tree: SavedTree,
    options: TreeRestoreOptions,
    cancellation: Cancellation | None = None,
) -> None:
    """Check everything that a restore of ``tree`` needs, without changing anything.

    Raises :class:`Busy` if a pid or thread id is taken, :class:`Unsupported` for files that
    changed and limits that cannot be given back, :class:`ImageCorrupt` if a CRIU file is too
    damaged to be read, and what :func:`require_restorable` raises.
    """
    with TreeFiles(tree, options.files, options.clone) as files:
        require_all(admission_checks(criu, tree, options, files))
        require_all([files_check(tree, files, cancellation)])


def admission_checks(
    criu: Criu, tree: SavedTree, options: TreeRestoreOptions, files: TreeFiles
) -> list[Check]:
    """Return the checks of :func:`admission` but that of ``files``, which these begin."""

    def rights() -> None:
        require_restorable(criu, tree)
        files.look()

    def cgroups() -> None:
        place_of(options.cgroups or tree.details.cgroups, tree.user.uid, criu.surroundings)

    def pids() -> None:
        if not in_own_namespace(tree, options):
            require_free(tree.processes)
        elif _KEEPER in tree.ids:
            raise Unsupported(
                f"a process of the image has the pid {_KEEPER}, as in a container, which in a pid "
                "namespace of its own is that of phosd's keeper",
                hint="restore it without a pid namespace, where that pid is free",
                reason=Reason.PROCESS_STATE,
            )

    clone = options.clone
    return [
        *([("clone", partial(_unless_damaged, tree, clone.require_possible))] if clone else []),
        ("rights", partial(_unless_damaged, tree, rights)),
        ("pids", pids),
        ("cgroup", partial(_unless_damaged, tree, cgroups)),
    ]


def files_check(
    tree: SavedTree, files: TreeFiles, cancellation: Cancellation | None = None
) -> Check:
    """Return the check that the tree's files are as they were saved, or can be put back."""

    def look() -> None:
        files.require_as_saved(cancellation)

    def check() -> str:
        _unless_damaged(tree, look)
        return "; ".join(files.told)

    return "files", check


def _unless_damaged(tree: SavedTree, check: Callable[[], None]) -> None:
    """Run a check that reads CRIU's files; a damaged one may be what could not be read."""
    try:
        check()
    except Internal:
        tree.check_bytes()
        raise


def require_restorable(criu: Criu, tree: SavedTree) -> None:
    """Check what a restore needs and what does not change until then, as ids, files and cgroups do.

    Raises :class:`NotAuthorized` for rights that the user does not have, :class:`Unsupported` for
    those that phosd cannot give, :class:`ImageCorrupt` if CRIU's files are not those of the
    manifest (:meth:`SavedTree.check_bytes` checks their bytes).
    """
    criu.require_reachable(tree.user)
    tree.check_listing()
    rights = saved_rights(tree)
    if criu.service is None:
        rights.require_attainable()
    if not tree.user.is_root:
        for memory in tree.folder.glob("mm-*.img"):
            require_no_rings(memory)
    if not rights.are_root_s:
        rseq_areas.require_harmless(tree.folder)


def require_free(processes: Sequence[Process]) -> None:
    """Raise :class:`Busy`, naming the holder, unless every pid and thread id is free.

    An id is also taken while other processes are in the session or process group of that number.
    """
    needed = {thread for process in processes for thread in (process.pid, *process.threads)}
    end = time.monotonic() + ENDING_TIMEOUT
    for number in sorted(needed):
        while (holder := procfs.stat(number)) is not None:
            if not procfs.ending(number):
                raise Busy(
                    f"the process needs id {number}, which {describe(number)} has",
                    hint="wait until that one ends, or end it, and try again",
                )
            if time.monotonic() > end:
                raise Busy(
                    f"id {number} belongs to a process that has ended, and that "
                    f"{describe(holder.parent)} does not collect",
                    hint="end that parent and try again",
                )
            time.sleep(0.01)
    end = time.monotonic() + _LEFT_SECONDS
    while left := next(_left_in(needed), None):
        if time.monotonic() > end:
            raise Busy(
                f"{describe(left)} is still in the session or process group of the saved program",
                hint="it was started by the program but left its tree; end it and try again",
            )
        time.sleep(0.01)


def _left_in(groups: Set[int]) -> Iterator[int]:
    """Yield the processes whose session or process group is one of these."""
    for pid in procfs.pids():
        other = procfs.stat(pid)
        if other is not None and not procfs.ending(pid) and groups & {other.group, other.session}:
            yield pid
