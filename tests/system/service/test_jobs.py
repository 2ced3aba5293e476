"""Jobs over the bus: their life, their errors, their permissions."""

import asyncio
import json
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from phosd.bus import Connection, Signal, path_of
from phosd.engine.job.progress import Progress
from phosd.engine.system.containers import Container
from phosd.errors import ImageCorrupt, Internal, OutOfSpace
from tests.support.bus import busctl
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import MANAGER, ROOT, Service
from tests.system.service.test_periodic import until

STRANGER = pwd.getpwnam("nobody").pw_uid


def state_of(service: Service, job: str) -> str:
    return service.get(job, "Job1", "State").strip('"')


def wait_for(service: Service, job: str, state: str) -> None:
    wait_until(lambda: state_of(service, job) == state, f"{job} to be {state}")


def test_a_checkpoint_runs_through_its_phases_and_leaves_an_image(service: Service) -> None:
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_until(lambda: service.get(job, "Job1", "Phase") == '"quiesce"', "quiesce")
    assert service.get(job, "Job1", "ProgramStopped") == "true"
    assert state_of(service, job) == "running"
    service.engine.go.set()
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "Result") == '"image-0"'
    assert service.get(job, "Job1", "Mode") == '"stop"'
    assert service.get(job, "Job1", "Progress") == "1"
    names = service.get(job, "Job1", "Phases")
    assert [p for p in ("prepare", "quiesce", "publish") if f'"{p}"' in names] == [
        "prepare",
        "quiesce",
        "publish",
    ]
    assert '"image-0"' in service.call("ListImages")


def test_a_second_job_on_a_process_is_busy_and_names_the_first(service: Service) -> None:
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    with pytest.raises(RuntimeError, match=r"job 1 .* holds process"):
        service.call("Checkpoint", "ua{sv}", os.getpid(), 0)
    service.engine.go.set()
    wait_for(service, job, "done")
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)


def test_a_program_is_held_until_it_is_to_continue(service: Service) -> None:
    me = os.getpid()
    service.engine.go.set()
    with pytest.raises(RuntimeError, match=f"process {me} is not held"):
        service.call("Continue", "ua{sv}", me, 0)
    job = service.start("Checkpoint", "ua{sv}", me, 1, "then", "s", "hold")
    wait_until(lambda: service.get(job, "Job1", "Phase") == '"hold"', "the job to hold it")
    assert service.get(job, "Job1", "Result") == '"image-0"'
    assert (state_of(service, job), service.get(job, "Job1", "ProgramStopped")) == (
        "running",
        "true",
    )
    assert '"image-0"' in service.call("ListImages")
    service.call("Continue", "ua{sv}", me, 0)
    wait_for(service, job, "done")
    service.engine.go.clear()
    job = service.start("Checkpoint", "ua{sv}", me, 1, "then", "s", "hold")
    with pytest.raises(RuntimeError, match=rf"job 2 \(checkpoint {me}\) works on process {me}"):
        service.call("Continue", "ua{sv}", me, 0)
    busctl(service.address, "call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")
    wait_for(service, job, "cancelled")


def test_a_program_that_ends_is_not_saved_again_and_again(service: Service) -> None:
    options = (2, "every", "d", 5.0, "then", "s", "end")
    with pytest.raises(RuntimeError, match="only a program that runs on"):
        service.call("Checkpoint", "ua{sv}", os.getpid(), *options)
    assert service.engine.requests == []


def test_a_child_of_a_process_under_a_job_is_busy_too(service: Service) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
        with pytest.raises(RuntimeError, match=f"holds process {os.getpid()}"):
            service.call("Checkpoint", "ua{sv}", child.pid, 0)
        child.communicate(b"\n")


def test_the_same_token_gives_the_same_job(service: Service) -> None:
    call = ("Checkpoint", "ua{sv}", os.getpid(), 1, "token", "s", "once")
    job = service.start(*call)
    assert service.start(*call) == job
    service.engine.go.set()
    wait_for(service, job, "done")
    assert service.start(*call) == job
    assert len(service.engine.stored) == 1
    with pytest.raises(RuntimeError, match="token 'once' belongs to job 1"):
        service.call("Restore", "sa{sv}", "image-0", 1, "token", "s", "once")


def test_cancel_ends_the_job_and_says_so(service: Service) -> None:
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    busctl(service.address, "call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")
    wait_for(service, job, "cancelled")
    assert service.get(job, "Job1", "Error") == '"Cancelled"'
    assert not service.engine.stored
    with pytest.raises(RuntimeError, match="has ended already"):
        busctl(service.address, "call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")


