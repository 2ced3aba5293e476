"""Jobs of a real Slurm are preempted, saved, requeued and go on; and what comes in the way."""

import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from phosd.engine.criu.run import cgroup_place
from phosd.engine.criu.run.cgroup_place import Surroundings
from phosd.engine.program import tree
from phosd.engine.system import cgroups, stopped_state
from phosd.engine.system.slurm_steps import step_of
from phosd.errors import NotAuthorized
from tests.support import slurm
from tests.support.harness import SELDOM, parse, undisturbed
from tests.support.rotation import EVERYTHING, SEED, part, plays
from tests.support.service import bus
from tests.support.slurm import PHOS, Cluster
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.service.test_preemption import ENDING

__all__ = ["bus"]

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.timeout(900),
]

Test = TypeVar("Test", bound=Callable[..., None])
STEPS = 120
_STRANGER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
ENDS_WITH = "7:0"
"""The exit code of the program, and no signal."""


def seldom(test: Test) -> Test:
    """Play a test in some commits only: Slurm takes its time to requeue a job."""
    played = plays("slurm", test.__name__, of=8)
    mark = pytest.mark.skipif(not played, reason="another commit plays it")
    marked: Test = mark(test)
    return marked


def _place() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """As many as jobs may ask for: Slurm tells them which of these are theirs."""
    monkeypatch.setenv("PHOS_SOFTGPU_DEVICES", str(cluster.gpus))


place = pytest.fixture(_place)
place_of_cluster = pytest.fixture(scope="module")(_place)


@pytest.fixture(scope="module")
def cluster(place_of_cluster: Path) -> Iterator[Cluster]:
    with slurm.cluster(place_of_cluster) as cluster:
        yield cluster


class Jobs:
    """Jobs of the program that computes, and what phosd keeps of them in ``place``."""

    def __init__(self, cluster: Cluster, bus: str, place: Path) -> None:
        self._cluster = cluster
        self._place = place
        self._bus = bus
        (place / "program.py").write_text(ENDING)
        self.variables = {
            "PHOS_RUNTIME_DIR": str(place / "run"),
            "XDG_STATE_HOME": str(place / "home"),
            "PHOS_BUS": bus,
            "PHOS_GPU": "soft",
        }

    def line(self, steps: int = STEPS) -> str:
        return f"{PHOS} run -- {sys.executable} {self._place / 'program.py'} {steps}"

    def submit(self, script: str, *options: str) -> str:
        return self._cluster.submit(script, "--phos=save", *options, **self.variables)

    def lines(self, job: str) -> list[str]:
        """The lines of its steps."""
        return re.findall(r"^\d+ [0-9a-f]{16}$", self._cluster.output(job), re.MULTILINE)

    def values(self, job: str) -> dict[int, str]:
        return parse(self._cluster.output(job).encode())

    def wait_for_steps(self, job: str, more: int = 3) -> None:
        """Wait until its program has come so many steps further."""
        at = len(self.lines(job))

        def enough() -> bool:
            state = self._cluster.job(job)["JobState"]
            assert state not in ("FAILED", "COMPLETED"), f"{state}: {self._cluster.output(job)}"
            return len(self.lines(job)) >= at + more

        self._cluster.wait(enough, f"{more} steps", job)

    def come_further(self, jobs: Sequence[str], more: int) -> None:
        """Wait until these jobs have printed so many more lines, or have ended."""
        ended = ("FAILED", "COMPLETED")

        def enough() -> bool:
            if sum(len(self.lines(job)) for job in jobs) >= at + more:
                return True
            return all(self._cluster.job(job)["JobState"] in ended for job in jobs)

        at = sum(len(self.lines(job)) for job in jobs)
        self._cluster.wait(enough, f"{more} steps of all", jobs[0])

    def wait_for_end(self, job: str, code: str = ENDS_WITH) -> dict[str, str]:
        found = self._cluster.wait_for(job, "FAILED", "COMPLETED")
        assert found["ExitCode"] == code, self._cluster.output(job)
        return found

    def require_right(self, job: str, steps: int = STEPS) -> None:
        """Every step came, once each or again after what was not saved, and is right."""
        expected = undisturbed("single", steps)
        assert self.values(job) == {step: expected[step] for step in range(steps)}

    def require_right_so_far(self, job: str) -> None:
        """The same of a program without an end."""
        values = self.values(job)
        expected = undisturbed("single", max(values) + 1)
        assert values == {step: expected[step] for step in values}

    def program(self, job: str) -> int:
        """The pid of the only program of a job."""

        def found() -> int:
            rows = phos(self._bus, self._place, "ps")
            pids = [row["pid"] for row in rows if str(row["slurm_step"]).startswith(f"{job}.")]
            return int(str(pids[0])) if len(pids) == 1 else 0

        return self._cluster.wait(found, f"phosd to list the program of job {job}", job)


