"""phosd, a data mover or the program is killed at a random moment of a random job, CRIU while it
runs, and phosd together with CRIU.

Beside it another program sleeps, and movers are about that no phosd has used yet. Whatever was
killed: the next phosd settles everything, both programs run on or it is said why not, and nothing
is left behind.
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.faults import Kind
from phosd.engine.node.suspended import Register
from phosd.engine.system import procfs
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right
from tests.support.harness import (
    SELDOM,
    Target,
    alive,
    children,
    has_two_gpus,
    wait_until,
)
from tests.support.rotation import EVERYTHING, seeds
from tests.system.faults.case import Case
from tests.system.faults.daemon_under_fault import (
    DIED,
    Plant,
    eventually_alone,
    leftovers,
    partial,
)

KILLS = 10 if EVERYTHING else 3
"""In one test; `make soak` plays 500."""
KILLS_TOGETHER = 10 if EVERYTHING else 1
"""Likewise."""
LATEST = 1.5
"""Seconds after the beginning of a job, within which it is hit; most take less."""
CRIU_SECONDS = 0.3
"""Within which CRIU is hit, likewise."""
JOBS = ("checkpoint", "checkpoint", "restore", "suspend", "resume", "migrate", "verify", "delete")
WITH_CRIU = ("checkpoint", "restore")
HELD = ("single", "threads", "features", "workers")
"""Programs that are saved while CRIU holds their threads."""
VICTIMS = ("phosd", "phosd", "mover", "criu", "program")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds("kills", 1, whole=1))
def test_random_kills(seed: int, plant: Plant, start: Starter, undisturbed: Undisturbed) -> None:
    rng = random.Random(seed)
    worker, sleeper = start("single", extra=SELDOM), start("features", extra=SELDOM)
    for target in (worker, sleeper):
        target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(worker.pid, "stop")) == "done"
    assert plant.end_of(plant.begin("Suspend", "ua{sv}", sleeper.pid, 0)) == "done"
    jobs = JOBS if has_two_gpus() else [job for job in JOBS if job != "migrate"]
    for number in range(KILLS):
        victim = rng.choice(VICTIMS)
        job = rng.choice(WITH_CRIU if victim == "criu" else jobs)
        story = f"seed {seed}, kill {number}: {victim} in {job}"
        path = begin(Case(plant, worker, undisturbed, Kind.KILL), job, rng)
        if victim == "criu":  # it runs for a moment only
            wait_until(lambda: [*crius(plant)], f"CRIU to run: {story}", every=0.005)
            time.sleep(0.1 * rng.random())
        else:
            time.sleep(LATEST * rng.random() ** 2)
        story += "" if hit(plant, victim, worker) else ", which is not there"
        story += f" ({plant.phase_of(path)})" if path and victim != "phosd" else ""
        if victim != "phosd" and path:
            assert plant.end_of(path) in ("done", "failed", DIED), story
        if not plant.dead and rng.random() < 0.5:
            plant.kill()
        if plant.dead:
            plant.start()
        settled(plant, worker, story, killed=victim == "program")
        goes_on(worker, story)
        computed_right(worker, undisturbed)
        if rng.random() < 0.3:
            assert plant.end_of(plant.begin("Resume", "ua{sv}", sleeper.pid, 0)) == "done", story
            goes_on(sleeper, story)
            computed_right(sleeper, undisturbed)
            assert plant.end_of(plant.begin("Suspend", "ua{sv}", sleeper.pid, 0)) == "done", story
    assert plant.end_of(plant.begin("Resume", "ua{sv}", sleeper.pid, 0)) == "done"
    goes_on(sleeper, f"seed {seed}, at the end")
    computed_right(sleeper, undisturbed)
    assert {plant.verify(image) for image in plant.images()} <= {"done"}
    plant.stop()
    assert not partial(plant.place) and not leftovers(plant.place)
    assert not any((plant.place / "run/memory").glob("*"))
    eventually_alone(plant)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds("kills together", 1, whole=1))
def test_phosd_and_criu_are_killed_together(
    seed: int, plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """In mode ``driver`` CRIU and the driver have the program in their hands at the same time."""
    rng = random.Random(seed)
    program, hooked = rng.choice(HELD), rng.random() < 0.7
    target = start(program, hooked=hooked, extra=SELDOM)
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "driver")) == "done"
    for number in range(KILLS_TOGETHER):
        plant.checkpoint(target.pid, "driver")
        if rng.random() < 0.8:  # CRIU runs for a moment only
            wait_until(lambda: [*crius(plant)], "CRIU to run", every=0.002)
            time.sleep(CRIU_SECONDS * rng.random())
        else:
            time.sleep(LATEST * rng.random())
        assert plant.daemon is not None
        victims = [plant.daemon.pid, *crius(plant)]
        rng.shuffle(victims)
        story = f"seed {seed}, kill {number}: {program}, {hooked=}, {len(victims)} together"
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        plant.daemon.wait()
        plant.start()
        settled(plant, target, story, killed=len(victims) > 1)  # CRIU's code may be in it
        goes_on(target, story)
        computed_right(target, undisturbed)
    plant.stop()
    assert not partial(plant.place) and not leftovers(plant.place)


def goes_on(target: Target, story: str) -> None:
    """The target makes steps: one that stands still lives as well."""
    try:
        target.more_steps(2)
    except AssertionError as error:
        threads = [thread_state(thread) for thread in procfs.threads(target.pid)]
        raise AssertionError(f"{story}: it stands still: {'; '.join(threads)}") from error


def thread_state(thread: int) -> str:
    """In which state a thread is, where it waits in the kernel, and who traces it."""
    folder = Path(f"/proc/{thread}")
    wanted = ("State", "TracerPid", "SigBlk", "ShdPnd", "SigPnd")
    lines = (folder / "status").read_text().splitlines()
    said = [line.replace("\t", " ") for line in lines if line.startswith(wanted)]
    return f"{thread} {(folder / 'comm').read_text().strip()}: {', '.join(said)}, " + ", ".join(
        (folder / name).read_text().strip() for name in ("wchan", "syscall")
    )


def begin(case: Case, job: str, rng: random.Random) -> str:
    """Begin a job with the target, or its last image; the job's path, if it has one."""
    plant, target = case.plant, case.target
    images = plant.images()
    if job == "checkpoint" or len(images) < 2:
        mode = rng.choice(("concurrent", "recopy", "stop", "driver"))
        return plant.checkpoint(target.pid, mode)
    if job == "suspend":
        return case.begin_nap()
    if job == "resume":
        assert plant.end_of(case.begin_nap()) == "done"
        return case.begin_waking()
    if job == "migrate":
        return case.begin_move()
    if job == "restore":
        target.kill()
        return plant.begin("Restore", "sa{sv}", images[-1], 0)
    if job == "verify":
        return plant.begin("VerifyImage", "sa{sv}", images[-1], 0)
    threading.Thread(target=delete, args=(plant, images[0])).start()
    return ""


