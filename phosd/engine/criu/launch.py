"""Starting CRIU: as a child, or outside of phosd's sandbox when there is a service for that."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from phosd.engine.system import unsandboxed
from phosd.engine.system.unsandboxed import OutsideError
from phosd.errors import Internal

_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "PYTHONPATH": str(Path(__file__).parents[3]),
}
_BOOTED = Path("/run/systemd/system")
"""There when systemd runs this machine (``sd_booted(3)``)."""


class Started(Protocol):
    """A command at work. ``said`` is what it wrote to standard error, when it has ended."""

    returncode: int | None
    said: str

    def fileno(self) -> int:
        """Readable when it has ended."""

    def poll(self) -> int | None:
        """Its exit status when it has ended. Raises :class:`OutsideError`."""

    def kill(self) -> None:
        """End it, and wait for that."""

    def close(self) -> None:
        """It has ended; let go of it."""


class Child:
    """A child of this process."""

    def __init__(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        self.returncode: int | None = None
        self.said = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=descriptors,
            start_new_session=True,
            env=_ENVIRONMENT,
        )
        self._ended = os.pidfd_open(self._process.pid)

    def fileno(self) -> int:
        return self._ended

    def poll(self) -> int | None:
        if self.returncode is None and self._process.poll() is not None:
            assert self._process.stderr is not None
            self.returncode, self.said = self._process.returncode, self._process.stderr.read()
        return self.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        os.close(self._ended)
        with self._process:
            pass


def launch(
    command: Sequence[str],
    descriptors: Sequence[int],
    service: Path | None,
    *,
    tied: bool,
    slice_of: int | None = None,
) -> Started:
    """Start ``command`` with the ``descriptors``, in the ``service`` behind that socket or as a
    child. A ``tied`` one is killed when this process ends; the command itself sees to that when it
    is a child. What it leaves running when it ran in a service gets a scope in the slice of the
    user ``slice_of``, where there is systemd.

    Raises :class:`Internal`.
    """
    if service is None:
        return Child(command, descriptors)
    words = list(command)
    if slice_of is not None and _BOOTED.is_dir():
        words = [*_scope(slice_of), *words]
    with _service_errors():
        return unsandboxed.Command(service, words, descriptors, _ENVIRONMENT, tied=tied)


def namespaces(service: Path | None) -> dict[str, str]:
    """The namespaces, by kind, that :func:`launch` starts commands in. Raises :class:`Internal`."""
    if service is None:
        return {kind.name: str(kind.readlink()) for kind in Path("/proc/self/ns").iterdir()}
    with _service_errors():
        return unsandboxed.namespaces(service)


@contextlib.contextmanager
def _service_errors() -> Iterator[None]:
    try:
        yield
    except OutsideError as error:
        raise Internal(
            f"CRIU cannot be started outside of phosd's sandbox: {error}",
            hint="see `systemctl status phosd-criu.socket`",
        ) from error


def _scope(uid: int) -> list[str]:
    """The command that makes a scope with itself in it and becomes what follows."""
    name = f"restored-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}.scope"
    words = ["/usr/bin/systemd-run", "--scope", "--quiet", "--collect", f"--unit={name}"]
    return [*words, f"--slice=user-{uid}.slice", "--description=Restored by phosd", "--"]
