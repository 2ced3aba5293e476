"""Run a program in the foreground: its output, its signals, its exit code, saved and resumed."""

import contextlib
import errno
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from phosd.cli.run_command.early_signals import EarlySignals
from phosd.cli.run_command.environment import prepend
from phosd.cli.run_command.named import keep_command
from phosd.cli.run_command.output_room import OutputRoom, why_full
from phosd.cli.run_command.program import END, Program, not_started, output_folder, read_end
from phosd.cli.run_command.relay import SAVED, Relayed, exit_code, follow
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError, Exit
from phosd.engine.system.native import term_library
from phosd.errors import Internal, PhosError

# What needs the bus is imported where it is used: most programs run without phosd.
if TYPE_CHECKING:
    from phosd.cli.run_command.enclosed import EnclosedProgram
    from phosd.cli.run_command.resuming import NamedImages
    from phosd.cli.run_command.saving import SaveOnTerm
    from phosd.cli.run_command.slurm import SavingStep
    from phosd.cli.run_command.suspending import SuspendWithJob
    from phosd.client import Client, Image, RestoreOptions


_HINTS = {
    errno.ENOEXEC: "; if it is a script, its first line must name its interpreter (#!/bin/sh)",
    errno.EACCES: "; give a script that is not executable to its interpreter: `python train.py`",
}
"""What to do when a command cannot be started, by the error's number."""


class Foreground:
    """What happens to one program in the foreground."""

    def __init__(
        self,
        settings: Settings,
        name: str | None,
        words: Sequence[str],
        *,
        saves: bool,
        grace: float | None,
        in_memory: bool,
        pidns: bool | None,
        step: "SavingStep | None",
    ) -> None:
        """``step``: of the Slurm job that this is a part of, in whose cgroups a program goes on."""
        self._settings = settings
        self._step = step
        self._name = name
        self._words = words
        self._saves = saves
        self._grace = grace
        self._in_memory = in_memory
        self._pidns = pidns
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, variables: dict[str, str], *, resuming: bool) -> int:
        """Run the program, or the last image of its name, to its end. Returns the exit code."""
        on_term = SAVED if resuming or self._saves else 128 + signal.SIGTERM
        early = self._stack.enter_context(EarlySignals(on_term))
        if resuming or self._saves:  # before there is anything to lose
            from phosd.client import Client

            with Client(self._settings.bus) as client:
                step, name = self._step, self._name or ""
                ended = step is not None and step.fetch(name, self._settings, client)
                images = self._images(client) if resuming else None
                if ended or (images and images.finished):
                    self._settings.note(
                        f"phos: {self._name} has ended with 0, so there is nothing to go on with; "
                        "to start it anew, delete its images (`phos rm`), or take another name"
                    )
                    return Exit.DONE
                resumed = self._resume(client, images, early) if images else None
            if resumed is not None:
                program, policy, image = resumed
                restored_at = time.monotonic()
                code = self._relayed(program, policy, early)
                if policy is None or not policy.began:  # else it may have ended for the SIGTERM
                    self._tell_crash(image, restored_at, code)
                return code
        folder = place_of_output()
        policy = self._policy(folder) if self._saves else None
        if policy is not None:
            variables |= policy.holder.environment
            variables.pop(policy.holder.ROOT, None)
            prepend(variables, "LD_PRELOAD", term_library())
        early.begin()
        program = start(
            self._settings, self._name, self._words, variables, folder, pidns=self._pidns
        )
        self._settings.note(f"phos: process {program.pid}; its output is kept in {folder}")
        return self._relayed(program, policy, early)

    def _restore_options(self, client: "Client", image: "Image") -> "RestoreOptions":
        # One that was in a pid namespace gets one again in any case.
        options: RestoreOptions = {}
        if "followers" in client.manager().features:  # phosd may be older than this phos
            options["follower"] = os.getpid()
        if self._pidns:
            options["pid_namespace"] = True
        if self._step is not None:
            options["cgroups_of"] = os.getpid()
            options["gpu"] = self._step.gpus_for(image, client)
        return options

    def _images(self, client: "Client") -> "NamedImages":
        from phosd.cli.run_command.resuming import NamedImages

        name, options = self._name or "", partial(self._restore_options, client)
        return NamedImages(self._settings, client, name, os.geteuid(), options)

    def _resume(
        self, client: "Client", images: "NamedImages", early: EarlySignals
    ) -> "tuple[Relayed, SaveOnTerm | None, Image]":
        """Restore the last image, and return what :meth:`_relayed` takes, and the image."""
        from phosd.cli.run_command.resuming import changed_since, folder_of, make_folder, resumed

        image = images.restorable(self._words)
        for word in changed_since(image, self._words):
            self._settings.note(f"phos: {word} is newer than the image, which has the older one")
        make_folder(image, self._words)
        folder = folder_of(image)
        policy = self._policy(folder) if self._saves and folder is not None else None
        if self._saves and policy is None:
            self._settings.note(
                "phos: the output folder of this program is gone, so SIGTERM is passed on to it"
            )
        options = self._restore_options(client, image)
        began = time.monotonic()
        try:
            return resumed(self._settings, client, image, options, early), policy, image
        except Internal:  # as if it ends before CRIU is done with it
            status = read_end(folder / END) if folder is not None else None
            code = Exit.FAILED if status is None else exit_code(status)
            self._tell_crash(image, began, code)
            raise

    def _tell_crash(self, image: "Image", restored_at: float, code: int) -> None:
        """Say that the program has crashed soon after it was restored, and what follows."""
        from phosd.cli.run_command.crashes import MOST, SOON, Crashes
        from phosd.cli.run_command.resuming import folder_of, label
        from phosd.client import Client

        crashes = Crashes(folder_of(image))
        before, count = crashes.of(image.id), crashes.ended(image.id, restored_at, code)
        if (now := crashes.of(image.id)) != before:
            try:
                with Client(self._settings.bus) as client:
                    client.report_crashes(image.id, now)
            except PhosError as error:  # the image may be gone by now, or phosd
                self._settings.note(f"phos: phosd was not told of the crash: {error}")
        if count:
            then = "goes on from the one before it" if count >= MOST else "tries it again"
            self._settings.note(
                f"phos: {label(image)}: the program has ended with {code} within {SOON:.0f} s of "
                f"its restore, {count} of {MOST} times; the same command {then}"
            )

    def _policy(self, folder: Path) -> "SaveOnTerm":
        from phosd.cli.run_command.grace import grace_of
        from phosd.cli.run_command.saving import SaveOnTerm
        from phosd.cli.run_command.termination import TermHolder

        holder = self._stack.enter_context(TermHolder(folder))
        grace = grace_of(self._grace, self._settings.note)
        return SaveOnTerm(
            self._settings,
            holder,
            grace,
            in_memory=self._in_memory,
            named=self._name is not None,
        )

    def _relayed(self, program: Relayed, policy: "SaveOnTerm | None", early: EarlySignals) -> int:
        status = self._followed(program, policy, early)
        if policy is not None:
            early.end()
            if policy.settle():
                return self._saved()
            if self._step is not None and policy.gave_up and status == -signal.SIGTERM:
                self._settings.note(
                    "phos: when the job runs again, the program begins anew, or goes on from its "
                    "last image if there is one"
                )
                return SAVED
        if status == -signal.SIGKILL and self._ended_by_phosd(program.pid):
            return self._saved()
        if status is None:
            self._settings.note(f"phos: how process {program.pid} has ended is not known")
            return Exit.FAILED
        if self._step is not None and status == Exit.DONE:
            self._step.keep_end(self._name or "")
        return exit_code(status)

    def _followed(
        self, program: Relayed, policy: "SaveOnTerm | None", early: EarlySignals
    ) -> int | None:
        """Follow the program to its end. Returns its status."""
        note, stops = self._settings.note, self._stops(program)
        if policy is not None:
            policy.take(program.pid)
        paths = [path for path, _, _ in program.outputs]
        with OutputRoom(program.pid, paths, note) as room:
            status = follow(program, policy, early, stops, room, note)
            room.tell_end(status)
        return status

    def _stops(self, program: Relayed) -> "SuspendWithJob | None":
        if self._step is None:
            return None
        from phosd.cli.run_command.suspending import SuspendWithJob

        return SuspendWithJob(self._settings, program.pid)

    def _saved(self) -> int:
        if self._step is not None:
            self._step.keep_node(self._name or "")
        return SAVED

    def _ended_by_phosd(self, pid: int) -> bool:
        """Return whether somebody else has saved and ended it (`phos checkpoint --end`)."""
        from phosd.client import Client

        if self._name is None:
            return False
        try:
            with Client(self._settings.bus) as client:
                jobs = [job for job in client.jobs() if str(pid) in job.targets]
        except PhosError:  # then nobody tells
            return False
        last = jobs[-1] if jobs else None
        saved = last is not None and any(phase.name == "end" for phase in last.phases)
        if last is not None and saved:
            self._settings.note(
                f"phos: saved and ended as {last.result}; the same command with --resume goes on"
            )
        return saved


