"""Checkpoints over the bus: options, waiting, repeating, wrong guesses, cancelling."""

import asyncio
import os
import pwd
import subprocess
import threading

import pytest

from phosd.bus import Connection, Signal
from phosd.engine.job.checkpoint_history import NONE, KernelMark
from phosd.engine.job.figures import Figures
from phosd.engine.job.progress import Progress
from phosd.engine.system.procfs import boot_id
from phosd.errors import ImageCorrupt, MisSpeculation
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.process_identity import identify
from tests.support.bus import busctl
from tests.support.fake_engine import block, manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.service.test_jobs import state_of, wait_for

STRANGER = pwd.getpwnam("nobody").pw_uid
ME = os.getpid()
STARTED = identify(ME).start_time
PROCESS = f"/org/phos/process/_{ME}_{STARTED}"


def begin(service: Service, options: str = "", uid: int = 0) -> str:
    """Ask for a checkpoint of this process with options as busctl takes them; the job."""
    words = options.split()
    return service.start("Checkpoint", "ua{sv}", ME, len(words) // 3, *words, uid=uid)


def cancel(service: Service, job: str) -> None:
    busctl(service.address, "call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")


def test_every_option_reaches_the_engine(service: Service) -> None:
    service.engine.go.set()
    service.engine.stored["old"] = manifest("old")
    options = "mode s recopy fallback s none parent s old tcp s close deadline d 2.5"
    options += " release_cached b true"
    wait_for(service, begin(service, options), "done")
    assert service.engine.requests == [
        CheckpointRequest(
            mode="recopy",
            fallback="none",
            parent="old",
            tcp="close",
            deadline=2.5,
            release_cached=True,
        )
    ]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("fallback s never", "'never' is no fallback; fallback is one of: "),
        ("parent s nothing", "there is no image nothing"),
        (
            "deadline d 0",
            "deadline has to be a number, greater than 0 and at most 86400, not 0.0; give such",
        ),
        ("deadline d nan", "at most 86400, not nan"),
        ("every d 0.5", "give at least 1 s, or 0 to end"),
        ("every d nan", "at most 2678400, not nan"),
        ("every d inf", "at most 2678400, not inf"),
        ("keep u 3", "keep is for checkpoints that repeat"),
        ("every d 0 keep u 3", "keep is for checkpoints that repeat"),
        ("every d 9 keep u 0", "keep has to be a whole number, at least 1 and at most 1000, not 0"),
        ("every d 9 parent s auto", "chooses the parent of each image itself"),
        ("queue s yes", "queue has to be true or false, not 'yes'"),
        ("release_cached u 1", "has to be true or false, not 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(service: Service, options: str, error: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        begin(service, options)
    assert error in str(caught.value)
    assert not service.engine.requests


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        ([], "d-latest"),
        (["b-older"], "d-latest"),
        (["d-latest"], "b-older"),
        (["c-shares"], ""),
        (["b-older", "d-latest"], ""),
    ],
)
def test_the_parent_is_the_latest_image_of_the_process_that_can_be_trusted(
    service: Service, damaged: list[str], expected: str
) -> None:
    def image(name: str, *packs: int, start_time: int = STARTED, boot: str = "") -> None:
        service.engine.stored[name] = manifest(
            name,
            pid=ME,
            blocks=(block(*packs),) if packs else (),
            start_time=start_time,
            boot=boot or boot_id(),
        )

    image("b-older", 1)
    image("c-shares", 1, 2)
    image("d-latest", 2)
    image("e-by-driver")
    image("f-of-its-predecessor", 9, start_time=STARTED - 1)
    image("g-of-another-boot", 9, boot="another")

    def fail(progress: Progress) -> None:
        raise ImageCorrupt("chunk 7 differs")

    service.engine.act = fail
    for name in damaged:
        wait_for(service, service.start("VerifyImage", "sa{sv}", name, 0), "failed")
    service.engine.act = lambda progress: None
    service.engine.go.set()
    wait_for(service, begin(service, "parent s auto"), "done")
    assert service.engine.requests == [CheckpointRequest(parent=expected)]


def test_a_parent_that_is_of_no_use_is_done_without(service: Service) -> None:
    service.engine.go.set()
    wait_for(service, begin(service), "done")

    def miss_a_pack(progress: Progress) -> None:
        if service.engine.requests[-1].parent:  # type: ignore[attr-defined]
            raise ImageCorrupt("pack 3 of image image-0 is missing", hint="delete it")

    service.engine.act = miss_a_pack
    job = begin(service, "parent s auto")
    wait_for(service, job, "done")
    note = "made without a parent: pack 3 of image image-0 is missing; delete it"
    assert service.get(job, "Job1", "Notes") == f'1 "{note}"'
    parents = [request.parent for request in service.engine.requests]  # type: ignore[attr-defined]
    assert parents == ["", "image-0", ""]
    job = begin(service, "parent s image-0")  # asked for, it must be
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"ImageCorrupt"'


def test_a_parent_must_be_ones_own(service: Service) -> None:
    service.engine.stored["roots"] = manifest("roots")
    with subprocess.Popen(["sleep", "60"], user=STRANGER) as mine:
        try:
            call = ("Checkpoint", "ua{sv}", mine.pid, 1, "parent", "s", "roots")
            with pytest.raises(RuntimeError, match="image roots belongs to uid 0"):
                service.call(*call, uid=STRANGER)
        finally:
            mine.kill()
    assert not service.engine.requests


