"""Restore a process tree with CRIU, as its owner. A failed restore leaves everything as it was."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.criu.files.file_orders import Policy
from phosd.engine.criu.images.rights import TO_RESTORE, Rights
from phosd.engine.criu.kinds import registry
from phosd.engine.criu.kinds.kind import Restoring
from phosd.engine.criu.kinds.named_files import without_sizes
from phosd.engine.criu.restore.admission import require_free
from phosd.engine.criu.restore.affinities import Affinities
from phosd.engine.criu.restore.bounding_sets import with_full_sets
from phosd.engine.criu.restore.driver_phase import DriverPhase, HeldRestore
from phosd.engine.criu.restore.ending import Ending
from phosd.engine.criu.restore.inherited_stdio import RestoredStdio
from phosd.engine.criu.restore.options import TreeRestoreOptions, in_own_namespace
from phosd.engine.criu.restore.parallel_pages import (
    ParallelPageLoader,
    ParallelPages,
    parallel_pages,
)
from phosd.engine.criu.restore.private_copy import private_copy, take_any_size
from phosd.engine.criu.restore.rehearsal import Rehearsal
from phosd.engine.criu.restore.restored_processes import NoneLeft, RestoredProcesses, StayAlive
from phosd.engine.criu.restore.restored_rights import SameRights, saved_rights
from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.criu.run.action_script import RESTORED, ActionScript
from phosd.engine.criu.run.cgroup_place import place_of
from phosd.engine.criu.run.folders import readable, require_private, working_folder
from phosd.engine.criu.run.invocation import Invocation
from phosd.engine.criu.run.owned_processes import end, restore_mark
from phosd.engine.criu.run.part import CriuPart, Parts
from phosd.engine.criu.run.program import Criu
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program import namespace_maker
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.system import audit, procfs
from phosd.engine.system.native import criu_plugins
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal

SETTLED = 0.05
"""Seconds that a restored program must live before it counts as restored."""


@dataclass
class Restored:
    """A restored tree that runs. Call :meth:`settle` to keep it, or :meth:`abandon` to undo it."""

    pid: int
    ids: Mapping[int, int]
    """The ids of all processes and threads, by those that they were saved with."""
    _files: TreeFiles
    _made: frozenset[ProcessId]
    """The processes by pid and start time, since pids may have been reused."""
    _namespace: PidNamespace | None
    _made_at: float
    _ending: Ending

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(each.pid for each in self._made))

    def settle(self) -> None:
        """Keep the tree: remove what was kept to undo the restore."""
        self._ending.close()
        self._files.settle()

    def require_settled(self) -> None:
        """Raise :class:`Internal` unless the program runs on a little after its restore."""
        time.sleep(max(0.0, self._made_at + SETTLED - time.monotonic()))
        _require_alive(self.pid, self._ending)

    @property
    def exit_code(self) -> int | None:
        """The exit code with which its first process has ended by itself; None if it has not."""
        found = procfs.stat(self.pid) if self.pid else None
        return self._ending.code if found is None or found.dead else None

    def abandon(self) -> None:
        """Kill the tree, and put its files back as they were before the restore; unless it has
        ended by itself: what it wrote stays.
        """
        if self.exit_code is not None:
            self.settle()
            return
        if self._namespace is not None:
            namespace_maker.end(self._namespace)
        else:
            pids = [each.pid for each in self._made]
            end(pids, lambda pid: procfs.process_id(pid) in self._made)
        self._ending.close()
        self._files.undo()


class EndedItself(Internal):
    """The program has ended by itself as soon as it was restored, with the exit code ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(
            f"the restored program ended at once, with exit code {status}",
            hint="its own log may say why",
        )
        self.status = status


