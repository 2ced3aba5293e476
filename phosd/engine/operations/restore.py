"""Restore the processes of an image (docs/design/protocols.md, Restore).

Nothing on the node is touched before every check has passed. CRIU works while the device memory is
loaded; nothing of the program runs before all of that has been hashed on its GPU, and CRIU's files,
too. Its gates open only after its state has been verified.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from phosd.engine.criu import restore as criu_restore
from phosd.engine.criu.cgroup_place import of_process
from phosd.engine.criu.clone import Clone, CloneFiles
from phosd.engine.criu.driver_turn import HeldRestore
from phosd.engine.criu.file_worker import Copied, Policy
from phosd.engine.criu.restore import Restored, TreeRestoreOptions
from phosd.engine.criu.saved_tree import saved_trees
from phosd.engine.criu.tree_files import TreeFiles
from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import BlockFlag, HookLink, HookState
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.affected import AffectedProcess, AffectedSet, now
from phosd.engine.job.checks import Check, Finding, findings, require_all
from phosd.engine.job.progress import Beside, Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.node.image_placement import ImagePlacement
from phosd.engine.node.machine import same_machine
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import require_device_memory, require_room_for_processes
from phosd.engine.operations.image_gpus import blocks_need, place, placed_image
from phosd.engine.operations.load import LoadedMemory, loaded
from phosd.engine.operations.move_checks import require_alone, require_shareable
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import GpuPairs
from phosd.engine.program.process import placed
from phosd.errors import Internal, Reason, Unsupported

if TYPE_CHECKING:  # mypy cannot evaluate a Literal of computed values
    Files = str
    Cloned = str
else:
    Files = Literal[tuple(map(str, Policy))]
    Cloned = Literal[tuple(map(str, CloneFiles))]

CloneName = Annotated[str, msgspec.Meta(pattern=r"\A([A-Za-z0-9][A-Za-z0-9_-]{0,31})?\Z")]


class RestoreOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a restore.

    ``files``: what to do with files that the program only wrote to and that grew since: ``keep``
    them (and refuse unless they are appended to) or ``cut`` them to their old length, with the rest
    kept in a file beside. ``output``: an append-only file for the program's output, if its standard
    output was a pipe or a terminal; empty: none. ``end``: a file that tells how the program ended,
    once it has: a line, ``exit CODE`` or ``signal NUMBER``. The program's user writes both.
    ``pid_namespace``: the program gets a pid namespace of its own, in which its ids are free, also
    if it was in none. ``clone``: the name of a clone of the program, which is restored in such a
    namespace, beside the program and other clones; empty: the program itself is restored.
    ``clone_files``: a clone writes to a ``copy`` of each file on the disk that the program wrote to
    (``FILE.clone-NAME``, as the file was at the checkpoint), or may ``share`` those that it only
    appends to, or there is none if it would write to any (``refuse``).
    ``gpu``: a GPU of this node, or ``OLD:NEW`` for each of several (``placement.py``); in place of
    those that are not named, it gets the same, or others like them. ``cgroups_of``: the pid of a
    process of the image's owner, in whose cgroups the program goes on; 0: in those that it was in.
    """

    files: Files = "keep"
    output: str = ""
    end: str = ""
    pid_namespace: bool = False
    clone: CloneName = ""
    clone_files: Cloned = "copy"
    gpu: str = ""
    cgroups_of: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0


@dataclass(frozen=True)
class RestoreResult:
    """The pids of the requested root and of all restored processes, and the duration in seconds."""

    pid: int
    pids: tuple[int, ...]
    seconds: float