def preempt(cluster: Cluster) -> None:
    """Run a job of the higher partition that needs all GPUs."""
    high = cluster.submit("true", "--partition=high", f"--gres=gpu:{cluster.gpus}")
    cluster.wait_for(high, "COMPLETED")


def test_a_preempted_job_goes_on_in_its_step(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place):
        job = jobs.submit(f"srun {jobs.line(3 * STEPS)}")
        jobs.wait_for_steps(job)
        preempt(cluster)
        jobs.wait_for_steps(job)
        assert str(step_of(jobs.program(job))) == f"{job}.0"
        found = jobs.wait_for_end(job)
    assert found["Restarts"] == "1"
    said = cluster.output(job)
    assert said.count("saved as") == said.count("goes on as process") == 1, said
    assert re.search(r"preempted: there are \d+ s more", said)
    jobs.require_right(job, 3 * STEPS)
    first, last = cluster.accounted(job)
    assert first["NodeList"] == last["NodeList"] == cluster.node
    assert (last["JobState"], last["ExitCode"]) == ("FAILED", ENDS_WITH)


@seldom
def test_every_way_to_end_a_job(cluster: Cluster, bus: str, place: Path) -> None:
    """By the line alone in a batch script, which becomes a step: a signal that was asked for, a
    requeue, and an end for good, after which somebody requeues the job nevertheless.
    """
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place):
        job = jobs.submit(jobs.line(2 * STEPS))
        jobs.wait_for_steps(job)
        cluster.ask("scancel", "--signal=TERM", job)  # as --signal=TERM@60 does
        cluster.wait_for_run(job, 1)
        jobs.wait_for_steps(job)
        cluster.ask("scontrol", "requeue", job)
        cluster.wait_for_run(job, 2)
        jobs.wait_for_steps(job)
        cluster.ask("scancel", job)
        cluster.wait_for(job, "CANCELLED")
        said = cluster.output(job)
        assert f"`scontrol requeue {job}` goes on with what was saved" in said, said
        cluster.ask("scontrol", "requeue", job)
        found = jobs.wait_for_end(job)
    assert found["Restarts"] == "3"
    assert cluster.output(job).count("saved as") == 3
    jobs.require_right(job, 2 * STEPS)


@seldom
def test_a_script_of_several_programs(cluster: Cluster, bus: str, place: Path) -> None:
    """Each has its own image. What has come to its end is not done again; the same line may come
    twice.
    """
    jobs = Jobs(cluster, bus, place)
    (place / "short.py").write_text(ENDING.replace("sys.exit(7)", "print('end of one')"))
    short = f"{PHOS} run -- {sys.executable} {place / 'short.py'} {STEPS}"
    with phosd(bus, place):
        job = jobs.submit(f"srun {short} || exit\nsrun {short} || exit\nsrun {jobs.line()}")
        jobs.wait_for_steps(job)
        preempt(cluster)
        said = "end of one"
        cluster.wait(lambda: cluster.output(job).count(said) == 1, "the first program's end", job)
        second = "is kept in"
        cluster.wait(lambda: second in cluster.output(job).rpartition(said)[2], "the second", job)
        jobs.wait_for_steps(job)
        preempt(cluster)
        found = jobs.wait_for_end(job)
        images = phos(bus, place, "images")
    assert found["Restarts"] == "2"
    assert cluster.output(job).count(said) == 2
    assert cluster.output(job).count("has ended with 0") == 1
    assert len({str(image["name"]) for image in images}) == len(images) == 2
    jobs.require_right(job)


