"""Gives up new privileges, and takes Landlock rules unless ``PHOS_TEST_RULES`` is ``none``."""

import ctypes
import os
import struct

import single

libc = ctypes.CDLL(None, use_errno=True)
NO_NEW_PRIVILEGES, CREATE_RULESET, RESTRICT_SELF = 38, 444, 446
EXECUTE = struct.pack("Q", 1)


def restrict() -> None:
    """Allow no file to be executed from now on."""
    rules = libc.syscall(CREATE_RULESET, EXECUTE, len(EXECUTE), 0)
    assert rules >= 0, ctypes.get_errno()
    assert libc.syscall(RESTRICT_SELF, rules, 0) == 0, ctypes.get_errno()
    os.close(rules)


def main() -> None:
    assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    if os.environ.get("PHOS_TEST_RULES") != "none":
        restrict()
    single.main()


if __name__ == "__main__":
    main()
