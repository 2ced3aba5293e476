"""Commands that reach the phosd of another node by ssh, for which a script stands here: it does on
this machine what ssh does on the other one.
"""

import os
from pathlib import Path

import pytest

from phosd.engine.system.procfs import process_id
from tests.support.cluster import Cluster
from tests.support.fake_engine import manifest, this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.system.cli.test_client import lines

ME = os.getpid()


@pytest.fixture
def cluster(service: Service, tmp_path: Path) -> Cluster:
    found = process_id(ME)
    assert found is not None
    service.engine.running = [this_process(name="bert", start_time=found.start_time)]
    service.engine.stored = {"i": manifest("i")}
    wait_until(lambda: "train.py" in service.call("ListProcesses"), "the process")
    return Cluster(service, tmp_path)


def test_one_node(cluster: Cluster) -> None:
    """What is asked there is answered there, and names are those of programs there."""
    (row,) = lines(cluster.phos("-H", "gpu7", "ps", "--json").stdout)
    assert row["pid"] == ME and "node" not in row
    assert cluster.phos("--host=ann@gpu7", "note", "i", "good").returncode == 0
    assert cluster.service.engine.noted == {"i": "good"}
    shown = cluster.phos("ps", "bert", "-H", "gpu7")
    assert str(ME) in shown.stdout, shown.stderr
    said = cluster.said.read_text().splitlines()
    assert said[0].endswith("-- gpu7 systemd-stdio-bridge")
    missing = cluster.phos("-H", "gpu7", "ps", "gpt")
    assert missing.returncode == 4 and "no program" in missing.stderr


def test_lists_of_several_nodes(cluster: Cluster) -> None:
    done = cluster.phos("-H", "b", "-H", "a", "ps", "--json")
    assert [(row["node"], row["pid"]) for row in lines(done.stdout)] == [("b", ME), ("a", ME)]
    heads, *rows = cluster.phos("-H", "b", "-H", "a", "images").stdout.splitlines()
    assert heads.split()[:2] == ["NODE", "IMAGE"]
    assert [row.split()[:2] for row in rows] == [["b", "i"], ["a", "i"]]
    status = cluster.phos("-H", "a", "-H", "b", "status")
    assert status.returncode == 1, "never saved"
    assert "a: programs 1: 1 never; " in status.stderr and "b: programs 1" in status.stderr
    assert [line.split()[0] for line in status.stdout.splitlines()] == ["NODE", "a", "b"]


def test_a_node_that_does_not_answer_is_told_and_the_others_are_shown(cluster: Cluster) -> None:
    done = cluster.phos("-H", "off", "-H", "a", "ps")
    assert done.returncode == 1
    assert f"a     {ME}" in done.stdout
    assert "no way to the bus of off: ssh: connect to host off port 22: No route" in done.stderr
    told, row = lines(cluster.phos("-H", "bare", "-H", "a", "ps", "--json").stdout)
    assert (told["node"], told["error"], row["node"]) == ("bare", "NoBus", "a")
    assert "systemd-stdio-bridge: not found" in str(told["message"])
    alone = cluster.phos("-H", "off", "status")
    assert alone.returncode == 1 and "`ssh off systemd-stdio-bridge` must work" in alone.stderr


def test_a_bus_in_the_environment_is_this_machines_and_no_other_nodes(cluster: Cluster) -> None:
    """Else the command would do here what is meant for there."""
    cluster.variables["PHOS_BUS"] = cluster.service.address
    gone = cluster.phos("-H", "off", "note", "i", "good")
    assert gone.returncode == 1 and "no way to the bus of off" in gone.stderr
    assert not cluster.service.engine.noted
    assert cluster.phos("-H", "gpu7", "note", "i", "good").returncode == 0
    assert cluster.said.read_text().count("-- gpu7 systemd-stdio-bridge")
    both = cluster.phos("-H", "gpu7", "--bus", "session", "ps")
    assert both.returncode == 2 and "give one" in both.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("-H", "a", "run", "--", "train"), 6, "`ssh a phos run train`"),
        (("-H", "a", "push", "i", "file:///x"), 6, "works on the node itself"),
        (("-H", "a", "-H", "b", "checkpoint", "7"), 2, "only lists are of several nodes"),
        (("-H", "a", "-H", "b", "images", "i"), 2, "only lists are of several nodes"),
        (("-H", "-oProxyCommand=x", "ps"), 2, "is no node"),
        (("-H", "a b", "ps"), 2, "is no node"),
        (("-H", "a", "-H", "$(x)", "ps"), 2, "is no node"),
    ],
)
def test_what_is_not_possible(
    cluster: Cluster, words: tuple[str, ...], code: int, says: str
) -> None:
    done = cluster.phos(*words)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert not cluster.said.exists(), "nothing was tried"


def test_phosd_of_a_node_does_not_run(cluster: Cluster) -> None:
    cluster.service.disconnect()
    done = cluster.phos("-H", "gpu7", "ps")
    assert done.returncode == 1
    assert "gpu7: phosd does not run on this bus; start it (`systemctl start phosd`" in done.stderr


def test_without_ssh(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    cluster.ssh.unlink()
    done = cluster.phos("-H", "gpu7", "ps")
    assert done.returncode == 1
    assert "gpu7: ssh cannot be started (No such file or directory)" in done.stderr