@pytest.mark.parametrize("delay", part("suspended-jobs", ["0", "2"], of=2))
def test_a_suspended_job_leaves_its_gpu(
    cluster: Cluster, bus: str, place: Path, delay: str
) -> None:
    """Slurm freezes it after two seconds, with a delay while phosd is at work. It can be saved when
    it is resumed.
    """
    jobs = Jobs(cluster, bus, place)
    jobs.variables |= SELDOM
    with phosd(bus, place, PHOS_FAULT_DELAY=delay):
        job = jobs.submit(jobs.line(0))
        jobs.wait_for_steps(job)
        program = jobs.program(job)
        for _ in range(2):  # the second time perhaps while phosd is still at the resumption
            cluster.ask("scontrol", "suspend", job)

            def left_and_still() -> bool:
                (row,) = (row for row in phos(bus, place, "ps") if row["pid"] == program)
                stands = stopped_state.stands_still(program) or [*cgroups.freezers(program)]
                return row["state"] == "suspended" and bool(stands)

            cluster.wait(left_and_still, "it to be suspended", job)
            assert cluster.job(job)["JobState"] == "SUSPENDED"
            cluster.ask("scontrol", "resume", job)
            jobs.wait_for_steps(job)
        assert cluster.job(job)["SecsPreSuspend"] != "0"
        cluster.ask("scontrol", "requeue", job)
        cluster.wait_for(job, "PENDING")
        assert cluster.output(job).count("saved as") == 1, cluster.output(job)
        cluster.ask("scancel", job)
    jobs.require_right_so_far(job)


def test_what_is_refused(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)
    wrong = cluster.try_to("sbatch", "--phos=rubbish", "--wrap=true")
    assert wrong.returncode != 0
    assert "--phos=rubbish: the option is save or none" in wrong.stderr
    script = f"srun --ntasks=2 --overcommit {jobs.line()}\nsrun sh -c '{jobs.line()}; exit $?'"
    job = jobs.submit(f"{script}\nsrun --phos=none sh -c 'echo phos=$PHOS_SLURM; exit 9'")
    jobs.wait_for_end(job, "9:0")
    said = cluster.output(job)
    assert "has 2 tasks on 1 nodes, and phosd saves steps of one task" in said
    assert "write `srun phos run`" in said
    assert "phos=none" in said
    assert not jobs.values(job)


@seldom
def test_another_users_job_stays_what_it_is(cluster: Cluster, bus: str, place: Path) -> None:
    """A stranger names its program and its image, in an environment as if in the job. Neither a
    process of the job nor its number in an earlier image lets a stranger's program into its step.
    """
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place):
        job = jobs.submit(f"srun {jobs.line(3 * STEPS)}")
        jobs.wait_for_steps(job)
        pid = jobs.program(job)
        image = str(phos(bus, place, "checkpoint", str(pid))[-1]["result"])
        answers = _as_stranger(
            bus,
            job,
            f"checkpoint({pid})",
            f"suspend({pid}, thaw=True)",
            f"migrate({pid}, '0:1')",
            f"restore({image!r})",
            f"restore({image!r}, cgroups_of={pid})",
            f"delete({image!r})",
        )
        assert answers == ["NotAuthorized"] * len(answers)
        assert {row["id"] for row in phos(bus, place, "images")} == {image}
        assert str(step_of(pid)) == f"{job}.0"
        with pytest.raises(NotAuthorized, match="is not of its user"):
            cgroup_place.of_process(pid, pwd.getpwnam("nobody").pw_uid)
        theirs = cgroup_place.noted(tree.scan(pid))
        outside = Surroundings(None, scopes=True)
        earlier = replace(theirs, invocation=f"{theirs.invocation}1")  # of a job with its number
        assert cgroup_place.place_of(theirs, 0, outside).entries
        assert not cgroup_place.place_of(earlier, 0, outside).entries
        jobs.wait_for_end(job)
    jobs.require_right(job, 3 * STEPS)


