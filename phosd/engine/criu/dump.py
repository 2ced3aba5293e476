"""Dump a process tree with CRIU, and record what a restore needs besides CRIU's files."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from phosd.engine.criu import cgroup_place, connections, file_records, preflight, relinked, stdio
from phosd.engine.criu.action_script import FROZEN, ActionScript
from phosd.engine.criu.connection_record import UNREAD
from phosd.engine.criu.connections import Saved, cut_out
from phosd.engine.criu.core_image import parent_death_signal
from phosd.engine.criu.driver_files import DriverDevices
from phosd.engine.criu.inert import make_inert
from phosd.engine.criu.owned_processes import dump_mark, without_orphans
from phosd.engine.criu.page_store import PageStore
from phosd.engine.criu.preflight import TreeResources
from phosd.engine.criu.program import Criu, Invocation, Owner
from phosd.engine.criu.rights import Rights
from phosd.engine.criu.tracers import Tracer
from phosd.engine.image.cpu_manifest import CpuDetails, MappedFile, MemoryFile, OpenFile
from phosd.engine.image.manifest import FileDigest, Tree
from phosd.engine.image.private_files import file_digest, write_durably
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.tree import ProcessTree, scan
from phosd.engine.system import procfs
from phosd.engine.system.native import criu_plugins
from phosd.engine.system.privileges import Capability
from phosd.engine.system.procfs import Descriptor
from phosd.engine.system.removal import remove_trees
from phosd.errors import Busy, Internal, InvalidOption, NoSuchProcess, Unsupported

GHOST_LIMIT = "2G"
"""Size limit of unlinked files that go into an image (data loaders unlink their shared memory)."""

_LOOKS = 5
_BETWEEN_LOOKS = 0.05
_START_SECONDS = 30.0


@dataclass(frozen=True)
class DumpOptions:
    """Options of a dump. ``tcp``: ``refuse`` connections that lead outside, or ``close`` them.

    ``deadline`` in seconds. ``leave_running=False`` ends the tree after the dump; if ``stopping``
    is given, CRIU leaves the tree stopped by SIGSTOP, after that was called with the frozen tree.
    ``checkpointed`` are the processes that the driver has checkpointed when the tree is dumped.
    ``held``: it does so only while CRIU holds their threads (:mod:`phosd.engine.criu.tracers`).
    """

    tcp: str = "refuse"
    deadline: float = 600.0
    leave_running: bool = True
    stopping: Callable[[ProcessTree], object] | None = None
    checkpointed: frozenset[int] = frozenset()
    held: bool = False


@dataclass(frozen=True)
class TreeDump:
    """A finished dump: ``tree`` as it was when frozen, and what the dump holds."""

    tree: ProcessTree
    folder: Path
    details: CpuDetails
    inheritors: frozenset[int]
    """Processes that had devices of the GPU driver's, which are restored as inert."""

    def record(self, name: str, files: tuple[FileDigest, ...] | None = None) -> Tree:
        """Return the manifest's entry; ``name`` is the folder's path in the image, ``files`` those
        of the dump.

        Without them it reads every byte of the dump to hash it, so call it when the tree runs
        again.
        """
        found = digests(self.folder) if files is None else files
        return Tree(self.tree.root.own_pid, name, found, self.details, self.tree.nested)


_YAMA = procfs.PROC / "sys/kernel/yama/ptrace_scope"


@dataclass
class _Noted:
    tree: ProcessTree
    rights: Rights = field(default_factory=lambda: Rights({}))
    open_files: tuple[OpenFile, ...] = ()
    memory_files: tuple[MemoryFile, ...] = ()
    mapped_files: tuple[MappedFile, ...] = ()
    inheritors: frozenset[int] = frozenset()
    reopened: tuple[Descriptor, ...] = ()
    relinked: dict[str, str] = field(default_factory=dict)
    connections: Saved = field(default_factory=Saved)


