"""Run a checkpoint: find the group, choose a mode, make the image, publish it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from phosd.engine.criu.dump import landlock
from phosd.engine.criu.dump.check import check as preflight_check
from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.dump.dumps import CpuParts
from phosd.engine.image.manifest import Block, Manifest
from phosd.engine.image.writer import MemoryTierFull
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import (
    bytes_to_store,
    check_space,
    require_room_elsewhere,
)
from phosd.engine.operations.checkpoint.attempt import Attempt, EndedUnasked
from phosd.engine.operations.checkpoint.by_driver import by_driver
from phosd.engine.operations.checkpoint.choose_mode import Choice, choose
from phosd.engine.operations.checkpoint.concurrent import concurrent
from phosd.engine.operations.checkpoint.options import CheckpointOptions
from phosd.engine.operations.checkpoint.publication import Publication, make_durable
from phosd.engine.operations.checkpoint.recopy import recopy
from phosd.engine.operations.checkpoint.standing import ProgramEnded, Standing
from phosd.engine.operations.checkpoint.stop import stop
from phosd.engine.operations.move_checks import bytes_in_use, claimed, gpus_in_use, require_alone
from phosd.engine.operations.safe_points import SafePoints
from phosd.engine.operations.torch_cache import release_cached
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.group import CheckpointGroup, explain_death
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import procfs
from phosd.errors import InvalidOption, MisSpeculation, PhosError, Reason, Unsupported

MODES: dict[str, Callable[[Attempt], tuple[Block, ...]]] = {
    "concurrent": concurrent,
    "recopy": recopy,
    "stop": stop,
    "driver": by_driver,
}
"""What saves a group's device memory, and has its processes saved, by mode."""
_LADDER = ("concurrent", "recopy", "stop")
"""The order of fallback: after a wrong guess the job goes on in the next of these modes."""
_REPETITIONS = 3
"""Times that an attempt is repeated because a process ended: data loaders start new workers with
each epoch.
"""


def checkpoint(node: Node, pid: int, options: CheckpointOptions, progress: Progress) -> Manifest:
    """Save the tree of ``pid``, and all processes that share device memory with it, as an image.

    The program is stopped in the phases marked ``stopped``. If anything fails, the program runs on:
    each step that stops it is a context whose end undoes it.
    """
    options.require_possible()
    progress.phase("prepare")
    with ExitStack() as job:
        group = job.enter_context(
            discover_group(pid, node.config.runtime_dir, dumpable(node, job, options))
        )
        landlock.require_none(node.criu, group, progress)
        require_alone_if_shared(group)
        require_one_tree_if_nested(group)
        choice = choose(group, options.mode, options.experience.past, stands=options.stands)
        if choice.why:
            progress.note(f"mode {choice.mode}: {choice.why}")
        progress.about_to_touch(group.affected)
        parent = job.enter_context(_parent(node, group, options.parent))
        job.callback(node.store.spares.drop)
        outcome = "" if options.stands else "nothing was saved; "  # it may be, and is told then
        job.enter_context(explain_death(group, "checkpoint", outcome))
        if options.release_cached:
            release_cached(group, progress)
        manifest = _Checkpoint(node, group, parent, options, progress).run(choice)
    # The processes are free for other jobs.
    if options.durable and not options.stands:
        make_durable(node, manifest.id, progress)
    return manifest


