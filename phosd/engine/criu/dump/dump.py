"""Dump a process tree with CRIU, and record what a restore needs besides CRIU's files."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from phosd.engine.criu.dump.check import check
from phosd.engine.criu.dump.credentials import Credentials
from phosd.engine.criu.dump.declared_files import DeclaredFiles
from phosd.engine.criu.dump.driver_files import DriverFiles
from phosd.engine.criu.dump.files import Files
from phosd.engine.criu.dump.output import Output
from phosd.engine.criu.dump.preflight import Dumpable
from phosd.engine.criu.dump.written_files import WrittenFiles
from phosd.engine.criu.images import rseq_areas
from phosd.engine.criu.images.core_image import parent_death_signal
from phosd.engine.criu.images.digests import digests
from phosd.engine.criu.kinds import registry
from phosd.engine.criu.kinds.kind import Choices
from phosd.engine.criu.run import cgroup_place
from phosd.engine.criu.run.action_script import FROZEN, ActionScript
from phosd.engine.criu.run.folders import lent, working_folder
from phosd.engine.criu.run.invocation import Invocation, Owner
from phosd.engine.criu.run.memory_handles import MemoryHandle
from phosd.engine.criu.run.owned_processes import dump_mark, without_orphans
from phosd.engine.criu.run.page_store import CopiedPages, PageStore
from phosd.engine.criu.run.part import CriuPart, Parts
from phosd.engine.criu.run.program import Criu
from phosd.engine.criu.run.tracers import Tracer
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.image.manifest import FileDigest, Tree
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.declared import KeptFiles
from phosd.engine.program.tree import ProcessTree, scan
from phosd.engine.system import procfs
from phosd.engine.system.native import criu_plugins
from phosd.engine.system.privileges import Capability
from phosd.errors import Internal

GHOST_LIMIT = "2G"
"""Size limit of unlinked files that go into an image (data loaders unlink their shared memory)."""

_START_SECONDS = 30.0
_YAMA = procfs.PROC / "sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True)
class DumpOptions:
    """Options of a dump. ``tcp``: ``refuse`` connections that lead outside, or ``close`` them.

    ``deadline`` in seconds. ``leave_running=False`` ends the tree after the dump; if ``stopping``
    is given, CRIU leaves the tree stopped by SIGSTOP, after that was called with the frozen tree.
    ``checkpointed`` are the processes that the driver has checkpointed when the tree is dumped.
    ``held``: it does so only while CRIU holds their threads (:mod:`phosd.engine.criu.run.tracers`).
    ``kept`` are files that belong to programs of users, open or not.
    """

    tcp: str = "refuse"
    deadline: float = 600.0
    leave_running: bool = True
    stopping: Callable[[ProcessTree], object] | None = None
    checkpointed: frozenset[int] = frozenset()
    held: bool = False
    kept: KeptFiles = ()


@dataclass(frozen=True)
class TreeDump:
    """A finished dump: ``tree`` as it was when frozen, and what the dump holds."""

    tree: ProcessTree
    folder: Path
    details: CpuDetails
    inheritors: frozenset[int]
    """Processes that had the GPU driver's devices, which are restored as inert."""
    left_out: tuple[str, ...] = ()
    """Paths of files that the tree writes to, and that are too large, or too many, to be saved."""

    def record(self, name: str, files: tuple[FileDigest, ...] | None = None) -> Tree:
        """Return the manifest's entry; ``name`` is the folder's path in the image, ``files`` those
        of the dump.

        Without them it reads every byte of the dump to hash it, so call it when the tree runs
        again.
        """
        found = digests(self.folder) if files is None else files
        return Tree(self.tree.root.own_pid, name, found, self.details, self.tree.nested)


