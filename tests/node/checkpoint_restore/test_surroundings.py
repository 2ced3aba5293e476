"""GPU programs and what is around them: where they print, sockets, databases, shared memory."""

import os
import socketserver
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore, try_restore
from phosd.errors import PhosError, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, check, save
from tests.support.harness import alive, parse, wait_until


class Reader:
    """Collects what a program prints into a pipe or a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._data = bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                piece = os.read(self._descriptor, 4096)
            except OSError:  # a terminal's other end is gone
                return
            if not piece:
                return
            self._data += piece

    def values(self) -> dict[int, str]:
        return parse(bytes(self._data).replace(b"\r\n", b"\n"))

    def wait_for(self, count: int) -> dict[int, str]:
        return wait_until(lambda: v if len(v := self.values()) >= count else None, "output")

    def close(self) -> None:
        """To be called when the writers are gone."""
        self._thread.join(10)
        os.close(self._descriptor)


@pytest.mark.parametrize("ends", [os.pipe, os.openpty])
def test_output_that_is_gone_at_the_restore(
    ends: Callable[[], tuple[int, int]],
    node: Node,
    start: Starter,
    place: Path,
    undisturbed: Undisturbed,
) -> None:
    """A pipe's reader or a terminal has gone; the restored program prints where it is told."""
    ours, theirs = ends()
    target = start("single", stdout=theirs)
    os.close(theirs)
    reader = Reader(ours)
    reader.wait_for(5)
    image = save(node, target, "stop").id
    count = len(reader.values())
    reader.wait_for(count + AFTER)
    target.kill()
    reader.close()
    original, output = reader.values(), place / "restored.txt"
    result = restore(node, image, RestoreOptions(output=str(output)), Progress())
    assert result.pid == target.pid

    def printed() -> dict[int, str] | None:
        assert alive(target.pid), target.errors.read_text()
        text = output.read_bytes() if output.exists() else b""
        values = parse(text.replace(b"\r\n", b"\n"))
        return values if len(values) >= AFTER else None

    check(wait_until(printed, "restored output"), original, undisturbed("single"))


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it receives."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(4096):
                self.request.sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_connections_within_the_program_go_on(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("sockets")
    target.wait_for_steps(5)
    image = save(node, target, "stop").id
    target.more_steps(AFTER)
    target.kill()
    original, mark = target.values(), target.position()
    restore(node, image, RestoreOptions(), Progress())
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed("sockets"))
    assert b"connection closed" not in target.log.read_bytes()


def test_connections_to_outside_are_refused_unless_they_may_be_closed(
    node: Node, start: Starter, echo: int, undisturbed: Undisturbed
) -> None:
    target = start("sockets", arguments=("0", str(echo)))
    target.wait_for_steps(5)
    with pytest.raises(Unsupported, match="connected TCP socket"):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    target.more_steps(2)
    options = CheckpointOptions(mode="stop", tcp="close")
    image = checkpoint(node, target.pid, options, Progress()).id
    target.more_steps(AFTER)
    target.kill()
    original, mark = target.values(), target.position()
    assert b"connection closed" not in target.log.read_bytes()
    restore(node, image, RestoreOptions(), Progress())
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed("sockets"))
    closed = [line for line in target.log.read_bytes()[mark:].splitlines() if b"closed" in line]
    assert closed == [b"outer connection closed"]


def test_a_database_that_changed_comes_back_and_is_never_cut(
    node: Node, start: Starter, place: Path, undisturbed: Undisturbed
) -> None:
    path = place / "steps.db"
    target = start("database", arguments=("0", str(path)))
    target.wait_for_steps(5)
    image = save(node, target, "stop").id
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    before = path.read_bytes()
    for files in ("keep", "cut"):
        with pytest.raises(PhosError, match=r"steps\.db"):
            restore(node, image, RestoreOptions(files=files), Progress())
    assert path.read_bytes() == before
    assert not alive(target.pid)
    (told,) = [
        each
        for each in try_restore(node, image, RestoreOptions(), Progress())
        if each.what == "files"
    ]
    assert told.trouble is None and f"{path} is put back; the newer one stays" in told.text
    assert path.read_bytes() == before
    mark, progress = target.position(), Progress()
    restore(node, image, RestoreOptions(), progress)
    check(target.wait_for_steps(AFTER, since=mark), original, {})
    assert any(f"{path} is put back" in note for note in progress.notes)
    (newer,) = place.glob("steps.db.phos-newer-*")
    assert newer.read_bytes() == before
    for each in (path, newer):
        (verdict,) = sqlite3.connect(each).execute("pragma integrity_check").fetchone()
        assert verdict == "ok"


def test_named_shared_memory_goes_back(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The counter in /dev/shm is as it was at the checkpoint, though the file was removed since."""
    path = Path(f"/dev/shm/phos-test-{uuid.uuid4().hex}")
    try:
        target = start("named_memory", arguments=("0", str(path)))
        target.wait_for_steps(5)
        image = save(node, target, "stop").id
        target.more_steps(AFTER)
        target.kill()
        path.unlink()
        original, mark = target.values(), target.position()
        restore(node, image, RestoreOptions(), Progress())
        restored = target.wait_for_steps(AFTER, since=mark)
        common = restored.keys() & original.keys()
        assert len(common) >= AFTER
        assert {s: restored[s] for s in common} == {s: original[s] for s in common}
    finally:
        path.unlink(missing_ok=True)


def test_an_append_log_just_works(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """However long it has grown, and whoever wrote to it."""
    target = start("single")
    target.wait_for_steps(5)
    image = save(node, target, "stop").id
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    with target.log.open("ab") as log:
        log.write(b"somebody else was here\n" * 1000)
    mark = target.position()
    restore(node, image, RestoreOptions(), Progress())
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed("single"))
    assert target.log.read_bytes().count(b"somebody else") == 1000
