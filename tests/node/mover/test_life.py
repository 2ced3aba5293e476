"""A mover outlives its engine: what it keeps, for whom, until when, and who may ask for it."""

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from phosd.engine.digest import DigestKey, digest_buffer
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import RECORD
from phosd.engine.mover.client import rescue_client as visit_module
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.rescue_client import RescueClient, rescue_clients
from phosd.engine.mover.client.standby import Standby
from phosd.engine.mover.protocol import wire
from phosd.engine.mover.protocol.endpoint import connect, folder_of, listeners, path_of
from phosd.engine.node.gpus import list_gpus
from phosd.engine.recovery.account import Account
from phosd.engine.recovery.rescue import free
from phosd.engine.system.native import python_environment
from phosd.engine.system.procfs import ProcessId, process_id
from phosd.errors import Busy, Internal, NotAuthorized, PhosError
from tests.node.mover import owner
from tests.node.mover.owner import Owner
from tests.support.harness import wait_until

RING = 8 * RECORD
KEY = DigestKey(b"a secret of the test, long enough")


@pytest.fixture
def place() -> Iterator[Path]:
    """A runtime directory with a short name."""
    with tempfile.TemporaryDirectory(prefix="phos-") as folder:
        yield Path(folder)


@pytest.fixture
def program() -> Iterator[Owner]:
    with owner.running() as process:
        yield process


@pytest.fixture
def sleeper() -> Iterator[ProcessId]:
    """A process that memory can be kept for."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield who(process.pid)
        process.kill()


def who(pid: int) -> ProcessId:
    found = process_id(pid)
    assert found is not None
    return found


def engine(place: Path) -> Mover:
    return Mover.start(0, RING, KEY, place)


def die(mover: Mover) -> None:
    """End the engine's connections as its death does; the mover may live on."""
    for channel in mover._channels:
        channel.close()


def ended(pid: int) -> None:
    wait_until(lambda: process_id(pid) is None or _reaped(pid), f"mover {pid} to end")


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def kept(place: Path) -> dict[ProcessId, list[int]]:
    """The ids of the blocks that are kept, by process."""
    (client,) = rescue_clients(place)
    with client:
        found = client.parked()
    for blocks in found.values():
        for descriptor in blocks.values():
            os.close(descriptor)
    return {process: sorted(blocks) for process, blocks in found.items()}


def test_what_is_guarded_comes_back_through_a_visitor(
    place: Path, program: Owner, sleeper: ProcessId
) -> None:
    """Beyond what one message takes, and what is not guarded is dropped."""
    count = 600
    sizes = [CHUNK] * count
    descriptors = program.create(sizes)
    mover = engine(place)
    mover.adopt([(key, CHUNK, fd) for key, fd in enumerate(descriptors)])
    for fd in descriptors:
        os.close(fd)
    program.write(7, b"seven")
    mover.guard([(sleeper, 100 + key, key) for key in range(count - 1)])
    die(mover)
    (client,) = rescue_clients(place)
    with client:
        memory = client.parked()[sleeper]
        assert sorted(memory) == list(range(100, 100 + count - 1))
        program.attach([memory[107]], [CHUNK])
        assert program.read(count).startswith(b"seven")
        for fd in memory.values():
            os.close(fd)
        client.unguard([sleeper])
        assert client.parked() == {}
    again = engine(place)
    assert again.pid == mover.pid
    with pytest.raises(Internal, match="holds no block"):
        again.digest([0])
    again.close()
    ended(mover.pid)


