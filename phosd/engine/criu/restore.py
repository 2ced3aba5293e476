"""Restore a process tree with CRIU, as its owner. A failed restore leaves everything as it was."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from phosd.engine.criu import ports
from phosd.engine.criu.action_script import RESTORED, ActionScript
from phosd.engine.criu.cgroup_place import place_of
from phosd.engine.criu.clone import Clone
from phosd.engine.criu.driver_turn import HeldRestore, driver_turn
from phosd.engine.criu.dump import require_private, working_folder
from phosd.engine.criu.file_worker import Policy
from phosd.engine.criu.inherited_stdio import Outlets
from phosd.engine.criu.made_processes import MadeProcesses, none_left
from phosd.engine.criu.missing_devices import MissingDevices
from phosd.engine.criu.owned_processes import (
    ENDING_PATIENCE,
    end,
    restore_mark,
)
from phosd.engine.criu.program import Criu, Invocation, Owner
from phosd.engine.criu.reconnection import Reconnected
from phosd.engine.criu.rehearsal import Rehearsal
from phosd.engine.criu.rights import Rights
from phosd.engine.criu.saved_tree import SavedTree
from phosd.engine.criu.spared_pages import PagesPutBack, SparedPages, spared_pages
from phosd.engine.criu.tree_files import TreeFiles
from phosd.engine.image.cpu_manifest import Cgroups
from phosd.engine.image.manifest import Process
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checks import Check, require_all
from phosd.engine.program import namespace_maker
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.system import procfs
from phosd.engine.system.looking import describe
from phosd.engine.system.native import criu_plugins
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, ImageCorrupt, Internal, NotAuthorized, Reason, Unsupported

SETTLED = 0.05
"""Seconds that a restored program must live before it counts as restored."""
_KEEPER = 1
"""The pid of the first process of a pid namespace."""
_LEFT_SECONDS = 1.0
"""How long what the program started just before its end may take to end as well."""


@dataclass(frozen=True)
class TreeRestoreOptions:
    """Options for one tree. ``files``: the policy for files that have grown since the checkpoint.

    ``output``: the file for what the program prints, if its output was a pipe, a terminal or a
    socket (None: it is discarded). ``end``: the file that is to tell how the root process ends.
    ``deadline`` in seconds. ``pid_namespace``: the tree gets one of its own, also if it was in
    none. ``image``: which is restored, for the record of that. ``clone``: which is restored in the
    tree's place, in such a namespace. ``cgroups``: where it goes on, if not where it was.
    ``rehearsed``: see :func:`rehearse_tree`.
    """

    files: Policy = Policy.KEEP
    output: Path | None = None
    end: Path | None = None
    deadline: float = 600.0
    pid_namespace: bool = False
    image: str = ""
    clone: Clone | None = None
    cgroups: Cgroups | None = None
    rehearsed: bool = False


@dataclass
class Restored:
    """A restored tree that runs. Call :meth:`settle` to keep it, or :meth:`abandon` to undo it."""

    pid: int
    ids: Mapping[int, int]
    """Of all processes and threads, by those that they were saved with."""
    _files: TreeFiles
    _made: frozenset[ProcessId]
    """The processes by pid and start time, since pids may have been reused."""
    _namespace: PidNamespace | None
    _made_at: float

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(each.pid for each in self._made))

    def settle(self) -> None:
        """Keep the tree: remove what was kept to undo the restore."""
        self._files.settle()

    def require_settled(self) -> None:
        """Raise :class:`Internal` unless the program runs on a little after its restore."""
        time.sleep(max(0.0, self._made_at + SETTLED - time.monotonic()))
        _require_alive(self.pid)

    def abandon(self) -> None:
        """Kill the tree, and put its files back as they were before the restore."""
        if self._namespace is not None:
            namespace_maker.end(self._namespace)
        else:
            pids = [each.pid for each in self._made]
            end(pids, lambda pid: procfs.process_id(pid) in self._made)
        self._files.undo()


def admission(
    criu: Criu,
    tree: SavedTree,
    options: TreeRestoreOptions,
    cancellation: Cancellation | None = None,
) -> None:
    """Check everything that a restore of ``tree`` needs, without changing anything.

    Raises :class:`Busy` if a pid or thread id is taken, :class:`Unsupported` for files that
    changed and limits that cannot be given back, :class:`ImageCorrupt` if a file of CRIU's is too
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
        if not _in_own_namespace(tree, options):
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
    """Return the check that the tree's files are as they were saved."""
    look = partial(files.require_as_saved, cancellation)
    return "files", partial(_unless_damaged, tree, look)


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
    rights = _rights(tree)
    if criu.service is None:
        rights.require_attainable()


