"""Wait until a program is where it wants to be stopped (docs/operate/programs.md).

A program with safe points says so to its hook. It is then stopped only while a thread of it waits
in the hook: at a safe point, or for a checkpoint that it asks for itself.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import Deadline
from phosd.engine.hook_client.link import HookLink, ProgramOutcome, ProgramState, reach
from phosd.engine.hook_client.wire import THENS
from phosd.engine.job.progress import Progress
from phosd.engine.program.group import CheckpointGroup
from phosd.errors import CallbackFailed, Cancelled, Internal, PhosError, Timeout

DEADLINE = 60.0
_TIMEOUT = 5.0
"""Seconds that a hook has for each answer."""
_POLL = 0.005
_TOGETHER = 1.0
"""Seconds that some processes wait at their safe points for the others, at first.

Ranks wait for each other in every step: one that had passed its safe point before it was wanted
there is in the next step, and waits for those that stand. So these go on to their next safe point,
to which all come together.
"""


class SafePointChoices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of whatever stops a program.

    ``callback_deadline``: the seconds within which a program with safe points must come to one; by
    default those of the configuration. ``without_callbacks``: after that, stop it where it is
    instead of failing.
    """

    callback_deadline: Deadline | None = None
    without_callbacks: bool = False


class SafePoints:
    """The safe points of a group's processes. ``deadline`` is the configured number of seconds.

    ``wish`` is the number of the checkpoint that the first process asks for itself; 0: somebody
    else has asked.
    """

    def __init__(
        self,
        group: CheckpointGroup,
        choices: SafePointChoices,
        deadline: float,
        progress: Progress,
        wish: int = 0,
    ) -> None:
        self._group = group
        self._choices = choices
        self._deadline = choices.callback_deadline or deadline
        self._progress = progress
        self._wish = wish
        self._waited: set[int] = set()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Hold each process with safe points at one inside the context.

        They go on when they were stopped and run again, or else at the end of the context. Raises
        :class:`CallbackFailed`, :class:`Timeout`, and :class:`Cancelled` if the process does not
        ask for its checkpoint any more.
        """
        with ExitStack() as connections:
            links = self._with_safe_points(connections)
            if links:
                self._progress.phase("safe-point")
                point(Point.SAFE_POINT)
                self._wait(links)
                self._progress.phase("prepare")
            yield

    def saved(self, then: str, name: str) -> None:
        """Tell the threads that wait for a checkpoint, and that the image has, of that image.

        ``name`` is that which was asked for, or empty.
        """
        for pid in sorted(self._waited):
            try:
                with reach(pid, self._group.runtime_dir) as link:
                    link.answer_program(ProgramOutcome.SAVED, then=THENS.index(then), text=name)
            except PhosError as error:  # the image is complete nevertheless
                self._progress.note(f"process {pid} was not told that it is saved: {error.what}")

    def _with_safe_points(self, connections: ExitStack) -> list[HookLink]:
        found = []
        for pid in [member.pid for member in self._group.members if member.link is not None]:
            # Not the group's own connection: a hook that is too old for this ends it.
            link = connections.enter_context(HookLink(pid, self._group.runtime_dir, _TIMEOUT))
            try:
                state = link.program()
            except Internal:
                state = ProgramState(False, 0, False, 0, "")
            if self._wish and pid == self._group.trees[0].root.pid and state.wish != self._wish:
                raise Cancelled(
                    f"process {pid} does not ask for this checkpoint any more",
                    hint="another one has saved it, or it has gone on",
                )
            if not (state.declared or state.waiting):
                link.close()
                continue
            link.program(want=True)
            found.append(link)
        return found

    def _wait(self, links: Sequence[HookLink]) -> None:
        """Wait until all of them are there at the same time."""
        until = time.monotonic() + self._deadline
        patience, since = _TOGETHER, None
        while left := [link for link in links if not self._is_there(link)]:
            self._progress.check()
            now = time.monotonic()
            if now > until:
                self._give_up(left)
                return
            since = None if len(left) == len(links) else since or now
            if since is not None and now - since > patience:
                for link in links:
                    if link not in left:
                        link.pass_safe_point()
                patience, since = 2 * patience, None
            time.sleep(_POLL)

    def _is_there(self, link: HookLink) -> bool:
        state = link.program()
        if state.refused:
            raise CallbackFailed(
                f"process {link.pid} is not ready to be stopped: {state.reason}",
                hint="the program goes on; mend what it calls before a checkpoint",
            )
        if state.waiting:
            self._waited.add(link.pid)
        return state.waiting > 0

    def _give_up(self, left: Sequence[HookLink]) -> None:
        pids = ", ".join(str(link.pid) for link in left)
        what = f"process {pids} came to no safe point within {self._deadline:g} s"
        if not self._choices.without_callbacks:
            raise Timeout(
                what,
                hint="the program goes on; give a longer callback_deadline, or let it be "
                "stopped where it is (without_callbacks)",
            )
        self._progress.note(f"{what}, and was stopped where it was")
