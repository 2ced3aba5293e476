"""Tell the audit identities of processes (``loginuid``): the uid with which their user logged in.

The kernel's audit log names it with all that a process does, whatever its uid is by then. A process
that has none may take any user's, without rights: so what phosd starts for a user gets one before
it becomes that user (:func:`phosd.engine.system.privileges.take_loginuid`).
"""

import logging

from phosd.engine.system import procfs
from phosd.engine.system.privileges import NO_LOGINUID

_log = logging.getLogger(__name__)


def loginuid(pid: int) -> int | None:
    """Return the audit identity of a process, :data:`NO_LOGINUID` if it has none; None if the
    kernel has no audit, or the process has ended.
    """
    try:
        return int((procfs.PROC / str(pid) / "loginuid").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def note_other(pid: int, wanted: int | None) -> None:
    """Log that a process has an audit identity although it should have none, as phosd has one that
    cannot be laid down. One that should have another was not started.
    """
    found = loginuid(pid)
    if wanted == NO_LOGINUID and found not in (None, wanted):
        _log.warning(
            "process %d has phosd's audit identity (loginuid) %d instead of none; phosd needs "
            "CAP_AUDIT_CONTROL, or to be started by systemd",
            pid,
            found,
        )
