"""Clones of a tree beside the original: what each has for itself, and what only one can have."""

import fcntl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from phosd.engine.criu import restore as restore_module
from phosd.engine.criu.clone import Clone, CloneFiles
from phosd.engine.criu.restore import Restored, TreeRestoreOptions, restore_tree
from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces
from phosd.errors import Busy, Cancelled, ImageCorrupt, Internal, Reason, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order, wait_for

HOLDER = """
import fcntl, mmap, os, socket, sys
def hold(kind):
    if kind in ("TCP", "UDP"):
        made = socket.socket(type=socket.SOCK_STREAM if kind == "TCP" else socket.SOCK_DGRAM)
        made.bind(("127.0.0.1", 0))
        if kind == "TCP":
            made.listen()
    elif kind == "connection":
        listening = socket.create_server(("127.0.0.1", 0))
        made = socket.create_connection(listening.getsockname()), listening.accept()
        listening.close()
    elif kind in ("@abstract", "path"):
        made = socket.socket(socket.AF_UNIX)
        made.bind("\\0" + os.getcwd() if kind[0] == "@" else os.getcwd() + "/socket")
        made.listen()
    elif kind in ("flock", "lockf"):
        open(kind, "w").close()
        made = open(kind, "r+" if kind == "lockf" else "r")
        getattr(fcntl, kind)(made, fcntl.LOCK_EX)
    elif kind == "fifo":
        os.mkfifo(kind)
        made = os.open(kind, os.O_RDWR)
    else:
        file = os.open("/dev/shm/" + os.path.basename(os.getcwd()), os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, mmap.PAGESIZE)
        made = mmap.mmap(file, mmap.PAGESIZE)
    return made
held = [hold(kind) for kind in sys.argv[1:]]
"""
"""Holds what its arguments say, and counts."""


@pytest.fixture
def life(lives: Callable[[int], Life], tmp_path: Path) -> Iterator[Life]:
    """A program of a user's, with a place for pid namespaces."""
    made = lives(USER)
    made.criu = replace(made.criu, runtime_dir=tmp_path)
    hooks_folder(tmp_path).mkdir()
    yield made
    for left in pid_namespaces.living(tmp_path):
        end(left)
    Path("/dev/shm", made.home.name).unlink(missing_ok=True)


def clone(life: Life, name: str, files: CloneFiles = CloneFiles.COPY) -> Restored:
    restored = life.restore(clone=Clone(life.saved_tree, name, files))
    restored.settle()
    return restored


def refused(life: Life, error: type[Exception] = Unsupported) -> str:
    """A clone is refused, and nothing is changed; what was said."""
    before = sorted(life.home.iterdir())
    with pytest.raises(error) as caught:
        clone(life, "refused")
    assert sorted(life.home.iterdir()) == before
    return str(caught.value)


def namespaces(life: Life) -> Sequence[pid_namespaces.PidNamespace]:
    assert life.criu.runtime_dir is not None
    return [*pid_namespaces.living(life.criu.runtime_dir)]


def test_each_writes_to_a_log_of_its_own(life: Life) -> None:
    """It begins with what the original had written when it was saved, not with what came after."""
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.counts_on()
    clones = [clone(life, name) for name in ("one", "two")]
    logs = [Path(f"{life.log}.clone-{name}") for name in ("one", "two")]
    for log in logs:
        life.counts_on(log)
    life.counts_on()
    assert all(in_order(life.values(log)) for log in (life.log, *logs))
    for log in (life.log, *logs):
        values = life.values(log)
        assert values == [*range(1, len(values) + 1)], "nothing twice, nothing of another's"
    status = logs[0].stat()
    assert (status.st_uid, status.st_mode & 0o777) == (USER, 0o644)
    assert "exists" in refused_again(life, "one")
    clones[0].abandon()
    life.counts_on(logs[1])
    assert not [*life.private.glob("clone-*")]


def refused_again(life: Life, name: str) -> str:
    with pytest.raises(Unsupported) as caught:
        clone(life, name)
    return str(caught.value)