def restore_tree(
    criu: Criu,
    tree: SavedTree,
    options: TreeRestoreOptions,
    cancellation: Cancellation | None = None,
    driver: HeldRestore | None = None,
    complete: Callable[[], bool] = lambda: True,
    files: TreeFiles | None = None,
) -> Restored:
    """Restore ``tree``, its ``files`` first. Call
    :func:`~phosd.engine.criu.restore.admission.admission` before.

    Nothing of the program runs before ``complete`` returns True. Raises what that and the
    admission raise, and :class:`Internal` if CRIU fails or the program dies at once; its files are
    then put back as they were. Raises :class:`EndedItself` if it exits at once; they stay then.
    """
    require_private(tree.folder)
    rights = saved_rights(tree)
    with contextlib.ExitStack() as stack:
        namespace = None
        if in_own_namespace(tree, options):
            namespace = stack.enter_context(_namespace_for(criu, tree, options))
        else:
            require_free(tree.processes)
        files = files or TreeFiles(tree, options.files, options.clone)
        tree, private = stack.enter_context(_with_own_files(tree, options))
        sets = with_full_sets(tree, rights, private=private)
        tree, private = stack.enter_context(sets)
        tree, spared = stack.enter_context(parallel_pages(tree, private=private))
        files.prepare()
        made, ending = RestoredProcesses(tree, namespace), Ending()
        try:
            run = _Run(criu, tree, rights, options, made, namespace, spared, ending)
            run.restore(complete, driver, cancellation)
        except BaseException:
            ending.close()
            made.end()
            files.undo()
            raise
        restored = _restored(tree, made, files, namespace, ending)
    try:
        _require_alive(restored.pid, ending)
        audit.note_other(restored.pid, _loginuid(tree))
    except BaseException:
        restored.abandon()
        raise
    return restored


@contextlib.contextmanager
def _with_own_files(
    tree: SavedTree, options: TreeRestoreOptions
) -> Iterator[tuple[SavedTree, bool]]:
    """Yield the tree with CRIU's files as a clone needs them, or to open files of any size, and
    whether that is a copy.
    """
    as_is, clone = options.files is Policy.AS_IS, options.clone
    if clone is None and not as_is:
        yield tree, False
        return
    if clone is None:
        with private_copy(tree, without_sizes) as copy:
            yield copy, True
        return
    with clone.private_copy() as copy:
        if as_is:
            take_any_size(copy)
        yield copy, True


def _namespace_for(criu: Criu, tree: SavedTree, options: TreeRestoreOptions) -> NamespaceMaker:
    clone = options.clone is not None
    return NamespaceMaker(_runtime_dir(criu), image=options.image, ids=tree.ids, clone=clone)


def _restored(
    tree: SavedTree,
    made: RestoredProcesses,
    files: TreeFiles,
    namespace: NamespaceMaker | None,
    ending: Ending,
) -> Restored:
    """Return the tree that CRIU has made."""
    ids = made.ids()
    there = (procfs.process_id(ids[each.pid]) for each in made.found(ids))
    known = frozenset(filter(None, there))
    place = namespace.namespace if namespace is not None else None
    root = ids.get(tree.record.root, 0)
    return Restored(root, ids, files, known, place, time.monotonic(), ending)


def rehearse_tree(
    criu: Criu, rehearsal: Rehearsal, image: str, cancellation: Cancellation | None = None
) -> None:
    """Let CRIU make the tree, with all of its memory, and end it before anything of it runs.

    Raises what :func:`restore_tree` raises where that would fail. Nothing is left of it.
    """
    tree = rehearsal.tree
    require_private(tree.folder)
    rights = saved_rights(tree)
    options = TreeRestoreOptions(image=image, rehearsed=True)
    with (
        NamespaceMaker(_runtime_dir(criu), image=image, ids=tree.ids, apart=True) as maker,
        rehearsal.private_copy() as changed,
        with_full_sets(changed, rights, private=True) as (full, private),
        parallel_pages(full, private=private) as (copy, spared),
    ):
        made, ending = RestoredProcesses(copy, maker), Ending()
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
            run = _Run(criu, copy, rights, options, made, maker, spared, ending)
            run.restore(require_made, None, cancellation)
        except _AllMadeError:
            return
        finally:
            ending.close()
            made.end()
    raise Internal("criu restore did not tell that it has made all", hint="report this")


class _AllMadeError(Exception):
    """All processes are made, so CRIU is to give up."""


def _runtime_dir(criu: Criu) -> Path:
    if criu.runtime_dir is None:
        raise Internal("this CRIU knows of no runtime folder", hint="report this")
    return criu.runtime_dir