def test_a_checkpoint_that_queues_waits_its_turn(service: Service) -> None:
    first = begin(service)
    second, third = (begin(service, "queue b true") for _ in range(2))
    assert [state_of(service, job) for job in (second, third)] == ["queued", "queued"]
    assert service.get(second, "Job1", "Cancelable") == "true"
    assert '"queued"' in service.call("ListHistory", "a{sv}", 0)
    with pytest.raises(RuntimeError, match=r"job 1 .* holds process"):
        begin(service)
    cancel(service, second)
    assert state_of(service, second) == "cancelled"
    service.engine.go.set()
    wait_for(service, third, "done")
    assert state_of(service, first) == "done"
    assert service.engine.made == 2
    journal = service.config.runtime_dir / "journal"
    wait_until(lambda: not list(journal.iterdir()), "the journal to be empty")


def test_a_schedule_is_told_and_ended_over_the_bus(service: Service) -> None:
    service.engine.running = [this_process(start_time=STARTED)]
    service.call("ListProcesses")
    assert service.get(PROCESS, "Process1", "CheckpointInterval") == "0"
    service.engine.go.set()
    heard: list[Signal] = []

    async def listen() -> None:
        connection = await Connection.open(service.address)
        await connection.subscribe(heard.append, "sender='org.phos'")
        job = await asyncio.to_thread(begin, service, "every d 1 keep u 2")
        await asyncio.to_thread(wait_for, service, job, "done")
        await asyncio.sleep(0.1)
        connection.close()
        assert await asyncio.to_thread(service.get, job, "Job1", "Scheduled") == "true"

    asyncio.run(listen())
    changed = [s.args[1] for s in heard if (s.path, s.member) == (PROCESS, "PropertiesChanged")]
    assert {"CheckpointInterval": 1.0, "CheckpointsKept": 2} in changed
    assert service.get(PROCESS, "Process1", "CheckpointsKept") == "2"
    off = ("Checkpoint", "ua{sv}", ME, 1, "every", "d", "0")
    with pytest.raises(RuntimeError, match="belongs to uid 0"):
        service.call(*off, uid=STRANGER)
    wait_until(lambda: service.engine.made >= 3, "the third one")
    assert service.call(*off) == 'o "/"'
    assert service.get(PROCESS, "Process1", "CheckpointInterval") == "0"
    assert service.call(*off) == 'o "/"'


KERNELS = [KernelMark("chase", 0xFEDCBA9876543210), KernelMark("scatter", 0)]


def test_suspects_of_a_program_are_remembered_for_its_next_checkpoint(service: Service) -> None:
    def guess_wrong(progress: Progress) -> None:
        progress.found_suspects(KERNELS)
        raise MisSpeculation("the program wrote where nobody expected it", hint="use recopy")

    service.engine.act = guess_wrong
    job = begin(service, "fallback s none")
    wait_for(service, job, "failed")
    assert service.get(job, "Job1", "Error") == '"MisSpeculation"'
    assert service.get(job, "Job1", "WrongGuesses") == "1"
    assert service.get(job, "Job1", "Suspects") == '2 "chase" "scatter"'
    with pytest.raises(RuntimeError, match="belongs to uid 0"):
        service.get(job, "Job1", "Suspects", uid=STRANGER)
    wait_until(lambda: '"wrong_guesses" x 1' in service.call("ListHistory", "a{sv}", 0), "the row")

    service.engine.go.set()
    service.engine.act = lambda progress: None
    wait_for(service, begin(service), "done")
    assert service.engine.experience[0].suspects == ()
    assert set(service.engine.experience[1].suspects) == set(KERNELS)
    (earlier,) = service.engine.experience[1].past
    assert (earlier.guessed_wrong, earlier.starved) == (True, False)
    with subprocess.Popen(["sleep", "60"]) as other:  # another program has other kernels
        try:
            wait_for(service, service.start("Checkpoint", "ua{sv}", other.pid, 0), "done")
        finally:
            other.kill()
    assert service.engine.experience[2] == NONE


STOPPED = ["quiesce", "digest", "park", "control", "cpu", "unpark"]
PHASES = ["prepare", *STOPPED, "drain", "persist"]


@pytest.mark.parametrize("phase", PHASES)
def test_a_job_is_cancelled_in_every_phase(service: Service, phase: str) -> None:
    def go_on_to(progress: Progress) -> None:
        for name in PHASES[: PHASES.index(phase) + 1]:
            progress.phase(name, stopped=name in STOPPED)

    service.engine.act = go_on_to
    job = begin(service)
    wait_until(lambda: service.get(job, "Job1", "Phase") == f'"{phase}"', phase)
    cancel(service, job)
    wait_for(service, job, "cancelled")
    assert not service.engine.stored
    service.engine.act = lambda progress: None
    service.engine.go.set()
    wait_for(service, begin(service), "done")


def test_what_is_drained_while_the_program_runs_is_told(service: Service) -> None:
    measured = threading.Event()

    def drain(progress: Progress) -> None:
        for count in (300, 500):  # the second attempt after a wrong guess
            progress.phase("drain", bytes_total=1000)
            progress.advance(count)
        measured.wait(30)
        progress.figures = Figures(drain_bytes=700, drain_seconds=0.5)

    service.engine.act = drain
    job = begin(service)
    wait_until(lambda: service.get(job, "Job1", "Phase") == '"drain"', "the drain")
    assert service.get(job, "Job1", "ProgramStopped") == "false"
    wait_until(lambda: service.get(job, "Job1", "DrainedBytes") == "800", "the bytes")
    assert float(service.get(job, "Job1", "DrainRate")) > 0
    measured.set()
    service.engine.go.set()
    wait_for(service, job, "done")
    assert service.get(job, "Job1", "DrainRate") == "1400"
    details = {"drain_bytes", "drain_seconds"}
    told = service.get(job, "Job1", "Details").split('"')
    assert (told[0].strip(), set(told[1::2])) == ("2", details)
    wait_until(
        lambda: '"drained_bytes" x 700' in service.call("ListHistory", "a{sv}", 0), "the row"
    )