def _enclosed(
    settings: Settings,
    words: Sequence[str],
    variables: dict[str, str],
    folder: Path,
    *,
    required: bool,
) -> "EnclosedProgram | None":
    """Start it so; return None, and say why, if phosd cannot and it is not ``required``."""
    from phosd.cli.run_command.enclosed import start_enclosed
    from phosd.client import Client

    try:
        with Client(settings.bus) as client:
            return start_enclosed(client, words, variables, folder)
    except PhosError as error:
        if required:
            raise
        settings.note(
            f"phos: no pid namespace of its own, so its pids must be free when it is restored: "
            f"{error}"
        )
        return None


def place_of_output() -> Path:
    """Make a folder for the output of a program. Raises :class:`CommandError`."""
    try:
        folder = output_folder()
        why = why_full(folder)
    except OSError as error:
        raise not_started(f"its output files cannot be made ({error})") from error
    if why:
        shutil.rmtree(folder)
        why = f"there is no room for its output in {folder.parent} ({why})"
        raise not_started(why, "OutOfSpace")
    return folder


def start(
    settings: Settings,
    name: str | None,
    words: Sequence[str],
    variables: dict[str, str],
    folder: Path,
    *,
    pidns: bool | None,
) -> "Program | EnclosedProgram":
    """Start the program with its output in ``folder``. Exits as a shell does: 127 without such a
    command, 126 if it cannot be executed. ``pidns``: in a pid namespace of its own; None: if it has
    a name, and phosd can make one.
    """
    try:
        if name is not None:
            keep_command(folder, words)
        enclosed = None
        if pidns or (pidns is None and name is not None):
            enclosed = _enclosed(settings, words, variables, folder, required=bool(pidns))
        return enclosed or Program.start(words, variables, folder)
    except OSError as error:
        if error.filename is None:  # the fork failed
            raise CommandError(
                "Unsupported",
                f"no process can be started: {error}; end other processes, and try again",
            ) from error
        hint = _HINTS.get(error.errno or 0, "")
        settings.note(f"phos: {error.strerror}: {shlex.quote(words[0])}{hint}")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
