"""The library that holds SIGTERM in the processes of a program that knows nothing of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from phosd.cli.run_command.termination import TermHolder, deliver, deliver_if_held
from phosd.engine.program.tree import scan
from phosd.engine.system import procfs
from phosd.engine.system.native import term_library
from phosd.errors import NoSuchProcess
from tests.support.harness import PATIENCE, children, wait_until

READY = """
import os, signal, subprocess, sys, time
def say(*what):
    os.write(1, (" ".join(map(str, what)) + "\\n").encode())  # print() is not for signal handlers
"""
ON_TERM = "signal.signal(signal.SIGTERM, lambda *_: say('term'))\n"
WAIT = "say('ready')\nwhile True: time.sleep(0.01)\n"
QUIET_SECONDS = 0.3


@contextmanager
def program(
    holder: TermHolder | Path, *words: str, source: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Run a program under the library; it says that it is ready."""
    folder = holder if isinstance(holder, Path) else Path(holder.environment["PHOS_TERM_DIR"])
    environment = os.environ | {"LD_PRELOAD": str(term_library()), "PHOS_TERM_DIR": str(folder)}
    environment.pop(TermHolder.ROOT, None)
    process = subprocess.Popen(
        words or (sys.executable, "-c", READY + source),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        assert heard(process) == "ready"
        yield process
    finally:
        with suppress(NoSuchProcess):
            for each in scan(process.pid).living:
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(each.pid, signal.SIGKILL)
        process.wait(PATIENCE)
        assert process.stdout is not None
        process.stdout.close()


def heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def kill_from_outside(pid: int) -> None:
    """As systemd does: by a process that is not below the program."""
    os.kill(pid, signal.SIGTERM)


def held_by(holder: TermHolder, *pids: int) -> None:
    """Wait until exactly these have told that they hold a signal."""
    told: list[int] = []

    def all_told() -> bool:
        told.extend(holder.newly_held(os.getpid()))
        return len(told) >= len(pids)

    wait_until(all_told, "the processes to tell")
    assert sorted(told) == sorted(pids)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[TermHolder]:
    with TermHolder(tmp_path) as holding:
        yield holding


def test_it_is_held_and_comes_when_it_is_let_through(holder: TermHolder) -> None:
    with program(holder, source=WAIT) as process:
        for _ in range(2):
            kill_from_outside(process.pid)
            held_by(holder, process.pid)
        assert process.poll() is None
        deliver(process.pid)
        assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_handler_runs_when_it_is_let_through(holder: TermHolder) -> None:
    with program(holder, source=ON_TERM + WAIT) as process:
        kill_from_outside(process.pid)
        held_by(holder, process.pid)
        deliver_if_held(process.pid)
        assert heard(process) == "term"
        deliver_if_held(process.pid)  # it holds none any more
        time.sleep(QUIET_SECONDS)
        deliver(process.pid)
        assert heard(process) == "term"
        assert process.poll() is None


def test_without_a_relay_nothing_is_held(tmp_path: Path) -> None:
    with program(tmp_path, source=ON_TERM + WAIT) as process:
        kill_from_outside(process.pid)
        assert heard(process) == "term"


def test_a_relay_that_is_gone_holds_nothing_any_more(tmp_path: Path) -> None:
    with TermHolder(tmp_path) as holder:
        running = program(holder, source=WAIT)
        process = running.__enter__()
    kill_from_outside(process.pid)
    assert process.wait(PATIENCE) == -signal.SIGTERM
    running.__exit__(None, None, None)


def test_two_relays_do_not_hold_for_one_program(holder: TermHolder, tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), TermHolder(tmp_path):
        pass


def test_what_the_program_sends_itself_comes_at_once(holder: TermHolder) -> None:
    source = f"""
{ON_TERM}
os.kill(os.getpid(), signal.SIGTERM)
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
'''], start_new_session=True)
signal.sigtimedwait([signal.SIGCHLD], 0.5)
child.terminate()
say("child", child.wait())
""" + WAIT.replace("ready", "done")
    with program(holder, source="say('ready')\n" + source) as process:
        assert [heard(process) for _ in range(4)] == ["term", "term", "child -15", "done"]
        assert holder.newly_held(os.getpid()) == []


def test_processes_below_hold_it_too(holder: TermHolder) -> None:
    """Also those that are no Python: here sleep(1), and a shell with a trap."""
    shell = "trap 'echo trap' TERM; echo up; while :; do sleep 0.01; done"
    source = f"""
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sh", "-c", {shell!r}])
if os.fork() == 0:
    time.sleep(1000)
time.sleep(0.2)
while True: time.sleep(1000)
"""
    with program(holder, source="say('ready')\n" + source) as process:
        assert heard(process) == "up"
        wait_until(lambda: len(own_children(process.pid)) == 3, "its children")
        below = own_children(process.pid)
        time.sleep(QUIET_SECONDS)  # until they execute what they are to be
        for pid in below:
            kill_from_outside(pid)
        held_by(holder, *below)
        time.sleep(QUIET_SECONDS)
        assert own_children(process.pid) == below
        for pid in below:
            deliver_if_held(pid)
        assert heard(process) == "trap"
        wait_until(lambda: len(own_children(process.pid)) == 1, "two of them to end")
        assert process.poll() is None


def own_children(pid: int) -> list[int]:
    """Return the living children of a process, without theirs."""
    found = ((child, procfs.stat(child)) for child in children(pid))
    return sorted(child for child, at in found if at and at.parent == pid and not at.dead)


def test_who_ignores_it_holds_nothing(holder: TermHolder) -> None:
    source = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    with program(holder, source=source) as process:
        kill_from_outside(process.pid)
        time.sleep(QUIET_SECONDS)
        assert process.poll() is None and holder.newly_held(os.getpid()) == []


def test_another_thread_may_take_it(holder: TermHolder) -> None:
    source = """
import threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
def wait():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    while True: time.sleep(0.01)
threading.Thread(target=wait, daemon=True).start()
"""
    with program(holder, source=source + WAIT) as process:
        kill_from_outside(process.pid)
        held_by(holder, process.pid)
        deliver(process.pid)
        assert process.wait(PATIENCE) == -signal.SIGTERM


ACTIONS = r"""
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static volatile sig_atomic_t plain, told;
static int sender;
static void on_plain(int number) { plain = number; }
static void on_told(int number, siginfo_t *info, void *context) {
    (void)context;
    sigset_t now;
    sigprocmask(SIG_BLOCK, 0, &now);
    told = number + 100 * sigismember(&now, SIGUSR1);
    sender = info->si_pid;
}
#define EXPECT(what) do { if (!(what)) { printf("wrong: %s\n", #what); return 1; } } while (0)
int main(void) {
    struct sigaction wanted, before;
    EXPECT(signal(SIGTERM, on_plain) == SIG_DFL);
    raise(SIGTERM);
    EXPECT(plain == SIGTERM);
    memset(&wanted, 0, sizeof wanted);
    wanted.sa_sigaction = on_told;
    wanted.sa_flags = SA_SIGINFO | SA_RESETHAND;
    sigaddset(&wanted.sa_mask, SIGUSR1);
    EXPECT(sigaction(SIGTERM, &wanted, &before) == 0);
    EXPECT(before.sa_handler == on_plain && before.sa_flags == SA_RESTART);
    kill(getpid(), SIGTERM);
    EXPECT(told == SIGTERM + 100 && sender == getpid());
    EXPECT(sigaction(SIGTERM, 0, &before) == 0 && before.sa_handler == SIG_DFL);
    EXPECT(sysv_signal(SIGTERM, on_plain) == SIG_DFL);
    raise(SIGTERM);
    EXPECT(sigaction(SIGTERM, 0, &before) == 0 && before.sa_handler == SIG_DFL);
    EXPECT(signal(SIGTERM, SIG_IGN) == SIG_DFL);
    raise(SIGTERM);
    EXPECT(signal(SIGTERM, SIG_DFL) == SIG_IGN);
    EXPECT(signal(SIGUSR1, on_plain) == SIG_DFL);
    raise(SIGUSR1);
    EXPECT(plain == SIGUSR1 && signal(SIGUSR1, SIG_DFL) == on_plain);
    EXPECT(signal(-1, on_plain) == SIG_ERR);
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
"""


def test_the_program_sees_its_own_actions(holder: TermHolder, tmp_path: Path) -> None:
    (tmp_path / "actions.c").write_text("#define _GNU_SOURCE\n" + ACTIONS)
    built = tmp_path / "actions"
    subprocess.run(["cc", "-w", "-o", built, tmp_path / "actions.c"], check=True)
    with program(holder, str(built)) as process:
        kill_from_outside(process.pid)
        held_by(holder, process.pid)
        deliver(process.pid)
        assert process.wait(PATIENCE) == -signal.SIGTERM