def dump_tree(
    criu: Criu,
    tree: ProcessTree,
    folder: Path,
    options: DumpOptions,
    cancellation: Cancellation | None = None,
) -> TreeDump:
    """Dump ``tree`` into ``folder``, which is empty and inside a private folder.

    The tree runs on afterwards, even after an error. Raises :class:`Unsupported` for what cannot be
    dumped, :class:`Internal` if CRIU fails, and :class:`Cancelled`.
    """
    with Dump(criu, tree, folder, options) as dump:
        dumped = dump.finish(cancellation)
        dump.settle()
        rseq_areas.clear(folder)
        return dumped


class Dump:
    """The dump of one tree, in three steps, since the program may be stopped for the second.

    Entering the context starts CRIU, which then waits and has not touched the tree. :meth:`finish`
    freezes and dumps the tree. :meth:`settle`, once the tree runs again, waits until CRIU has ended
    successfully; only then is the dump complete. ``pages`` takes memory pages during the dump;
    without it CRIU writes everything to ``folder``.
    """

    def __init__(
        self,
        criu: Criu,
        tree: ProcessTree,
        folder: Path,
        options: DumpOptions,
        pages: PageStore | None = None,
    ) -> None:
        self._criu = criu
        self._tree = tree
        self._folder = folder
        self._options = options
        self._pages = pages
        self._handles: Sequence[MemoryHandle] = ()
        self._left = contextlib.ExitStack()
        """Undoes everything at the end."""
        self._lent = contextlib.ExitStack()
        """What CRIU has while it runs, and CRIU itself."""
        self.tracer: Tracer | None = None
        """What has the driver's restore threads run, if the tree has processes to be ``held``."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            running_tree = TreeResources.of(self._tree)
            plan = check(self._criu, self._tree, self._options.tcp)
            self._cgroups = cgroup_place.noted(self._tree)
            self._devices = DriverFiles(running_tree, self._folder)
            held = self._options.checkpointed & set(self._tree.pids)
            if held and self._options.held:
                self.tracer = Tracer(lambda: held, self._options.deadline)
            declared = stack.enter_context(
                DeclaredFiles(self._tree, self._options.kept, self._criu.runtime_dir)
            )
            parts = self._parts(running_tree, Output(self._tree, plan), declared)
            self._parts_of_dump = stack.enter_context(Parts(parts))
            with contextlib.ExitStack() as begun:
                self._start(begun)
                self._lent = stack.enter_context(begun.pop_all())
            self._left = stack.pop_all()
        return self

    def _parts(
        self, before: TreeResources, output: Output, declared: DeclaredFiles
    ) -> Iterator[CriuPart]:
        folder, options, owner = self._folder, self._options, Owner.of(self._tree)
        yield Credentials(folder)
        yield Dumpable(self._criu, options.tcp, options.checkpointed)
        yield output
        yield self._devices
        yield from registry.dump_parts(folder, Choices.of(options.tcp, owner))
        yield Files(before, folder, owner)
        self._written = WrittenFiles(before, folder, declared)
        yield self._written
        if self._pages is not None:
            yield CopiedPages(self._pages, lambda: self._running.goes_on())
        if self.tracer is not None:
            yield self.tracer
        if options.stopping is not None:
            yield _Stopping(options.stopping)

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Start CRIU, which waits, in a folder of its own and with the dump's lent to its user."""
        parts, owner = self._parts_of_dump, Owner.of(self._tree)
        work = stack.enter_context(working_folder(self._folder, owner))
        stack.enter_context(without_orphans())
        self._script = stack.enter_context(ActionScript(work, owner.uid, self._note))
        stack.enter_context(lent(self._folder, owner))
        invocation = Invocation(
            "dump",
            [*_words(self._tree, self._options), *parts.words, *ActionScript.WORDS],
            owner=owner,
            images=self._folder,
            work=work,
            descriptors=parts.descriptors,
            environment={**dump_mark(self._tree.root.pid), **parts.environment},
            capabilities=_to_dump(),
            plugins=criu_plugins() if parts.plugged else None,
            inside=self._criu.inside(self._tree.root),
        )
        self._running = stack.enter_context(self._criu.start(invocation))
        parts.started()
        self._running.wait_until_started(_START_SECONDS, self._script)

    def _note(self) -> None:
        """Let all parts act while CRIU holds the tree."""
        self._tree = scan(self._tree.root.pid)
        self._parts_of_dump.frozen(TreeResources.of(self._tree, self._handles))

    def finish(
        self,
        cancellation: Cancellation | None = None,
        handles: Sequence[MemoryHandle] = (),
    ) -> TreeDump:
        """Let CRIU continue until it has released the tree, which may have ``handles`` open. Raises
        as :func:`dump_tree` does.
        """
        self._handles = handles
        if cancellation is not None:
            cancellation.check()
        try:
            self._script.let_go_on()
            deadline = self._options.deadline
            self._running.wait_and_answer(
                deadline, cancellation, self._script, self._released, self._waits_for_us
            )
        except Internal:
            if self._script.error is None:
                raise
        if self._script.error is not None:
            raise self._script.error
        if FROZEN not in self._script.reached:
            raise Internal("criu dump never said that the tree is frozen", "report this")
        details = self._parts_of_dump.record(self._details())
        left_out = self._written.left_out
        return TreeDump(self._tree, self._folder, details, self._devices.inheritors, left_out)

    def _details(self) -> CpuDetails:
        """Return what is said of the tree's root; the parts add theirs."""
        root = self._tree.root
        return CpuDetails(
            uid=root.uid,
            gid=root.gid,
            groups=root.groups,
            privileged=self._tree.privileged,
            tcp=self._options.tcp,
            shell_job=False,
            tied_to_parent=parent_death_signal(self._folder / f"core-{root.own_pid}.img"),
            cgroups=self._cgroups,
        )

    def settle(self) -> None:
        """Wait for CRIU to end.

        Raises :class:`Internal` if it failed after all, and what :meth:`CriuPart.complete` of the
        parts raises. The pages are not touched: if they are elsewhere, they must be put into place
        before :func:`rseq_areas.clear`.
        """
        self._running.wait(self._options.deadline)
        self._lent.close()  # from here on only root can write to the folder
        self._parts_of_dump.complete()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._left.__exit__(kind, error, traceback)

    def _released(self) -> bool:
        """Return whether CRIU no longer traces any thread of the tree."""
        return not any(procfs.tracer(process.pid) for process in self._tree.living)

    def refuse(self) -> None:
        """Make CRIU give up at its next question; from any thread."""
        self._script.refuse()

    def _waits_for_us(self) -> bool:
        return self.tracer is not None and self.tracer.waits


class _Stopping(CriuPart):
    """Has the caller act last on the frozen tree, which CRIU will leave stopped."""

    def __init__(self, action: Callable[[ProcessTree], object]) -> None:
        self._action = action

    def frozen(self, tree: TreeResources) -> None:
        self._action(tree.tree)


def _to_dump() -> tuple[Capability, ...]:
    """Return the capabilities that CRIU needs to dump a user's program."""
    if _YAMA.exists() and int(_YAMA.read_text()) != 0:  # users may trace only their own children
        return (Capability.CHECKPOINT_RESTORE, Capability.SYS_PTRACE)
    return (Capability.CHECKPOINT_RESTORE,)


def _words(tree: ProcessTree, options: DumpOptions) -> list[str]:
    words = ["--tree", str(tree.root.own_pid), "--file-locks", "--ghost-limit", GHOST_LIMIT]
    # Which connections there are is looked at when the tree is frozen.
    words += ["--manage-cgroups=ignore", "--link-remap", "--tcp-close"]
    if options.stopping is not None:
        words.append("--leave-stopped")
    elif options.leave_running:
        words.append("--leave-running")
    if options.tcp == "close":
        words.append("--skip-in-flight")
    return words
