"""Sockets of other processes, which come and go while they are looked at."""

import os
import socket
from pathlib import Path

import pytest

from phosd.engine.system import procfs, sockets


def test_a_socket_whose_number_another_file_has_by_now(tmp_path: Path) -> None:
    """It is closed, for whoever looked at it before."""
    ours = socket.socket(socket.AF_UNIX)
    (seen,) = [each for each in procfs.descriptors(os.getpid()) if each.number == ours.fileno()]
    assert sockets.protocol(seen).startswith("UNIX")
    number = ours.detach()
    with (tmp_path / "file").open("w") as file:
        os.dup2(file.fileno(), number)
        with pytest.raises(FileNotFoundError):
            sockets.protocol(seen)
    os.close(number)
    with pytest.raises(FileNotFoundError):
        sockets.protocol(seen)
