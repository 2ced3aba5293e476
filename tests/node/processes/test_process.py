"""GPU processes as /proc and their hooks show them, hostile ones among them."""

import mmap
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phosd.engine.hook_client import distrust
from phosd.engine.program import driver_checkpoint, process, process_gpus
from phosd.engine.program.process_gpus import parse_visible, visible_gpus
from phosd.engine.system.cuda import gpu_uuid
from phosd.errors import NoSuchProcess
from tests.support import older_kernel
from tests.support.fake_hook import DEVICE, Answer, Request, blocks, fake_hook, hello
from tests.support.harness import users_hooks, wait_until

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("chosen", "ordinals"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2, 0", [2, 0]),
        ("01", [1]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,3,1", [0]),
        ("1,nonsense,2", [1]),
        ("GPU-bb33,0", [2, 0]),
        ("GPU-b", [2]),
        ("GPU-aa", []),  # fits two
        ("GPU-aa1,GPU-aa2", [0, 1]),
        ("MIG-aa11", []),
        ("²", []),
        ("٢", []),
        ("9" * 5000, []),
    ],
)
def test_visible_devices(chosen: str, ordinals: list[int]) -> None:
    assert parse_visible(chosen, UUIDS) == ordinals


@given(st.text(), st.integers(0, 4))
def test_any_text_names_some_devices_or_none(chosen: str, number: int) -> None:
    uuids = UUIDS[:number]
    assert set(parse_visible(chosen, uuids)) <= set(range(number))


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: UUIDS)
    for chosen, expected in ((None, [0, 1, 2]), ("2,0", [2, 0]), ("\udcff", [])):
        env = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], **env}) as sleeper:
            # A program that has only just been started has no environment for a moment.
            wait_until(Path(f"/proc/{sleeper.pid}/environ").read_bytes, "its environment")
            assert visible_gpus(sleeper.pid) == expected
            sleeper.kill()
    with pytest.raises(NoSuchProcess):
        visible_gpus(sleeper.pid)


def test_a_mapped_file_with_a_strange_name(tmp_path: Path) -> None:
    """A name that is no UTF-8, and one that looks like the driver's."""
    strange = os.fsencode(tmp_path) + b"/\xff\xfe"
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1].encode('utf-8', 'surrogateescape'), 'r+b')\n"
        "held = mmap.mmap(file.fileno(), 4096)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    for name, cuda in ((strange, False), (os.fsencode(tmp_path / "libcuda.so.1"), True)):
        Path(os.fsdecode(name)).write_bytes(b"\0" * mmap.PAGESIZE)
        command = [sys.executable, "-c", code, os.fsdecode(name)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdout and holder.stdout.readline() == "ready\n"
            assert process.uses_cuda(holder.pid) == cuda
            assert not process.is_gpu_process(holder.pid), "mapping a file is not using a GPU"
    assert not process.uses_cuda(holder.pid)


@pytest.fixture
def gpu_process(monkeypatch: pytest.MonkeyPatch) -> int:
    """This very process, as if it used the last of the node's GPUs."""
    monkeypatch.setattr(driver_checkpoint, "state", lambda pid: driver_checkpoint.State.RUNNING)
    monkeypatch.setattr(process_gpus, "gpu_uuids", lambda: [*UUIDS, gpu_uuid(DEVICE)])
    return os.getpid()


def test_a_process_without_a_hook(gpu_process: int, runtime: Path) -> None:
    found = process.describe(gpu_process, runtime)
    assert found is not None
    assert (found.hook_state, found.state, found.device_bytes) == ("driver", "running", 0)
    assert "no hook" in found.reason


def test_a_hook_that_nobody_has_woken(
    gpu_process: int, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a process that was stopped while it was parked, and has gone on since."""
    users_hooks(runtime)
    monkeypatch.setattr(process, "has_hook", lambda pid: pid == gpu_process)
    found = process.describe(gpu_process, runtime)
    assert found is not None and found.hook_state == "unsupported"
    assert f"`phos recover {gpu_process}`" in found.reason


def test_a_hooked_process(gpu_process: int, runtime: Path) -> None:
    def script(request: Request) -> Answer:
        if request.payload:
            return Answer(blocks((1, 1), (2, 1)))
        return Answer(hello(state=2, devices=[DEVICE]))

    with fake_hook(runtime, script):
        found = process.describe(gpu_process, runtime)
    assert found is not None
    assert (found.hook_state, found.state, found.gpus) == ("hooked", "closed", (3,))
    assert found.device_bytes == 4 << 20


@pytest.mark.parametrize(
    ("answer", "hook_state", "reason"),
    [
        (Answer(hello(parkable=0, reason=b"an unknown call")), "driver", "an unknown call"),
        (Answer(hello(devices=[bytes(16)])), "unsupported", "none of this node's GPUs"),
        (Answer(b"garbage"), "driver", "7 bytes instead of 288"),
        (Answer(hello()[:-1]), "driver", "303 bytes for 1 devices"),
        (Answer(hello() + bytes(16)), "driver", "320 bytes for 1 devices"),
        (Answer(status=4, payload=b"not now"), "unsupported", "not now"),
        (Answer(cut=0), "driver", "went away"),
    ],
)
def test_a_hook_with_something_to_say(
    gpu_process: int, runtime: Path, answer: Answer, hook_state: str, reason: str
) -> None:
    """A list of processes never fails because of one of them."""
    with fake_hook(runtime, lambda r: Answer(blocks()) if r.payload else answer):
        found = process.describe(gpu_process, runtime)
    assert found is not None
    assert found.hook_state == hook_state and reason in found.reason


def test_a_hook_that_sends_what_it_must_not(
    gpu_process: int, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists processes sees why phosd does not ask it any more."""
    older_kernel.passes_descriptors(monkeypatch)  # others send none with such an answer
    monkeypatch.setattr(distrust, "_processes", set())

    def answer(_: Request) -> Answer:
        return Answer(hello(devices=[DEVICE]), [socket.socket(socket.AF_UNIX).detach()])

    with fake_hook(runtime, answer) as seen:
        for _ in range(2):
            found = process.describe(gpu_process, runtime)
    assert len(seen) == 1
    assert found is not None and found.hook_state == "unsupported"
    assert "sent files or sockets instead of memory; phosd asks it nothing" in found.reason


def test_a_hook_that_is_slow_keeps_its_memory(
    gpu_process: int, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a program does not lose its GPUs for a moment."""
    monkeypatch.setattr(process, "_TIMEOUT", 0.2)
    over = threading.Event()

    def script(request: Request) -> Answer:
        if len(asked) > 1:
            over.wait(20)
        asked.append(request)
        return Answer(blocks((1, 1)) if request.payload else hello(devices=[DEVICE]))

    asked: list[Request] = []
    with fake_hook(runtime, script):
        before = process.describe(gpu_process, runtime)
        assert before is not None and before.gpus == (3,)
        now = process.describe(gpu_process, runtime, before=before)
        unknown = process.describe(gpu_process, runtime)
        over.set()
    assert now is not None and unknown is not None
    assert (now.hook_state, now.gpus, now.device_bytes) == ("hooked", (3,), before.device_bytes)
    assert "did not answer" in now.reason
    assert (unknown.hook_state, unknown.gpus) == ("unsupported", ())


def test_a_job_works_on_it(gpu_process: int, runtime: Path) -> None:
    with fake_hook(runtime, lambda _: Answer(hello())) as seen:
        found = process.describe(gpu_process, runtime, ask_hook=False)
    assert found is not None and not seen
    assert (found.hook_state, found.reason) == ("hooked", "a job works on it")
