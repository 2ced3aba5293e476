"""Send phosd's log to the journal with structured fields, or to stderr as plain text.

The journal's own protocol (https://systemd.io/JOURNAL_NATIVE_PROTOCOL) is one datagram per entry.
Entries of a job carry ``PHOS_JOB``, ``PHOS_PID`` and ``PHOS_IMAGE``, so that ``journalctl
PHOS_JOB=12`` shows one job. No command line, environment or memory is logged. An entry is one line,
but for tracebacks, whatever users call their files (:mod:`phosd.engine.system.log_format`).
"""

import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

from phosd.engine.system.log_format import LogFormatter
from phosd.service.jobs.job import Job, JobState

SOCKET = Path("/run/systemd/journal/socket")
JOB_ENDED = "4ac0ead3107b4322adb2f6acb6de21fb"
"""``MESSAGE_ID`` of the entry for the end of a job."""

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_concern: ContextVar[Mapping[str, str] | None] = ContextVar("concern", default=None)
_log = logging.getLogger(__name__)


def begin() -> None:
    """Set up logging to the journal if standard error is connected to it, else to standard
    error.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setFormatter(LogFormatter("%(levelname)s %(name)s: %(message)s"))
    if _stderr_is_the_journal():
        handlers = [JournalHandler(SOCKET, otherwise=handlers[0])]
    logging.basicConfig(level=logging.INFO, handlers=handlers)


def concerning(job: Job) -> None:
    """Attach the job's fields to all entries logged from now on in this context (a task or
    thread).
    """
    _concern.set(_fields(job))


def ended(job: Job) -> None:
    """Log the end of a job and its outcome."""
    fields = _fields(job) | {"MESSAGE_ID": JOB_ENDED}
    made = {"checkpoint": "PHOS_IMAGE", "restore": "PHOS_PID"}.get(job.task.operation)
    told = f": {job.error}" if job.error is not None else ""
    if job.state is JobState.DONE:
        told = f" in {(job.ended or job.started) - job.started:.1f} s"
        told += f", mode {job.outcome.mode}" if job.outcome.mode not in ("", "eager") else ""
        if made is not None:
            fields[made] = job.outcome.result
    level = logging.WARNING if job.state is JobState.FAILED else logging.INFO
    text = "job %d, %s of %s: %s%s"
    words = (job.number, job.task.operation, job.task.target, job.state, told)
    _log.log(level, text, *words, extra={"fields": fields})


def _fields(job: Job) -> dict[str, str]:
    of_image = job.task.operation in ("restore", "verify", "delete", "export", "import")
    name = "PHOS_IMAGE" if of_image else "PHOS_PID"
    target = job.task.target.partition(" ")[0]  # of a swap: the process to suspend
    return {"PHOS_JOB": str(job.number), name: target}


class JournalHandler(logging.Handler):
    """A handler that sends entries to the journal's socket, and to ``otherwise`` when that
    fails.
    """

    def __init__(self, address: Path, otherwise: logging.Handler) -> None:
        super().__init__()
        self.setFormatter(LogFormatter("%(message)s"))
        self._otherwise = otherwise
        self._address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(b"".join(_encode(*field) for field in self._fields(record)))
        except OSError:
            self._otherwise.handle(record)

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, str]]:
        yield "MESSAGE", self.format(record)
        yield "PRIORITY", str(next((p for n, p in _PRIORITIES if record.levelno >= n), _DEBUG))
        yield "SYSLOG_IDENTIFIER", "phosd"
        yield "LOGGER", record.name
        yield "CODE_FILE", record.pathname
        yield "CODE_LINE", str(record.lineno)
        yield "CODE_FUNC", record.funcName or ""
        yield from {**(_concern.get() or {}), **getattr(record, "fields", {})}.items()

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.sendto(entry, self._address)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            self._send_sealed(entry)

    def _send_sealed(self, entry: bytes) -> None:
        """Send an entry that exceeds a datagram as a sealed memfd, as the protocol demands."""
        with os.fdopen(
            os.memfd_create("entry", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC), "wb"
        ) as file:
            file.write(entry)
            file.flush()
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file.fileno()))]
            self._socket.sendmsg([], ancillary, 0, self._address)


def _encode(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "replace")
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def _stderr_is_the_journal() -> bool:
    """Whether systemd has connected standard error to the journal (``systemd.exec(5)``)."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or without a descriptor
        return False
    stream = f"{status.st_dev}:{status.st_ino}"
    return os.environ.get("JOURNAL_STREAM") == stream and SOCKET.is_socket()