@dataclass(frozen=True)
class _Checkpoint:
    """One checkpoint of ``group``: attempts in one mode after another, until no guess is wrong.

    An attempt during which a worker ended is repeated a few times, and one that needed more memory
    than was expected once, on the disk.
    """

    node: Node
    group: CheckpointGroup
    parent: Manifest | None
    options: CheckpointOptions
    progress: Progress

    def run(self, choice: Choice) -> Manifest:
        """Make the image in the chosen mode, or after a wrong guess in one that guesses less."""
        repeated, estimated = 0, True
        while True:
            try:
                return self._make_image(choice, estimated=estimated)
            except MisSpeculation as wrong:
                if self.options.fallback == "none" or choice.mode == _LADDER[-1]:
                    raise
                choice = _after_wrong_guess(choice, wrong)
                self.progress.note(f"mode {choice.mode}: {choice.why}")
            except EndedUnasked as ended:
                if repeated == _REPETITIONS:
                    raise
                repeated += 1
                self.progress.note(f"tried again: {ended.what}")
            except MemoryTierFull as full:
                estimated = False
                self.progress.note(f"tried again: {full.what}")
            self.progress.phase("prepare")

    def _make_image(self, choice: Choice, *, estimated: bool) -> Manifest:
        node, group, options = self.node, self.group, self.options
        points = SafePoints(
            group, options, node.config.callback_deadline, self.progress, options.wish
        )
        # Before anything is held that others may wait for.
        with points.reached():
            manifest = self._save(choice, estimated=estimated)
        if options.then != "end":
            points.saved(options.then, options.name)
        return manifest

    def _save(self, choice: Choice, *, estimated: bool) -> Manifest:
        """Make the image. ``estimated``: expect that only what differs has to be stored."""
        node, group, parent, progress = self.node, self.group, self.parent, self.progress
        in_use = bytes_in_use(group)
        require_room_elsewhere(in_use)
        node.movers.begin(in_use)
        to_store = bytes_to_store(node, group) if estimated and choice.mode != "driver" else None
        needs = check_space(node, group, choice.mode, self.options.limits, to_store)
        owner = group.owner
        standing = Standing(node.stopped, progress)
        with (
            node.store.begin(
                owner,
                self.options.limits.quota(owner),
                node.suspend_store.taken,
                needs.image,
            ) as writer,
            node.staging.folder(needs.cpu) as staging,
            CpuParts(
                node.criu,
                writer,
                staging,
                self._dump_options(choice, standing),
                pages=needs.cpu,
            ) as cpu,
        ):
            # How much of the memory other images have is known only after the copying.
            writer.reserve(needs.cpu + max(0, needs.gpu - writer.shareable_bytes))
            if node.store.memory not in (None, writer.tier):
                progress.note("written to the disk at once: the memory tier has no room for it")
            writer.limit(needs.room)
            shared = 0 if needs.fits else writer.shareable_bytes
            node.store.spares.preallocate(max(0, needs.gpu - shared), writer.tier)
            kept = tuple(map(node.movers.mover, sorted(in_use)))
            publication = Publication(
                node, group, choice, in_use, parent, writer, cpu, progress, self.options
            )
            attempt = Attempt(
                node,
                group,
                writer,
                cpu,
                self.options,
                progress,
                kept,
                standing,
                partial(self._complete, publication, standing),
            )
            try:
                blocks = MODES[choice.mode](attempt)
            except ProgramEnded as ended:
                return ended.manifest
            except PhosError as error:
                if publication.manifest is not None:
                    error.add_note(f"image {publication.manifest.id} is complete")
                raise
            return publication.manifest or publication.publish(blocks)

    def _dump_options(self, choice: Choice, standing: Standing) -> DumpOptions:
        return DumpOptions(
            tcp=self.options.tcp,
            checkpointed=frozenset(self.group.gpu_pids),
            held=choice.mode == "driver",
            stopping=standing.expect if self.options.stands else None,
            kept=self.node.config.kept_files,
        )

    def _complete(
        self, publication: Publication, standing: Standing, blocks: tuple[Block, ...]
    ) -> None:
        """Publish the image of a program that stands still, and end the program, or hold it."""
        options, progress = self.options, self.progress
        manifest = publication.publish(blocks)
        if options.durable or (options.then == "end" and not options.in_memory):
            make_durable(self.node, manifest.id, progress, stopped=True)
        progress.made(manifest.id)
        if options.then == "end":
            standing.end(manifest)
        standing.hold()


def require_one_tree_if_nested(group: CheckpointGroup) -> None:
    """Raise :class:`Unsupported` if one of several trees is in a pid namespace of its own: restored
    they would be in one each, and not find each other by their pids.
    """
    nested = next((tree for tree in group.trees if tree.nested), None)
    if nested is not None and len(group.trees) > 1:
        other = next(tree for tree in group.trees if tree is not nested)
        raise Unsupported(
            f"{procfs.describe(nested.root.pid)} is in a pid namespace of its own, and shares "
            f"device memory with {procfs.describe(other.root.pid)}, which is not below it",
            hint="start both with `phos run --no-pidns`",
            reason=Reason.SHARED_MEMORY,
        )


def require_alone_if_shared(group: CheckpointGroup) -> None:
    """Raise as :func:`~phosd.engine.operations.move_checks.require_alone` does for ranks."""
    if group.shares_memory():
        require_alone(gpus_in_use(group), group.pids)


def dumpable(
    node: Node, job: ExitStack, options: CheckpointOptions
) -> Callable[[ProcessTree], object]:
    """Return the check for each tree of the group; it also claims the tree's processes for the job,
    since connections of others to their hooks would look to CRIU like the program's own.
    """
    claim = claimed(node, job, options.caller)

    def check(tree: ProcessTree) -> None:
        claim(tree)
        preflight_check(node.criu, tree, options.tcp)

    return check


def _after_wrong_guess(choice: Choice, wrong: MisSpeculation) -> Choice:
    following = _LADDER[_LADDER.index(choice.mode) + 1]
    return Choice(following, f"mode {choice.mode} guessed wrong ({wrong.what})")


@contextmanager
def _parent(node: Node, group: CheckpointGroup, image_id: str) -> Iterator[Manifest | None]:
    """Open the parent image. It cannot be deleted inside the context."""
    if not image_id:
        yield None
        return
    with node.store.open(image_id) as image:
        owner = group.owner
        if image.manifest.owner != owner:
            raise InvalidOption(
                f"image {image_id} belongs to user {image.manifest.owner}, the program to {owner}",
                hint="content is shared within one user only: give an image of the same owner",
            )
        yield image.manifest