def restore(
    node: Node, image_id: str, options: RestoreOptions, progress: Progress
) -> RestoreResult:
    """Restore image ``image_id`` with its old pids, perhaps in a pid namespace, on its GPUs or
    others; or a clone of it.
    """
    started = time.monotonic()
    progress.phase("admission")
    with ExitStack() as job:
        image = job.enter_context(node.store.open(image_id))
        manifest = image.manifest
        cpu = job.enter_context(_CpuSide(node, manifest, options))
        job.enter_context(node.claim(cpu.pids_here))
        choice = placed_image(node, manifest, options.gpu)
        admission = _Admission(node, manifest, cpu, lambda: job.enter_context(choice))
        require_all(admission.checks())
        placement = admission.placement
        gpus = frozenset(placement.moves[block.gpu] for block in manifest.blocks)
        if placement.changed:
            progress.note(placement.text)
        progress.check()
        progress.about_to_touch(_affected(manifest, cpu.pids_here, gpus))

        node.movers.begin(gpus)
        progress.phase("load", bytes_total=manifest.device_bytes)
        point(Point.RESTORE_LOAD)
        loading = job.enter_context(_Loading(node, image, cpu, placement, progress))
        require_all(cpu.files_checks(progress))
        point(Point.RESTORE_CPU)
        with Undo() as undo:
            with loading.named_if_damaged():
                for restored in cpu.restore(progress, loading.complete, placement.pairs):
                    undo.add(restored.abandon)
            memory = loading.memory
            manifest = cpu.as_restored()
            pids = tuple(p.pid for p in manifest.processes)
            job.enter_context(node.claim({*pids} - {*cpu.pids_here}))
            memory.belongs_to(cpu.ids)
            progress.phase("control")
            point(Point.RESTORE_CONTROL)
            with node.gpu_locks.locked(gpus, progress):
                users = [p.pid for p in manifest.processes if p.gpu]
                if manifest.mode == "driver":  # restored while CRIU held their threads
                    driver_checkpoint.require_running(users)
                else:
                    driver_checkpoint.resume(users, placement.pairs)
            progress.phase("map")
            point(Point.RESTORE_MAP)
            links = [job.enter_context(link) for link in _woken_links(node, manifest)]
            for link in links:
                _require_placed(link, manifest, placement.moves)
                if manifest.shares_memory and link.hello().makes_memory:
                    require_shareable({link.pid: ()}, placement.moves.values())
                memory.hand_back(link)
            progress.phase("verify")
            point(Point.RESTORE_VERIFY)
            cpu.require_settled()
            _require_running(manifest, links)
            point(Point.RESTORE_OPEN)
            memory.keep(links)
            for link in links:
                link.open_gate()
            undo.forget()
        cpu.settle()
        for file in cpu.copies:
            progress.note(f"the clone writes to {file.target}, not to {file.path}")
        progress.finish()
    return RestoreResult(manifest.trees[0].root, pids, time.monotonic() - started)


def try_restore(
    node: Node, image_id: str, options: RestoreOptions, progress: Progress
) -> list[Finding]:
    """Return what a restore of the image checks before it begins; nothing is restored.

    Raises :class:`NoSuchImage` and :class:`ImageCorrupt`.
    """
    with node.store.open(image_id) as image:
        manifest = image.manifest
        with _CpuSide(node, manifest, options) as cpu:

            def claim() -> None:
                with node.claim(cpu.pids_here):
                    pass

            def checks() -> Iterator[Check]:
                yield "jobs", claim
                choose = partial(place, node, manifest, options.gpu)
                yield from _Admission(node, manifest, cpu, choose).checks()
                yield from cpu.files_checks(progress)

            return findings(checks())


class _Admission:
    """The checks before a restore; one of them has the GPUs chosen."""

    def __init__(
        self,
        node: Node,
        manifest: Manifest,
        cpu: "_CpuSide",
        choose: Callable[[], ImagePlacement],
    ) -> None:
        self._node = node
        self._manifest = manifest
        self._cpu = cpu
        self._choose = choose
        self._placement: ImagePlacement | None = None

    @property
    def placement(self) -> ImagePlacement:
        """The GPUs, once the checks have passed."""
        assert self._placement is not None
        return self._placement

    def checks(self) -> Iterator[Check]:
        """Yield the checks: one is run before the next is made. Those of files go on beside them.
        What depends on the GPUs is not checked if none could be chosen.
        """
        manifest = self._manifest
        yield from same_machine(manifest, self._node.criu, self._node.config.runtime_dir)
        yield from self._cpu.admission()
        yield "GPUs", self._place  # the program has ended, whose memory fills them otherwise
        if self._placement is None:
            return
        needs = blocks_need(manifest, self._placement.moves)
        yield "device memory", partial(require_device_memory, self._node, needs)
        if manifest.shares_memory:  # beside a clone, its original is another program
            yield "other programs", partial(require_alone, needs.keys(), self._cpu.pids_here)

    def _place(self) -> str:
        self._placement = self._choose()
        return self._placement.text


