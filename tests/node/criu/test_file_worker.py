"""A restore acts as the owner of the program: it opens nothing that the owner may not open."""

import dataclasses
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.images.build_ids import build_id
from phosd.engine.image.cpu_manifest import MappedFile, OpenFile
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import Internal, PhosError, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order

CAP_SYS_RESOURCE = 24

WRITER = """
import time
out = open("written", "w")
value = 0
while True:
    value += 1
    print(value, file=out, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that root alone may read, in a folder that everybody may enter."""
    path = Path("/tmp") / f"phos-secret-{os.getpid()}"
    path.write_text("the secret\n")
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def _no_secret_left(secret: Path) -> object:
    yield
    assert secret.read_text() == "the secret\n", "nobody wrote to it"
    secret.unlink()


def swap(path: Path, secret: Path) -> None:
    """What an attacker does between the kill and the restore."""
    path.unlink()
    path.symlink_to(secret)


def test_a_swapped_append_file_is_not_opened(lives: Callable[[int], Life], secret: Path) -> None:
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    swap(life.log, secret)
    with pytest.raises(Unsupported, match="log"):
        life.restore()
    assert procfs.stat(life.pid) is None or procfs.ending(life.pid)


def test_criu_itself_may_not_follow_the_owner_to_a_secret(
    lives: Callable[[int], Life], secret: Path
) -> None:
    """Even past the admission, in the time between check and use."""
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    dump = life.dump()
    life.kill()
    swap(life.log, secret)
    assert life.record is not None
    unchecked = msgspec.structs.replace(dump.details, open_files=())
    life.record = msgspec.structs.replace(life.record, details=unchecked)
    with pytest.raises(Internal, match="Permission denied"):
        life.restore()


def test_the_same_swap_works_for_root_alone(life: Life, secret: Path) -> None:
    """The counter-check: without the owner's ids the attack of the test above succeeds."""
    life.start(COUNTER)
    life.counts_on()
    dump = life.dump()
    life.kill()
    copy = life.home / "copy"
    copy.write_text("1\n" * 10)
    life.log.unlink()
    life.log.symlink_to(copy)
    assert life.record is not None
    unchecked = msgspec.structs.replace(dump.details, open_files=())
    life.record = msgspec.structs.replace(life.record, details=unchecked)
    life.restore()
    life.counts_on(copy)


def test_a_swapped_file_is_not_cut(lives: Callable[[int], Life], secret: Path) -> None:
    life = lives(USER)
    life.start(WRITER)
    written = life.home / "written"
    life.counts_on(written)
    life.dump()
    life.counts_on(written)
    life.kill()
    swap(written, secret)
    with pytest.raises(Unsupported, match="written"):
        life.restore(files=Policy.CUT)


def test_output_is_not_written_where_the_owner_may_not(
    lives: Callable[[int], Life], secret: Path
) -> None:
    life = lives(USER)
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer)
    os.close(writer)
    assert os.read(reader, 10)
    life.dump()
    os.close(reader)
    life.kill()
    with pytest.raises(PhosError, match="Permission denied"):
        life.restore(output=secret)


def test_an_image_is_roots_alone_again_after_dump_and_restore(
    lives: Callable[[int], Life],
) -> None:
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    assert private(life.images)
    life.kill()
    life.restore()
    assert private(life.images)


def private(folder: Path) -> bool:
    """Whether everything belongs to root, for root's eyes alone."""
    paths = [folder, *folder.rglob("*")]
    return len(paths) > 1 and all(
        p.stat().st_uid == 0 and stat.S_IMODE(p.stat().st_mode) & 0o077 == 0 for p in paths
    )


