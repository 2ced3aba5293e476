"""Serve the sockets that systemd has passed, by a program that was started for that: systemd's own
proxy connects whoever calls there to where the program listens.
"""

import os
import select
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from phosd.client.errors import CommandError

_FIRST = 3
"""The first of the descriptors that are passed (``sd_listen_fds(3)``)."""
_PROXIES = ("/usr/lib/systemd/systemd-socket-proxyd", "/lib/systemd/systemd-socket-proxyd")
_AS_ITSELF = 'export LISTEN_PID=$$; unset LISTEN_PIDFDID; exec "$@"'
"""The proxy takes sockets that were passed to its own pid."""
_END_SECONDS = 10.0
"""Seconds that a program has to end after SIGTERM."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
"""The signals that end what is served."""


class _ToldError(Exception):
    """One of these signals has come."""


@contextmanager
def told_later() -> Iterator[None]:
    """Hold the signals back that end what is served, until :class:`Served` takes them: a program
    that is being started meanwhile would be nobody's.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def require_sockets() -> int:
    """Return how many sockets were passed. Raises :class:`CommandError` if none was."""
    count = os.environ.get("LISTEN_FDS", "")
    ours = os.environ.get("LISTEN_PID") == str(os.getpid())
    if not (ours and count.isdecimal() and int(count)):
        raise CommandError(
            "InvalidOption",
            "no socket was passed to serve: let a .socket unit of systemd start this, or try it "
            "with `systemd-socket-activate -l 8000 phos start NAME --serve`",
        )
    return int(count)


def require_proxy() -> str:
    """Return the path of systemd's proxy. Raises :class:`CommandError` if there is none."""
    for path in _PROXIES:
        if os.access(path, os.X_OK):
            return path
    raise CommandError(
        "Unsupported",
        f"there is no {_PROXIES[0]}, which connects callers to the program; install it (`apt "
        "install systemd`)",
    )


def only_door(pid: int, doors: Sequence[str]) -> str:
    """Return where the proxy finds a process that listens on ``doors``. Raises
    :class:`CommandError` unless that is one socket, or one port at several addresses.
    """
    if not doors:
        raise CommandError(
            "Unsupported",
            f"process {pid} listened nowhere, so nobody could call it, and has been ended; save "
            "the program when it listens, and make the pool of that image",
        )
    found = [door.rpartition(":") for door in doors]
    if len(doors) > 1 and len({(colon, port) for _, colon, port in found}) > 1:
        raise CommandError(
            "Unsupported",
            f"process {pid} listened on {', '.join(doors)}, of which phos does not know the one "
            "that is called, and has been ended; start one without --serve, and pass callers on "
            "yourself (`phos ps PID` says where it listens)",
        )
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    hosts = {local.get(host, host) for host, _, _ in found}
    _, colon, port = found[0]
    host = next((each for each in local.values() if each in hosts), min(hosts))
    return f"{host}{colon}{port}"


class Served:
    """A program that was started to serve, as process ``pid``. It ends with the context, and from
    its begin on SIGTERM and SIGINT end that.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise _gone(pid) from error

    def __enter__(self) -> "Served":
        for number in _ENDING:
            signal.signal(number, _tell)
        return self

    def take_signals(self) -> None:
        """Let the signals come that :func:`told_later` has held back."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
            if _ended(self._process, seconds=_END_SECONDS):
                break
        os.close(self._process)
        return kind is _ToldError

    def serve(self, proxy: str, sockets: int, door: str, idle: float | None) -> None:
        """Pass callers on to ``door`` until there was no connection for ``idle`` seconds. Raises
        :class:`CommandError` if the program or the proxy ends before.
        """
        words = [proxy, *([f"--exit-idle-time={idle:.0f}s"] if idle else []), door]
        with subprocess.Popen(
            ["/bin/sh", "-c", _AS_ITSELF, "sh", *words],
            pass_fds=range(_FIRST, _FIRST + sockets),
        ) as passing:
            try:
                self._await_end(passing)
            finally:
                passing.terminate()
        if passing.returncode not in (0, -signal.SIGTERM):  # with which systemd stops all at once
            raise CommandError(
                "Internal",
                f"{Path(proxy).name} has failed ({passing.returncode}), and process {self._pid} is "
                "ended; its output says why",
            )

    def _await_end(self, passing: "subprocess.Popen[bytes]") -> None:
        """Return when the proxy has ended. Raises :class:`CommandError` if the program has."""
        proxy = os.pidfd_open(passing.pid)
        try:
            poller = select.poll()
            for each in (proxy, self._process):
                poller.register(each, select.POLLIN)
            ended = {number for number, _ in poller.poll()}
        finally:
            os.close(proxy)
        if self._process in ended:
            raise _gone(self._pid)


def _tell(_: int, __: FrameType | None) -> None:
    raise _ToldError


def _ended(process: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _gone(pid: int) -> CommandError:
    return CommandError(
        "NoSuchProcess", f"process {pid} has ended by itself; the next call starts another one"
    )
