"""Programs that are restored to be hollow: a resume starts them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.job.affected import AffectedSet, InterruptedJob, now
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.admission import UNLIMITED, DiskLimits
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore, try_restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.engine.program.namespace_maker import end
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.startup import settle
from phosd.engine.system import memory_mount, pid_namespaces, procfs
from phosd.engine.system.freezer import frozen_for
from phosd.errors import OutOfSpace, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, check, computes_right
from tests.support.harness import Target, parse, wait_until

HOLLOW = RestoreOptions(hollow=True)


@pytest.fixture
def config(place: Path) -> Iterator[NodeConfig]:
    made = NodeConfig(place / "state", place / "run", memory_tier=4 << 30)
    yield made
    for left in pid_namespaces.living(made.runtime_dir):
        end(left)
    while made.memory_tier_dir.is_mount():
        assert memory_mount.unmount(made.memory_tier_dir) == ""


@pytest.fixture
def node(config: NodeConfig) -> Iterator[Node]:
    with Node(config) as made:
        yield made


def saved(node: Node, target: Target) -> str:
    target.wait_for_steps(5)
    return checkpoint(node, target.pid, CheckpointOptions(), Progress()).id


def to_the_disk(node: Node, image: str) -> None:
    """Leave an image on the disk alone."""
    node.store.write_back.write(image, Progress())
    assert memory_mount.unmount(node.config.memory_tier_dir) == ""


def with_steps(log: Path, count: int) -> dict[int, str]:
    """The values in a log, once there are so many."""
    wait_until(lambda: len(parse(log.read_bytes())) >= count, f"{count} steps in {log.name}")
    return parse(log.read_bytes())


def blocks_of_files(folder: Path) -> int:
    """The bytes that the files there take, each once however many names it has."""
    found = {(s.st_dev, s.st_ino): s.st_blocks for p in folder.iterdir() if (s := p.stat())}
    return sum(found.values()) * 512


@pytest.mark.parametrize(
    "program", ["single", pytest.param("two_devices", marks=pytest.mark.rotated(of=4))]
)
@pytest.mark.parametrize("durable", [False, True], ids=["memory", "disk"])
def test_a_resume_starts_it(
    program: str, durable: bool, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """From an image in memory, of which it takes nothing more, or from one on the disk alone."""
    target = start(program)
    image = saved(node, target)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    if durable:
        to_the_disk(node, image)
    mark = target.position()
    progress = Progress()
    result = restore(node, image, HOLLOW, progress)
    assert result.pid == target.pid
    assert "load" not in [phase.name for phase in progress.phases]
    assert driver_checkpoint.state(target.pid) is State.RUNNING
    (entry,) = node.suspended.living()
    assert entry.hollow and entry.where == "memory" and entry.pid == target.pid
    assert frozen_for(target.pid) == entry.image
    assert node.suspend_store.taken(entry.owner) == (entry.stored_bytes if durable else 0)
    assert not left_parked(node.config.runtime_dir)
    packs = node.suspend_store.shelf("memory").disk.packs
    assert {each.stat().st_nlink for each in packs.iterdir()} == {1 if durable else 2}
    node.store.delete(image)  # it goes on without
    assert node.suspend_store.taken(entry.owner) == entry.stored_bytes
    resume(node, target.pid, ResumeOptions(), Progress())
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed(program))
    assert not node.suspended.all() and not node.suspend_store.shelf("memory").list()
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


def test_clones_have_their_memory_once(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The first brings what is on the disk to memory, where the others find it."""
    target = start("single")
    image = saved(node, target)
    target.kill()
    to_the_disk(node, image)
    clones = {}
    for name in ("a", "b", "c"):
        options = RestoreOptions(clone=name, hollow=True)
        clones[name] = restore(node, image, options, Progress()).pid
    entries = node.suspended.living()
    assert {each.pid for each in entries} == {*clones.values()}
    shelf = node.suspend_store.shelf("memory")
    assert node.suspend_store.taken(entries[0].owner) == entries[0].stored_bytes
    assert blocks_of_files(shelf.disk.packs) < 2 * entries[0].stored_bytes
    for name, pid in clones.items():
        resume(node, pid, ResumeOptions(), Progress())
        values = with_steps(Path(f"{target.log}.clone-{name}"), 5 + AFTER)
        right = undisturbed("single", max(values) + 1)
        assert values == {step: right[step] for step in range(len(values))}
    assert not shelf.list() and not shelf.disk.pack_numbers()


