"""The main path of a job, with the Slurm that `make setup-slurm` unpacks beside the system's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.system.slurm_steps import step_of
from tests.support import slurm
from tests.support.harness import SELDOM
from tests.support.rotation import EVERYTHING
from tests.support.service import bus
from tests.support.slurm import Cluster
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.slurm.test_slurm import ENDS_WITH, STEPS, Jobs, place, place_of_cluster, preempt

__all__ = ["bus", "place", "place_of_cluster"]

pytestmark = [
    pytest.mark.skipif(not EVERYTHING, reason="`make test-all` plays it"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.skipif(
        slurm.unpacked() is None,
        reason="there is no other Slurm than the system's: `make setup-slurm build` unpacks one",
    ),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(place_of_cluster: Path) -> Iterator[Cluster]:
    with slurm.cluster(place_of_cluster, slurm.unpacked()) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setenv("PHOS_SOFTGPU_DEVICES", str(cluster.gpus))


def test_a_preempted_job(cluster: Cluster, bus: str, place: Path) -> None:
    """It is requeued once, whoever does that: Slurm or `phos run`."""
    wrong = cluster.try_to("sbatch", "--phos=rubbish", "--wrap=true")
    assert "--phos=rubbish: the option is save or none" in wrong.stderr
    jobs = Jobs(cluster, bus, place)
    with phosd(bus, place):
        job = jobs.submit(jobs.line(3 * STEPS))
        jobs.wait_for_steps(job)
        preempt(cluster)
        found = jobs.wait_for_end(job)
    assert found["Restarts"] == "1"
    assert cluster.output(job).count("goes on as process") == 1, cluster.output(job)
    first, last = cluster.accounted(job)
    assert first["NodeList"] == last["NodeList"] == cluster.node
    assert (last["JobState"], last["ExitCode"]) == ("FAILED", ENDS_WITH)
    jobs.require_right(job, 3 * STEPS)


def test_a_suspended_job(cluster: Cluster, bus: str, place: Path) -> None:
    jobs = Jobs(cluster, bus, place)
    jobs.variables |= SELDOM
    with phosd(bus, place):
        job = jobs.submit(jobs.line(0))
        jobs.wait_for_steps(job)
        program = jobs.program(job)
        assert str(step_of(program)) == f"{job}.0"
        cluster.ask("scontrol", "suspend", job)

        def left() -> bool:
            (row,) = (row for row in phos(bus, place, "ps") if row["pid"] == program)
            return row["state"] == "suspended"

        cluster.wait(left, "it to be suspended", job)
        cluster.ask("scontrol", "resume", job)
        jobs.wait_for_steps(job)
        cluster.ask("scontrol", "requeue", job)
        cluster.wait_for_run(job, 1)
        jobs.wait_for_steps(job)
        cluster.ask("scancel", job)
        cluster.wait_for(job, "CANCELLED")
    jobs.require_right_so_far(job)
