"""What runs for a user has nothing that is root's."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phosd.engine.system import audit, privileges, procfs
from phosd.engine.system.privileges import NO_LOGINUID, take_loginuid

LEAVE = """
import ctypes, sys
from phosd.engine.system.privileges import become
libc = ctypes.CDLL(None)
libc.syscall(250, 1, None)  # KEYCTL_JOIN_SESSION_KEYRING: one of root's own
key = libc.syscall(248, b"user", b"of-root", b"secret", 6, -3)  # add_key, to the session keyring
assert key > 0
assert libc.syscall(250, 10, -3, b"user", b"of-root", 0) == key  # KEYCTL_SEARCH
become(54321, 54321, [])
sys.exit(libc.syscall(250, 10, -3, b"user", b"of-root", 0) == key)
"""


def test_a_user_gets_no_keys_of_root_s() -> None:
    assert subprocess.run([sys.executable, "-c", LEAVE], check=False).returncode == 0


TAKE = """
import sys
from phosd.engine.system.privileges import take_loginuid
try:
    for each in sys.argv[1:]:
        take_loginuid(int(each))
except PermissionError as error:
    sys.exit(error.strerror)
finally:
    print(open("/proc/self/loginuid").read())
"""
UNABLE = ("setpriv", "--inh-caps=-audit_control", "--bounding-set=-audit_control")


def taken(*loginuids: int, before: Sequence[str] = ()) -> tuple[str, str]:
    """The audit identity of a process that takes these, one after the other, and what it says."""
    words = [*before, sys.executable, "-c", TAKE, *map(str, loginuids)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.skipif(audit.loginuid(os.getpid()) is None, reason="the kernel has no audit")
def test_an_audit_identity_is_taken_where_the_kernel_allows_it() -> None:
    """It allows a first one to everybody."""
    assert taken(4242, 4343) == ("4343", "")
    assert taken(4242, NO_LOGINUID) == (str(NO_LOGINUID), "")
    first, said = taken(4242, before=UNABLE)
    assert (first, said) == ("4242", "")
    kept, said = taken(4242, 4242, 4343, before=UNABLE)
    assert kept == "4242" and "CAP_AUDIT_CONTROL" in said and "4343" in said
    assert taken(4242, NO_LOGINUID, before=UNABLE) == ("4242", "")


def test_an_audit_identity_is_written_only_if_it_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel with audit, and on one without."""
    file = tmp_path / "loginuid"
    monkeypatch.setattr(privileges, "LOGINUID", str(file))
    take_loginuid(4242)
    assert not file.exists()
    file.write_text(str(NO_LOGINUID))
    take_loginuid(1002)
    assert file.read_text().startswith("1002")
    before = file.stat().st_mtime_ns
    file.write_text("1002")
    before = file.stat().st_mtime_ns
    take_loginuid(1002)
    assert file.stat().st_mtime_ns == before


def test_an_audit_identity_that_phosd_cannot_lay_down_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(procfs, "PROC", tmp_path)
    assert audit.loginuid(7) is None
    audit.note_other(7, NO_LOGINUID)
    (tmp_path / "7").mkdir()
    for loginuid in (NO_LOGINUID, 4242):
        (tmp_path / "7/loginuid").write_text(str(loginuid))
        assert audit.loginuid(7) == loginuid
        assert not caplog.text
        audit.note_other(7, NO_LOGINUID)
    assert "process 7 has phosd's audit identity (loginuid) 4242 instead of none" in caplog.text
