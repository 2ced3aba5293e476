"""Nobody gets more rights out of an image than the program had, and CRIU has few to give."""

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump.dump import Dump, DumpOptions
from phosd.engine.criu.images.rights import Rights
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.run.action_script import MADE, ActionScript
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.owned_processes import carried
from phosd.engine.program import tree
from phosd.engine.system import privileges, procfs
from phosd.engine.system.privileges import Capability
from phosd.engine.system.procfs import Credentials
from phosd.errors import Internal, NotAuthorized, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, wait_for
from tests.support.harness import children

CAP_SYS_RESOURCE = 24
PLAIN = Credentials(
    uids=(USER,) * 4,
    gids=(USER,) * 4,
    groups=(),
    inheritable=0,
    permitted=0,
    effective=0,
    bounding=1,
    ambient=0,
    no_new_privileges=0,
    seccomp_mode=0,
)
WITH_THREAD = (
    """
import threading, time
threading.Thread(target=time.sleep, args=(999,), daemon=True).start()
"""
    + COUNTER
)


SETS = {"inheritable": 9, "permitted": 10, "effective": 11}
"""Fields of CRIU's ``creds_entry``, of two words each."""


def forge(image: Path, *names: str) -> None:
    """Put a capability into these sets, all of which are empty in ``core-<id>.img``."""

    def written(which: tuple[str, ...]) -> bytes:
        words = ((field << 3, name in which) for name, field in SETS.items())
        return b"".join(bytes([tag, first, tag, 0]) for tag, first in words)

    data = image.read_bytes()
    assert data.count(written(())) == 1, "not what CRIU writes"
    image.write_bytes(data.replace(written(()), written(names)))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("which", ["process", "thread"])
def test_what_the_program_says_of_its_rights_is_not_believed(
    lives: Callable[[int], Life], which: str, name: str
) -> None:
    """CRIU asks the program itself, whose user may have changed its code."""
    life = lives(USER)
    life.start(WITH_THREAD)
    life.counts_on()
    (thread,) = set(procfs.threads(life.pid)) - {life.pid}
    life.images.mkdir()
    with Dump(life.criu, tree.scan(life.pid), life.images, DumpOptions()) as dump:
        dump.finish()
        forge(life.images / f"core-{life.pid if which == 'process' else thread}.img", name)
        with pytest.raises(NotAuthorized, match=f"has other {name} for thread"):
            dump.settle()
    life.counts_on()


def test_a_thread_that_is_missing_is_noticed(lives: Callable[[int], Life]) -> None:
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.images.mkdir()
    with Dump(life.criu, tree.scan(life.pid), life.images, DumpOptions()) as dump:
        dump.finish()
        (life.images / f"core-{life.pid}.img").unlink()
        with pytest.raises(NotAuthorized, match="has the threads"):
            dump.settle()


def test_an_image_that_gives_more_is_not_restored(lives: Callable[[int], Life]) -> None:
    """One that an older phosd has made, and sealed."""
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    forge(life.images / f"core-{life.pid}.img", "permitted", "effective")
    with pytest.raises(NotAuthorized, match="has capabilities"):
        criu_restore.restore_tree(life.criu, life.saved_tree, TreeRestoreOptions())
    wait_for(lambda: procfs.stat(life.pid) is None)


def more_than_it_had(monkeypatch: pytest.MonkeyPatch, thread: int) -> list[str]:
    """Make the kernel say that the restorer gave a capability away; which state the thread had."""
    known = procfs.credentials
    states: list[str] = []

    def given(of: int) -> Credentials:
        right = known(of)
        if of != thread:
            return right
        found = procfs.stat(of)
        states.append(found.state if found else "")
        return dataclasses.replace(right, effective=1 << Capability.CHECKPOINT_RESTORE)

    monkeypatch.setattr(procfs, "credentials", given)
    return states


