"""Clones of a tree beside the original: what each has for itself, and what only one can have."""

import errno
import fcntl
import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phosd.engine.criu.restore import restore as restore_module
from phosd.engine.criu.restore.clone import Clone, CloneFiles, ClonePorts
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.restore import Restored, restore_tree
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program import doors
from phosd.engine.system import pid_namespaces, sockets
from phosd.errors import Busy, Cancelled, ImageCorrupt, Internal, Reason, Unsupported
from tests.node.criu.life import COUNTER, HOLDER, USER, CriuKiller, Life, in_order, wait_for


def clone(
    beside: Life,
    name: str,
    files: CloneFiles = CloneFiles.COPY,
    ports: ClonePorts = ClonePorts.MOVE,
) -> Restored:
    restored = beside.restore(clone=Clone(beside.saved_tree, name, files, ports))
    restored.settle()
    return restored


def refused(
    beside: Life, error: type[Exception] = Unsupported, ports: ClonePorts = ClonePorts.MOVE
) -> str:
    """A clone is refused, and nothing is changed; what was said."""
    before = sorted(beside.home.iterdir())
    with pytest.raises(error) as caught:
        clone(beside, "refused", ports=ports)
    assert sorted(beside.home.iterdir()) == before
    return str(caught.value)


def namespaces(beside: Life) -> Sequence[pid_namespaces.PidNamespace]:
    assert beside.criu.runtime_dir is not None
    return [*pid_namespaces.living(beside.criu.runtime_dir)]


def test_each_writes_to_a_log_of_its_own(beside: Life) -> None:
    """It begins with what the original had written when it was saved, not with what came after."""
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    beside.counts_on()
    clones = [clone(beside, name) for name in ("one", "two")]
    logs = [Path(f"{beside.log}.clone-{name}") for name in ("one", "two")]
    for log in logs:
        beside.counts_on(log)
    beside.counts_on()
    assert all(in_order(beside.values(log)) for log in (beside.log, *logs))
    for log in (beside.log, *logs):
        values = beside.values(log)
        assert values == [*range(1, len(values) + 1)], "nothing twice, nothing of another's"
    status = logs[0].stat()
    assert (status.st_uid, status.st_mode & 0o777) == (USER, 0o644)
    assert "exists" in refused_again(beside, "one")
    clones[0].abandon()
    beside.counts_on(logs[1])
    assert not [*beside.private.glob("copy-*")]


def refused_again(beside: Life, name: str) -> str:
    with pytest.raises(Unsupported) as caught:
        clone(beside, name)
    return str(caught.value)


def test_files_that_it_writes_to_may_be_shared_or_refused(beside: Life) -> None:
    beside.start("import os\nother = os.open('other', os.O_WRONLY | os.O_CREAT)\n" + COUNTER)
    beside.counts_on()
    beside.dump()
    for policy in (CloneFiles.SHARE, CloneFiles.REFUSE):
        with pytest.raises(Unsupported, match="/other") as caught:
            clone(beside, "a", policy)
        assert caught.value.reason == Reason.TAKEN
        assert ("/log" in str(caught.value)) == (policy is CloneFiles.REFUSE)


def test_a_log_that_is_shared_has_the_lines_of_both(beside: Life) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    clone(beside, "a", CloneFiles.SHARE)
    wait_for(lambda: len(beside.values()) > 20 + len(set(beside.values())))
    assert [path.name for path in beside.home.glob("log*")] == ["log"]


def test_a_file_that_is_read_and_written_is_copied_as_it_was(beside: Life) -> None:
    beside.start("import os\nfile = os.open('both', os.O_RDWR | os.O_CREAT)\n" + COUNTER)
    beside.counts_on()
    beside.dump()
    clone(beside, "a")
    assert (beside.home / "both.clone-a").exists()
    (beside.home / "both").write_text("changed")
    clone(beside, "b")
    assert (beside.home / "both.clone-b").read_text() == ""


def test_a_database_of_sqlite_has_one_journal_by_its_name(beside: Life) -> None:
    """The clone would delete the original's, or be rolled back by it."""
    beside.start(
        "import sqlite3\ndatabase = sqlite3.connect('steps.db')\n"
        "database.execute('create table steps (x)')\n" + COUNTER
    )
    beside.counts_on()
    beside.dump()
    said = refused(beside)
    assert "which SQLite finds by the name of its database: " in said
    assert str(beside.home / "steps.db") in said
    beside.counts_on()