def test_files_that_it_writes_to_may_be_shared_or_refused(life: Life) -> None:
    life.start("import os\nother = os.open('other', os.O_WRONLY | os.O_CREAT)\n" + COUNTER)
    life.counts_on()
    life.dump()
    for policy in (CloneFiles.SHARE, CloneFiles.REFUSE):
        with pytest.raises(Unsupported, match="/other") as caught:
            clone(life, "a", policy)
        assert caught.value.reason == Reason.TAKEN
        assert ("/log" in str(caught.value)) == (policy is CloneFiles.REFUSE)


def test_a_log_that_is_shared_has_the_lines_of_both(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    clone(life, "a", CloneFiles.SHARE)
    wait_for(lambda: len(life.values()) > 20 + len(set(life.values())))
    assert [path.name for path in life.home.glob("log*")] == ["log"]


def test_a_file_that_is_read_and_written_is_copied_unless_it_has_changed(life: Life) -> None:
    life.start("import os\nfile = os.open('both', os.O_RDWR | os.O_CREAT)\n" + COUNTER)
    life.counts_on()
    life.dump()
    clone(life, "a")
    assert (life.home / "both.clone-a").exists()
    (life.home / "both").write_text("changed")
    assert "both has changed" in refused(life)


def test_what_only_one_can_have_is_named_and_free_when_the_original_has_gone(life: Life) -> None:
    """Also for the first clone, which then has it."""
    kinds = ("TCP", "UDP", "@abstract", "path", "connection")
    life.start(HOLDER + COUNTER, *kinds)
    life.counts_on()
    life.dump()
    there = (life.home / "socket").stat()
    first = refused(life)
    assert all(word in first for word in ("TCP port", "UDP port", f"@{life.home}", "/socket"))
    assert "end" in first and "of a TCP connection" in first
    assert (life.home / "socket").stat().st_ino == there.st_ino, "CRIU would remove it"
    life.counts_on()
    life.kill()
    clone(life, "a")
    life.counts_on(Path(f"{life.log}.clone-a"))
    assert "TCP port" in refused(life)


@pytest.mark.parametrize(("kind", "words"), [("flock", "a lock on"), ("fifo", "the named pipe")])
def test_a_lock_and_a_named_pipe(life: Life, kind: str, words: str) -> None:
    life.start(HOLDER + COUNTER, kind)
    life.counts_on()
    life.dump()
    said = refused(life)
    assert words in said and f"{life.home}/{kind}" in said
    life.kill()
    if kind == "flock":
        clone(life, "a")
        with (life.home / kind).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert words in refused(life)


def test_a_lock_on_a_file_that_is_copied_is_on_the_copy(life: Life) -> None:
    life.start(HOLDER + COUNTER, "lockf")
    life.counts_on()
    life.dump()
    clone(life, "a")
    with (life.home / "lockf.clone-a").open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_shared_memory_with_a_name_is_the_originals(life: Life) -> None:
    life.start(HOLDER + COUNTER, "shm")
    life.counts_on()
    life.dump()
    assert f"/dev/shm/{life.home.name}" in refused(life, Busy)


def test_damaged_files_and_a_cancellation_leave_nothing(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    cancelled = Cancellation()
    cancelled.cancel()
    options = TreeRestoreOptions(clone=Clone(life.saved_tree, "a", CloneFiles.COPY))
    before = sorted(life.home.iterdir())
    with pytest.raises(Cancelled):
        restore_tree(life.criu, life.saved_tree, options, cancelled)
    assert sorted(life.home.iterdir()) == before
    files = life.images / "files.img"
    content = files.read_bytes()
    files.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(life, ImageCorrupt)
    assert not namespaces(life) and not [*life.private.glob("clone-*")]


def test_one_that_dies_at_once_takes_its_log_with_it(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_module, "SETTLED", 3.0)  # ending takes a busy machine some time
    life.start(
        "import os, time\nopen('there', 'w').close()\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
    )
    wait_for((life.home / "there").exists)
    life.dump()
    life.kill()
    (life.home / "go").touch()
    with pytest.raises(Internal, match="ended at once"):
        life.restore(clone=Clone(life.saved_tree, "a", CloneFiles.COPY)).require_settled()
    for restored in life.restored:
        restored.abandon()
    assert not namespaces(life) and not [*life.home.glob("*.clone-*")]