def _rights(tree: SavedTree) -> Rights:
    """Return the rights that CRIU would give the tree: a user's are no more than the user has."""
    rights = Rights.in_images(tree.folder)
    if not tree.user.is_root:
        rights.require_plain(tree.user)
        if tree.details.imported:
            rights.require_untrimmed()
    if tree.details.imported and (hidden := rights.of.keys() - tree.ids):
        raise ImageCorrupt(
            f"CRIU would make a thread {min(hidden)}, which the image does not list",
            hint="the image cannot be restored; delete it",
        )
    return rights


def restore_tree(
    criu: Criu,
    tree: SavedTree,
    options: TreeRestoreOptions,
    cancellation: Cancellation | None = None,
    driver: HeldRestore | None = None,
    complete: Callable[[], bool] = lambda: True,
    files: TreeFiles | None = None,
) -> Restored:
    """Restore ``tree``, its ``files`` first. Call :func:`admission` before.

    Nothing of the program runs before ``complete`` returns True. Raises what that and
    :func:`admission` raise, and :class:`Internal` if CRIU fails or the program dies at once; its
    files are then put back as they were.
    """
    require_private(tree.folder)
    with contextlib.ExitStack() as stack:
        namespace = None
        if _in_own_namespace(tree, options):
            namespace = stack.enter_context(
                NamespaceMaker(
                    _runtime_dir(criu),
                    image=options.image,
                    ids=tree.ids,
                    clone=options.clone is not None,
                )
            )
        else:
            require_free(tree.processes)
        files = files or TreeFiles(tree, options.files, options.clone)
        clone = options.clone
        if clone is not None:
            tree = stack.enter_context(clone.private_copy())
        tree, spared = stack.enter_context(spared_pages(tree, private=clone is not None))
        files.prepare()
        made = MadeProcesses(tree, namespace)
        try:
            _run(criu, tree, options, cancellation, made, driver, namespace, complete, spared)
        except BaseException:
            made.end()
            files.undo()
            raise
        ids = made.ids()
        there = made.found(ids)
        pids = (ids[process.pid] for process in there)
        known = frozenset(filter(None, map(procfs.process_id, pids)))
        place = namespace.namespace if namespace is not None else None
        root = ids.get(tree.record.root, 0)
        restored = Restored(root, ids, files, known, place, time.monotonic())
    try:
        _require_alive(root)
        _set_affinities(there, ids)
    except BaseException:
        restored.abandon()
        raise
    return restored


def rehearse_tree(
    criu: Criu, rehearsal: Rehearsal, image: str, cancellation: Cancellation | None = None
) -> None:
    """Have CRIU make the tree, with all of its memory, and end it before anything of it runs.

    Raises what :func:`restore_tree` raises where that would fail. Nothing is left of it.
    """
    tree = rehearsal.tree
    require_private(tree.folder)
    options = TreeRestoreOptions(image=image, rehearsed=True)
    with (
        NamespaceMaker(_runtime_dir(criu), image=image, ids=tree.ids, apart=True) as maker,
        rehearsal.private_copy() as changed,
        spared_pages(changed, private=True) as (copy, spared),
    ):
        made = MadeProcesses(copy, maker)
        wanted = {process.pid for process in copy.processes}

        def require_made() -> bool:
            if cancellation is not None:
                cancellation.check()
            if missing := wanted - made.ids().keys():
                raise Internal(
                    f"criu restore did not make process {min(missing)}",
                    hint="`phos doctor` checks CRIU on this machine",
                )
            raise _AllMadeError

        try:
            _run(criu, copy, options, cancellation, made, None, maker, require_made, spared)
        except _AllMadeError:
            return
        finally:
            made.end()
    raise Internal("criu restore did not tell that it has made all", hint="report this")


class _AllMadeError(Exception):
    """All processes are made, so CRIU is to give up."""


def _in_own_namespace(tree: SavedTree, options: TreeRestoreOptions) -> bool:
    return tree.record.pid_namespace or options.pid_namespace or options.clone is not None


def _runtime_dir(criu: Criu) -> Path:
    if criu.runtime_dir is None:
        raise Internal("this CRIU knows of no runtime folder", hint="report this")
    return criu.runtime_dir


def require_free(processes: Sequence[Process]) -> None:
    """Raise :class:`Busy`, naming the holder, unless every pid and thread id is free.

    An id is also taken while other processes are in the session or process group of that number.
    """
    needed = {thread for process in processes for thread in (process.pid, *process.threads)}
    end = time.monotonic() + ENDING_PATIENCE
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