def test_an_image_that_is_written_over_leaves_it_whole(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The packs of an image in memory go on to the next one, but not those that it has, too."""
    target = start("single")
    image = saved(node, target)
    target.kill()
    mark = target.position()
    restore(node, image, HOLLOW, Progress())
    node.store.delete(image)
    other = start("features")
    for _ in range(2):
        node.store.delete(saved(node, other))
    other.kill()
    resume(node, target.pid, ResumeOptions(), Progress())
    assert target.wait_for_steps(AFTER, since=mark)
    computes_right(target, undisturbed)


def test_what_cannot_be_hollow_is_refused(node: Node, start: Starter) -> None:
    """By name, before anything is made."""
    target = start("single", hooked=False)
    by_driver = saved(node, target)
    target.kill()
    found = try_restore(node, by_driver, HOLLOW, Progress())
    assert [each.what for each in found if each.trouble is not None] == ["hollow"]
    with pytest.raises(Unsupported, match="its memory included"):
        restore(node, by_driver, HOLLOW, Progress())
    assert procfs.process_id(target.pid) is None


def test_a_quota_counts_what_is_brought(node: Node, start: Starter) -> None:
    target = start("single")
    image = saved(node, target)
    target.kill()
    to_the_disk(node, image)
    little = DiskLimits(quota=lambda user: node.store.taken(user) + 1)
    with pytest.raises(OutOfSpace, match="images and suspended programs of uid"):
        restore(node, image, HOLLOW, Progress(), little)
    assert procfs.process_id(target.pid) is None
    assert not node.suspend_store.shelf("memory").disk.pack_numbers()
    restore(node, image, HOLLOW, Progress(), UNLIMITED)
    resume(node, target.pid, ResumeOptions(), Progress())


@pytest.mark.parametrize("clone", ["", "a"], ids=["original", "clone"])
def test_the_engine_is_killed(
    clone: str, config: NodeConfig, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """At every step: what was made of it is ended, or it is suspended, and is resumed then."""
    program = """
import sys, pathlib
from phosd.engine import RestoreOptions, restore
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.job.progress import Progress
place = pathlib.Path(sys.argv[1])
node = Node(NodeConfig(place / "state", place / "run", memory_tier=4 << 30))
restore(node, sys.argv[2], RestoreOptions(hollow=True, clone=sys.argv[3]), Progress())
"""
    target = start("single")
    with Node(config) as node:
        image = saved(node, target)
        target.kill()
        node.store.write_back.write(image, Progress())
    steps = "restore-load", "restore-map", "hollow-shelve", "restore-open"
    for number, step in enumerate(steps):
        name = f"{clone}{number}" if clone else ""
        words = [sys.executable, "-c", program, str(place), image, name]
        fault = os.environ | {"PHOS_FAULT": f"{step}:1:kill"}
        affected = AffectedSet((), (0,), image, now())
        with (place / "engine.log").open("ab") as said:  # which its movers keep open
            done = subprocess.run(words, env=fault, stderr=said, timeout=60)
        assert done.returncode == -signal.SIGKILL, (place / "engine.log").read_text()
        with Node(config) as node:
            (text,) = settle(node, [InterruptedJob(1, affected)]).values()
            assert not left_parked(config.runtime_dir), step
            asleep = node.suspended.living()
            if step != "restore-open":
                assert not asleep and "start the job again" in text, step
                assert not node.suspend_store.shelf("memory").disk.pack_numbers(), step
                continue
            root = asleep[0].pid
            assert text == f"the restored program (pid {root}) is suspended, as it was to be"
            log = Path(f"{target.log}.clone-{name}") if clone else target.log
            count = len(parse(log.read_bytes())) + AFTER
            resume(node, root, ResumeOptions(), Progress())
            values = with_steps(log, count)
            right = undisturbed("single", max(values) + 1)
            assert values == {step: right[step] for step in values}
