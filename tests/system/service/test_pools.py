"""The real daemon and engine: pools of programs that are started in a moment."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.program.namespace_maker import end
from phosd.engine.system import memory_mount, pid_namespaces, procfs
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed
from tests.support.bus import busctl
from tests.support.harness import Target, parse, start, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import NAME, phos, phos_ended, phosd, phosd_that_ends
from tests.system.service.test_metrics import free_port, scrape

__all__ = ["place", "undisturbed"]


@pytest.fixture
def target(place: Path) -> Iterator[Target]:
    """A program of which images are made, and of which nothing is left afterwards."""
    found = start("single", place, runtime=place / "run")
    found.wait_for_steps(3)
    yield found
    found.kill()
    for left in pid_namespaces.living(place / "run"):
        end(left)
    while (place / "run/memory").is_mount():
        assert memory_mount.unmount(place / "run/memory") == ""


def pool(bus: str, folder: Path, name: str = "chat") -> dict[str, Any]:
    (row,) = [row for row in phos(bus, folder, "pool") if row["name"] == name]
    return row


def suspended(bus: str, folder: Path) -> set[int]:
    rows = phos(bus, folder, "ps")
    return {int(str(row["pid"])) for row in rows if row["state"] == "suspended"}


def wait_for(bus: str, folder: Path, **state: object) -> None:
    def there() -> bool:
        found = pool(bus, folder)
        return all(found[key] == value for key, value in state.items())

    wait_until(there, f"a pool with {state}")


def computes_on(log: Path, undisturbed: Undisturbed) -> None:
    """A clone goes on, and has computed what is right."""
    before = len(parse(log.read_bytes()))
    wait_until(lambda: len(parse(log.read_bytes())) >= before + AFTER, f"steps in {log.name}")
    values = parse(log.read_bytes())
    right = undisturbed("single", max(values) + 1)
    assert values == {step: right[step] for step in range(len(values))}


def test_one_is_started_and_the_next_is_made(
    bus: str, place: Path, target: Target, undisturbed: Undisturbed
) -> None:
    """It is there again after a phosd that is killed, and ends when the pool does."""
    port = free_port()
    (place / "phosd.toml").write_text(f'metrics = "127.0.0.1:{port}"\n')
    with phosd(bus, place):
        image = phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"]
        phos(bus, place, "pool", "create", "chat", str(image), "--hollow", "2", "--max", "4")
        wait_for(bus, place, waiting=2, running=0, trouble=None)
        wait_until(lambda: len(suspended(bus, place)) == 2, "both to be listed")
        hollow = suspended(bus, place)

        done = phos(bus, place, "start", "chat")[-1]
        assert (done["state"], done["mode"], done["operation"]) == ("done", "hollow", "start")
        first = int(str(done["result"]))
        assert first in hollow
        wait_for(bus, place, waiting=2, running=1)
        pools = {row["pid"]: (row["pool"], row["waits"]) for row in phos(bus, place, "ps")}
        waiting = suspended(bus, place)
        assert pools[first] == ("chat", False)
        assert {pools[pid] for pid in waiting} == {("chat", True)}
        listed = phos_ended(bus, place, "status", "--json").stdout.splitlines()
        programs = [json.loads(line) for line in listed]
        assert {"chat"} == {each["pool"] for each in programs if first in each["pids"]}
        pids = {pid for each in programs for pid in each["pids"]}
        assert not waiting & pids, "what waits is no program yet"
        assert f"chat, pid {first}" in phos_ended(bus, place, "status").stdout
        told = scrape(port)
        for state, count in {"waiting": 2, "running": 1, "missing": 0}.items():
            assert told["phosd_pool_programs", (("state", state),)] == count
        assert told["phosd_start_seconds_count", (("level", "hollow"),)] == 1
        assert told["phosd_start_seconds_count", (("level", "image"),)] == 0
        wait_until(lambda: scrape(port)["phosd_hollow_programs", ()] == 2, "two hollow programs")
        refused = phos_ended(bus, place, "rm", "--yes", str(image))
        assert refused.returncode != 0 and "the pool chat makes its programs" in refused.stderr
    with phosd(bus, place):
        wait_for(bus, place, waiting=2, running=1)
        waiting = suspended(bus, place)
        ids = {pid: procfs.process_id(pid) for pid in waiting}
        done = phos(bus, place, "start", "chat")[-1]
        assert done["mode"] == "hollow"
        second = int(str(done["result"]))
        wait_for(bus, place, running=2, waiting=2)
        for log in place.glob("single.log.clone-chat-*"):
            if _written_by(log, first, second):
                computes_on(log, undisturbed)
        phos(bus, place, "pool", "rm", "chat")
        assert phos(bus, place, "pool") == []
        left = waiting - {second}
        assert all(procfs.process_id(pid) != ids[pid] for pid in left)
        assert procfs.process_id(first) and procfs.process_id(second)


def test_what_was_started_is_its_users(bus: str, place: Path, target: Target) -> None:
    """It is neither handed out again nor ended, whatever its user does with it."""
    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(bus, place, "pool", "create", "chat", image, "--max", "4")
        wait_for(bus, place, waiting=1)
        started = str(phos(bus, place, "start", "chat")[-1]["result"])
        phos(bus, place, "suspend", started, "--hollow")
        wait_for(bus, place, waiting=1, running=1)
        (other,) = wait_until(lambda: suspended(bus, place) - {int(started)}, "the next")
        taken = str(other)
        phos(bus, place, "resume", taken)  # its user knows its pid, too
        wait_for(bus, place, waiting=1, running=2)
        phos(bus, place, "suspend", taken)
    with phosd(bus, place):
        wait_for(bus, place, waiting=1, running=2)
        assert str(phos(bus, place, "start", "chat")[-1]["result"]) not in (started, taken)
        phos(bus, place, "pool", "rm", "chat")
        for pid in (started, taken):
            phos(bus, place, "resume", pid)


@pytest.mark.rotated(of=4)
def test_deaths_bursts_and_bounds(bus: str, place: Path, target: Target) -> None:
    """A program that dies in its sleep is made again; a burst gets what there may be."""
    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(bus, place, "pool", "create", "chat", image, "--hollow", "1", "--max", "3")
        wait_for(bus, place, waiting=1)
        (dead,) = wait_until(lambda: suspended(bus, place), "it to be listed")
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: suspended(bus, place) - {dead}, "another one")
        wait_for(bus, place, waiting=1, trouble=None)
        with ThreadPoolExecutor(5) as clients:
            ended = [*clients.map(lambda _: phos_ended(bus, place, "start", "chat"), range(5))]
        pids = {int(done.stdout) for done in ended if done.returncode == 0}
        assert len(pids) == 3 and all(map(procfs.process_id, pids)), [e.stderr for e in ended]
        assert all(
            "its output goes on in /" in done.stderr for done in ended if not done.returncode
        )
        refused = [done for done in ended if done.returncode]
        assert all("as many as it may" in done.stderr for done in refused), ended
        assert pool(bus, place)["running"] == 3
        phos(bus, place, "pool", "scale", "chat", "--max", "4")
        wait_for(bus, place, waiting=1)
        once = ("StartPooled", "sa{sv}", "chat", "1", "token", "s", "once")
        asked = busctl(bus, "call", NAME, ROOT, MANAGER, *once)
        wait_for(bus, place, running=4)
        assert busctl(bus, "call", NAME, ROOT, MANAGER, *once) == asked, "it is full, and was asked"
        phos(bus, place, "pool", "scale", "chat", "--max", "6", "--hollow", "1")
        wait_for(bus, place, waiting=1)
        phos(bus, place, "pool", "scale", "chat", "--max", "2")
        refused_now = phos_ended(bus, place, "start", "chat")
        assert refused_now.returncode and "as many as it may" in refused_now.stderr
        wait_for(bus, place, waiting=0, running=4)
        assert "it has 2, as many as it may" in phos_ended(bus, place, "pool").stdout
        for words in (("create", "chat", image), ("create", "a/b", image), ("rm", "none")):
            assert phos_ended(bus, place, "pool", *words).returncode
        phos(bus, place, "pool", "rm", "chat")
        assert not suspended(bus, place)


@pytest.mark.rotated(of=2)
def test_those_that_the_administrator_states(bus: str, place: Path, target: Target) -> None:
    """They are as the file says, also after another start of phosd, until it says so no more."""
    settings = place / "phosd.toml"
    table = '[[pools]]\nname = "{}"\nimage = "{}"\nhollow = {}\n'
    with phosd(bus, place) as daemon:
        settings.write_text(table.format("chat", "root/none", 1))
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: _told(bus, place, "there is no image root/none"), "the event")
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        settings.write_text(table.format("chat", image, 1))
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: phos(bus, place, "pool"), "the pool")
        wait_for(bus, place, waiting=1, stated=True)
        for words in (("scale", "chat", "--hollow", "2"), ("rm", "chat")):
            refused = phos_ended(bus, place, "pool", *words)
            assert refused.returncode == 2 and "as phosd.toml says" in refused.stderr
        started = int(str(phos(bus, place, "start", "chat")[-1]["result"]))
        phos(bus, place, "pool", "create", "mine", image, "--hollow", "0")
    settings.write_text(table.format("chat", image, 2) + table.format("mine", image, 0))
    with phosd(bus, place) as daemon:
        wait_for(bus, place, waiting=2, running=1, stated=True)
        assert pool(bus, place, "mine")["stated"] is False
        wait_until(lambda: _told(bus, place, "there is a pool mine already"), "the event")
        settings.write_text("")
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: [row["name"] for row in phos(bus, place, "pool")] == ["mine"], "its end")
        wait_until(lambda: not suspended(bus, place), "what waited to end")
        assert procfs.process_id(started)


def _told(bus: str, place: Path, text: str) -> bool:
    return any(text in str(event["text"]) for event in phos(bus, place, "events"))


def test_one_waits_ready(bus: str, place: Path, target: Target, undisturbed: Undisturbed) -> None:
    """It starts first, and the next one that waits becomes it; a new phosd loads it again."""
    port = free_port()
    (place / "phosd.toml").write_text(f'metrics = "127.0.0.1:{port}"\n')

    def states() -> list[str]:
        return sorted(str(row["ready"]) for row in phos(bus, place, "pool", "ls", "chat"))

    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(
            *(bus, place, "pool", "create", "chat", image),
            *("--hollow", "1", "--ready", "1", "--max", "4"),
        )
        wait_for(bus, place, waiting=2, waiting_ready=1, trouble=None)
        wait_until(lambda: states() == ["False", "True"], "one that is ready, and one that is not")
        (ready,) = (row for row in phos(bus, place, "ps") if row["ready"])
        assert ready["state"] == "suspended" and ready["hollow"] and ready["last_image"] == image
        assert "on its GPUs already, as are its contexts (ready)" in str(ready["reason"])
        assert ready["device_bytes"]

        done = phos(bus, place, "start", "chat")[-1]
        assert (done["mode"], done["result"]) == ("ready", str(ready["pid"]))
        phases: Any = done["phases"]
        assert "load" not in [phase["name"] for phase in phases]
        wait_for(bus, place, waiting=2, waiting_ready=1, running=1)
        wait_until(lambda: scrape(port)["phosd_ready_programs", ()] == 1, "one that is ready")
        told = scrape(port)
        assert told["phosd_pool_programs", (("state", "ready"),)] == 1
        assert told["phosd_pool_programs", (("state", "waiting"),)] == 1
        assert told["phosd_start_seconds_count", (("level", "ready"),)] == 1

        phos(bus, place, "pool", "scale", "chat", "--ready", "0")
        wait_for(bus, place, waiting=1, waiting_ready=0)
        phos(bus, place, "pool", "scale", "chat", "--ready", "2", "--hollow", "0")
        wait_for(bus, place, waiting=2, waiting_ready=2)
        phos(bus, place, "pool", "scale", "chat", "--ready", "1", "--hollow", "1")
        wait_for(bus, place, waiting=2, waiting_ready=1)
        three = ["False", "False", "True"]  # with the one that runs
        wait_until(lambda: states() == three, "one that is ready of three")
        plan = phos(bus, place, "evacuate", "0", "--dry-run")
        assert [
            "`phos start chat` would bring it back there" in str(row["why"])
            for row in plan
            if row["action"] == "suspend"
        ] == [True, True]
        refused = phos_ended(bus, place, "pool", "ls", "none")
        assert refused.returncode and "there is no pool none" in refused.stderr
    with phosd(bus, place):
        wait_for(bus, place, waiting=2, waiting_ready=1, running=1)
        done = phos(bus, place, "start", "chat")[-1]
        assert done["mode"] == "ready"
        phos(bus, place, "pool", "rm", "chat")
        ours = {ready["pid"], int(str(done["result"]))}
        rows = [row for row in phos(bus, place, "ps") if row["pid"] in ours]
        assert [(row["last_image"], row["state"]) for row in rows] == 2 * [(image, "running")]
    for log in place.glob("single.log.clone-chat-*"):
        if _written_by(log, int(str(ready["pid"])), int(str(done["result"]))):
            computes_on(log, undisturbed)


@pytest.mark.rotated(of=4)
def test_what_a_start_made_of_the_image_has_it_as_its_last_one(
    bus: str, place: Path, target: Target
) -> None:
    """Before phosd is started again, and after."""
    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(bus, place, "pool", "create", "chat", image, "--hollow", "0", "--max", "2")
        done = phos(bus, place, "start", "chat")[-1]
        assert done["mode"] == "image"
        (row,) = phos(bus, place, "pool", "ls", "chat")
        assert row["last_image"] == image and str(row["pid"]) == done["result"]
    with phosd(bus, place):
        (row,) = phos(bus, place, "pool", "ls", "chat")
        assert row["last_image"] == image


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize(
    ("step", "came", "ready"),
    [("resume-load", "none", 0), ("resume-control", "one", 1), ("resume-open", "one", 1)],
)
def test_a_start_that_phosd_does_not_survive(
    step: str, came: str, ready: int, bus: str, place: Path, target: Target
) -> None:
    """The history says what has come of it, and the pool goes on."""
    sizes = ["--ready", str(ready), "--hollow", str(1 - ready)]
    with phosd(bus, place):
        image = str(phos(bus, place, "checkpoint", str(target.pid), "--end")[-1]["result"])
        phos(bus, place, "pool", "create", "chat", image, *sizes)
        wait_for(bus, place, waiting=1, waiting_ready=ready)
        (waiting,) = wait_until(lambda: suspended(bus, place), "one that waits")
    with (
        phosd_that_ends(-signal.SIGKILL, bus, place, PHOS_FAULT=f"{step}:1:kill"),
        ThreadPoolExecutor(1) as client,
    ):
        wait_for(bus, place, waiting=1, waiting_ready=ready)
        assert client.submit(phos_ended, bus, place, "start", "chat").result().returncode
    with phosd(bus, place):
        (row,) = phos(bus, place, "history", "--operation", "start")
        said = {
            "none": "no program of the pool was started; `phos start chat` starts one",
            "one": f"process {waiting} of the pool runs; `phos pool ls chat` lists what does",
        }
        assert row["state"] == "interrupted" and said[came] in str(row["message"])
        wait_for(bus, place, waiting=1, waiting_ready=ready, running=int(came == "one"))
        still = came == "none"
        wait_until(lambda: (waiting in suspended(bus, place)) == still, f"{waiting}: {still}")


def _written_by(log: Path, *pids: int) -> bool:
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if descriptor.is_symlink() and str(descriptor.readlink()) == str(log):
                return True
    return False
