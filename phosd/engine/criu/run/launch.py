"""Start CRIU: as a child, or, if there is a service for that, outside of phosd's sandbox."""

import contextlib
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from phosd.engine.criu.run.cgroup_place import Place
from phosd.engine.system import unsandboxed
from phosd.engine.system.reaping import reap_later
from phosd.engine.system.unsandboxed import OutsideError
from phosd.errors import Internal

_ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "PYTHONPATH": str(Path(__file__).parents[4]),
}
_KILLED_SECONDS = 30.0
"""How long a killed command may take to end: it may wait for a file system that is lost."""
_BOOTED = Path("/run/systemd/system")
"""Exists if systemd runs this machine (``sd_booted(3)``)."""


class Started(Protocol):
    """A running command: process ``pid``, or a child of it.

    ``said`` is its standard error, once it has ended.
    """

    pid: int
    returncode: int | None
    said: str

    def fileno(self) -> int:
        """Return a descriptor that is readable when the command has ended."""

    def poll(self) -> int | None:
        """Return the exit status if the command has ended. Raises :class:`OutsideError`."""

    def kill(self) -> None:
        """Kill the command, and wait for its end, for a while if it does not end."""

    def close(self) -> None:
        """Release the resources; a command that has not ended is left alone."""


class Child:
    """A command that runs as a child of this process."""

    def __init__(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        self.returncode: int | None = None
        self.said = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,
            env=_ENVIRONMENT,
        )
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._ended

    def poll(self) -> int | None:
        if self.returncode is None and self._process.poll() is not None:
            self.returncode, self.said = self._process.returncode, self._has_said()
        return self.returncode

    def _has_said(self) -> str:
        """Return what is in the pipe, and not wait for its end: a child may have inherited it."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        return (self._process.stderr.read() or b"").decode(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_SECONDS)

    def close(self) -> None:
        os.close(self._ended)
        if self._process.poll() is None:
            reap_later(self._process)
        else:
            with self._process:
                pass


def launch(
    command: Sequence[str],
    descriptors: Sequence[int],
    service: Path | None,
    *,
    tied: bool,
    place: Place | None = None,
) -> Started:
    """Start ``command`` with the ``descriptors``, by the ``service`` or as a child.

    A ``tied`` command is killed when this process ends; a child must arrange that by itself. A
    command with a ``place`` starts there, and what it leaves running stays. Raises
    :class:`Internal`.
    """
    words = list(command)
    if place is not None and place.entries:
        words = place.enter(words)
    elif place is not None and makes_scopes(service):
        words = [*_scope(place), *words]
    if service is None:
        return Child(words, descriptors)
    with _service_errors():
        return unsandboxed.Command(service, words, descriptors, _ENVIRONMENT, tied=tied)


def namespaces(service: Path | None) -> dict[str, str]:
    """Return the namespaces of commands that :func:`launch` starts. Raises :class:`Internal`."""
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


def makes_scopes(service: Path | None) -> bool:
    """Return whether :func:`launch` can start a command in a systemd scope."""
    return service is not None and _BOOTED.is_dir()


def _scope(place: Place) -> list[str]:
    """Return a command that creates a scope, enters it, and executes the words that follow."""
    name = f"restored-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}.scope"
    words = ["/usr/bin/systemd-run", "--scope", "--quiet", "--collect", f"--unit={name}"]
    # At a shutdown it ends after phosd: what saves it then is another service, ordered after phosd.
    words += ["--property=Before=phosd.service"]
    words += [f"--property={each}" for each in place.properties]
    return [*words, f"--slice=user-{place.uid}.slice", "--description=Restored by phosd", "--"]