def _run(
    criu: Criu,
    tree: SavedTree,
    options: TreeRestoreOptions,
    cancellation: Cancellation | None,
    made: MadeProcesses,
    driver: HeldRestore | None,
    namespace: NamespaceMaker | None,
    complete: Callable[[], bool],
    spared: Sequence[SparedPages],
) -> None:
    details, owner, folder = tree.details, tree.user, tree.folder
    rights = _rights(tree)

    def require_same_rights() -> None:
        """The restorer works in memory that its user may change: see what it has given."""
        if owner.is_root:
            return
        try:
            rights.require_restored(Rights.known_to_kernel(made.ids()))
        except NotAuthorized:
            made.kill()  # before CRIU, which holds them, ends
            raise

    def held() -> None:
        reconnected.complete()
        require_same_rights()
        if turn is not None:
            turn.require_done()

    # Their addresses may be the original's; without new ones CRIU makes closed sockets.
    connections = () if options.rehearsed else details.connections

    def watch() -> None:
        made.require_alive(rights.of.keys())
        if not options.rehearsed:
            complete()

    looked = False

    def all_made() -> bool:
        nonlocal looked
        if not looked:
            made.look(rights.of.keys())
            looked = True
        return pages.complete() and complete()

    words = ["--restore-detached", "--file-locks", "--manage-cgroups=ignore", "--link-remap"]
    words.append("--tcp-close")
    if not options.rehearsed:
        ports.take_back(folder, details.connections)
    if details.shell_job:
        words.append("--shell-job")
    with (
        Outlets(tree.record.root, details, owner, options.end, namespace) as outlets,
        Reconnected(connections, folder, owner) as reconnected,
        MissingDevices(details.devices, owner) as missing,
        _readable(folder, owner),
        working_folder(folder, owner) as work,
        PagesPutBack(spared, made, owner, rights.to_restore) as pages,
        ActionScript(work, owner.uid, held, RESTORED, all_made) as script,
        driver_turn(driver, options.deadline, require_same_rights, made) as turn,
        none_left(made) as inherited_by_all,
    ):
        tracer = turn.tracer if turn is not None else None
        invocation = Invocation(
            "restore",
            [*words, *outlets.words, *reconnected.words, *missing.words, *ActionScript.WORDS],
            owner=owner,
            images=folder,
            work=work,
            descriptors=(
                *outlets.inherited,
                *reconnected.inherited,
                *missing.inherited,
                inherited_by_all,
                *(tracer.descriptors if tracer is not None else ()),
            ),
            environment=restore_mark(made.mark)
            | (tracer.environment if tracer is not None else {}),
            capabilities=rights.to_restore,
            dies_with_us=True,
            # The limits of the original's cgroup are for the original.
            place=None
            if options.rehearsed
            else place_of(options.cgroups or details.cgroups, owner.uid, criu.surroundings),
            plugins=criu_plugins() if tracer is not None else None,
            bounded=details.imported and not owner.is_root,
            wrap=lambda command: outlets.wrap(command, options.output),
        )
        with criu.start(invocation) as running:
            if namespace is not None:
                namespace.started()
                namespace.made()
            if turn is not None:
                turn.begin()
            running.wait(options.deadline, cancellation, script, watch)
        require_same_rights()  # whoever killed the script has skipped it


@contextlib.contextmanager
def _readable(folder: Path, owner: Owner) -> Iterator[None]:
    """Let the owner's group read the folder's files; CRIU gets the folder as a descriptor."""
    if owner.is_root:
        yield
        return
    paths = [folder, *folder.rglob("*")]
    try:
        for path in paths:
            os.chown(path, 0, owner.gid, follow_symlinks=False)
            path.chmod(0o750 if path.is_dir() else 0o640)
        yield
    finally:
        close_to_others(folder)


def close_to_others(folder: Path) -> None:
    """Return an image's folder, which a restore lent to its owner's group, to root alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.chown(path, 0, 0, follow_symlinks=False)


def _require_alive(root: int) -> None:
    """Raise unless the program runs, whatever CRIU reported."""
    now = procfs.stat(root)
    if now is None or now.dead:
        raise Internal(
            f"the restored program (pid {root}) ended at once", hint="its own log may say why"
        )


def _set_affinities(processes: Sequence[Process], ids: Mapping[int, int]) -> None:
    """Restore on which CPUs threads may run, which CRIU does not."""
    everywhere = set(range(os.cpu_count() or 1))
    for process in processes:
        theirs: tuple[int, ...] = ()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            theirs = procfs.threads(ids[process.pid])
        for thread, cpus in process.affinity.items():
            if ids.get(thread) not in theirs:
                continue
            present = set(cpus) & everywhere
            with contextlib.suppress(ProcessLookupError):  # the thread has ended since
                os.sched_setaffinity(ids[thread], present or everywhere)