def check(criu: Criu, tree: ProcessTree, tcp: str = "refuse") -> stdio.StdioPlan:
    """Check whether ``criu`` can dump ``tree``, which runs on. Returns where its output leads.

    Raises :class:`Unsupported` naming what cannot be dumped, :class:`NoSuchProcess` if the root has
    ended.
    """
    if tcp not in preflight.TCP_POLICIES:
        choices = ", ".join(preflight.TCP_POLICIES)
        raise InvalidOption(f"there is no tcp policy {tcp!r}", hint=f"use one of {choices}")
    refused: Unsupported | None = None
    for _ in range(_LOOKS):
        # A descriptor that the running program closes during the check can no longer be read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            rights = Rights.known_to_kernel(tree.ids)
            if criu.service is None:
                rights.require_attainable()
            resources = TreeResources.of(tree)
            try:
                preflight.require_dumpable(resources, tcp, criu.namespaces_for(tree.root.pid))
            except Unsupported as error:
                # What leads to a process that was forked meanwhile seems to lead outside, and a
                # connection may be about to be accepted: what is there twice is there to stay.
                if refused is not None and str(refused) == str(error):
                    raise
                refused = error
                tree = scan(tree.root.pid)
                time.sleep(_BETWEEN_LOOKS)
                continue
            _require_plain(tree, rights)
            return stdio.plan(tree, resources.descriptors)
        if not tree.root.alive:
            raise NoSuchProcess(f"process {tree.root.pid} has ended", hint="start it again")
    if refused is not None:
        raise refused
    raise Busy(
        f"{procfs.describe(tree.root.pid)} opens and closes files too quickly to be looked at",
        hint="try again",
    )


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
        self._noted = _Noted(tree)
        self._stack = contextlib.ExitStack()
        self.tracer: Tracer | None = None
        """What has the driver's restore threads run, if the tree has processes to be ``held``."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._devices = DriverDevices.here()
            known = TreeResources.of(self._tree)
            self._known_of_driver = known.places_of_driver()
            self._plan = check(self._criu, self._tree, self._options.tcp)
            self._cgroups = cgroup_place.noted(self._tree)
            owner = dumping_user(self._tree)
            relinked.remove_stale_links(known.mappings, owner)
            work = stack.enter_context(working_folder(self._folder, owner))
            stack.enter_context(without_orphans())
            self._script = stack.enter_context(ActionScript(work, owner.uid, self._note))
            stack.enter_context(_lent(self._folder, owner))
            held = self._options.checkpointed & set(self._tree.pids)
            if held and self._options.held:
                self.tracer = stack.enter_context(Tracer(lambda: held, self._options.deadline))
            helpers = [each for each in (self._pages, self.tracer) if each is not None]
            environment = dump_mark(self._tree.root.pid) | self._devices.environment
            for each in helpers:
                environment |= each.environment
            self._running = stack.enter_context(
                self._criu.start(
                    Invocation(
                        "dump",
                        [
                            *_words(self._tree, self._options),
                            *self._plan.words,
                            *ActionScript.WORDS,
                        ],
                        owner=owner,
                        images=self._folder,
                        work=work,
                        descriptors=[d for each in helpers for d in each.descriptors],
                        environment=environment,
                        capabilities=_to_dump(),
                        plugins=criu_plugins() if self._devices.kinds or self.tracer else None,
                        inside=self._criu.inside(self._tree.root),
                    )
                )
            )
            if self.tracer is not None:
                self.tracer.started()
            self._running.wait_until_started(_START_SECONDS, self._script)
            self._stack = stack.pop_all()
        return self

    def settle(self) -> None:
        """Wait for CRIU to end.

        Raises :class:`Internal` if it failed after all, and :class:`NotAuthorized` if it recorded
        other credentials of the program than the kernel has.
        """
        self._running.wait(self._options.deadline)
        self._stack.close()  # from here on only root can write to the folder
        self._noted.rights.require_equal(Rights.in_images(self._folder))
        if self._devices.kinds:
            make_inert(self._folder, self._noted.reopened, self._noted.tree.own)
        saved = self._noted.connections
        cut_out(self._folder, saved.inodes, close_others=self._options.tcp == "close")
        if any(saved.unread):
            write_durably(self._folder / UNREAD, b"".join(saved.unread))
        relinked.relink(self._folder, self._noted.relinked, dumping_user(self._noted.tree))

    def finish(self, cancellation: Cancellation | None = None) -> TreeDump:
        """Let CRIU continue until it has released the tree. Raises as :func:`dump_tree` does."""
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
        noted = self._noted
        root, own = noted.tree.root, noted.tree.own
        details = CpuDetails(
            uid=root.uid,
            gid=root.gid,
            groups=root.groups,
            privileged=noted.tree.privileged,
            tcp=self._options.tcp,
            shell_job=self._plan.shell_job,
            tied_to_parent=parent_death_signal(self._folder / f"core-{root.own_pid}.img"),
            endpoints=tuple(replace(each, pid=own(each.pid)) for each in self._plan.endpoints),
            open_files=tuple(replace(each, pid=own(each.pid)) for each in noted.open_files),
            memory_files=noted.memory_files,
            mapped_files=noted.mapped_files,
            cgroups=self._cgroups,
            connections=noted.connections.connections,
            devices=tuple(sorted({each.target for each in noted.reopened})),
        )
        return TreeDump(noted.tree, self._folder, details, noted.inheritors)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _released(self) -> bool:
        """Return whether CRIU no longer traces any thread of the tree."""
        return not any(procfs.traced(process.pid) for process in self._noted.tree.living)

    def refuse(self) -> None:
        """Have CRIU give up at its next question; from any thread."""
        self._script.refuse()

    def _waits_for_us(self) -> bool:
        return self.tracer is not None and self.tracer.waits

    def _note(self) -> None:
        """Record what CRIU does not save of the frozen tree; wait until its pages are copied."""
        noted = self._noted
        noted.tree = scan(self._tree.root.pid)
        found = TreeResources.of(noted.tree)
        noted.rights = Rights.known_to_kernel(noted.tree.ids)
        _require_plain(noted.tree, noted.rights)
        preflight.require_dumpable(
            found,
            self._options.tcp,
            self._criu.namespaces_for(noted.tree.root.pid),
            self._options.checkpointed,
        )
        self._replan(found)
        mappings = found.own_mappings
        noted.open_files = file_records.open_files(found.descriptors, dumping_user(noted.tree))
        noted.mapped_files = file_records.mapped_files(mappings)
        noted.relinked = relinked.names(mappings)
        noted.memory_files = file_records.save_memory_files(mappings, self._folder, noted.relinked)
        noted.inheritors = found.users_of_driver
        noted.reopened = tuple(found.of_management)
        noted.connections = connections.save(connections.find(found.descriptors), found.descriptors)
        preflight.require_inherited(found, self._known_of_driver)
        if self._pages is not None:
            self._pages.wait(self._running.goes_on)
        if self._options.stopping is not None:
            self._options.stopping(noted.tree)

    def _replan(self, found: TreeResources) -> None:
        """Plan again where the tree's output leads. Of who came and went while the tree ran, only
        one end of a pipe may have been seen; a restore would take its other end for lost.

        Raises :class:`Busy` if CRIU would have to be told something else.
        """
        before, self._plan = self._plan, stdio.plan(found.tree, found.descriptors)
        told, needed = set(before.words), set(self._plan.words)
        if needed - told or before.shell_job != self._plan.shell_job:
            raise Busy(
                f"{procfs.describe(found.tree.root.pid)} changed its session, or where its output "
                "leads, while it was saved",
                hint="try again",
            )


def _require_plain(tree: ProcessTree, rights: Rights) -> None:
    """Require that all threads of a user's program have only the user's credentials."""
    user = dumping_user(tree)
    if not user.is_root:
        rights.require_plain(user)


def _to_dump() -> tuple[Capability, ...]:
    """Return the capabilities that CRIU needs to dump a user's program."""
    if _YAMA.exists() and int(_YAMA.read_text()) != 0:  # users may trace only their own children
        return (Capability.CHECKPOINT_RESTORE, Capability.SYS_PTRACE)
    return (Capability.CHECKPOINT_RESTORE,)


