"""Several nodes, which phos-tui reaches by ssh."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.client.over_ssh import Tunnel
from phosd.engine.system.procfs import process_id
from phosd.tui.link import BusLink
from phosd.tui.node import Contact, Node
from tests.support.cluster import Cluster
from tests.support.fake_engine import this_process
from tests.support.harness import wait_until
from tests.support.service import Service
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told


def test_nodes_are_reached_and_one_that_cannot_be_says_why(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = process_id(os.getpid())
    assert found is not None
    service.engine.running = [this_process(name="bert", start_time=found.start_time)]
    service.engine.go.set()
    wait_until(lambda: "train.py" in service.call("ListProcesses"), "the process")
    cluster = Cluster(service, tmp_path)
    monkeypatch.setenv("PATH", f"{cluster.ssh.parent}:{os.environ['PATH']}")
    with ExitStack() as stack:
        nodes = [
            Node(BusLink("system", stack.enter_context(Tunnel(name, asks=False))), name=name)
            for name in ("gpu7", "off", "bare")
        ]

        def others_are_gone() -> bool:
            return all(node.contact is Contact.GONE for node in nodes[1:])

        async def body() -> None:
            async with opened(nodes, LARGE) as pilot:
                await until_shown(pilot, "1 of 3 nodes", "○ 1 never saved", "✗ no phosd")
                await until(pilot, others_are_gone, "the others")
                assert "No route to host" in nodes[1].trouble
                assert "systemd-stdio-bridge` must work" in nodes[2].trouble
                await pilot.press("end", "enter")
                await until_shown(pilot, "gpu7 phosd", "bert")
                await pilot.press("c")
                await until_told(pilot, f"checkpoint of {os.getpid()} is done")

        run(body)
    assert "BatchMode=yes" in cluster.said.read_text()