def test_what_only_one_can_have_is_named_and_free_when_the_original_has_gone(beside: Life) -> None:
    """Also for the first clone, which then has it."""
    kinds = ("TCP", "UDP", "@abstract", "path", "connection")
    beside.start(HOLDER + COUNTER, *kinds)
    beside.counts_on()
    beside.dump()
    there = (beside.home / "socket").stat()
    assert "TCP port" not in refused(beside), "it would listen on another one"
    first = refused(beside, ports=ClonePorts.REFUSE)
    assert all(word in first for word in ("TCP port", "UDP port", f"@{beside.home}", "/socket"))
    assert "end" in first and "of a TCP connection" in first
    assert (beside.home / "socket").stat().st_ino == there.st_ino, "CRIU would remove it"
    beside.counts_on()
    beside.kill()
    clone(beside, "a")
    beside.counts_on(Path(f"{beside.log}.clone-a"))
    assert "TCP port" in refused(beside, ports=ClonePorts.REFUSE)


SERVER = """
import os, select, socket
doors = [socket.create_server(("127.0.0.1", 0))]
port = doors[0].getsockname()[1]
doors.append(socket.create_server(("::1", port), family=socket.AF_INET6))
for _ in range(2):  # as several workers have
    doors.append(socket.create_server(("127.0.0.2", port), reuse_port=True))
with open("draft", "w") as file:
    file.write(str(port))
os.rename("draft", "port")
value = 0
while True:
    for door in select.select(doors, [], [])[0]:
        value += 1
        caller = door.accept()[0]
        caller.sendall(f"{value}".encode())
        caller.close()
"""


def called(host: str, port: int) -> int:
    with socket.create_connection((host, port), 20) as caller:
        return int(caller.recv(99))


def ports_of(restored: Restored) -> dict[str, int]:
    """Where a clone listens."""
    found = (place.rpartition(":") for place in doors.places(restored.ids.values()))
    return {host: int(port) for host, _, port in found}


def test_servers_of_one_port_answer_beside_each_other(beside: Life) -> None:
    """Each on a port of its own, and the original on the one that it had."""
    beside.start(SERVER)
    wait_for((beside.home / "port").exists)
    port = int((beside.home / "port").read_text())
    assert [called("127.0.0.1", port) for _ in range(2)] == [1, 2]
    beside.dump()
    assert called("127.0.0.1", port) == 3
    found = [ports_of(clone(beside, name)) for name in ("a", "b")]
    ports = [{*each.values()} for each in found]
    assert [len(each) for each in ports] == [1, 1], "all of its sockets are on one"
    assert len({port, *ports[0], *ports[1]}) == 3
    for each in found:
        assert each.keys() == {"127.0.0.1", "127.0.0.2", "[::1]"}
        hosts = [host.strip("[]") for host in each]
        assert [called(host, each["127.0.0.1"]) for host in hosts] == [3, 4, 5]
    assert called("::1", port) == 4
    beside.kill()
    assert {*ports_of(clone(beside, "c")).values()} == {port}, "it is free again"
    assert f"TCP port {port} of 127.0.0.1" in refused(beside, ports=ClonePorts.REFUSE)


def test_two_at_once_that_find_their_port_free(beside: Life) -> None:
    """One of them has it, though CRIU binds it long after they have looked."""
    beside.start(SERVER)
    wait_for((beside.home / "port").exists)
    port = int((beside.home / "port").read_text())
    beside.dump()
    beside.kill()
    with ThreadPoolExecutor(2) as both:
        found = [*both.map(lambda name: ports_of(clone(beside, name)), ("a", "b"))]
    ports = {each["127.0.0.1"] for each in found}
    assert len(ports) == 2 and port in ports
    assert [called("127.0.0.1", each) for each in ports] == [1, 1]


def test_a_server_that_calls_itself_keeps_its_port(beside: Life) -> None:
    beside.start(
        "import socket\nlistening = socket.create_server(('0.0.0.0', 0))\n"
        "port = listening.getsockname()[1]\n"
        "held = socket.create_connection(('127.0.0.1', port)), listening.accept()\n" + COUNTER
    )
    beside.counts_on()
    beside.dump()
    said = refused(beside)
    assert "TCP port" in said and "of a TCP connection" in said
    beside.kill()
    clone(beside, "a")
    beside.counts_on(Path(f"{beside.log}.clone-a"))


