"""The Python client, with a service over a real bus."""

import asyncio
import math
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from phosd.client import AsyncClient, Change, Client, Image, Job, Process
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.errors import (
    Busy,
    Cancelled,
    InvalidOption,
    NoBus,
    NoDaemon,
    NoSuchImage,
    NoSuchJob,
    NoSuchProcess,
    OutOfSpace,
    Reason,
    Timeout,
    Unsupported,
)
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import running
from tests.support.service import MANAGER, Service

ME = os.getpid()


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    service.engine.running = [this_process()]
    with Client(service.address) as client:
        yield client


def test_what_there_is_as_records(service: Service, client: Client) -> None:
    service.engine.stored["i"] = manifest("i")
    service.engine.stored["h"] = manifest("h")
    assert "get-one" in client.manager().features
    (gpu,) = client.gpus()
    assert (gpu.ordinal, gpu.uuid, gpu.temperature) == (0, "GPU-1234-ab", 40.0)
    (process,) = client.processes()
    assert (process.pid, process.command, process.gpus) == (ME, ("python", "train.py"), (gpu.path,))
    assert client.process(ME) == process
    images = client.images()
    assert [image.id for image in images] == ["h", "i"]
    assert client.image("i") == images[1]
    assert (images[1].stop_seconds, images[1].command) == (0.5, ("train", "--secret"))
    assert client.jobs() == []


def test_a_checkpoint_is_waited_for_with_its_progress(service: Service, client: Client) -> None:
    seen: list[Job] = []

    def look(job: Job) -> None:
        seen.append(job)
        assert client.job(job.number).number == job.number, "calls may be made meanwhile"
        service.engine.go.set()

    handle = client.checkpoint(ME, mode="stop", deadline=7)
    job = handle.wait(look)
    assert (job.state, job.result, job.number) == ("done", "image-0", handle.number)
    assert seen[0].state == "running" and seen[-1] == job
    assert [phase.name for phase in job.phases] == ["prepare", "quiesce", "publish"]
    (request,) = service.engine.requests
    assert (request.mode, request.deadline) == ("stop", 7.0)  # type: ignore[attr-defined]
    assert handle.wait() == client.attach(handle.number).wait() == job, "also afterwards"
    assert client.image(job.result).id == "image-0"
    client.delete(job.result)
    assert client.images() == []
    assert [past.operation for past in client.history()] == ["delete", "checkpoint"]
    assert client.history(operation="checkpoint", since=time.time() - 60)[0].result == "image-0"
    assert client.history(since=time.time() + 60) == []
    assert {event.kind for event in client.events(limit=10)} >= {"image-deleted", "job"}


def test_what_can_be_no_argument_is_refused_by_an_error_of_phosd(
    service: Service, client: Client
) -> None:
    """Also what is not sent to the bus as it is."""
    service.engine.go.set()
    handle = client.checkpoint(ME)
    wrong: Any = "ten"
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: Client(cast(Any, 5)), "bus is text, not 5; give text"),
        (lambda: client.history(wrong), "limit is a whole number, 0 or more, not 'ten'; give a"),
        (lambda: client.history(-1), "limit is a whole number, 0 or more, not -1"),
        (lambda: client.history(since=wrong), "since is a number, not 'ten'; give a number"),
        (lambda: client.history(until=math.nan), "until is nan; give seconds since the epoch"),
        (lambda: client.events(since=wrong), "since is a number, not 'ten'"),
        (lambda: handle.wait(cast(Any, 5)), "progress cannot be called: 5; give a function"),
        (lambda: handle.wait(timeout=wrong), "timeout is a number, not 'ten'; give a number"),
    ]
    for call, said in refused:
        with pytest.raises(InvalidOption, match=said) as raised:
            call()
        assert raised.value.hint
    assert handle.wait(timeout=math.inf).state == "done"

    async def awaited() -> None:
        async with await AsyncClient.connect(service.address) as asynchronous:
            job = await asynchronous.attach(handle.number)
            with pytest.raises(InvalidOption, match="timeout is a number"):
                await job.wait(timeout=wrong)

    asyncio.run(awaited())


