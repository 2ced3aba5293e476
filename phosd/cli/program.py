"""Start a program that is not tied to a terminal."""

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