def test_a_typed_error_is_told_with_its_hint(service: Service) -> None:
    def fail(progress: Progress) -> None:
        raise OutOfSpace("the disk is full", hint="delete an image")

    service.engine.act = fail
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"OutOfSpace"'
    assert service.get(job, "Job1", "Message") == '"the disk is full; delete an image"'


def test_an_unexpected_error_is_internal_and_no_traceback_crosses_the_bus(
    service: Service,
) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError("inner secret")

    service.engine.act = fail
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"Internal"'
    message = service.get(job, "Job1", "Message")
    assert "ZeroDivisionError" in message
    assert "inner secret" not in message
    assert "Traceback" not in message

    def broken(image: str) -> None:
        raise ZeroDivisionError("inner secret")

    service.engine.image = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(RuntimeError) as caught:
        service.call("Restore", "sa{sv}", "image-0", 0)
    assert "its log says why" in str(caught.value)
    assert "inner secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("Checkpoint", "ua{sv}", 2**22 + 1, 0), "there is no process"),
        (("Checkpoint", "ua{sv}", os.getpid(), 1, "mood", "s", "good"), "no option `mood`"),
        (
            ("Checkpoint", "ua{sv}", os.getpid(), 1, "mode", "u", 1),
            "1 is no mode; mode is one of: ",
        ),
        (
            ("Checkpoint", "ua{sv}", os.getpid(), 1, "mode", "s", "fast"),
            "'fast' is no mode; mode is one of: ",
        ),
        (("Checkpoint", "sa{sv}", "12", 0), "takes 'ua{sv}'"),
        (("Checkpoint", "u", 12), "takes 'ua{sv}'"),
        (("Restore", "sa{sv}", "nothing", 0), "there is no image nothing"),
        (("VerifyImage", "sa{sv}", "nothing", 0), "there is no image nothing"),
        (("DeleteImage", "sa{sv}", "nothing", 0), "there is no image nothing"),
        (("GetProcess", "u", 1), "process 1 uses no GPU"),
        (("Nonsense", "u", 1), "no method"),
    ],
)
def test_bad_calls_get_clear_errors(service: Service, call: tuple[str, ...], error: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        service.call(*call)
    assert error in str(caught.value)


def test_a_zombie_is_no_process_to_save(service: Service) -> None:
    child = subprocess.Popen(["true"])
    try:
        wait_until(
            lambda: ") Z " in open(f"/proc/{child.pid}/stat").read(),  # noqa: PTH123, SIM115
            "the zombie",
        )
        with pytest.raises(RuntimeError, match="has ended and waits for its parent"):
            service.call("Checkpoint", "ua{sv}", child.pid, 0)
    finally:
        child.wait()


def test_a_thread_is_no_process_to_save(service: Service) -> None:
    thread = next(t for t in map(int, os.listdir("/proc/self/task")) if t != os.getpid())  # noqa: PTH208
    with pytest.raises(RuntimeError, match=f"{thread} is a thread of process {os.getpid()}"):
        service.call("Checkpoint", "ua{sv}", thread, 0)


def test_strangers_may_not_touch_processes_images_and_jobs(service: Service) -> None:
    service.engine.stored["image-r"] = manifest("image-r")
    for call in (
        ("Checkpoint", "ua{sv}", os.getpid(), 0),
        ("Restore", "sa{sv}", "image-r", 0),
        ("VerifyImage", "sa{sv}", "image-r", 0),
        ("DeleteImage", "sa{sv}", "image-r", 0),
    ):
        with pytest.raises(RuntimeError, match="belongs to uid 0"):
            service.call(*call, uid=STRANGER)
    assert "image-r" in service.engine.stored
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    cancel = ("call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")
    with pytest.raises(RuntimeError, match="belongs to uid 0"):
        busctl(service.address, *cancel, uid=STRANGER)
    assert state_of(service, job) == "running"


def test_a_user_handles_what_is_his_own(service: Service) -> None:
    service.engine.stored["mine"] = manifest("mine", owner=STRANGER)
    job = service.start("Restore", "sa{sv}", "mine", 1, "files", "s", "cut", uid=STRANGER)
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "Result", uid=STRANGER) == '"4711"'
    service.call("DeleteImage", "sa{sv}", "mine", 0, uid=STRANGER)
    assert not service.engine.stored


def test_who_reads_that_a_job_is_done_finds_its_image(service: Service) -> None:
    service.engine.images_take = 0.5
    service.engine.go.set()
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_until(lambda: state_of(service, job) == "done", "the checkpoint to be done")
    image = service.get(job, "Job1", "Result").strip('"')
    owner = service.get(path_of("image", image), "Image1", "Owner")
    assert owner == str(os.getuid())


def come_seldom(changes: list[tuple[float, Signal]], begun: float) -> bool:
    """Whether these signals of a job that began then came at most twice a second. One may be heard
    late, which does not make the next one early.
    """
    return all(heard - begun > 0.5 * n - 0.1 for n, (heard, _) in enumerate(changes))