def delete(plant: Plant, image: str) -> None:
    """Delete an image; phosd may be killed beneath it."""
    with contextlib.suppress(RuntimeError):
        plant.call("DeleteImage", "sa{sv}", image, 0)


def hit(plant: Plant, victim: str, program: Target) -> bool:
    """kill -9, of one of them. Returns whether there was one."""
    if victim == "phosd":
        plant.kill()
        return True
    if victim == "program":
        program.kill()
        return True
    found = plant.movers() if victim == "mover" else list(crius(plant))
    with contextlib.suppress(ProcessLookupError):
        for pid in found[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def crius(plant: Plant) -> Iterator[int]:
    """CRIU's processes of the plant."""
    assert plant.daemon is not None
    for pid in children(plant.daemon.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text() == "criu\n":
                yield pid


def settled(plant: Plant, target: Target, story: str, *, killed: bool) -> None:
    """Nothing is half done, and the target runs, after a restore if it had ended: phosd says so if
    it was not ``killed``.
    """
    last = plant.last()
    print(f"{story}: {last['operation']} {last['state']}: {last['message']}")
    assert last["state"] == "done" or last["message"], story
    if target.pid in {entry.pid for entry in Register(plant.place / "run").living()}:
        job = plant.begin("Resume", "ua{sv}", target.pid, 0)
        assert plant.end_of(job) == "done", (story, plant.last())
    if not alive(target.pid):
        said = last["operation"] == "restore" or str(target.pid) in last["message"]
        assert killed or said, (story, last)
        target.kill()  # it is collected, so that its pid is free
        job = plant.begin("Restore", "sa{sv}", plant.images()[-1], 0)
        assert plant.end_of(job) == "done", (story, plant.last())
    wait_until(lambda: not leftovers(plant.place), f"the journal to be empty: {story}")
    assert not {folder.name for folder in partial(plant.place)} & {*plant.images()}, story
