"""The CRIU program: where it is, which version, how it is run, and what it says when it fails."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from phosd.engine import as_owner
from phosd.engine.errors import Internal, Timeout
from phosd.engine.progress import Progress

MINIMUM = (4, 2)
"""Older ones cannot dump a process with a TCP or UDP socket on Linux 6.16 or newer."""

INSTALL_HINT = (
    "run `make setup` in the checkout, or install CRIU 4.2 or newer and name it with "
    "PHOS_CRIU=/path/to/criu"
)


@dataclass(frozen=True)
class Owner:
    """Whose program it is, in numeric ids."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    @property
    def is_root(self) -> bool:
        return self.uid == 0


@dataclass(frozen=True)
class Criu:
    """A CRIU program."""

    path: Path

    @classmethod
    def find(cls, path: Path | None = None) -> Self:
        """The CRIU to use: ``path`` if given, else the first of :func:`candidates`.

        Raises :class:`Internal` when there is none, or when it is too old.
        """
        if path is not None and not path.is_file():
            raise Internal(f"there is no CRIU at {path}", hint=INSTALL_HINT)
        for candidate in [path] if path is not None else candidates():
            found = cls(candidate.resolve())
            if _numbers(found.version) >= MINIMUM:
                return found
            if path is not None:
                raise Internal(
                    f"CRIU {found.version} at {path} is too old for current kernels",
                    hint=INSTALL_HINT,
                )
        raise Internal("CRIU 4.2 or newer was not found", hint=INSTALL_HINT)

    @cached_property
    def version(self) -> str:
        """E.g. ``4.2.1``. Raises :class:`Internal` if the program does not start."""
        try:
            done = subprocess.run(
                [self.path, "--version"], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Internal(f"CRIU at {self.path} does not start: {error}", INSTALL_HINT) from error
        found = re.search(r"Version: (\S+)", done.stdout)
        return found.group(1) if found else "0"

    def require_reachable(self, owner: Owner) -> None:
        """Raise :class:`Internal` if ``owner`` may not execute it (a checkout below ``/root``)."""
        if owner.is_root:
            return
        for part in (self.path, *self.path.parents):
            if not _may_execute(part, owner):
                raise Internal(
                    f"user {owner.uid} may not execute {self.path} (because of {part})",
                    hint="copy CRIU's folder to /usr/lib/phos/criu and run "
                    "packaging/install_criu.py on it",
                )

    def run(
        self,
        action: str,
        words: Sequence[str],
        *,
        owner: Owner,
        images: Path,
        work: Path,
        descriptors: Sequence[int] = (),
        deadline: float,
        progress: Progress | None = None,
        while_waiting: Callable[[], None] | None = None,
        dies_with_us: bool = False,
        wrap: Callable[[list[str]], list[str]] = list,
    ) -> None:
        """Run ``criu action`` as ``owner``; ``images`` and ``work`` may lie in private folders.

        CRIU gets both folders as descriptors, so a user who owns them meanwhile still cannot reach
        them by a path. ``descriptors`` are inherited. ``wrap`` may put a command around CRIU's.
        ``while_waiting`` is called every few milliseconds.
        Killing CRIU, which a cancelled ``progress`` or the ``deadline`` (seconds) does, does not
        hurt a process that it dumps. Raises :class:`Internal` with CRIU's own last error lines.
        """
        self.require_reachable(owner)
        folders = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (images, work)]
        log = f"{action}.log"
        try:
            (work / log).unlink(missing_ok=True)
            # CRIU's CUDA plugin would get in the way of the driver checkpoint that we do.
            (work / "no-plugins").mkdir(mode=0o755, exist_ok=True)
            places = [f"/proc/self/fd/{folder}" for folder in folders]
            line = [str(self.path), action, "--no-default-config", "-v2", "-o", log]
            line += ["-D", places[0], "-W", places[1], "-L", places[1] + "/no-plugins"]
            if not owner.is_root:
                line.append("--unprivileged")
            command = as_owner.command(
                [*line, *words],
                uid=owner.uid,
                gid=owner.gid,
                groups=owner.groups,
                capabilities=True,
                dies_with_parent=dies_with_us,
            )
            started = subprocess.Popen(
                wrap(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=(*folders, *descriptors),
                start_new_session=True,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "LC_ALL": "C",
                    "PYTHONPATH": str(Path(__file__).parents[3]),
                },
            )
        finally:
            for folder in folders:
                os.close(folder)
        with started:
            try:
                _wait(started, action, deadline, progress, while_waiting)
            except BaseException:
                started.kill()
                raise
            if started.returncode != 0:
                assert started.stderr is not None
                raise self._failure(action, started.returncode, work / log, started.stderr.read())

    def _failure(self, action: str, code: int, log: Path, said: str) -> Internal:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [re.sub(r"^\(\d+\.\d+\)\s*", "", line) for line in lines if "Error" in line]
        # Root without CAP_SYS_RESOURCE meets this one always, and it is harmless.
        errors = [line for line in errors if "RLIMIT_NOFILE for self" not in line]
        shown = errors[-6:] or said.strip().splitlines()[-3:] or ["it said nothing"]
        hint = next((hint for text, hint in _HINTS if any(text in line for line in shown)), "")
        return Internal(
            f"criu {action} failed (it returned {code}): " + " | ".join(shown),
            hint=hint or "`phos doctor` checks CRIU on this machine",
        )


_HINTS = (
    ("Permission denied", "the owner of the program may not open that file (any more)"),
    ("get rlimit", "root needs CAP_SYS_RESOURCE to save a tree of several users"),
    ("No space left", "make room and try again"),
    ("tcp", "see the option tcp=close"),
    ("bad size", "the file has changed since the checkpoint"),
    ("build-id", "a library of the program was replaced since the checkpoint"),
)


def candidates() -> list[Path]:
    """Where CRIU may be: ``PHOS_CRIU``, the checkout's own, the package's own, the system's."""
    named = os.environ.get("PHOS_CRIU")
    if named:
        return [Path(named)]
    places = [
        Path(__file__).parents[3] / ".criu/criu",
        Path("/usr/lib/phos/criu/criu"),
    ]
    system = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin")
    if system:
        places.append(Path(system))
    return [place for place in places if place.is_file()]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _may_execute(path: Path, owner: Owner) -> bool:
    status = path.stat()
    if status.st_uid == owner.uid:
        return bool(status.st_mode & 0o100)
    if status.st_gid in (owner.gid, *owner.groups):
        return bool(status.st_mode & 0o010)
    return bool(status.st_mode & 0o001)


def _wait(
    started: subprocess.Popen[str],
    action: str,
    deadline: float,
    progress: Progress | None,
    while_waiting: Callable[[], None] | None,
) -> None:
    end = time.monotonic() + deadline
    while True:
        try:
            started.wait(timeout=0.005)
        except subprocess.TimeoutExpired:
            if while_waiting is not None:
                while_waiting()
            if progress is not None:
                progress.check()
            if time.monotonic() > end:
                raise Timeout(
                    f"criu {action} did not finish within {deadline:g} s",
                    hint="the program goes on; try again when the machine is less busy",
                ) from None
            continue
        return