def end_was_told(heard: list[tuple[float, Signal]], job: str) -> bool:
    """Whether both signals have come that tell the end of a job; the later may be due a while
    after it is over.
    """
    signals = [signal for _, signal in heard]
    changes = [s.args[1] for s in signals if (s.member, s.path) == ("PropertiesChanged", job)]
    removed = [s.args[0] for s in signals if s.member == "JobRemoved"]
    return any(values.get("State") == "done" for values in changes) and job in removed


def test_notifications_come_at_most_twice_a_second(service: Service) -> None:
    def work(progress: Progress) -> None:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            progress.advance(1)
            time.sleep(0.001)

    service.engine.act = work
    service.engine.go.set()
    heard: list[tuple[float, Signal]] = []

    async def listen() -> str:
        connection = await Connection.open(service.address)
        await connection.subscribe(
            lambda signal: heard.append((time.monotonic(), signal)), "sender='org.phos'"
        )
        job = await asyncio.to_thread(service.start, "Checkpoint", "ua{sv}", os.getpid(), 0)
        await until(lambda: end_was_told(heard, job), "the end to be told")
        await asyncio.sleep(0.6)  # nothing comes after it
        connection.close()
        return job

    begun = time.monotonic()
    job = asyncio.run(listen())
    changes = [(t, s) for t, s in heard if s.member == "PropertiesChanged" and s.path == job]
    assert 3 <= len(changes) <= 7
    assert come_seldom(changes, begun)
    # The last one tells the end.
    interface, values, _ = changes[-1][1].args
    assert (interface, values["State"]) == ("org.phos.Job1", "done")
    # What the job has made is there before its state says so, perhaps by a notification.
    assert [name for _, change in changes for name in change.args[2]] == ["Result"]
    members = [s.member for _, s in heard if s.path == ROOT]
    assert members.index("JobNew") < members.index("ImageNew") < members.index("JobRemoved")
    assert next(s.args for _, s in heard if s.member == "JobRemoved") == (job, "done")


def test_a_job_that_waits_and_begins_is_told_of_as_seldom(service: Service) -> None:
    heard: list[tuple[float, Signal]] = []
    first_ends = threading.Event()

    def work(progress: Progress) -> None:
        progress.advance(1)
        first_ends.wait(60)

    service.engine.act = work
    service.engine.go.set()
    checkpoint = ("Checkpoint", "ua{sv}", os.getpid(), 1, "queue", "b", "true")

    async def listen() -> None:
        connection = await Connection.open(service.address)
        await connection.subscribe(
            lambda signal: heard.append((time.monotonic(), signal)), "sender='org.phos'"
        )
        jobs = [await asyncio.to_thread(service.start, *checkpoint) for _ in range(3)]
        await asyncio.sleep(0.7)  # nothing waits to be told any more
        first_ends.set()
        for job in jobs:
            await until(partial(end_was_told, heard, job), f"the end of {job} to be told")
        await asyncio.sleep(1.2)
        connection.close()

    begun = time.monotonic()
    asyncio.run(listen())
    for number in (1, 2, 3):
        job = f"/org/phos/job/_{number}"
        changes = [(t, s) for t, s in heard if (s.member, s.path) == ("PropertiesChanged", job)]
        assert changes[-1][1].args[1]["State"] == "done"
        assert come_seldom(changes, begun), changes


def test_verification_is_remembered(service: Service) -> None:
    service.engine.stored["i"] = manifest("i")
    service.call("ListImages")  # which puts it on the bus
    job = service.start("VerifyImage", "sa{sv}", "i", 0)
    wait_for(service, job, "done")
    path = "/org/phos/image/i"
    wait_until(lambda: service.get(path, "Image1", "VerifiedWhole") == "true", "the note")

    def fail(progress: Progress) -> None:
        raise ImageCorrupt("chunk 7 differs", hint="delete it")

    service.engine.act = fail
    job = service.start("VerifyImage", "sa{sv}", "i", 0)
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Message") == '"chunk 7 differs; delete it"'
    wait_until(lambda: service.get(path, "Image1", "VerifiedWhole") == "false", "the note")


