"""What runs for a user has nothing of root's."""

import subprocess
import sys

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