def _as_stranger(bus: str, job: str, *calls: str) -> list[str]:
    """Make calls as a user without rights whose environment names a job; the errors' names."""
    tries = "".join(
        f"try: print(client.{call}.wait())\nexcept Exception as e: print(type(e).__name__)\n"
        for call in calls
    )
    done = subprocess.run(
        [
            *_STRANGER,
            sys.executable,
            "-c",
            f"from phosd.client import Client\nclient = Client()\n{tries}",
        ],
        env=os.environ | {"PHOS_BUS": bus, "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@seldom
def test_a_job_array_of_which_one_has_no_gpu_program(
    cluster: Cluster, bus: str, place: Path
) -> None:
    jobs = Jobs(cluster, bus, place)
    other = f'[ "$SLURM_ARRAY_TASK_ID" != 3 ] || exec srun {PHOS} run -- sleep 1000'
    with phosd(bus, place):
        array = jobs.submit(
            f"{other}\nexec srun {jobs.line()}", "--array=1-3", "--output=%A_%a.out"
        )
        elements = [f"{array}_{number}" for number in (1, 2, 3)]
        for element in elements[:2]:
            jobs.wait_for_steps(element)
        cluster.wait(lambda: "is kept in" in cluster.output(elements[2]), "the third", elements[2])
        preempt(cluster)
        for element in elements[:2]:
            found = jobs.wait_for_end(element)
            assert found["Restarts"] == "1"
        cluster.ask("scancel", elements[2])
        images = phos(bus, place, "images")
    for element in elements[:2]:
        jobs.require_right(element)
    assert len({str(image["name"]) for image in images}) == 2, [*map(cluster.output, elements)]


@seldom
def test_a_job_that_is_given_another_gpu(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)

    def gpu(job: str) -> object:
        program = jobs.program(job)
        (row,) = (row for row in phos(bus, place, "ps") if row["pid"] == program)
        (only,) = row["gpus"]  # type: ignore[misc]
        return only["ordinal"]  # type: ignore[has-type]

    with phosd(bus, place):
        job = jobs.submit(jobs.line(3 * STEPS))
        jobs.wait_for_steps(job)
        before = gpu(job)
        cluster.ask("scontrol", "requeue", job)
        other = cluster.submit("echo $SLURM_JOB_GPUS; exec sleep 1000", "--partition=high")
        cluster.wait(lambda: cluster.output(other) == f"{before}\n", "another job on its GPU")
        cluster.wait_for_run(job, 1)
        jobs.wait_for_steps(job)
        assert gpu(job) != before
        cluster.ask("scancel", other)
        jobs.wait_for_end(job)
    jobs.require_right(job, 3 * STEPS)


@seldom
def test_without_phosd_a_preempted_job_begins_anew(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place) as daemon:
        job = jobs.submit(f"exec srun {jobs.line()}")
        jobs.wait_for_steps(job)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)
        high = cluster.submit("true", "--partition=high", f"--gres=gpu:{cluster.gpus}")
        cluster.wait_for(high, "COMPLETED")
    assert "not saved: phosd does not run" in cluster.output(job)
    with phosd(bus, place):
        found = jobs.wait_for_end(job)
    assert found["Restarts"] == "1"
    assert "goes on as" not in cluster.output(job)
    jobs.require_right(job)


@seldom
def test_what_does_not_fit_on_the_disk_begins_anew(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)
    (state := place / "state").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "full", state], check=True)
    try:
        with phosd(bus, place):
            job = jobs.submit(jobs.line())
            jobs.wait_for_steps(job)
            preempt(cluster)
            found = jobs.wait_for_end(job)
            assert not phos(bus, place, "images")
    finally:
        subprocess.run(["umount", state], check=True)
    assert found["Restarts"] == "1"
    assert "not saved: " in cluster.output(job)
    jobs.require_right(job)


