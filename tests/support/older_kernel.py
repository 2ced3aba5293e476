"""Make phosd find a kernel that is older than this one."""

import pytest

from phosd import unix_sockets

_UNKNOWN = 0x7FFF
"""A socket option that no kernel has."""


def passes_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.16 a socket passes descriptors that nobody has asked for."""
    monkeypatch.setattr(unix_sockets, "PASS_RIGHTS", _UNKNOWN)


def tells_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.5 it does not say whether the process at its other end lives."""
    monkeypatch.setattr(unix_sockets, "PEER_HANDLE", _UNKNOWN)