def dumping_user(tree: ProcessTree) -> Owner:
    """Return the user that CRIU runs as: the tree's owner, or root for a tree of several users."""
    if tree.privileged:
        return Owner(0, 0, ())
    return Owner(tree.root.uid, tree.root.gid, tree.root.groups)


def digests(folder: Path) -> tuple[FileDigest, ...]:
    """Return the digest of every file below ``folder``."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(max_workers=8) as pool:
        return tuple(pool.map(lambda path: _digest(path, folder), paths))


def _digest(path: Path, folder: Path) -> FileDigest:
    with path.open("rb") as file:
        sha256 = file_digest(file.fileno())
    return FileDigest(str(path.relative_to(folder)), path.stat().st_size, sha256)


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


@contextlib.contextmanager
def _lent(folder: Path, owner: Owner) -> Iterator[None]:
    """Give ``folder`` to ``owner`` inside the context, and then to root alone with all files."""
    require_private(folder)
    os.chown(folder, owner.uid, owner.gid)
    try:
        yield
    finally:
        folder.chmod(0o700)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)


def require_private(folder: Path) -> None:
    """Raise :class:`Internal` unless one of the folders above ``folder`` is open to root alone."""
    for parent in folder.resolve().parents:
        status = parent.stat()
        if status.st_uid == 0 and status.st_mode & 0o077 == 0:
            return
    raise Internal(
        f"{folder} can be reached by every user", hint="its parent must belong to root, mode 0700"
    )


@contextlib.contextmanager
def working_folder(folder: Path, owner: Owner) -> Iterator[Path]:
    """Create a folder beside ``folder`` for CRIU's log, which ``owner`` may write to."""
    work = Path(tempfile.mkdtemp(prefix="criu-", dir=folder.parent))
    try:
        os.chown(work, owner.uid, owner.gid)
        yield work
    finally:
        remove_trees([work])
