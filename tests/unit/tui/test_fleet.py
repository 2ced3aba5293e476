"""Several nodes on one screen, and the screens of each."""

import asyncio
from pathlib import Path

import pytest
from textual.pilot import Pilot

from phosd.client.errors import CommandError
from phosd.tui.node import Contact, Node, Update
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process
from tests.support.tui.full_node import full_node
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import compare, text

_TROUBLE = "there is no way to the bus of gpu9: ssh: connect to host gpu9 port 22: No route to host"


def quiet_node(name: str) -> tuple[Node, FakeLink]:
    """Return a node with one program, which is protected."""
    saved = image(created=NOW - 5)
    there = (gpu(), process(77, name="bert", every=60.0, last_image=saved.id), saved)
    node, link = fake_node(*there, features=(*FEATURES, "storage"))
    node.name, node.here = name, False
    link.answers["GetStorage"] = [1000 << 30, 400 << 30, 100 << 30, 0]
    return node, link


def fleet() -> list[Node]:
    """Return three nodes: all is well on one, some programs need somebody, and no phosd."""
    full, _ = full_node()
    full.name = "gpu7"
    lost, _ = fake_node()
    lost.name = "gpu9"
    lost.apply(Update(whole=True, contact=Contact.GONE, trouble=_TROUBLE))
    lost.heard, lost.since = 0.0, NOW - 190
    return [quiet_node("gpu8")[0], full, lost]


@pytest.mark.parametrize("width", [80, 140])
def test_all_nodes(width: int) -> None:
    async def body() -> None:
        async with opened(fleet(), (width, 20)) as pilot:
            await until_shown(pilot, "2 of 3 nodes", "● 1 protected", "ssh: connect to host gpu9")
            rows = [line.strip("▶ ").split()[0] for line in text(pilot).splitlines()[2:5]]
            assert rows == ["gpu9", "gpu7", "gpu8"]
            await compare(pilot, f"fleet-{width}x20")

    run(body)


def first_words(pilot: Pilot[None]) -> str:
    return " ".join(text(pilot).splitlines()[0].split())


def test_one_goes_to_a_node_and_back_and_to_another() -> None:
    nodes = fleet()

    async def body() -> None:
        async with opened(nodes, LARGE) as pilot:
            await until_shown(pilot, "2 of 3 nodes")
            await pilot.press("down", "enter")
            await until_shown(pilot, "8 programs:", "rl-agent", "gpu7 phosd 0.1.0")
            await pilot.press("3")
            await until_shown(pilot, "llama-ft@4")
            await pilot.press("0")
            await until_shown(pilot, "2 of 3 nodes")
            await pilot.press("end", "enter")
            await until_shown(pilot, "1 program:", "bert", "gpu8 phosd 0.1.0")
            assert "rl-agent" not in text(pilot)
            await pilot.press("3")
            await until(pilot, lambda: "llama-ft" not in text(pilot), "this node's images")
            await pilot.press("q")
            await until_shown(pilot, "2 of 3 nodes")
            await pilot.press("home", "enter")
            await until_shown(pilot, "No phosd for 3 min", "No route to host")

    run(body)


def test_a_key_acts_on_the_node_that_is_open_and_no_other_ones_jobs_are_told() -> None:
    (first, first_link), (second, second_link) = quiet_node("gpu1"), quiet_node("gpu2")
    second_link.answers["Checkpoint"] = CommandError("Busy", "a job works on it; wait")

    async def body() -> None:
        async with opened([first, second], LARGE) as pilot:
            await pilot.press("enter")
            await until_shown(pilot, "gpu1 phosd")
            await pilot.press("c")
            await until(pilot, lambda: ("Checkpoint", 77) in first_link.asked, "the call")
            await pilot.press("0", "end", "enter")
            await until_shown(pilot, "gpu2 phosd")
            ended = job(1, target="77", state="failed", ended=NOW, message="no room")
            first.apply(Update({ended.path: ended}))
            assert "Checkpoint" not in {asked[0] for asked in second_link.asked}
            await pilot.press("c")
            await until_told(pilot, "Busy", "a job works on it")
            assert "no room" not in text(pilot)
            await pilot.press("0")
            await until_shown(pilot, "2 of 2 nodes", "✗ 1 failed", "✗ 1")

    run(body)


def test_a_job_that_comes_late_is_not_taken_for_one_of_the_other_node() -> None:
    (first, first_link), (second, _) = quiet_node("gpu1"), quiet_node("gpu2")
    first_link.slow["Checkpoint"] = asyncio.Event()
    ended = job(1, target="77", state="failed", ended=NOW, message="no room")
    second.apply(Update({ended.path: ended}))

    async def body() -> None:
        async with opened([first, second], LARGE) as pilot:
            await pilot.press("down", "enter")
            await until_shown(pilot, "gpu1 phosd")
            await pilot.press("c")
            await until(pilot, lambda: ("Checkpoint", 77) in first_link.asked, "the call")
            await pilot.press("0", "home", "enter")
            await until_shown(pilot, "gpu2 phosd")
            first_link.slow["Checkpoint"].set()
            await pilot.pause(0.5)
            assert not [each for each in pilot.app._notifications if "no room" in each.message]

    run(body)


def test_what_comes_of_any_node_is_shown() -> None:
    nodes = fleet()

    async def body() -> None:
        async with opened(nodes, LARGE) as pilot:
            await until_shown(pilot, "✗ no phosd")
            nodes[2].apply(Update({}, whole=True, contact=Contact.HERE))
            await until_shown(pilot, "3 of 3 nodes", "no programs")
            assert "No route" not in text(pilot)
            nodes[0].apply(Update(contact=Contact.GONE, trouble="the bus went away"))
            await until_shown(pilot, "2 of 3 nodes", "the bus went away")

    run(body)


def test_the_output_of_another_nodes_program_is_not_looked_for_here(tmp_path: Path) -> None:
    output = tmp_path / "train.log"
    output.write_text("a file of this machine\n")
    node, _ = quiet_node("gpu1")
    there = process(77, name="bert", output=(str(output),))
    node.apply(Update({there.path: there}))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await until_shown(pilot, "train.log")
            await pilot.pause(1.5)
            assert "a file of this machine" not in text(pilot)
            node.here = True
            await until_shown(pilot, "a file of this machine")

    run(body)
