"""What comes to the socket at which programs ask for checkpoints of themselves."""

import os
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from phosd import unix_sockets
from phosd.engine.hook_client.wire import HEADER, MAGIC, PROGRAM_WISH, VERSION, Status, Type
from phosd.engine.job.progress import Progress
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, MisSpeculation
from phosd.service import process_identity
from phosd.service.config import Config
from phosd.service.jobs.options import OwnCheckpointRequest
from phosd.service.process_identity import Target, identify
from phosd.service.tasks import own_checkpoints
from phosd.service.tasks.own_checkpoints import CONNECTIONS, MOST, OPEN
from tests.support.authority import NO, YES, authority
from tests.support.fake_engine import FakeEngine, this_process
from tests.support.harness import wait_until
from tests.support.service import Service, serving

STRANGER = pwd.getpwnam("nobody").pw_uid
ME = os.getpid()
PATIENCE = 120


@contextmanager
def connected(service: Service) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(service.config.runtime_dir / "program.sock"))
        yield connection


def message(
    wish: int = 1,
    then: int = 0,
    name: bytes = b"",
    kind: int = Type.PROGRAM,
    size: int | None = None,
    name_size: int | None = None,
) -> bytes:
    body = PROGRAM_WISH.pack(wish, then, len(name) if name_size is None else name_size) + name
    return HEADER.pack(MAGIC, VERSION, kind, 7, 0, len(body) if size is None else size, 0) + body


def ask(service: Service, wish: int = 1, then: int = 0, name: bytes = b"") -> tuple[int, str]:
    """Ask for a checkpoint of this process; the status of the answer and its text."""
    with connected(service) as connection:
        connection.sendall(message(wish, then, name))
        answer = connection.recv(4096)
    _, _, kind, sequence, status, length, _ = HEADER.unpack(answer[: HEADER.size])
    assert (kind, sequence, length) == (Type.PROGRAM | 0x8000, 7, len(answer) - HEADER.size)
    return status, answer[HEADER.size :].decode()


def answered(service: Service, wish: int) -> str:
    """What a process was told of its wish."""

    def found() -> list[str]:
        return [f"{error}!" for _, number, error in service.engine.answers if number == wish]

    return wait_until(found, f"the answer to wish {wish}")[0].removesuffix("!")


def test_a_process_is_saved_as_it_asks_and_told_so(service: Service) -> None:
    service.engine.running = [this_process(start_time=identify(ME).start_time)]
    service.engine.go.set()
    assert ask(service, wish=3) == (Status.OK, "")
    assert answered(service, 3) == ""
    (request,) = service.engine.requests
    assert isinstance(request, OwnCheckpointRequest)
    assert request.token.startswith(f"program {ME} {identify(ME).start_time} 3 0 ")
    assert request == OwnCheckpointRequest(wish=3, queue=True, token=request.token)


def test_the_job_names_a_program_that_no_list_had_yet(service: Service) -> None:
    known = this_process(start_time=identify(ME).start_time, name="bert")
    service.engine.running = [known]
    service.engine.go.set()
    assert ask(service, wish=3) == (Status.OK, "")
    assert answered(service, 3) == ""
    assert service.get("/org/phos/job/_1", "Job1", "Name") == '"bert"'


def test_an_image_has_the_name_that_is_asked_for(service: Service) -> None:
    service.engine.go.set()
    assert ask(service, name=b"x" * 63) == (Status.OK, "")
    assert answered(service, 1) == ""
    (request,) = service.engine.requests
    assert isinstance(request, OwnCheckpointRequest) and request.name == "x" * 63


@pytest.mark.parametrize("name", [b"latest", b"4711", b"../x", b"a b", b"\xff", b"\0", b"@1"])
def test_a_name_that_no_image_may_have(service: Service, name: bytes) -> None:
    status, text = ask(service, name=name)
    assert status == Status.BUSY
    assert text.startswith("InvalidOption: ") and "can be no name of an image; a letter" in text
    assert service.engine.requests == []