@seldom
def test_two_programs_at_the_same_time(cluster: Cluster, bus: str, place: Path) -> None:
    """Both are saved when the first of them has the job requeued."""
    jobs = Jobs(cluster, bus, place)
    begin, end = jobs.line(3 * STEPS).rsplit(" ", 1)
    other = f"{begin} {int(end) + 1} >>{place / 'other'}"
    with phosd(bus, place):
        job = jobs.submit(f"{other} & {jobs.line(3 * STEPS)}; wait $!")

        def of_other() -> int:
            return len(parse((place / "other").read_bytes())) if (place / "other").exists() else 0

        jobs.wait_for_steps(job)
        cluster.wait(lambda: of_other() >= 3, "the other", job)
        preempt(cluster)
        found = jobs.wait_for_end(job)
        images = phos(bus, place, "images")
    assert found["Restarts"] == "1"
    assert sorted({str(image["name"]).split("-")[1] for image in images}) == [job]
    assert len(images) == 2, cluster.output(job)
    jobs.require_right(job, 3 * STEPS)
    expected = undisturbed("single", 3 * STEPS + 1)
    assert parse((place / "other").read_bytes()) == {n: expected[n] for n in range(3 * STEPS + 1)}


@seldom
def test_the_controller_is_down_and_the_node_drained(
    cluster: Cluster, bus: str, place: Path
) -> None:
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place):
        job = jobs.submit(f"srun {jobs.line(3 * STEPS)}")
        jobs.wait_for_steps(job)
        program = jobs.program(job)
        cluster.ask("scontrol", "update", f"NodeName={cluster.node}", "State=drain", "Reason=test")
        cluster.stop("slurmctld")
        os.kill(program, signal.SIGTERM)
        cluster.wait(
            lambda: "as soon as the controller answers" in cluster.output(job), "the loss", job
        )
        cluster.start_controller()
        cluster.wait_for(job, "PENDING")
        cluster.ask("scontrol", "update", f"NodeName={cluster.node}", "State=resume")
        found = jobs.wait_for_end(job)
    assert found["Restarts"] == "1"
    jobs.require_right(job, 3 * STEPS)


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all` plays it")
def test_a_time_limit(cluster: Cluster, bus: str, place: Path) -> None:
    """Slurm looks at it every half minute, so the program has no end."""
    jobs = Jobs(cluster, bus, place)
    jobs.variables |= SELDOM
    with phosd(bus, place):
        job = jobs.submit(jobs.line(0), "--time=1")
        cluster.wait_for(job, "TIMEOUT")
        assert "saved as" in cluster.output(job)
        cluster.ask("scontrol", "requeue", job)
        jobs.wait_for_steps(job)
        cluster.ask("scancel", job)
        cluster.wait_for(job, "CANCELLED")
    jobs.require_right_so_far(job)


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all` plays it")
def test_thirty_jobs_preempted_at_random(cluster: Cluster, bus: str, place: Path) -> None:
    """Three at a time, so that some are saved while others begin or go on."""
    jobs, chance = Jobs(cluster, bus, place), random.Random(SEED)
    jobs.variables["PHOS_TEST_PACE"] = "0.05"  # or most have ended before they are saved
    with phosd(bus, place):
        mine = [jobs.submit(jobs.line()) for _ in range(30)]
        ended = ("FAILED", "COMPLETED")
        while left := [job for job in mine if cluster.job(job)["JobState"] not in ended]:
            jobs.come_further(left, chance.randrange(1, 3 * STEPS))
            preempt(cluster)
        for job in mine:
            jobs.wait_for_end(job)
            jobs.require_right(job)
    preempted = [job for job in mine if cluster.job(job)["Restarts"] != "0"]
    saved = [job for job in mine if "goes on as" in cluster.output(job)]
    assert len(saved) > 5, f"{len(preempted)} were preempted, {len(saved)} of these saved"