class _CpuSide:
    """CRIU's part of a restore: one process tree after the other."""

    def __init__(self, node: Node, manifest: Manifest, options: RestoreOptions) -> None:
        self._criu = node.criu
        self._manifest = manifest
        output = Path(options.output) if options.output else None
        end = Path(options.end) if options.end else None
        self._trees = saved_trees(manifest, node.store.image_folder(manifest.id))
        # Several trees are refused.
        clone = Clone(self._trees[0], options.clone, CloneFiles(options.clone_files))
        self._options = TreeRestoreOptions(
            files=Policy(options.files),
            output=output,
            end=end,
            pid_namespace=options.pid_namespace or bool(options.clone),
            image=manifest.id,
            clone=clone if options.clone else None,
            cgroups=of_process(options.cgroups_of, manifest.owner) if options.cgroups_of else None,
        )
        self._restored: list[Restored] = []
        self._opened = ExitStack()
        self._files = [
            self._opened.enter_context(TreeFiles(tree, self._options.files, self._options.clone))
            for tree in self._trees
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def copies(self) -> Sequence[Copied]:
        """The files that a clone has for itself."""
        return self._options.clone.copies if self._options.clone is not None else ()

    @property
    def pids_here(self) -> list[int]:
        """The pids that processes are to get which get no pid namespace of their own."""
        everywhere = self._options.pid_namespace
        return [
            process.pid
            for process in self._manifest.processes
            if not everywhere and not self._manifest.trees[process.tree].pid_namespace
        ]

    @property
    def ids(self) -> dict[int, int]:
        """The ids of the restored processes, by those that they were saved with."""
        return {saved: now for restored in self._restored for saved, now in restored.ids.items()}

    def as_restored(self) -> Manifest:
        """Return the manifest with the pids that the processes have now.

        Raises :class:`Internal` if one has ended.
        """
        ids = self.ids
        try:
            return msgspec.structs.replace(
                self._manifest,
                processes=tuple(
                    msgspec.structs.replace(p, pid=ids[p.pid]) for p in self._manifest.processes
                ),
                trees=tuple(
                    msgspec.structs.replace(tree, root=ids[tree.root])
                    for tree in self._manifest.trees
                ),
            )
        except KeyError as error:
            raise Internal(
                f"process {error} of the restored program has ended at once",
                hint="its own log may say why",
            ) from error

    def admission(self) -> Iterator[Check]:
        """Yield the checks that pids are free, and the owner may restore the trees; with these
        begin those of their files.
        """
        yield "pid namespaces", self._require_one_namespace
        if self._options.clone is not None:
            yield "host memory", partial(require_room_for_processes, self._manifest)
        for tree, files in zip(self._trees, self._files, strict=True):
            yield from criu_restore.admission_checks(self._criu, tree, self._options, files)

    def files_checks(self, progress: Progress) -> Iterator[Check]:
        """Yield the checks that files are as recorded."""
        for tree, files in zip(self._trees, self._files, strict=True):
            yield criu_restore.files_check(tree, files, progress)

    def _require_one_namespace(self) -> None:
        """Raise :class:`Unsupported` if several trees were to be in a pid namespace each: they find
        each other by their pids.
        """
        if self._options.pid_namespace and len(self._trees) > 1:
            roots = ", ".join(str(tree.root) for tree in self._manifest.trees)
            raise Unsupported(
                f"the image has {len(self._trees)} programs that share device memory (pids {roots})"
                ", which cannot have a pid namespace each",
                hint="restore it without a pid namespace",
                reason=Reason.SHARED_MEMORY,
            )

    def check_bytes(self) -> None:
        """Check CRIU's files against their recorded digests."""
        for tree in self._trees:
            tree.check_bytes()

    def restore(
        self, progress: Progress, complete: Callable[[], bool], pairs: GpuPairs
    ) -> Iterator[Restored]:
        """Restore each tree; its GPU processes sleep in the hook, or have been restored by the
        driver, by ``pairs`` on other GPUs. Nothing runs before ``complete`` returns True.
        """
        for index, tree in enumerate(self._trees):
            options = self._options if index == 0 else replace(self._options, end=None)
            restored = criu_restore.restore_tree(
                self._criu,
                tree,
                options,
                progress,
                self._held(index, pairs),
                complete,
                self._files[index],
            )
            self._restored.append(restored)
            yield restored

    def _held(self, tree: int, pairs: GpuPairs) -> HeldRestore | None:
        """Return what the driver does while CRIU holds a tree; None where hooks keep its threads
        out of the driver.
        """
        pids = [p.pid for p in self._manifest.processes if p.gpu and p.tree == tree]
        if self._manifest.mode != "driver" or not pids:
            return None
        return HeldRestore(
            frozenset(pids),
            driver_checkpoint.restore_threads,
            partial(driver_checkpoint.restore_all, pairs=pairs),
        )

    def require_settled(self) -> None:
        """Raise :class:`Internal` if a tree has ended at once."""
        for restored in self._restored:
            restored.require_settled()

    def settle(self) -> None:
        """Remove what was kept to undo the restore."""
        for restored in self._restored:
            restored.settle()


class _Loading:
    """What is read beside CRIU's work: device memory, which is loaded and hashed on its GPU, and
    CRIU's files, which are hashed.

    The phase ``load`` ends when the device memory is there; what CRIU needs longer is ``cpu``.
    """

    def __init__(
        self,
        node: Node,
        image: Image,
        cpu: _CpuSide,
        placement: ImagePlacement,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._part = Beside(progress)
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor(2)
        self._hashed = self._pool.submit(cpu.check_bytes)
        self._loaded = self._pool.submit(
            lambda: self._stack.enter_context(loaded(node, image, self._part, placement.moves))
        )

    def complete(self) -> bool:
        """Return whether all of it is there, and as it was saved. Raises what went wrong."""
        parts: tuple[Future[Any], ...] = (self._hashed, self._loaded)
        for part in parts:
            if part.done():
                part.result()
        if self._loaded.done() and self._progress.phases[-1].name == "load":
            self._progress.phase("cpu")
        return all(part.done() for part in parts)

    @property
    def memory(self) -> LoadedMemory:
        """The device memory, once it is complete."""
        return self._loaded.result()

    @contextmanager
    def named_if_damaged(self) -> Iterator[None]:
        """If CRIU fails in the context, raise :class:`ImageCorrupt` in place of its words, if its
        files are damaged.
        """
        try:
            yield
        except Internal:
            self._hashed.result()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._part.cancel()
        self._pool.shutdown()
        self._stack.close()


def _affected(manifest: Manifest, pids: Collection[int], gpus: Collection[int]) -> AffectedSet:
    """Return the processes that the restore will create on ``gpus``, of which these pids are known
    before.
    """
    processes = (
        AffectedProcess(p.pid, None, gpu=p.gpu, hooked=p.hooked)
        for p in manifest.processes
        if p.pid in pids
    )
    return AffectedSet(tuple(processes), tuple(sorted(gpus)), manifest.id, now())


def _require_placed(link: HookLink, manifest: Manifest, moves: Mapping[int, int]) -> None:
    """Raise :class:`Internal` unless the driver has put a process on the GPUs on which its memory
    was loaded. It would not notice that it reaches that from another one.
    """
    there = {
        block.id: gpu
        for block, gpu in placed(link.hello(), link.list_blocks())
        if gpu >= 0 and not block.flags & BlockFlag.HOST_LOCATED
    }
    for block in manifest.blocks:
        pid, gpu = manifest.processes[block.process].pid, moves[block.gpu]
        if pid == link.pid and there.get(block.id, gpu) != gpu:
            raise Internal(
                f"the driver has restored process {pid} on GPU {there[block.id]} instead of GPU"
                f" {gpu}",
                hint="restore it on the GPUs that it had (`--gpu`), and report this",
            )


def _woken_links(node: Node, manifest: Manifest) -> Iterator[HookLink]:
    """Wake and connect to the hooks of the restored processes, which sleep since the dump."""
    for process in manifest.processes:
        if process.hooked:
            link = HookLink(process.pid, node.config.runtime_dir)
            link.reattach()
            yield link


def _require_running(manifest: Manifest, links: Sequence[HookLink]) -> None:
    """Raise unless all processes run: CRIU may succeed and the program die a moment later."""
    for process in manifest.processes:
        if (
            process.gpu
            and (state := driver_checkpoint.state(process.pid))
            is not driver_checkpoint.State.RUNNING
        ):
            raise Internal(
                f"restored process {process.pid} is {state.name.lower() if state else 'gone'},"
                " not running",
                hint="see the program's output and the driver's log (dmesg)",
            )
    for link in links:
        if link.hello().state is HookState.PARKED:
            raise Internal(
                f"the memory of restored process {link.pid} is not mapped", hint="report this"
            )
