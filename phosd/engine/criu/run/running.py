"""Wait for a CRIU that runs, answer it, and explain its failure."""

import os
import re
import select
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Self

from phosd.engine.criu.run.action_script import FROZEN, STARTED, ActionScript
from phosd.engine.criu.run.criu_watchdog import IDLE_SECONDS, CriuWatchdog
from phosd.engine.criu.run.launch import Started
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.system.unsandboxed import OutsideError
from phosd.errors import Cancelled, Internal, Timeout

_LOG_BYTES = 64 << 10
"""How much of the end of CRIU's log is read for its errors."""
_SOON_MILLISECONDS = 1
_LOOK_MILLISECONDS = 50
"""How often to check whether a job was cancelled; the end of CRIU is noticed at once."""


_HINTS = (
    ("Permission denied", "the owner of the program may not open that file (any more)"),
    (
        "get rlimit",
        "root needs CAP_SYS_RESOURCE to save a program of other users or under seccomp filters",
    ),
    ("Unable to load", "CRIU could not load its plugin; run `make build`, or install the package"),
    (
        "Can't link remap",
        "another program is being saved whose shared memory needs such a link, or somebody left "
        "/dev/shm/link_remap.*; try again, or remove it",
    ),
    ("No space left", "make room and try again"),
    ("tcp", "see `--tcp close`"),
    ("bad size", "the file has changed since the checkpoint"),
    ("build-id", "a library of the program was replaced since the checkpoint"),
)


_PLACE = re.compile(r"^(?:\s*\d+: )?Error \([^)]*\): ")
"""Where in its source CRIU met an error."""


class Running:
    """A running CRIU. Leaving the context before its end kills it."""

    def __init__(self, process: Started, action: str, log: BinaryIO) -> None:
        self._process = process
        self._action = action
        self._log = log
        self._watchdog = CriuWatchdog(process.pid)

    def goes_on(self) -> bool:
        """Return whether CRIU has not ended. Raises :class:`Internal` if that cannot be told."""
        return self._poll() is None

    def wait(
        self,
        deadline: float,
        cancellation: Cancellation | None = None,
        script: ActionScript | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Wait until CRIU has ended, for at most ``deadline`` seconds. Answers ``script``.

        Raises :class:`Internal` with the first of CRIU's last errors, :class:`Timeout`, and
        :class:`Cancelled`; and what the script's action, or ``watch`` in the meantime, raised.
        """
        began = time.monotonic()
        watched = 0.0
        while self._look([script] if script else (), soon=script is not None and script.waits):
            if script is not None:
                script.attend()
                if script.error is not None:
                    raise script.error
            if watch is not None and time.monotonic() - watched > _LOOK_MILLISECONDS / 1000:
                watch()
                watched = time.monotonic()
            self._require_in_time(began, deadline)
            if cancellation is not None:
                cancellation.check()
            self._watchdog.look()
            self._require_unhindered()
        self._require_success()

    def wait_until_started(self, deadline: float, script: ActionScript) -> None:
        """Wait until CRIU has reached the first point of ``script``."""
        began = time.monotonic()
        while STARTED not in script.reached and self._look([script]):
            self._require_in_time(began, deadline)
            script.attend()
            self._watchdog.look()
            self._require_unhindered()
        if STARTED not in script.reached:
            self._require_success()

    def wait_and_answer(
        self,
        deadline: float,
        cancellation: Cancellation | None,
        script: ActionScript,
        released: Callable[[], bool],
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait and answer ``script``, until CRIU has ended or ``released`` the tree.

        After a release CRIU only cleans up; :meth:`wait` then tells whether it succeeded. If the
        job is cancelled or the ``deadline`` has passed, CRIU is not killed but told to give up:
        nothing is raised while it holds the tree. Only if its user does not let it do that, CRIU is
        killed after a while, and perhaps their program with it; and while it waits for a file
        system that does not answer, so does the job. While CRIU is ``excused``, it waits for us.
        """
        began = time.monotonic()  # CRIU may have waited long before it was allowed to continue
        given_up: Cancelled | Timeout | Internal | None = None
        while self._look([script], soon=FROZEN in script.reached):
            script.attend()
            self._watchdog.look(helpers=True)
            if excused():
                self._watchdog.forget()
            if given_up is not None:
                if self._watchdog.persists or self._watchdog.idle > IDLE_SECONDS:
                    if not self._watchdog.waits:
                        self._process.kill()
                        continue
                    if cancellation is not None:
                        cancellation.held_up()
                    if isinstance(given_up, Timeout):
                        given_up = self._lost()
                continue
            try:
                self._require_in_time(began, deadline)
                if cancellation is not None:
                    cancellation.check()
                self._require_unhindered()
            except (Cancelled, Timeout, Internal) as error:
                given_up = error
                script.refuse()
                self._watchdog.forget()
                continue
            if FROZEN in script.reached and released():
                return
        if given_up is not None:
            raise given_up
        self._require_success()

    def _look(self, readable: Sequence[ActionScript], *, soon: bool = False) -> bool:
        """Wait briefly, or until something happens. Returns whether CRIU still runs."""
        if self._poll() is not None:
            return False
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        for one in readable:
            poller.register(one, select.POLLIN)
        poller.poll(_SOON_MILLISECONDS if soon else _LOOK_MILLISECONDS)
        return True

    def _require_in_time(self, began: float, deadline: float) -> None:
        if time.monotonic() - began > deadline:
            raise Timeout(
                f"criu {self._action} did not finish within {deadline:g} s",
                hint="the program goes on; try again when the machine is less busy",
            )

    def _lost(self) -> Timeout:
        return Timeout(
            f"criu {self._action} waited for a file system that did not answer",
            hint="the program, which had to wait as long, goes on",
        )

    def _require_unhindered(self) -> None:
        if self._watchdog.persists:
            raise Internal(
                f"criu {self._action} was stopped again and again",
                hint="it runs with the id of the program's user, who must not send it signals",
            )

    def _require_success(self) -> None:
        if code := self._process.returncode:
            raise self._failure(code, self._process.said)

    def _poll(self) -> int | None:
        try:
            return self._process.poll()
        except OutsideError as error:
            raise Internal(
                f"criu {self._action} cannot be watched any more: {error}",
                hint="see `journalctl -u 'phosd-criu@*'`",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self._process.close()
        self._log.close()

    def _failure(self, code: int, said: str) -> Internal:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_BYTES))
        text = self._log.read(_LOG_BYTES).decode(errors="replace")
        errors = [re.sub(r"^\(\d+\.\d+\)\s*", "", x) for x in text.splitlines() if "Error" in x]
        # Root without CAP_SYS_RESOURCE always gets this error, which is harmless.
        errors = [line for line in errors if "RLIMIT_NOFILE for self" not in line]
        shown = errors[-6:] or said.strip().splitlines()[-3:]
        hint = next((hint for text, hint in _HINTS if any(text in line for line in shown)), "")
        # What comes after the first error follows from it.
        cause = _PLACE.sub("", shown[0]) if shown else f"it returned {code}, and said nothing"
        error = Internal(
            f"{cause} (criu {self._action} failed)",
            hint=hint or "`phos jobs JOB` shows all that CRIU said; `phos doctor` checks CRIU here",
        )
        error.details = tuple(f"criu {self._action}: {line}" for line in shown)
        return error