def test_a_rehearsal_is_remembered_and_its_failure_told(service: Service) -> None:
    service.engine.stored["i"] = manifest("i")
    service.call("ListImages")
    path, options = "/org/phos/image/i", (1, "rehearse", "b", "true")
    wait_for(service, service.start("VerifyImage", "sa{sv}", "i", *options), "done")
    wait_until(lambda: service.get(path, "Image1", "Rehearsed") != "0", "the note")
    assert service.get(path, "Image1", "RehearsalError") == '""'

    def fail(progress: Progress) -> None:
        error = Internal("criu restore failed", hint="read its log")
        error.details = ("what it said",)
        raise error

    service.engine.act = fail
    job = service.start("VerifyImage", "sa{sv}", "i", *options)
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Notes") == '1 "what it said"'
    said = "criu restore failed; read its log"
    wait_until(lambda: service.get(path, "Image1", "RehearsalError") == f'"{said}"', "the note")
    assert service.get(path, "Image1", "Verified") == "0", "nobody says that it is damaged"
    assert f"it could not be restored now: {said}" in service.call("ListEvents", "a{sv}", 0)


def test_the_journal_is_there_while_the_job_runs_and_gone_afterwards(service: Service) -> None:
    journal = service.config.runtime_dir / "journal"
    seen: Callable[[], list[str]] = lambda: [p.name for p in journal.iterdir()]  # noqa: E731
    at_work: list[str] = []
    service.engine.act = lambda progress: at_work.extend(seen())
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_until(lambda: at_work, "the engine at work")
    assert at_work == ["1.json"]
    entry = json.loads((journal / "1.json").read_text())
    assert (entry["pid"], entry["operation"]) == (os.getpid(), "checkpoint")
    service.engine.go.set()
    wait_for(service, job, "done")
    wait_until(lambda: not seen(), "the journal to be empty")


def test_history_lists_the_jobs_of_the_caller(service: Service) -> None:
    service.engine.go.set()
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_for(service, job, "done")
    wait_until(lambda: '"done"' in service.call("ListHistory", "a{sv}", 0), "the row")
    text = service.call("ListHistory", "a{sv}", 0)
    assert '"checkpoint"' in text
    assert '"image-0"' in text
    assert service.call("ListHistory", "a{sv}", 0, uid=STRANGER) == "aa{sv} 0"
    with pytest.raises(RuntimeError, match="no option `all`"):
        service.call("ListHistory", "a{sv}", 1, "all", "b", "true")
    assert MANAGER in busctl(service.address, "introspect", "org.phos", ROOT)


def test_a_job_and_its_history_tell_what_its_program_is_called(service: Service) -> None:
    """Also when the program has ended since, or is in an image only."""
    pod = Container("containerd", "0" * 64, "main", "ml/bert-0")
    service.engine.running = [this_process(name="bert", container=pod)]
    service.engine.stored["old"] = msgspec.structs.replace(
        manifest("old"), name="gpt", number=3, within="Slurm job 12"
    )
    service.call("ListProcesses")
    service.call("ListImages")
    assert service.get("/org/phos/image/old", "Image1", "Within") == '"Slurm job 12"'
    service.engine.go.set()
    saved = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_for(service, saved, "done")
    service.engine.running = []
    service.call("ListProcesses")
    verified = service.start("VerifyImage", "sa{sv}", "old", 0)
    wait_for(service, verified, "done")
    called = [
        [service.get(job, "Job1", name).strip('"') for name in ("Name", "Within")]
        for job in (saved, verified)
    ]
    assert called == [["bert", "pod ml/bert-0"], ["gpt", "Slurm job 12"]]
    with pytest.raises(RuntimeError, match="belongs to uid 0"):
        service.get(saved, "Job1", "Within", uid=STRANGER)
    reply = busctl(
        *(service.address, "--json=short", "call", "org.phos", ROOT, MANAGER),
        *("ListHistory", "a{sv}", "0"),
    )
    (rows,) = json.loads(reply)["data"]
    past = [[row[name]["data"] for name in ("name", "within")] for row in rows]
    assert past == called[::-1]


def test_who_is_sent_brought_or_recovered_is_told(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import knows whom it brings when the image has come."""
    of_gpt = msgspec.structs.replace(manifest("old"), name="gpt", number=3)
    service.engine.stored["old"] = of_gpt
    service.engine.running = [this_process(name="bert")]
    service.call("ListProcesses")
    monkeypatch.setattr(service.engine, "import_image", lambda *_: of_gpt)
    service.engine.go.set()
    jobs = [
        service.start("Export", "ssa{sv}", "old", "socket", 0),
        service.start("Import", "sa{sv}", "socket", 0),
    ]
    for job in jobs:
        wait_for(service, job, "done")
    service.call("Recover", "ua{sv}", os.getpid(), 0)
    assert [service.get(job, "Job1", "Name") for job in jobs] == ['"gpt"', '"gpt"']
    reply = busctl(
        *(service.address, "--json=short", "call", "org.phos", ROOT, MANAGER),
        *("ListHistory", "a{sv}", "0"),
    )
    (rows,) = json.loads(reply)["data"]
    past = {row["operation"]["data"]: row["name"]["data"] for row in rows}
    assert past == {"export": "gpt", "import": "gpt", "recover": "bert"}