@pytest.mark.parametrize("which", ["process", "thread"])
def test_a_program_that_was_given_more_never_runs(
    lives: Callable[[int], Life], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lives(USER)
    life.start(WITH_THREAD)
    life.counts_on()
    (thread,) = set(procfs.threads(life.pid)) - {life.pid}
    life.dump()
    life.kill()
    before = life.values()
    with monkeypatch.context() as patched:
        states = more_than_it_had(patched, life.pid if which == "process" else thread)
        with pytest.raises(NotAuthorized, match="of the restored program has other effective"):
            life.restore()
    assert states and states[0] in "Tt", "it ran when it was looked at"
    wait_for(lambda: procfs.stat(life.pid) is None)
    assert life.values() == before
    life.restore()
    life.counts_on()


def test_whoever_kills_the_script_is_found_out_after_it(
    lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU goes on without it."""
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    with monkeypatch.context() as patched:
        attend = ActionScript.attend

        def end_it(script: ActionScript) -> None:
            if MADE in script.reached and not script.waits:
                end_script(script._work)
            else:
                attend(script)

        patched.setattr(ActionScript, "attend", end_it)
        more_than_it_had(patched, life.pid)
        with pytest.raises(NotAuthorized, match="of the restored program has other effective"):
            life.restore()
    wait_for(lambda: procfs.stat(life.pid) is None)


def end_script(work: Path) -> None:
    """Kill the action script of a folder at its last point: CRIU fails if it misses another."""
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            script = procfs.command_line(pid)[1:] == ("./meet.sh",)
            if (
                script
                and carried(pid, "CRTOOLS_SCRIPT_ACTION") == "pre-resume"
                and (procfs.PROC / str(pid) / "cwd").readlink() == work
            ):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "more",
    [
        {"uids": (USER, USER, 0, USER)},
        {"gids": (USER, 0, USER, USER)},
        {"groups": (0,)},
        {"permitted": 1 << 40},
        {"ambient": 1},
        {"secure_bits": 1},
        {"inheritable": 1},
    ],
    ids=lambda each: next(iter(each)),
)
def test_more_than_a_user_has(more: dict[str, Any]) -> None:
    owner = Owner(USER, USER, ())
    Rights({7: PLAIN}).require_plain(owner)
    with pytest.raises(NotAuthorized, match="thread 8 has"):
        Rights({7: PLAIN, 8: dataclasses.replace(PLAIN, **more)}).require_plain(owner)


def test_threads_of_a_user_have_one_bounding_set() -> None:
    owner = Owner(USER, USER, ())
    other = dataclasses.replace(PLAIN, bounding=0)
    with pytest.raises(NotAuthorized, match="threads 7 and 8 have different bounding sets"):
        Rights({7: PLAIN, 8: other}).require_plain(owner)


def test_what_criu_may(lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it works for a user: no more than it needs, in any set."""
    life = lives(USER)
    life.start(COUNTER)
    life.counts_on()
    seen: list[Credentials] = []
    note = Dump._note

    def look(self: Dump) -> None:
        for pid in children(os.getpid()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a script's `head`
                if b"criu" in (procfs.PROC / str(pid) / "comm").read_bytes():
                    seen.append(procfs.credentials(pid))
        note(self)

    monkeypatch.setattr(Dump, "_note", look)
    monkeypatch.setattr(criu_dump, "_YAMA", life.private / "none")
    life.dump()
    assert seen
    for each in seen:
        sets = each.permitted | each.effective | each.inheritable | each.ambient
        assert sets == 1 << Capability.CHECKPOINT_RESTORE
        assert (each.uids, each.gids) == ((USER,) * 4, (USER,) * 4)


def test_a_command_keeps_what_it_is_given() -> None:
    command = privileges.command(
        ["/bin/cat", "/proc/self/status"],
        uid=USER,
        gid=USER,
        groups=[],
        capabilities=[Capability.SYS_PTRACE, Capability.CHECKPOINT_RESTORE],
        bounding=1 << Capability.SYS_PTRACE,
    )
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == 1 << 19 | 1 << 40
    assert int(fields["CapBnd"], 16) == 1 << 19
    assert fields["Uid"].split() == [str(USER)] * 4


def test_a_command_says_what_it_cannot_have_in_its_bounding_set() -> None:
    own = procfs.credentials(os.getpid()).bounding
    command = privileges.command(
        ["/bin/true"], uid=USER, gid=USER, groups=[], bounding=own | 1 << 62
    )
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "lacks capabilities that the program has in its bounding set (numbers 62" in said.stderr


ALONE = 6_000_000 + os.getpid()
"""A user of whom there are no other processes."""
FEW = 1 << 0 | 1 << 7  # CAP_CHOWN, CAP_SETUID


def start_with(bounding: int | None, life: Life, source: str) -> None:
    """Start a program with a bounding set, which it has from the thread that starts it."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        if bounding is not None:
            thread.submit(privileges.limit_bounding_set, bounding).result()
        thread.submit(life.start, source).result()


def saved_with_few(lives: Callable[[int], Life]) -> Life:
    """A user's program with a smaller bounding set that was saved, and has ended."""
    life = lives(USER)
    start_with(FEW, life, COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    return life


@pytest.mark.parametrize("bounding", [None, FEW, 0], ids=["this machine's", "few", "none"])
def test_the_bounding_set_is_given_back_without_a_capability_for_that(
    lives: Callable[[int], Life], bounding: int | None
) -> None:
    """CRIU drops what is missing, if it is told, and needs CAP_SETPCAP then."""
    life = lives(ALONE)
    start_with(bounding, life, WITH_THREAD)
    life.counts_on()
    before = procfs.credentials(life.pid)
    assert bounding is None or before.bounding == bounding
    life.dump()
    life.kill()
    life.admit()
    seen: list[int] = []

    def look() -> bool:
        for pid in procfs.pids():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                each = procfs.credentials(pid)
                if ALONE in each.uids:
                    seen.append(each.permitted | each.effective | each.inheritable | each.ambient)
        return True

    made = criu_restore.restore_tree(
        life.criu, life.saved_tree, TreeRestoreOptions(deadline=120), complete=look
    )
    life.restored.append(made)
    life.counts_on()
    assert 1 << Capability.CHECKPOINT_RESTORE in seen
    # After CRIU's last step they have none.
    assert {0, 1 << Capability.CHECKPOINT_RESTORE} >= {*seen}
    for thread in procfs.threads(life.pid):
        assert procfs.credentials(thread) == before
    assert {path.name for path in life.private.iterdir()} == {"images"}
    life.saved_tree.check_bytes()


def test_without_links_a_smaller_bounding_set_cannot_be_given_back(
    lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    life = saved_with_few(lives)

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", failing)
        with pytest.raises(Internal, match="links to CRIU's files cannot be made in"):
            life.restore()
    assert {path.name for path in life.private.iterdir()} == {"images"}


def test_a_bounding_set_that_is_not_the_image_s_never_runs(
    lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever CRIU's process was given."""
    life = saved_with_few(lives)
    before = life.values()
    with monkeypatch.context() as patched:
        patched.setattr(Rights, "bounding", FEW | 1 << Capability.SYS_PTRACE)
        with pytest.raises(NotAuthorized, match="has other bounding than it had"):
            life.restore()
    wait_for(lambda: procfs.stat(life.pid) is None)
    assert life.values() == before


FILTERED = """
import ctypes, struct
allow = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # return allow
program = struct.pack("HxxxxxxP", 1, ctypes.addressof(allow))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, filter
"""


def test_a_filtered_program_is_for_administrators(lives: Callable[[int], Life]) -> None:
    """It takes root to suspend its filters, and they come back."""
    life = lives(USER)
    life.start(FILTERED + COUNTER)
    life.counts_on()
    before = procfs.credentials(life.pid)
    assert (before.seccomp_mode, before.no_new_privileges) == (2, 1)
    assert "is under seccomp filters" in tree.scan(life.pid).privileged
    if not procfs.status(os.getpid()).capabilities >> CAP_SYS_RESOURCE & 1:
        with pytest.raises(Internal, match="root needs CAP_SYS_RESOURCE"):
            life.dump()
        life.counts_on()
        return
    life.dump()
    life.counts_on()
    life.kill()
    life.restore()
    life.counts_on()
    assert procfs.credentials(life.pid) == before


def test_what_phosd_lacks_itself_is_named() -> None:
    own = procfs.credentials(os.getpid()).bounding
    Rights({7: dataclasses.replace(PLAIN, bounding=own)}).require_attainable()
    with pytest.raises(Unsupported, match=r"numbers 62 of linux/capability\.h"):
        Rights({7: dataclasses.replace(PLAIN, bounding=own | 1 << 62)}).require_attainable()
