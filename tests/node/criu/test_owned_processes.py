"""What is CRIU and what CRIU has made is told from what only has its looks, or its pid."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phosd.engine.criu.dump.dump import Dump, DumpOptions
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.criu.run.owned_processes import (
    dump_mark,
    end,
    end_orphans,
    end_restoring,
    is_criu,
    is_made,
    restore_mark,
)
from phosd.engine.criu.run.program import Criu
from phosd.engine.job.affected import now
from phosd.engine.program.tree import scan
from phosd.engine.recovery import dumps
from phosd.engine.system import procfs
from phosd.errors import Internal
from tests.node.criu.life import COUNTER, SYSTEM_PYTHON, USER, Life, records, wait_for
from tests.support.harness import alive
from tests.support.pids import occupy, release

WAITING = "print(flush=True); input()"


@contextmanager
def running(*words: str, **popen: Any) -> Iterator[int]:
    """A program that is running when the context is entered."""
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, **popen
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.kill()


@pytest.fixture
def named_criu() -> Iterator[str]:
    """A program that anybody may run, and that is called as CRIU is."""
    folder = Path("/tmp") / f"phos-made-{os.getpid()}"
    folder.mkdir(mode=0o755)
    shutil.copy("/usr/bin/sleep", folder / "criu")
    yield str(folder / "criu")
    shutil.rmtree(folder)


@pytest.mark.parametrize("uid", [0, USER])
def test_a_failed_restore_hits_nobody_who_took_a_pid(
    uid: int, lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids were free when they were looked at; the work on the files takes its time."""
    life = lives(uid)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    prepare = TreeFiles.prepare

    def work(files: TreeFiles) -> None:
        occupy(life.pid)
        prepare(files)

    monkeypatch.setattr(TreeFiles, "prepare", work)
    with pytest.raises(Internal, match="File exists"):
        life.restore()
    assert alive(life.pid)
    release(life.pid)


def test_who_has_the_pid_of_an_abandoned_program_is_not_hit(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    restored = life.again()
    subprocess.run(["kill", "-9", str(life.pid)], check=True)
    wait_for(lambda: not alive(life.pid))
    stranger = occupy(life.pid)
    restored.abandon()
    assert alive(stranger)
    release(stranger)


def test_what_has_become_another_program_since_is_abandoned_as_well(life: Life) -> None:
    life.start(
        "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)\n"
        "os.execv('/usr/bin/sleep', ['sleep', '1000'])\n"
    )
    time.sleep(0.2)
    restored = life.again()
    (life.home / "go").touch()
    link = Path(f"/proc/{life.pid}/exe")
    wait_for(lambda: link.readlink().name.startswith(("sleep", "coreutils")))
    restored.abandon()
    assert not alive(life.pid)


def test_what_a_restore_has_made() -> None:
    since = now()
    with running(SYSTEM_PYTHON, "-S", "-c", WAITING, user=USER, group=USER) as pid:
        (process,) = records(scan(pid))
        assert is_made(process, USER, since)
        assert not is_made(process, USER, now() + 100), "it is older"
        other = msgspec.structs.replace(process, executable="/usr/bin/another")
        assert not is_made(other, USER, since), "it is another program"
        theirs = msgspec.structs.replace(process, uid=USER + 1)
        assert not is_made(theirs, USER + 1, since), "it is another user's"
        assert is_made(theirs, USER, since), "it has not got its ids yet"
        end([pid], lambda _: False)
        assert alive(pid)
        end([pid, 2**22 + 1], lambda each: is_made(process, USER, since))
        assert not alive(pid)
        assert not is_made(process, USER, since)


def test_a_criu_that_restores_and_one_that_dumps(named_criu: str) -> None:
    since = now()
    for first, made in (("restore", True), ("dump", False)):
        with running("/bin/bash", "-c", f"echo; exec -a {first} {named_criu} 99") as pid:
            wait_for(lambda: Path(f"/proc/{pid}/exe").readlink() == Path(named_criu))
            (process,) = records(scan(pid))
            process = msgspec.structs.replace(process, executable="/usr/bin/another")
            assert is_made(process, 0, since) == made


def looks(action: Sequence[str]) -> list[str]:
    """The command line of a program that does nothing and looks like CRIU."""
    return [SYSTEM_PYTHON, "-S", "-c", WAITING, *action]


def test_anybody_may_look_like_criu(named_criu: str) -> None:
    """With all capabilities, in a user namespace of their own; or by a program that is root's."""
    dump, restore = (
        ["dump", "--tree", "1"],
        ["restore", "--no-default-config", "--restore-detached"],
    )
    for words in (dump, restore):
        with (
            running("unshare", "-Ur", *looks(words), user=USER, group=USER, extra_groups=[]) as pid,
            running(*looks(words)) as root,
        ):
            wait_for(lambda: Path(f"/proc/{pid}/status").read_text().count("ffffffff"))
            assert not is_criu(pid)
            assert not is_criu(root)
            assert 1 not in dumps.roots_of_dumps()
    # ... which may be called as CRIU is.
    with running(
        "unshare", "-Ur", "/bin/sh", "-c", f"echo; exec {named_criu} 99", user=USER, group=USER
    ) as pid:
        wait_for(lambda: Path(f"/proc/{pid}/exe").readlink() == Path(named_criu))
        assert not is_criu(pid)


def test_what_a_restore_has_started_is_ended(named_criu: str) -> None:
    """Also a helper that leads a session of its own, and one that is stopped."""
    since = now()
    words = ("/bin/sh", "-c", f"echo; setsid {named_criu} 98 & kill -STOP $$")
    with (
        running(*words, env=restore_mark("77")) as first,
        running(*words, env=restore_mark("78")) as other,
    ):
        (helper,) = wait_for(lambda: procfs.children(first))
        end_restoring(["77"], now() + 100)
        assert alive(first)
        end_restoring(["77"], since)
        assert not alive(first)
        assert not alive(helper)
        assert alive(other)
        end_restoring(["77", "78"], since)
        assert not alive(other)


def test_a_helper_that_a_killed_criu_left_is_ended(named_criu: str) -> None:
    """It would be taken for a dump under way. That of a living CRIU is left alone."""
    words = ("/bin/bash", "-c", f"echo; {named_criu} 98 & exec {named_criu} 99")

    def named(pid: int) -> list[int]:
        found = procfs.children(pid)
        return [each for each in found if str(Path(f"/proc/{each}/exe").readlink()) == named_criu]

    with (
        running(*words, env=dump_mark(77)) as first,
        running(*words, env=dump_mark(77)) as living,
        running(*words, env={}) as another,  # an administrator's
    ):
        wait_for(lambda: all(map(named, (first, living, another))))
        helpers = [named(pid)[0] for pid in (first, living, another)]
        for pid in (first, another):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive(first) and not alive(another))
        end_orphans()
        assert [alive(pid) for pid in helpers] == [False, True, True]
        for pid in helpers[1:]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("uid", [0, USER])
def test_the_real_one_is_known(uid: int, criu: Criu, lives: Callable[[int], Life]) -> None:
    life = lives(uid)
    life.start(COUNTER)
    life.counts_on()
    life.images.mkdir()
    with Dump(criu, scan(life.pid), life.images, DumpOptions()) as dump:
        assert life.pid in dumps.roots_of_dumps()
        dump.finish()
        dump.settle()
    assert life.pid not in dumps.roots_of_dumps()
