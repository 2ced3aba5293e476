"""What comes to the socket at which programs ask for checkpoints of themselves."""

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client.wire import HEADER, MAGIC, PROGRAM_WISH, VERSION, Status, Type
from phosd.engine.job.progress import Progress
from phosd.errors import Busy, MisSpeculation
from phosd.service.config import Config
from phosd.service.jobs.options import OwnCheckpointRequest
from phosd.service.process_identity import identify
from phosd.service.tasks.own_checkpoints import MOST, OPEN
from tests.support.authority import NO, YES, authority
from tests.support.fake_engine import FakeEngine, this_process
from tests.support.harness import wait_until
from tests.support.service import Service, serving

STRANGER = pwd.getpwnam("nobody").pw_uid
ME = os.getpid()


@contextmanager
def connected(service: Service) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
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
    token = f"program {ME} {identify(ME).start_time} 3 0"
    expected = OwnCheckpointRequest(wish=3, queue=True, token=token)
    assert service.engine.requests == [expected]


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


def test_a_user_may_ask_so_often(service: Service) -> None:
    service.engine.go.set()
    found = [ask(service, wish) for wish in range(1, MOST + 2)]
    assert found[:MOST] == [(Status.OK, "")] * MOST
    status, text = found[MOST]
    assert status == Status.BUSY and text.startswith("Busy: programs of uid 0 have asked for")


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