def test_no_job_begins_before_the_connection_is_closed(service: Service) -> None:
    """It would be refused for the connection, or CRIU would meet it."""
    with connected(service) as connection:
        connection.sendall(message())
        assert HEADER.unpack(connection.recv(HEADER.size))[4] == Status.OK
        assert ask(service, wish=2) == (Status.OK, "")
        wait_until(lambda: service.engine.requests, "the job of the other one")
        (request,) = service.engine.requests
        assert isinstance(request, OwnCheckpointRequest) and request.wish == 2
    service.engine.go.set()
    assert answered(service, 1) == answered(service, 2) == ""


def test_it_is_told_why_there_is_no_image(service: Service) -> None:
    service.engine.running = [this_process(start_time=identify(ME).start_time)]

    def fail(_: object) -> None:
        raise MisSpeculation("its memory changed", hint="look who writes")

    service.engine.act = fail
    assert ask(service) == (Status.OK, "")
    assert answered(service, 1) == "MisSpeculation: its memory changed; look who writes"


def test_ranks_that_are_in_each_others_way_are_tried_again(service: Service) -> None:
    service.engine.go.set()

    def fail(progress: Progress) -> None:
        if len(service.engine.requests) < 3:
            progress.phases.clear()  # the engine finds that out before anything is stopped
            raise Busy("a job works on process 1, which it needs")

    service.engine.act = fail
    assert ask(service) == (Status.OK, "")
    assert answered(service, 1) == ""
    assert len(service.engine.requests) == 3


def test_a_program_that_does_not_come_to_rest_is_not_tried_again(service: Service) -> None:
    def fail(progress: Progress) -> None:
        progress.phase("quiesce", stopped=True)
        raise Busy("the program did not come to rest")

    service.engine.act = fail
    assert ask(service) == (Status.OK, "")
    assert answered(service, 1) == "Busy: the program did not come to rest"
    assert len(service.engine.requests) == 1


def test_a_wish_that_is_told_twice_is_one_job(service: Service) -> None:
    assert [ask(service), ask(service)] == [(Status.OK, "")] * 2
    wait_until(lambda: service.engine.requests, "the job")
    service.engine.go.set()
    assert answered(service, 1) == ""
    assert len(service.engine.requests) == 1


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"\0" * 40,
        message()[:20],
        message(kind=Type.HELLO),
        message(size=17),
        message(size=1 << 31),
        message(size=15),
        message(name_size=1),
        message(name=b"best", name_size=0),
        message(name=b"x" * 64),
        message(wish=0),
        message(then=3),
    ],
)
def test_rubbish_is_not_answered(service: Service, rubbish: bytes) -> None:
    with connected(service) as connection:
        connection.sendall(rubbish)
        connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # not all of it was read
            assert connection.recv(4096) == b""
    service.engine.go.set()
    assert ask(service)[0] == Status.OK


def test_who_says_nothing_is_not_waited_for(service: Service) -> None:
    with connected(service) as silent:
        assert silent.recv(1) == b""  # after its two seconds


def test_a_user_has_a_share_of_the_connections(service: Service) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(connected(service)) for _ in range(OPEN + 1)]
        assert opened[-1].recv(1) == b""
        opened[0].sendall(message())
        assert HEADER.unpack(opened[0].recv(HEADER.size))[4] == Status.OK