def test_sockets_of_the_gpus_driver_get_names_of_their_own(beside: Life) -> None:
    """Each process that uses CUDA has one (driver 580)."""
    names = f"cuda-uvmfd-4026531836-{os.getpid()}", f"phos-softgpu-{os.getpid()}-{'ab' * 8}"
    beside.start(
        "import socket\n"
        f"made = [socket.socket(socket.AF_UNIX) for _ in {names}]\n"
        f"[each.bind('\\0' + name) for each, name in zip(made, {names})]\n" + COUNTER
    )
    beside.counts_on()
    beside.dump()
    clone(beside, "a")
    beside.counts_on(Path(f"{beside.log}.clone-a"))
    found = [each.name for each in sockets.unix_sockets().values()]
    for name in names:
        assert found.count(f"@{name}") == 1
    uvm = [name for name in found if re.fullmatch(rf"@cuda-uvmfd-\d{{16}}-{os.getpid()}", name)]
    assert len(uvm) == 1
    clone(beside, "b")


@pytest.mark.parametrize(("kind", "words"), [("flock", "a lock on"), ("fifo", "the named pipe")])
def test_a_lock_and_a_named_pipe(beside: Life, kind: str, words: str) -> None:
    beside.start(HOLDER + COUNTER, kind)
    beside.counts_on()
    beside.dump()
    said = refused(beside)
    assert words in said and f"{beside.home}/{kind}" in said
    beside.kill()
    if kind == "flock":
        clone(beside, "a")
        with (beside.home / kind).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert words in refused(beside)


def test_a_lock_on_a_file_that_is_copied_is_on_the_copy(beside: Life) -> None:
    beside.start(HOLDER + COUNTER, "lockf")
    beside.counts_on()
    beside.dump()
    clone(beside, "a")
    with (beside.home / "lockf.clone-a").open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_shared_memory_with_a_name_is_the_originals(beside: Life) -> None:
    beside.start(HOLDER + COUNTER, "shm")
    beside.counts_on()
    beside.dump()
    assert f"/dev/shm/{beside.home.name}" in refused(beside, Busy)


def test_damaged_files_and_a_cancellation_leave_nothing(beside: Life) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    cancelled = Cancellation()
    cancelled.cancel()
    options = TreeRestoreOptions(clone=Clone(beside.saved_tree, "a", CloneFiles.COPY))
    before = sorted(beside.home.iterdir())
    with pytest.raises(Cancelled):
        restore_tree(beside.criu, beside.saved_tree, options, cancelled)
    assert sorted(beside.home.iterdir()) == before
    files = beside.images / "files.img"
    content = files.read_bytes()
    files.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(beside, ImageCorrupt)
    assert not namespaces(beside) and not [*beside.private.glob("copy-*")]


def test_one_that_dies_at_once_takes_its_log_with_it(
    beside: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_module, "SETTLED", 3.0)  # ending takes a busy machine some time
    beside.start(
        "import os, time\nopen('there', 'w').close()\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\nos.kill(os.getpid(), 9)\n"
    )
    wait_for((beside.home / "there").exists)
    beside.dump()
    beside.kill()
    (beside.home / "go").touch()
    with pytest.raises(Internal, match="ended at once"):
        beside.restore(clone=Clone(beside.saved_tree, "a", CloneFiles.COPY)).require_settled()
    for restored in beside.restored:
        restored.abandon()
    assert not namespaces(beside) and not [*beside.home.glob("*.clone-*")]


def test_images_without_hard_links_are_told(beside: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert "hard links" in refused(beside, Internal)
    assert [path.name for path in beside.private.iterdir()] == ["images"]


def test_criu_is_killed_while_it_holds_the_tree(beside: Life) -> None:
    beside.start(COUNTER)
    beside.counts_on()
    beside.dump()
    before = sorted(beside.home.iterdir())
    killer = CriuKiller()
    options = TreeRestoreOptions(clone=Clone(beside.saved_tree, "a", CloneFiles.COPY))

    def complete() -> bool:
        killer.check()
        return False

    with pytest.raises(Internal, match="criu restore"):
        restore_tree(beside.criu, beside.saved_tree, options, complete=complete)
    assert killer.killed and not namespaces(beside) and not [*beside.private.glob("copy-*")]
    assert sorted(beside.home.iterdir()) == before
    beside.counts_on()
