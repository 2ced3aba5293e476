"""TCP ports for what others will bind in a moment."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.engine.system import free_ports
from phosd.engine.system.free_ports import ports_for
from phosd.errors import Busy


def others() -> list[int]:
    """Another program has all of them."""
    return [80, 443, 8000]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The kernel's settings, as the test writes them."""
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "ip_local_reserved_ports").write_text("\n")
    monkeypatch.setattr(free_ports, "_SETTINGS", tmp_path)
    yield tmp_path
    assert not free_ports._reserved


def test_each_is_anothers_and_can_be_bound(settings: Path) -> None:
    with ExitStack() as stack:
        given = [stack.enter_context(ports_for([8000], others)) for _ in range(50)]
        found = [each[8000] for each in given]
        assert len({*found}) == 50
        for port in found:
            socket.create_server(("127.0.0.1", port)).close()
    assert all(not 32768 <= port <= 60999 and not 30000 <= port < 32768 for port in found)


def test_a_port_that_is_free_is_kept_by_one(settings: Path) -> None:
    """Another that wants it meanwhile gets another one: both would bind it in a moment."""
    with ports_for([8001, 8000], others) as first, ports_for([8001], others) as second:
        assert first[8001] == 8001 and first[8000] != 8000
        assert second[8001] not in (8001, first[8000])
    with ports_for([8001], others) as again:
        assert again == {8001: 8001}


def test_none_that_anybody_has(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(("127.0.0.2", 0))
        two = [each.getsockname()[1] for each in (first, second)]
        monkeypatch.setattr(free_ports, "_candidates", lambda: two)
        with pytest.raises(Busy, match="TCP ports"), ports_for([80], others):
            pass
    with ports_for([80, 443], others) as found:
        assert {*found.values()} == {*two}
        with pytest.raises(Busy), ports_for([8000], others):
            pass
    with pytest.raises(Busy), ports_for([80, 443, 8000], others):
        pass


def test_where_the_kernel_gives_all_of_them(settings: Path) -> None:
    (settings / "ip_local_port_range").write_text("1024\t65535\n")
    with ports_for([80], others) as found:
        assert found[80] >= free_ports._LOWEST


def test_reserved_ones_are_left_alone(settings: Path) -> None:
    (settings / "ip_local_reserved_ports").write_text("20000-29998,61000-65535\n")
    (settings / "ip_local_port_range").write_text("29000\t65535\n")
    assert 29999 in free_ports._candidates() and 29998 not in free_ports._candidates()
    (settings / "ip_local_reserved_ports").write_text("20000,20002-20003\n")
    assert {*range(20000, 20005)} - {*free_ports._candidates()} == {20000, 20002, 20003}


def test_trouble_is_not_taken_for_a_port_that_is_not_free(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(OSError, match="Too many"), ports_for([80], others):
        pass
