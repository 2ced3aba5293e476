"""Swap two programs on GPUs that have room for only one: suspend one, resume the other."""

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.coming_back import require_resumable
from phosd.engine.operations.permissions import ROOT
from phosd.engine.operations.pinned_shelf import keep_pinned
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendChoices, SuspendOptions, suspend
from phosd.errors import InvalidOption, PhosError


class SwapOptions(SuspendChoices, frozen=True):
    """Options of a swap: those of :class:`SuspendOptions`, for the program that is suspended."""

    caller: int = ROOT
    limits: DiskLimits = UNLIMITED


def swap(node: Node, leaving: int, coming: int, options: SwapOptions, progress: Progress) -> None:
    """Suspend the program of process ``leaving`` and resume that of ``coming`` in its place.

    If ``coming`` cannot be resumed, ``leaving`` is resumed, and the error is raised.
    """
    waiting = node.suspended.of(coming)
    require_resumable(waiting, options.caller)
    how = SuspendOptions(
        where=options.where,
        deadline=options.deadline,
        thaw=options.thaw,
        hollow=options.hollow,
        caller=options.caller,
        limits=options.limits,
        instead_of=waiting,
        leave=False,
        pin=False,
        callback_deadline=options.callback_deadline,
        without_callbacks=options.without_callbacks,
    )
    left = suspend(node, leaving, how, progress)
    try:
        how_back = ResumeOptions(_place(left, waiting), caller=options.caller)
        resume(node, coming, how_back, progress)
    except PhosError as error:
        progress.note(
            f"process {coming} could not be resumed, so process {leaving} was resumed instead"
        )
        try:
            resume(node, leaving, ResumeOptions(), Progress())
        except PhosError as worse:
            error.add_note(f"besides, process {leaving} stays suspended: {worse}")
        raise
    if left.hollow:  # not before: it takes a second for 40 GB
        keep_pinned(node, left)


def _place(left: Suspended, waiting: Suspended) -> str:
    """Return the moves of ``waiting`` to the GPUs of ``left``, as in :class:`ResumeOptions`."""
    if set(left.gpus) == set(waiting.gpus):
        return ""
    if len(left.gpus) != len(waiting.gpus):
        raise InvalidOption(
            f"process {left.pid} has left {len(left.gpus)} GPUs, process {waiting.pid} needs"
            f" {len(waiting.gpus)}",
            hint=f"`phos resume {waiting.pid} --gpu ...` says where it goes",
        )
    return ",".join(f"{old}:{new}" for old, new in zip(waiting.gpus, left.gpus, strict=True))