def test_the_error_of_a_job_is_raised_with_its_reason(service: Service, client: Client) -> None:
    def fail(progress: Progress) -> None:
        raise Unsupported("it uses multicast", hint="do without", reason=Reason.MULTICAST)

    service.engine.act = fail
    with pytest.raises(Unsupported, match="it uses multicast; do without") as caught:
        client.checkpoint(ME).wait()
    assert (caught.value.reason, caught.value.hint) == ("multicast", "do without")
    (past,) = client.history()
    assert (past.error, past.error_reason) == ("Unsupported", "multicast")
    service.engine.act = lambda progress: fail_plainly()
    with pytest.raises(OutOfSpace, match="the disk is full") as plainly:
        client.checkpoint(ME).wait()
    assert (plainly.value.reason, plainly.value.hint) == ("", "")


def fail_plainly() -> None:
    raise OutOfSpace("the disk is full")


def test_the_error_of_a_call_is_raised_with_its_reason(service: Service, client: Client) -> None:
    service.engine.go.set()
    handle = client.checkpoint(ME)
    handle.wait()
    with pytest.raises(Unsupported, match="ended already") as caught:
        handle.cancel()
    assert (caught.value.reason, caught.value.hint) == ("job-ended", "there is nothing to cancel")


@pytest.mark.parametrize(
    "tool",
    [
        ["busctl", "--address={}", "call", "org.phos", "/org/phos", MANAGER, "GetJob", "u", "99"],
        [
            *("gdbus", "call", "--address={}", "--dest=org.phos", "--object-path=/org/phos"),
            *(f"--method={MANAGER}.GetJob", "99"),
        ],
        [
            *("dbus-send", "--bus={}", "--print-reply", "--dest=org.phos", "/org/phos"),
            *(f"{MANAGER}.GetJob", "uint32:99"),
        ],
    ],
    ids=lambda tool: tool[0],
)
def test_tools_that_expect_a_text_alone_show_it(service: Service, tool: list[str]) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"{tool[0]} is not installed")
    done = subprocess.run(
        [word.format(service.address) for word in tool], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "phosd knows no job 99; `phos jobs` lists those that it knows" in done.stderr


def test_arguments_that_a_method_does_not_take(client: Client) -> None:
    """It is told of the class that is used."""
    with pytest.raises(TypeError, match=r"^Client\.image: missing a required argument"):
        client.image()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Client\.changes: too many positional arguments"):
        client.changes(4711)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda client: client.process(2**22), NoSuchProcess),
        (lambda client: client.image("nothing"), NoSuchImage),
        (lambda client: client.job(99), NoSuchJob),
        (lambda client: client.attach(99), NoSuchJob),
        (lambda client: client.restore("nothing"), NoSuchImage),
        (lambda client: client.delete("nothing"), NoSuchImage),
        (lambda client: client.suspend(2**22), NoSuchProcess),
        (lambda client: client.checkpoint(ME, mode="fast"), InvalidOption),
        (lambda client: client.checkpoint(ME, every=0), InvalidOption),
        (lambda client: client.continue_(ME), NoSuchProcess),
        (lambda client: client.plan_evacuation("7"), InvalidOption),
    ],
)
def test_wrong_calls_raise_typed_errors(
    client: Client, ask: Callable[[Client], object], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        ask(client)
    assert str(caught.value)


def test_moves_restores_and_verifications(service: Service, client: Client) -> None:
    service.engine.go.set()
    service.engine.stored["i"] = manifest("i")
    assert client.restore("i", files="cut").wait().result == "4711"
    assert client.verify("i").wait().result == "i"
    assert client.image("i").whole is True
    assert client.suspend(ME, where="disk").wait().operation == "suspend"
    assert client.resume(ME).wait().state == "done"
    assert [step.pid for step in client.plan_evacuation("0")] == [ME]
    service.engine.found = [Finding("memory", found="enough")]
    assert [(c.what, c.error, c.text) for c in client.try_checkpoint(ME)] == [
        ("memory", "", "enough")
    ]
    trouble = Unsupported("it is used", hint="wait", reason=Reason.BUSY_GPU)
    service.engine.found = [Finding("GPU", trouble)]
    (check,) = client.try_restore("i")
    assert (check.error, check.text) == ("Unsupported", "it is used; wait")
    assert check.reason == "busy-gpu"
    assert client.recover(ME)


def test_a_job_is_cancelled(service: Service, client: Client) -> None:
    handle = client.checkpoint(ME)
    with pytest.raises(Timeout, match=r"has not ended within 0\.2 s; it goes on"):
        handle.wait(timeout=0.2)
    with pytest.raises(Busy):
        client.checkpoint(ME)
    waiting = client.checkpoint(ME, queue=True)
    assert client.job(waiting.number).position == 1
    waiting.cancel()
    with pytest.raises(Cancelled):
        waiting.wait()
    handle.cancel()
    with pytest.raises(Cancelled):
        handle.wait()


def test_an_exception_in_the_callback_ends_the_waiting_alone(
    service: Service, client: Client
) -> None:
    handle = client.checkpoint(ME)

    def fail(job: Job) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        handle.wait(fail)
    service.engine.go.set()
    assert handle.wait().state == "done"


def test_periodic_checkpoints_begin_and_end(service: Service, client: Client) -> None:
    service.engine.go.set()
    service.engine.running = [this_process(start_time=start_time())]
    client.checkpoint(ME, every=60.0, keep=2).wait()
    assert (client.process(ME).every, client.process(ME).keep) == (60.0, 2)
    client.end_periodic(ME)
    assert client.process(ME).every == 0.0


def start_time() -> int:
    from phosd.engine.system.procfs import process_id

    found = process_id(ME)
    assert found is not None
    return found.start_time


def test_changes_are_told(service: Service, client: Client) -> None:
    changes = client.changes()
    first = [next(changes) for _ in range(2)]
    assert {change.kind for change in first} == {"added"}
    assert {type(change.record).__name__ for change in first} == {"Process", "Gpu"}
    service.engine.go.set()
    client.checkpoint(ME).wait()

    def until(kind: type, what: str) -> Change:
        return next(c for c in changes if isinstance(c.record, kind) and c.kind == what)

    assert isinstance(until(Image, "added").record, Image)
    service.engine.running = [this_process(state="locked")]
    changed = until(Process, "changed").record
    assert isinstance(changed, Process) and changed.state == "locked"
    client.delete("image-0")
    removed = until(Image, "removed").record
    assert isinstance(removed, Image) and removed.id == "image-0"
    service.engine.running = []
    assert until(Process, "removed").record == changed
    changes.close()  # type: ignore[attr-defined]
    assert client.gpus(), "the connection is left as it was"


def test_many_wait_at_the_same_time(service: Service) -> None:
    service.engine.stored |= {f"i{n}": manifest(f"i{n}") for n in range(20)}

    async def body() -> None:
        async with await AsyncClient.connect(service.address) as client:
            jobs = [await client.verify(f"i{n}") for n in range(20)]
            done = await asyncio.gather(*jobs)
            assert [job.result for job in done] == [f"i{n}" for n in range(20)]
            assert not client._daemon._listeners

    asyncio.run(body())


def test_threads_share_a_client(service: Service, client: Client) -> None:
    service.engine.stored |= {f"i{n}": manifest(f"i{n}") for n in range(8)}
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(client.verify(f"i{n}").wait().result))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [f"i{n}" for n in range(8)]