def test_a_user_may_connect_so_often(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that connects again and again is not looked at each time, even with none open."""
    monkeypatch.setattr(own_checkpoints, "WINDOW", 1000.0)
    for number in range(CONNECTIONS):
        with connected(service) as each:
            each.shutdown(socket.SHUT_WR)
            assert each.recv(1) == b"", number
    with connected(service) as refused, suppress(BrokenPipeError, ConnectionResetError):
        refused.sendall(message())
        assert refused.recv(1) == b""
    assert not service.engine.requests


def test_a_user_may_ask_so_often(service: Service) -> None:
    service.engine.go.set()
    found = [ask(service, wish) for wish in range(1, MOST + 2)]
    assert found[:MOST] == [(Status.OK, "")] * MOST
    status, text = found[MOST]
    assert status == Status.BUSY and text.startswith("Busy: programs of uid 0 have asked for")


def test_who_uses_no_gpu_is_not_kept(service: Service) -> None:
    service.engine.without_gpu = {ME}
    status, text = ask(service)
    assert status == Status.BUSY
    assert text == f"NoSuchProcess: process {ME} uses no GPU; ask when it has initialised CUDA"
    assert service.engine.requests == []


def test_a_connection_does_not_speak_for_the_next_process_with_its_pid(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified = threading.Event()

    def identify_once(pid: int) -> Target:
        found = identify(pid)
        if identified.is_set():  # another process has the pid
            return replace(found, id=ProcessId(pid, found.start_time + 1))
        identified.set()
        return found

    monkeypatch.setattr(process_identity, "identify", identify_once)
    with connected(service) as connection:
        assert identified.wait(PATIENCE), "it is not identified when it connects"
        connection.sendall(message())
        answer = connection.recv(4096)
    assert HEADER.unpack(answer[: HEADER.size])[4] == Status.BUSY
    assert answer[HEADER.size :].decode().startswith(f"NoSuchProcess: process {ME} has ended")


def test_nobody_asks_for_a_process_of_another_user(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that had this pid has connected."""
    monkeypatch.setattr(unix_sockets, "peer_of", lambda _: (ME, STRANGER))
    with connected(service) as connection:
        connection.sendall(message())
        answer = connection.recv(4096)
    assert HEADER.unpack(answer[: HEADER.size])[4] == Status.BUSY
    said = f"NotAuthorized: process {ME} is not uid {STRANGER}'s, who has connected to phosd"
    assert answer[HEADER.size :].decode().startswith(said)


def test_nobody_is_identified_by_the_pid_of_who_has_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has the pid when phosd accepts the connection."""
    monkeypatch.setattr(unix_sockets, "peer_lives", lambda _: False)
    with connected(service) as connection:
        connection.sendall(message())
        answer = connection.recv(4096)
    assert HEADER.unpack(answer[: HEADER.size])[4] == Status.BUSY
    assert answer[HEADER.size :].decode().startswith(f"NoSuchProcess: process {ME} has ended")


def test_who_has_ended_is_known_to_have(tmp_path: Path) -> None:
    with unix_sockets.listening(tmp_path / "socket") as listener:
        code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "socket")], check=True)
        with listener.accept()[0] as ended:
            assert not unix_sockets.peer_lives(ended)
        with socket.socket(socket.AF_UNIX) as mine:
            mine.connect(str(tmp_path / "socket"))
            with listener.accept()[0] as lives:
                assert unix_sockets.peer_lives(lives)


def test_hooks_that_do_not_answer_take_the_threads_of_their_user_alone(service: Service) -> None:
    service.engine.running = [this_process(start_time=identify(ME).start_time)]
    service.engine.without_gpu = {ME}  # no thread is needed for one that the scan has found
    wait_until(lambda: str(ME) in service.call("ListProcesses"), "the scan")
    service.engine.go.set()
    over, lock = threading.Event(), threading.Lock()
    asked: list[int] = []

    def wait(process: ProcessId, wish: int, error: str) -> None:
        with lock:
            asked.append(wish)
        over.wait(PATIENCE)

    service.engine.answer_wish = wait  # type: ignore[method-assign]
    try:
        for wish in range(1, 9):
            assert ask(service, wish) == (Status.OK, "")
        wait_until(lambda: len(service.engine.requests) == 8, "the jobs")
        wait_until(lambda: len(asked) == 2, "the user's two threads")
        assert service.call("ListProcesses", uid=STRANGER).startswith("a")
        assert len(asked) == 2
    finally:
        over.set()
    wait_until(lambda: sorted(asked) == [*range(1, 9)], "the others")


def test_a_process_that_is_always_busy_is_not_told_for_ever(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_checkpoints, "TELL_SECONDS", 0.3)
    monkeypatch.setattr(service.engine, "silent", Busy("a job works on it"))
    service.engine.go.set()
    with caplog.at_level("INFO", logger=own_checkpoints.__name__):
        assert ask(service) == (Status.OK, "")
        wait_until(
            lambda: "was not told of its checkpoint: a job works on it" in caplog.text, "end"
        )
    assert len(service.engine.asked) > 1


def test_a_user_has_so_many_requests_that_are_not_over(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_checkpoints, "KEPT", 2)
    assert [ask(service, wish)[0] for wish in (1, 2)] == [Status.OK] * 2
    wait_until(lambda: len(service.engine.requests) == 1, "the first job")
    status, text = ask(service, 3)
    assert status == Status.BUSY and "that programs of uid 0 have asked for are not over" in text
    service.engine.go.set()
    assert answered(service, 1) == answered(service, 2) == ""
    wait_until(lambda: ask(service, 4)[0] == Status.OK, "room for another request")


_ASKS = """
import os, socket, sys
user = int(sys.argv[3])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    connection.connect(sys.argv[1])
    connection.sendall(bytes.fromhex(sys.argv[2]))
    sys.stdout.buffer.write(connection.recv(4096))
    sys.stdout.flush()
    sys.stdin.read()
"""


@contextmanager
def asking(service: Service, then: int = 0) -> Iterator[int]:
    """A process of a user that asks for a checkpoint; its pid."""
    for folder in (service.config.runtime_dir, *service.config.runtime_dir.parents):
        if "pytest" in str(folder):
            folder.chmod(0o755)
    place = str(service.config.runtime_dir / "program.sock")
    with subprocess.Popen(
        [sys.executable, "-c", _ASKS, place, message(then=then).hex(), str(STRANGER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.read(HEADER.size)
        yield process.pid
        process.stdin.close()


def test_who_connects_has_a_folder_for_its_hooks(service: Service) -> None:
    """Whatever it says, or nothing at all, as a hook that has none yet."""
    hooks = service.config.runtime_dir / "hook"
    hooks.mkdir()
    with connected(service):
        wait_until((hooks / str(os.geteuid())).is_dir, "the folder")
    with asking(service):
        wait_until((hooks / str(STRANGER)).is_dir, "the user's folder")
        wait_until(lambda: (hooks / str(STRANGER)).stat().st_uid == STRANGER, "its owner")
        assert (hooks / str(STRANGER)).stat().st_mode & 0o777 == 0o700


def test_a_job_belongs_to_the_processs_user(service: Service) -> None:
    service.engine.go.set()
    with asking(service) as pid:
        assert answered(service, 1) == ""
        assert service.engine.answers == [(pid, 1, "")]
    jobs = service.call("ListJobs", uid=STRANGER)
    assert f'"checkpoint" "{pid}" "done"' in jobs


def test_polkit_decides_about_the_process(service: Service, bus: str) -> None:
    service.engine.go.set()
    with authority(bus, NO) as polkit, asking(service) as pid:
        told = answered(service, 1)
        assert told.startswith(f"NotAuthorized: uid {STRANGER} may not checkpoint process {pid}")
        (question,) = polkit.questions
        assert (question.kind, question.subject) == ("unix-process", str(pid))
        assert question.details == {"owner": str(STRANGER), "pid": str(pid)}
    assert service.engine.requests == []


def test_who_ends_by_its_checkpoint_needs_the_right_to_be_suspended(
    service: Service, bus: str
) -> None:
    service.engine.go.set()
    with authority(bus, NO) as polkit:
        polkit.verdicts["org.phos.checkpoint"] = YES
        with asking(service, then=1) as pid:
            told = answered(service, 1)
            assert told.startswith(f"NotAuthorized: uid {STRANGER} may not migrate process {pid}")


def test_the_socket_of_a_killed_phosd_is_replaced(bus: str, tmp_path: Path) -> None:
    config = Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", rescan_seconds=0.5)
    config.runtime_dir.mkdir()
    place = config.runtime_dir / "program.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(place))
    with serving(bus, config, FakeEngine()) as service:
        service.engine.go.set()
        assert ask(service) == (Status.OK, "")
        assert place.stat().st_mode & 0o777 == 0o666
    assert not place.exists()
