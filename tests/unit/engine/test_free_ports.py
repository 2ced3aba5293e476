"""TCP ports for what others will bind in a moment."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.engine.system import free_ports
from phosd.engine.system.free_ports import free_port
from phosd.errors import Busy


def test_each_is_anothers_and_can_be_bound() -> None:
    with ExitStack() as stack:
        found = [stack.enter_context(free_port()) for _ in range(50)]
        assert len({*found}) == 50
        for port in found:
            socket.create_server(("127.0.0.1", port)).close()
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    kernels = low <= free_ports._LOWEST and high >= free_ports._HIGHEST
    assert kernels or all(not low <= port <= high for port in found)


def test_none_that_anybody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(("127.0.0.2", 0))
        taken = [each.getsockname()[1] for each in (first, second)]
        monkeypatch.setattr(free_ports, "_candidates", lambda: taken)
        with pytest.raises(Busy, match="TCP ports"), free_port():
            pass
    with free_port() as port:
        assert port in taken
        with free_port() as other:
            assert {port, other} == {*taken}
            with pytest.raises(Busy), free_port():
                pass
    with free_port():
        pass


def test_where_the_kernel_gives_all_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    every = tmp_path / "range"
    every.write_text("1024\t65535\n")
    monkeypatch.setattr(free_ports, "_RANGE", every)
    with free_port() as port:
        assert port >= free_ports._LOWEST