def test_phosd_that_ends_is_told(service: Service, client: Client) -> None:
    handle = client.checkpoint(ME)
    changes = client.changes()
    next(changes)
    service.disconnect()
    with pytest.raises(NoDaemon, match="phosd ended while it worked on"):
        handle.wait()
    with pytest.raises(NoDaemon, match="phosd has ended"):
        for _ in changes:
            pass
    with pytest.raises(NoDaemon, match="does not run"):
        client.jobs()


def test_without_a_bus_it_says_so() -> None:
    with pytest.raises(NoBus, match="no D-Bus at unix:path=/nowhere") as caught:
        Client("unix:path=/nowhere")
    assert caught.value.hint
    assert "phos-client" not in {thread.name for thread in threading.enumerate()}


def test_the_bus_is_taken_from_the_environment(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHOS_BUS", service.address)
    with Client() as client:
        assert client.manager().version


_THRICE = """
import gc, sys
from phosd.client import Client
for _ in range(3):
    with Client(sys.argv[1]) as client:
        client.checkpoint(int(sys.argv[2])).wait()
        changes = client.changes()
        next(changes)
    gc.collect()
    client.close()
try:
    client.jobs()
except RuntimeError as error:
    print(error)
"""


def test_a_closed_client_leaves_nothing_behind(service: Service) -> None:
    service.engine.running = [this_process()]
    service.engine.go.set()
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", _THRICE, service.address, str(ME)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "this client is closed; make another one\n"


_FORKED = """
import os, sys
from phosd.client import Client
with Client(sys.argv[1]) as client:
    if os.fork() == 0:
        try:
            client.processes()
        except RuntimeError as error:
            print(error, flush=True)
        client.close()
        os._exit(0)
    os.wait()
    print(len(client.processes()))
"""


def test_a_client_is_of_the_process_that_made_it(service: Service) -> None:
    """Its thread is not there in a child, which would wait for it for ever."""
    service.engine.running = [this_process()]
    done = subprocess.run(
        [sys.executable, "-c", _FORKED, service.address], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["this client was made before a fork; make another one", "1"]


_INTERRUPTED = """
import sys
from phosd.client import Client
with Client(sys.argv[1]) as client:
    handle = client.checkpoint(int(sys.argv[2]))
    try:
        handle.wait(lambda job: print(job.state, flush=True))
    except KeyboardInterrupt:
        print("interrupted", client.job(handle.number).state, flush=True)
    print(handle.wait().state)
"""


def test_ctrl_c_ends_the_waiting_alone(service: Service) -> None:
    service.engine.running = [this_process()]
    command = [sys.executable, "-W", "default", "-c", _INTERRUPTED, service.address, str(ME)]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "running\n"
        waiting.send_signal(signal.SIGINT)
        while (line := waiting.stdout.readline()) == "running\n":
            pass
        assert line == "interrupted running\n", waiting.communicate()
        service.engine.go.set()
        assert waiting.communicate(timeout=60) == ("done\n", "")
        assert waiting.returncode == 0


_AS_STRANGER = """
import sys
from phosd.client import Client
from phosd.errors import NotAuthorized
with Client(sys.argv[1]) as client:
    print([client.processes(), client.images(), client.jobs()])
    for ask, what in (client.process, int(sys.argv[2])), (client.image, "i"), (client.job, 1):
        try:
            ask(what)
        except NotAuthorized as error:
            print(error)
"""


def test_what_is_of_others_is_as_hidden_as_in_the_lists(service: Service, client: Client) -> None:
    service.engine.go.set()
    service.engine.stored["i"] = manifest("i")
    client.checkpoint(ME).wait()
    done = subprocess.run(
        [
            *("setpriv", f"--reuid={pwd.getpwnam('nobody').pw_uid}", "--clear-groups"),
            *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
            *(sys.executable, "-c", _AS_STRANGER, service.address, str(ME)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lists, *refused = done.stdout.splitlines()
    assert lists == "[[], [], []]"
    assert [line.partition(";")[0] for line in refused] == [
        f"process {ME} belongs to uid 0",
        "image i belongs to uid 0",
        "job 1 belongs to uid 0",
    ]
