"""Programs with files on a file system that does not answer any more, as of a server that is lost.

A process that waits for it cannot be killed: neither phosd nor anybody else's job may wait.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phosd.engine.criu.dump import dump
from phosd.engine.criu.run import owned_processes
from phosd.engine.job.progress import Progress
from phosd.engine.system import procfs
from phosd.errors import Cancelled, Timeout, Unsupported
from tests.node.criu.life import COUNTER, USER, Life
from tests.support.hanging_folder import HangingFolder, hanging_folder
from tests.support.harness import children

WRITER = """
import mmap, sys
written = open(sys.argv[1] + '/written', 'w')
written.write('x' * 1000)
written.flush()
appended = open(sys.argv[1] + '/appended', 'a')
library = open(sys.argv[1] + '/library', 'w+b')
library.write(bytes(8192))
library.flush()
mapped = mmap.mmap(library.fileno(), 8192, mmap.MAP_PRIVATE)
print(mapped[5], file=appended, flush=True)
library.close()
"""
SOON = 1.0


@pytest.fixture
def far() -> Iterator[tuple[Path, HangingFolder]]:
    """A folder on such a file system, which every user may write to; not among pytest's, which the
    next pytest on this machine closes to others.
    """
    place = Path(tempfile.mkdtemp(prefix="phos-far-"))
    with hanging_folder(place) as server:
        yield place, server
    place.rmdir()


@pytest.fixture
def life(lives: Callable[[int], Life], far: tuple[Path, HangingFolder]) -> Life:
    """A user's program that has files there."""
    made = lives(USER)
    made.start(WRITER + COUNTER, str(far[0]))
    made.counts_on()
    return made


def test_while_it_answers_all_is_as_ever(life: Life, far: tuple[Path, HangingFolder]) -> None:
    details = life.dump().details
    found = {Path(file.path).name: file for file in details.open_files}
    assert found["written"].content
    assert (found["written"].size, found["appended"].content) == (1000, None)
    assert {Path(file.path).name: file.size for file in details.mapped_files}["library"] == 8192
    life.kill()
    life.restore()
    life.counts_on()
    life.kill()
    (far[0] / "written").write_text("y" * 1000)
    with pytest.raises(Unsupported, match="written was overwritten"):
        life.admit()


def test_lost_while_the_program_stands_still(
    life: Life, far: tuple[Path, HangingFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """phosd asks for nothing there itself, and does without what its worker asks for."""
    monkeypatch.setattr("phosd.engine.criu.files.file_worker.SHORT_TIMEOUT", SOON)
    note = dump.Dump._note

    def hanging(self: dump.Dump) -> None:
        far[1].hang()
        note(self)

    monkeypatch.setattr(dump.Dump, "_note", hanging)
    found = {Path(file.path).name: file for file in life.dump().details.open_files}
    assert (found["written"].size, found["written"].content) == (1000, None)
    life.counts_on()
    far[1].answer()


def test_lost_before(
    life: Life, far: tuple[Path, HangingFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU waits there and holds the program. It is not killed, and both go on when they can."""
    monkeypatch.setattr("phosd.engine.criu.run.running.IDLE_SECONDS", SOON)
    far[1].hang()
    progress = Progress()
    with ThreadPoolExecutor() as pool:
        dump = pool.submit(life.dump, progress, deadline=SOON)
        with pytest.raises(TimeoutError):
            dump.result(4 * SOON)
        assert procfs.tracer(life.pid)
        assert progress.stuck, "nobody else's job waits for its place"
        far[1].answer()
        with pytest.raises(Timeout, match="waited for a file system that did not answer"):
            dump.result(10 * SOON)
    life.counts_on()
    assert not any(map(owned_processes.is_criu, children(os.getpid())))


def test_a_restore_that_looks_there_is_cancelled(
    life: Life, far: tuple[Path, HangingFolder]
) -> None:
    life.dump()
    life.kill()
    far[1].hang()
    progress = Progress()
    with ThreadPoolExecutor() as pool:
        restore = pool.submit(life.admit, progress)
        try:
            with pytest.raises(TimeoutError):
                restore.result(2 * SOON)
            progress.cancel()
            with pytest.raises(Cancelled):
                restore.result(10 * SOON)
        finally:
            far[1].answer()
    life.restore()
    life.counts_on()


def test_others_do_not_wait_for_it(
    life: Life, lives: Callable[[int], Life], far: tuple[Path, HangingFolder]
) -> None:
    """A restore that cuts a file looks at what all programs have open."""
    other = lives(USER + 1)
    log = other.home / "output"
    with log.open("w") as output:
        os.chown(log, other.uid, other.uid)
        other.start(COUNTER, stdout=output)
    other.counts_on(log)
    other.dump()
    other.counts_on(log)
    other.kill()
    far[1].hang()
    began = time.monotonic()
    other.restore(files="cut")
    assert time.monotonic() - began < 20
    other.counts_on(log)
    far[1].answer()
    life.counts_on()


def test_a_file_system_for_its_user_alone(lives: Callable[[int], Life], tmp_path: Path) -> None:
    """Root may not even ask for the size of a file there."""
    life = lives(USER)
    place = life.home / "own"
    place.mkdir()
    with hanging_folder(place, user=USER):
        life.start(WRITER + COUNTER, str(place))
        life.counts_on()
        with pytest.raises(Unsupported, match=f"{place}/written, on a file system .* for its user"):
            life.dump()
        life.counts_on()
        os.kill(life.pid, signal.SIGKILL)
        assert life.started is not None
        life.started.wait()
