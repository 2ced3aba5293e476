"""Say what would stand in the way of a checkpoint, and do nothing."""

from contextlib import ExitStack
from functools import partial

from phosd.engine.criu.dump import landlock
from phosd.engine.image.quota import SpaceReservation, require_within
from phosd.engine.job.checks import Finding, findings
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import bytes_to_store, check_space
from phosd.engine.operations.checkpoint.checkpoint import (
    dumpable,
    require_alone_if_shared,
    require_one_tree_if_nested,
)
from phosd.engine.operations.checkpoint.choose_mode import choose
from phosd.engine.operations.checkpoint.options import CheckpointOptions
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.group import CheckpointGroup
from phosd.errors import OutOfSpace, PhosError
from phosd.units import human_bytes

_NO_IMAGE = ""
"""Stands for the image that would be made."""


def try_checkpoint(
    node: Node, pid: int, options: CheckpointOptions, progress: Progress
) -> list[Finding]:
    """Return what a checkpoint of ``pid`` checks before it begins. The program runs on.

    Raises :class:`InvalidOption`.
    """
    options.require_possible()
    with ExitStack() as job:
        try:
            group = job.enter_context(
                discover_group(pid, node.config.runtime_dir, dumpable(node, job, options))
            )
        except PhosError as error:
            return [Finding("processes", error)]
        return [
            Finding("processes", found=_named(group)),
            *findings(
                [
                    ("sandbox", partial(landlock.require_none, node.criu, group, progress)),
                    ("other programs", partial(require_alone_if_shared, group)),
                    ("pid namespace", partial(require_one_tree_if_nested, group)),
                ]
            ),
            *_mode_and_room(node, group, options),
        ]


def _named(group: CheckpointGroup) -> str:
    users = ", ".join(map(str, group.gpu_pids))
    return f"{len(group.pids)} in all; with GPU: {users}"


def _mode_and_room(node: Node, group: CheckpointGroup, options: CheckpointOptions) -> list[Finding]:
    """The room depends on the mode."""
    try:
        choice = choose(group, options.mode, options.experience.past, stands=options.stands)
    except PhosError as error:
        return [Finding("mode", error)]

    def room() -> str:
        try:
            needs = check_space(node, group, choice.mode, options.limits)
        except OutOfSpace:
            if choice.mode == "driver":
                raise
            # Not before: it takes a mover, which takes some of the GPU.
            to_store = bytes_to_store(node, group)
            needs = check_space(node, group, choice.mode, options.limits, to_store)
        size = needs.cpu + max(0, needs.gpu - node.store.shareable_bytes(group.owner))
        if (quota := options.limits.quota(group.owner)) is not None:
            require_within(
                quota,
                _NO_IMAGE,
                {**node.store.reservations, _NO_IMAGE: SpaceReservation(group.owner, size)},
                node.store.list(),
                node.suspend_store.taken(group.owner),
            )
        return f"about {human_bytes(needs.cpu + needs.gpu)}"

    why = f"{choice.mode}: {choice.why}" if choice.why else choice.mode
    return [Finding("mode", found=why), *findings([("memory and disk", room)])]