class _AwaitCaller(CriuPart):
    """Holds the tree until the caller has restored its own share: ``done`` returns True then, and
    raises if it cannot. ``watched``: it is asked already while CRIU works.
    """

    def __init__(self, done: Callable[[], bool], *, watched: bool) -> None:
        self._done = done
        self._watched = watched

    def watch(self) -> None:
        if self._watched:
            self._done()

    def made(self) -> bool:
        return self._done()


@dataclass(frozen=True)
class _Run:
    """The run of CRIU for one restore: of ``tree``, whose files are as CRIU is to read them."""

    criu: Criu
    tree: SavedTree
    rights: Rights
    options: TreeRestoreOptions
    made: RestoredProcesses
    namespace: NamespaceMaker | None
    spared: Sequence[ParallelPages]
    ending: Ending

    def restore(
        self,
        complete: Callable[[], bool],
        driver: HeldRestore | None,
        cancellation: Cancellation | None,
    ) -> None:
        """Run CRIU; see :func:`restore_tree`."""
        owner, folder = self.tree.user, self.tree.folder
        with (
            readable(folder, owner),
            working_folder(folder, owner) as work,
            Parts(self._parts(complete, driver)) as parts,
            ActionScript(work, owner.uid, parts.held, RESTORED, parts.made) as script,
            self.criu.start(self._invocation(parts, work)) as running,
        ):
            parts.started()
            running.wait(self.options.deadline, cancellation, script, parts.watch)
            parts.complete()

    def _parts(
        self, complete: Callable[[], bool], driver: HeldRestore | None
    ) -> Iterator[CriuPart]:
        tree, details, owner, options = self.tree, self.tree.details, self.tree.user, self.options
        rights = SameRights(tree, self.rights, self.made)
        yield StayAlive(self.made, self.rights.of.keys())
        yield RestoredStdio(
            tree.record.root,
            details,
            owner,
            options.end,
            self.ending,
            self.namespace,
            options.output,
            options.follower,
        )
        yield from registry.restore_parts(
            Restoring(details, tree.folder, owner, options.rehearsed, options.memory)
        )
        yield ParallelPageLoader(self.spared, self.made, owner, TO_RESTORE)
        yield _AwaitCaller(complete, watched=not options.rehearsed)
        yield Affinities(self.made)
        yield rights
        if driver is not None:
            yield DriverPhase(driver, options.deadline, self.made, rights.require)
        yield NoneLeft(self.made)

    def _invocation(self, parts: Parts, work: Path) -> Invocation:
        details, owner, options = self.tree.details, self.tree.user, self.options
        # The limits of the original's cgroup are for the original.
        place = None
        if not options.rehearsed:
            place = place_of(options.cgroups or details.cgroups, owner.uid, self.criu.surroundings)
        return Invocation(
            "restore",
            [*_WORDS, *parts.words, *ActionScript.WORDS],
            owner=owner,
            images=self.tree.folder,
            work=work,
            descriptors=parts.descriptors,
            environment={**restore_mark(self.made.mark), **parts.environment},
            capabilities=TO_RESTORE,
            bounding=None if owner.is_root else self.rights.bounding,
            dies_with_us=True,
            place=place,
            plugins=criu_plugins() if parts.plugged else None,
            bounded=details.imported and not owner.is_root,
            loginuid=_loginuid(self.tree),
            wrap=parts.wrap,
        )


_WORDS = (
    *("--restore-detached", "--file-locks", "--manage-cgroups=ignore"),
    *("--link-remap", "--tcp-close"),
    "--skip-file-rwx-check",  # that the files are the program's is asked before, and of their bytes
)


def _loginuid(tree: SavedTree) -> int | None:
    """Return the audit identity that the tree had, or, if that is not known, its user's; None: root
    gets no other than phosd has. A user's CRIU cannot change it, whatever its files say.
    """
    noted = tree.details.loginuid
    return noted if noted is not None else tree.user.uid or None


def _require_alive(root: int, ending: Ending) -> None:
    """Raise unless the program runs, whatever CRIU reported."""
    now = procfs.stat(root) if root else None
    if now is None or now.dead:
        if (status := ending.code) is not None:
            raise EndedItself(status)
        raise Internal("the restored program ended at once", hint="its own log may say why")
