"""A job of Slurm goes on on another node, by way of a folder that both have."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.harness import SELDOM
from tests.support.service import bus
from tests.support.slurm import Cluster
from tests.system.elsewhere.test_elsewhere import another_machine
from tests.system.service.test_end_to_end import phos, phosd
from tests.system.slurm.test_slurm import Jobs, place, place_of_cluster, seldom

__all__ = ["bus", "place", "place_of_cluster"]

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(place_of_cluster: Path) -> Iterator[Cluster]:
    with slurm.cluster(place_of_cluster, nodes=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    monkeypatch.setenv("PHOS_SOFTGPU_DEVICES", str(cluster.gpus))


def signing_key(place: Path) -> Path:
    """A key that the phosd of ``place`` trusts."""
    key, signers = place / "key", place / "signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    signers.write_text(f"root {key.with_suffix('.pub').read_text()}")
    (place / "phosd.toml").write_text(f'allowed_signers = "{signers}"\n')
    return key


@seldom
def test_a_job_goes_on_on_another_node(cluster: Cluster, bus: str, place: Path) -> None:
    """Each node has a phosd of its own, of which one runs at a time: they are on one machine."""
    jobs, key = Jobs(cluster, bus, place), signing_key(place)
    jobs.variables |= SELDOM
    first, second = cluster.nodes
    with phosd(bus, place):
        options = [f"--phos-images=file://{place}/images", f"--phos-key={key}"]
        job = jobs.submit(jobs.line(0), *options, f"--exclude={second}")
        jobs.wait_for_steps(job)
        cluster.ask("scontrol", "hold", job)
        cluster.ask("scontrol", "requeue", job)
        cluster.wait_for(job, "PENDING")
        assert "any node may go on with it" in cluster.output(job)
        assert cluster.job(job)["ReqNodeList"] == "(null)"
        (made,) = phos(bus, place, "images")
    cluster.ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={first}")
    with another_machine(place), phosd(bus, place):
        cluster.ask("scontrol", "release", job)
        cluster.wait_for_run(job, 1)
        jobs.wait_for_steps(job)
        assert f"image {made['id']} of {made['name']} was brought here" in cluster.output(job)
        assert cluster.job(job)["NodeList"] == second
        cluster.ask("scancel", job)
        cluster.wait_for(job, "CANCELLED")
    jobs.require_right_so_far(job)


@seldom
def test_an_image_that_stays_on_its_node(cluster: Cluster, bus: str, place: Path) -> None:
    """The job is bound to the node, and refused on another one."""
    jobs = Jobs(cluster, bus, place)
    jobs.variables |= SELDOM
    first, second = cluster.nodes
    with phosd(bus, place):
        options = ["--phos-images=file:///proc/none", f"--exclude={second}"]
        job = jobs.submit(jobs.line(0), *options)
        jobs.wait_for_steps(job)
        cluster.ask("scontrol", "hold", job)
        cluster.ask("scontrol", "requeue", job)
        found = cluster.wait_for(job, "PENDING")
        assert f"is on node {first} alone: " in cluster.output(job)
        assert found["ReqNodeList"] == first
        there = [f"JobId={job}", "ReqNodeList=", f"ExcNodeList={first}"]
        cluster.ask("scontrol", "update", *there)
        cluster.ask("scontrol", "release", job)
        jobs.wait_for_end(job, "6:0")
        assert f"was saved on node {first}" in cluster.output(job)
        job = jobs.submit(jobs.line(0), "--phos-images=nowhere://images")
        jobs.wait_for_end(job, "2:0")
    assert not jobs.lines(job)