def test_a_standby_has_nothing_of_the_gpu_until_an_engine_attaches(place: Path) -> None:
    standby = Standby.start(0, RING, place)
    assert listeners(place) == {standby.pid}, "nobody takes it for a program"
    maps = Path(f"/proc/{standby.pid}/maps")
    wait_until(lambda: "libcuda.so" in maps.read_text(), "the driver's library")
    opened = {str(each.readlink()) for each in Path(f"/proc/{standby.pid}/fd").iterdir()}
    assert not any(path.startswith("/dev/nvidia") for path in opened), opened
    assert "/dev/nvidia" not in maps.read_text()
    assert not any(standby.pid in gpu.pids for gpu in list_gpus())
    mover = Mover.start(0, RING, KEY, place, standby.child)
    standby.release()
    assert mover.pid == standby.pid
    assert mover.free_memory()[0] > 0
    mover.close()
    ended(standby.pid)


def test_a_standby_ends_when_it_is_told_to_and_after_its_phosd(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Standby.start(0, RING, place)
    told.end()
    ended(told.pid)
    monkeypatch.setenv("PHOS_TEST_LINGER", "1")
    left = Standby.start(0, RING, place)
    again = Standby.start(0, RING, place)  # as the next phosd does
    left.release()
    assert again.pid == left.pid
    again.release()
    ended(left.pid)


def test_a_standby_that_is_used_does_not_end(place: Path) -> None:
    standby = Standby.start(0, RING, place)
    with Mover.start(0, RING, KEY, place, standby.child) as mover:
        standby.end()
        assert mover.free_memory()[0] > 0


def test_a_standby_that_was_killed_is_in_nobodys_way(place: Path) -> None:
    standby = Standby.start(0, RING, place)
    os.kill(standby.pid, signal.SIGKILL)
    wait_until(lambda: not standby.alive, "its end")
    standby.release()
    with engine(place) as mover:
        assert mover.pid != standby.pid


def test_a_mover_of_another_version_makes_room_once_it_guards_nothing(
    place: Path, program: Owner, sleeper: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    (descriptor,) = program.create([CHUNK])
    mover = engine(place)
    mover.adopt([(1, CHUNK, descriptor)])
    os.close(descriptor)
    mover.guard([(sleeper, 5, 1)])
    die(mover)
    monkeypatch.setattr(wire, "VERSION", wire.VERSION + 1)
    with pytest.raises(Busy, match=f"process {mover.pid}. was started by another phosd, and keeps"):
        engine(place)
    (client,) = rescue_clients(place)
    with client:
        os.close(client.parked()[sleeper][5])
        client.unguard([sleeper])
    # The next one comes from the files of this test, which has been replaced, so to speak.
    with pytest.raises(Internal, match="files were replaced while it ran; restart phosd"):
        engine(place)
    ended(mover.pid)


def test_the_next_engine_uses_the_same_numbers(
    place: Path, program: Owner, sleeper: ProcessId
) -> None:
    """Keys are the engine's own; what an earlier one left is known by its process."""
    first, second = program.create([CHUNK, CHUNK])
    mover = engine(place)
    mover.adopt([(1, CHUNK, first)])
    mover.guard([(sleeper, 5, 1)])
    die(mover)
    assert listeners(place) == {mover.pid}, "it is known as a mover, whoever started it"
    with engine(place) as again:
        again.adopt([(1, CHUNK, second)])
        program.write(1, b"second")
        wanted = digest_buffer(KEY, b"second".ljust(CHUNK, b"\0"))
        assert again.digest([1]) == {1: wanted}
        assert kept(place) == {sleeper: [5]}
        again.unguard([sleeper])
        assert kept(place) == {}
    for fd in (first, second):
        os.close(fd)
    ended(mover.pid)
    assert listeners(place) == set()


def test_what_is_guarded_is_not_dropped(place: Path, program: Owner, sleeper: ProcessId) -> None:
    """The engine may have failed to give it back. It goes when it is guarded no more."""
    first, second = program.create([CHUNK, CHUNK])
    with engine(place) as mover:
        mover.adopt([(1, CHUNK, first), (2, CHUNK, second)])
        for fd in (first, second):
            os.close(fd)
        program.write(0, b"first")
        mover.guard([(sleeper, 5, 1)])
        mover.drop([1, 2])
        for key in (1, 2):  # as far as the engine can tell
            with pytest.raises(Internal, match="holds no block"):
                mover.digest([key])
        (client,) = rescue_clients(place)
        with client:
            memory = client.parked()
            assert list(memory) == [sleeper] and list(memory[sleeper]) == [5]
            descriptor = memory[sleeper][5]
            program.attach([descriptor], [CHUNK])
            assert program.read(2).startswith(b"first")
            program.kill()
            os.close(descriptor)
            free, _ = mover.free_memory()
            client.unguard([sleeper])
            assert client.parked() == {}
        assert mover.free_memory()[0] == free + CHUNK
    ended(mover.pid)


def test_a_reply_that_cannot_be_received(place: Path, program: Owner, sleeper: ProcessId) -> None:
    """No descriptor is left for it: the mover is given up, and found again with all it keeps."""
    (block,) = program.create([CHUNK])
    mover = engine(place)
    mover.adopt([(1, CHUNK, block)])
    mover.guard([(sleeper, 5, 1)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (block + 5, limits[1]))
    try:
        with pytest.raises(Internal, match="did not arrive"):
            mover.create([(key, CHUNK) for key in range(10, 40)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(block)
    assert not mover.alive
    with pytest.raises(Internal):
        mover.free_memory()
    mover.close()
    with engine(place) as again:
        assert again.pid == mover.pid
        assert kept(place) == {sleeper: [5]}
        again.unguard([sleeper])
    ended(mover.pid)


def test_room_is_kept_for_a_stopped_process(place: Path, sleeper: ProcessId) -> None:
    with engine(place) as before:
        free, _ = before.free_memory()
        before.reserve(4 * CHUNK, [sleeper])
        before.reserve(2 * CHUNK)  # for this engine only
        die(before)
        (client,) = rescue_clients(place)
        with client:
            wait_until(lambda: client.parked() == {sleeper: {}}, "the session to be over")
        with engine(place) as after:
            assert after.free_memory()[0] == free - 4 * CHUNK
            (client,) = rescue_clients(place)
            with client:
                client.unreserve([sleeper])
            assert after.free_memory()[0] == free
    ended(before.pid)


def test_two_jobs_have_room_of_their_own(place: Path, sleeper: ProcessId) -> None:
    """One that ends gives back its own only."""
    other = who(os.getpid())
    with engine(place) as mover:
        free, _ = mover.free_memory()
        mover.reserve(4 * CHUNK, [sleeper])
        mover.reserve(2 * CHUNK, [other])
        mover.unreserve([other])
        assert mover.free_memory()[0] == free - 4 * CHUNK
        mover.unreserve([sleeper])
        assert mover.free_memory()[0] == free


def test_nothing_is_kept_for_the_dead(place: Path, program: Owner) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        mover = engine(place)
        (block,) = program.create([CHUNK])
        mover.adopt([(1, CHUNK, block)])
        os.close(block)
        mover.guard([(who(process.pid), 1, 1)])
        mover.reserve(CHUNK, [who(process.pid)])
        mover.close()  # a good-bye: it stays for what it keeps
        assert list(kept(place)) == [who(process.pid)]
        process.kill()
    ended(mover.pid)
    assert not path_of(place, 0).exists()


def test_a_mover_that_nobody_needs_ends(place: Path) -> None:
    """Also when no engine ever came, and when its engine died."""
    words = ["-m", "phosd.engine.mover", "--gpu=0", f"--ring={RING}", f"--runtime-dir={place}"]
    command = [sys.executable, *words]
    with subprocess.Popen([*command, "--linger=0.5"], env=python_environment()) as process:
        assert process.wait(60) == 0
    with subprocess.Popen([*command, "--linger=5"], env=python_environment()) as process:
        wait_until(path_of(place, 0).exists, "it to listen")
        mover = engine(place)
        assert mover.pid == process.pid
        die(mover)
        assert process.wait(60) == 0


def test_one_mover_a_gpu(place: Path) -> None:
    """A second one leaves at once, and does no harm."""
    words = ["-m", "phosd.engine.mover", "--gpu=0", f"--ring={RING}", f"--runtime-dir={place}"]
    with engine(place) as mover:
        second = subprocess.run([sys.executable, *words], env=python_environment(), timeout=60)
        assert second.returncode == 0
        assert mover.free_memory()[1] > 0
    ended(mover.pid)


def test_a_killed_one_is_replaced(place: Path) -> None:
    """Its socket is still there."""
    with engine(place) as mover:
        os.kill(mover.pid, signal.SIGKILL)
        wait_until(lambda: not mover.alive, "its end")
    assert path_of(place, 0).exists()
    assert rescue_clients(place) == []
    with engine(place) as another:
        assert another.free_memory()[1] > 0


def test_one_that_no_engine_has_used_answers_visitors(place: Path, sleeper: ProcessId) -> None:
    """It guards nothing, and releases that when it is asked to."""
    words = ["-m", "phosd.engine.mover", "--gpu=0", f"--ring={RING}", f"--runtime-dir={place}"]
    with subprocess.Popen([sys.executable, *words], env=python_environment()) as mover:
        wait_until(path_of(place, 0).exists, "the mover")
        (client,) = wait_until(lambda: rescue_clients(place), "an answer")
        with client:
            assert client.parked() == {}
            client.unguard([sleeper])
            client.unreserve([sleeper])
            with pytest.raises(Internal, match="a visitor may not ask for Drop"):
                client._ask(wire.Drop([1]), wire.Done)
        mover.terminate()


def test_a_recovery_of_nobody_asks_for_nothing(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(place):
        assert free([], place) == Account()
    assert caplog.records == []


@pytest.mark.parametrize("refused", [wire.Drop([1]), wire.Reserve(CHUNK, []), wire.Leave()])
def test_a_visitor_may_not_do_an_engines_work(place: Path, refused: wire.Message) -> None:
    with engine(place) as mover:
        connection = connect(path_of(place, 0))
        assert connection is not None
        with closing(RescueClient(path_of(place, 0), connection)) as client:
            connection.send(9, refused)
            received = connection.receive(10)
            assert received is not None
            assert received[0] == 9 and isinstance(received[1], wire.Failed)
            assert client.parked() == {}
        assert mover.free_memory()[1] > 0


def test_other_users_do_not_reach_it(place: Path) -> None:
    place.chmod(0o755)
    with engine(place):
        folder, file = path_of(place, 0).parent.stat(), path_of(place, 0).stat()
        assert [stat.S_IMODE(one.st_mode) for one in (folder, file)] == [0o700, 0o600]
        script = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path_of(place, 0))!r})"
        stranger = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = subprocess.run(
            [*stranger, "/usr/bin/python3", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 1 and "PermissionError" in done.stderr


def test_an_open_door_is_not_used(place: Path) -> None:
    """A folder that others may enter is not one of ours."""
    (place / "mover").mkdir()
    (place / "mover").chmod(0o755)
    with pytest.raises(NotAuthorized):
        engine(place)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 12, b"\0" * 64])
def test_garbage_and_silence_do_not_disturb_the_engine(place: Path, garbage: bytes) -> None:
    with engine(place) as mover, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path_of(place, 0)))
        stranger.sendall(garbage)
        began = time.monotonic()
        assert mover.free_memory()[1] > 0
        assert time.monotonic() - began < 20


def test_one_that_does_not_answer_is_told_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps is not known, which is not the same as nothing."""
    monkeypatch.setattr(visit_module, "_TIMEOUT", 0.2)
    folder_of(place)
    silent: list[PhosError] = []
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path_of(place, 0)))
        hung.listen()
        assert rescue_clients(place, silent) == []
    assert len(silent) == 1 and "does not answer" in str(silent[0])
