"""Start a program that is not tied to a terminal."""

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phosd.client.errors import CommandError

END = "end"
"""The file of an output folder that tells how its program has ended, by its last line."""
_END_SECONDS = 5.0
_MOST_BYTES = 1 << 16


def runs_folder() -> Path:
    """Return the folder of programs' output folders, below XDG_STATE_HOME, or /var/lib/phos for
    root.
    """
    home = os.environ.get("XDG_STATE_HOME")
    if home:
        base = Path(home) / "phos"
    elif os.geteuid() == 0:
        base = Path("/var/lib/phos")
    else:
        base = Path.home() / ".local" / "state" / "phos"
    return base / "run"


def not_started(why: str, code: str = "Unsupported") -> CommandError:
    """Return the error of a program that has no folder in which to write its output."""
    return CommandError(
        code,
        f"the program was not started: {why}; set XDG_STATE_HOME to a folder that you may write "
        "to, and that has room",
    )


def output_folder() -> Path:
    """Make a folder for one program's output."""
    runs = runs_folder()
    # Also root's folder of images.
    runs.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.mkdir(mode=0o700, exist_ok=True)
    folder = runs / f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}"
    folder.mkdir(mode=0o700)
    return folder


@dataclass(frozen=True)
class Program:
    """A running program, and the files that it writes its output to."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    @staticmethod
    def start(words: Sequence[str], environment: dict[str, str], folder: Path) -> "Program":
        """Start the program as the leader of a session without a terminal.

        Its output is append-only, since CRIU restores such files even if they have grown. Raises
        :class:`OSError` if it cannot be executed; its folder is then removed.
        """
        stdout, stderr = folder / "stdout", folder / "stderr"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        out, err = os.open(stdout, flags, 0o600), os.open(stderr, flags, 0o600)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            shutil.rmtree(folder)
            raise
        finally:
            os.close(out)
            os.close(err)
        return Program(process, stdout, stderr)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def outputs(self) -> list[tuple[Path, int, int]]:
        return [(self.stdout, 1, 0), (self.stderr, 2, 0)]

    def status(self) -> int:
        """Return how it has ended, and keep it for others (:func:`read_end`)."""
        status = self.process.wait()
        write_end(self.stdout.parent, status)
        return status


@dataclass(frozen=True)
class RestoredProgram:
    """A program that phosd has restored: no child of ours. ``end`` is the file that tells how it
    has ended.
    """

    pid: int
    outputs: list[tuple[Path, int, int]]
    end: Path

    def status(self) -> int | None:
        """Return how it has ended; None if nobody has told within some seconds."""
        return await_end(self.end)


def write_end(folder: Path, status: int) -> None:
    """Write how the program of an output folder has ended."""
    told = f"exit {status}" if status >= 0 else f"signal {-status}"
    with contextlib.suppress(OSError):  # the disk is full, or the folder was removed
        (folder / END).write_text(f"{told}\n")


def await_end(file: Path, seconds: float = _END_SECONDS) -> int | None:
    """Return how a program has just ended; None if the file does not tell in time."""
    give_up = time.monotonic() + seconds
    while (status := read_end(file)) is None and time.monotonic() < give_up:
        time.sleep(0.01)
    return status


def read_end(file: Path) -> int | None:
    """Return how a program has ended, by the file that tells it; None if it does not."""
    with contextlib.suppress(OSError, ValueError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(file, flags), "rb") as opened:
            lines = opened.read(_MOST_BYTES).decode("ascii").splitlines()
        kind, number = lines[-1].split() if lines else ("", "")
        if kind in ("exit", "signal"):
            return int(number) if kind == "exit" else -int(number)
    return None