def test_a_folder_that_others_can_reach_is_refused(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.private = life.home
    with pytest.raises(Internal, match="can be reached by every user"):
        life.dump()


def test_a_tree_of_several_rights_is_for_administrators(life: Life) -> None:
    life.start(
        "import os, signal\nif os.fork() == 0:\n    os.setgroups([54321])\n    signal.pause()\n"
        + COUNTER
    )
    life.counts_on()
    dump = life.dump()
    assert "has other groups than its root" in dump.details.privileged
    life.kill()
    life.restore()
    assert in_order(life.counts_on())
    assert procfs.status(dump.tree.pids[1]).groups == (54321,)


def test_a_tree_of_several_users_is_for_administrators(life: Life) -> None:
    life.start(
        "import os, signal\nif os.fork() == 0:\n    os.setuid(54321)\n    signal.pause()\n"
        + COUNTER
    )
    life.counts_on()
    assert "runs under other ids than its root" in tree.scan(life.pid).privileged
    may_look = procfs.status(os.getpid()).capabilities >> CAP_SYS_RESOURCE & 1
    if not may_look:
        with pytest.raises(Internal, match="root needs CAP_SYS_RESOURCE"):
            life.dump()
        assert in_order(life.counts_on())
        return
    life.again()
    assert in_order(life.counts_on())


def test_capabilities_of_a_user_are_for_administrators(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    assert tree.scan(life.pid).privileged == ""
    (process,) = tree.scan(life.pid).processes
    capable = tree.ProcessTree((dataclasses.replace(process, capabilities=1 << 12),))
    assert "has capabilities" in capable.privileged


def test_orders_of_any_length_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe takes, though the worker begins to read after the first look at it."""
    monkeypatch.setattr(file_worker, "_LOOK_SECONDS", 0.01)
    folders = tuple(f"{tmp_path}/{'x' * 90}/{number}" for number in range(3000))
    orders = file_worker.Orders(os.getuid(), os.getgid(), (), mark="", folders=folders)
    assert file_worker.work(orders, 30).closed == folders


def test_another_build_of_a_library_is_told_by_its_id(tmp_path: Path) -> None:
    """Also if it has the same size. A copy has the same id; what has none is compared by size."""
    library = Path(os.path.realpath(sys.executable))
    with library.open("rb") as file:
        known = build_id(file.fileno())
    told = subprocess.run(["readelf", "-n", library], capture_output=True, text=True, check=True)
    assert known == told.stdout.partition("Build ID: ")[2].split()[0]
    copy = tmp_path / "copy"
    content = library.read_bytes()

    def problems(data: bytes, wanted: str) -> tuple[str, ...]:
        copy.write_bytes(data)
        mapped = MappedFile(str(copy), len(content), wanted)
        orders = file_worker.Orders(0, 0, (), mark="", mapped_files=(mapped,))
        return file_worker.work(orders).problems

    assert problems(content, known) == problems(content, "") == ()
    other = content.replace(bytes.fromhex(known), bytes(len(known) // 2))
    assert problems(other, "") == ()
    for data in (other, bytes(len(content)), content[:5] + bytes(len(content) - 5)):
        assert problems(data, known) == (f"{copy}, which the program maps, was replaced",)


def test_output_that_is_missing_is_made_and_taken_back(tmp_path: Path) -> None:
    """The program comes from another machine; its output is never made where its user may not."""
    output = tmp_path / "run" / "of a program" / "stdout"
    appended = os.O_WRONLY | os.O_APPEND
    file = OpenFile(1, 1, str(output), appended, size=100, mtime_ns=1, mode=0o640)

    def work(uid: int = 0, *, made: bool = True, **more: Any) -> file_worker.Answer:
        outputs = (file,) if made else ()
        orders = file_worker.Orders(
            uid, uid, (), mark="", open_files=(file,), outputs_made=outputs, **more
        )
        return file_worker.work(orders)

    assert work(made=False).problems == (f"{output} is gone",)
    assert work().problems == () and not output.parent.parent.exists()
    (problem,) = work(USER, apply=True).problems  # who may not even enter that folder
    assert problem == f"{output} is missing, and cannot be made: Permission denied"
    changes = work(apply=True).changes
    assert output.read_bytes() == b"" and output.stat().st_mode & 0o777 == 0o640
    assert work(apply=True).changes == ()  # it is there
    file_worker.work(file_worker.Orders(0, 0, (), mark="", undo=changes))
    assert [*tmp_path.iterdir()] == []
