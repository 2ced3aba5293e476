"""Restore an image's process trees with CRIU, one after the other."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.clone import Clone, CloneFiles, ClonePorts
from phosd.engine.criu.restore.driver_phase import HeldRestore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import Restored
from phosd.engine.criu.restore.saved_tree import saved_trees
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.criu.run.cgroup_place import of_process
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.checks import Check
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import require_room_for_processes
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.original import require_ended
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import GpuPairs
from phosd.engine.program.follower import of_user
from phosd.errors import Internal, Reason, Unsupported


class CpuSide:
    """CRIU's part of a restore: one process tree after the other."""

    def __init__(self, node: Node, manifest: Manifest, options: RestoreOptions) -> None:
        self._node = node
        self._criu = node.criu
        self._manifest = manifest
        output = Path(options.output) if options.output else None
        end = Path(options.end) if options.end else None
        self._trees = saved_trees(manifest, node.store.image_folder(manifest.id))
        # Several trees are refused.
        policies = CloneFiles(options.clone_files), ClonePorts(options.clone_ports)
        clone = Clone(self._trees[0], options.clone, *policies)
        self._options = TreeRestoreOptions(
            files=Policy(options.files),
            output=output,
            end=end,
            follower=of_user(options.follower, manifest.owner) if options.follower else None,
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

    def tell_copies(self, progress: Progress) -> None:
        """Note the files and the ports that a clone has for itself."""
        clone = self._options.clone
        if clone is None:
            return
        for file in clone.copies:
            progress.note(f"the clone writes to {file.target}, not to {file.path}")
        for port, other in sorted(clone.moved.items()):
            progress.note(f"the clone listens on port {other}, not on port {port}")

    def tell_files(self, progress: Progress) -> None:
        """Note what is done with files that are not as they were saved."""
        for files in self._files:
            for told in files.told:
                progress.note(told)

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
        """Yield the checks that the program has ended and pids are free, and the owner may restore
        the trees; with these begin those of their files.
        """
        yield "pid namespaces", self._require_one_namespace
        elsewhere = len(self.pids_here) < len(self._manifest.processes)
        if self._options.clone is None and (elsewhere or self._manifest.name):
            yield "original", partial(require_ended, self._node, self._manifest)
        if self._options.clone is not None:
            yield "host memory", partial(require_room_for_processes, self._manifest)
        for tree, files in zip(self._trees, self._files, strict=True):
            yield from admission.admission_checks(self._criu, tree, self._options, files)

    def files_checks(self, progress: Progress) -> Iterator[Check]:
        """Yield the checks that files are as recorded."""
        for tree, files in zip(self._trees, self._files, strict=True):
            yield admission.files_check(tree, files, progress)

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
        self,
        progress: Progress,
        complete: Callable[[], bool],
        pairs: GpuPairs,
        memory: Callable[[str], int],
    ) -> Iterator[Restored]:
        """Restore each tree; its GPU processes sleep in the hook, or have been restored by the
        driver, by ``pairs`` on other GPUs. Nothing runs before ``complete`` returns True.
        ``memory`` returns a descriptor of device memory that a tree had open, by its name.
        """
        for index, tree in enumerate(self._trees):
            opened = {name: memory(name) for name in tree.details.device_memory}
            options = replace(self._options, memory=opened)
            if index:
                options = replace(options, end=None, follower=None)
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
