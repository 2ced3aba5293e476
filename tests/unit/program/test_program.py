"""A program's side of its checkpoints, beside a hook that the tests play."""

import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phosd import program
from phosd.engine.image.name import may_be_given
from phosd.engine.program.declared import declared_patterns

NOTHING, SAVED, RESTORED, STOPPED, WAITING, FAILED = 0, 1, 2, 3, 4, -1


@dataclass
class Hook:
    """What the hook exports. Waits have the outcomes of ``outcomes``, and then nothing."""

    outcomes: list[int] = field(default_factory=list)
    wants: int = 1
    declared: int | None = None
    refusals: list[bytes] = field(default_factory=list)
    kinds: list[tuple[int, int]] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    why: bytes = b"Busy: not now"
    waits: Callable[[], None] = lambda: None

    def wanted(self) -> int:
        return self.wants

    def declare(self, has: int) -> None:
        self.declared = has

    def refuse(self, text: bytes) -> None:
        self.refusals.append(text)

    def begin(self, kind: int, then: int) -> int:
        self.kinds.append((kind, then))
        return len(self.kinds)

    def begin_named(self, kind: int, then: int, name: bytes) -> int:
        self.names.append(name)
        return self.begin(kind, then)

    def wait(self, ticket: int, milliseconds: int, why: Any, size: int) -> int:
        assert milliseconds == 1000 and size == 256
        self.waits()
        outcome = self.outcomes.pop(0) if self.outcomes else NOTHING
        if outcome == FAILED:
            why.value = self.why
        return outcome

    def leave(self, ticket: int) -> None:
        self.left.append(ticket)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    played = Hook()
    monkeypatch.setattr(program, "_hook", lambda: played)
    return played


@pytest.fixture(autouse=True)
def no_callables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_before", "_after", "_restored"):
        monkeypatch.setattr(program, name, [])


@pytest.fixture
def calls(hook: Hook) -> list[str]:
    made: list[str] = []
    program.before_checkpoint(lambda: made.append("first before"))
    program.before_checkpoint(lambda: made.append("second before"))
    program.after_checkpoint(lambda: made.append("first after"))
    program.after_checkpoint(lambda: made.append("second after"))
    program.after_restore(lambda: made.append("restored"))
    return made


def test_without_the_hook_nothing_happens() -> None:
    made: list[str] = []
    program.before_checkpoint(lambda: made.append("before"))
    assert program.checkpoint() is None and program.safe_point() is None
    program.end_safe_points()
    assert made == []


def test_the_file_alone_does(tmp_path: Path) -> None:
    shutil.copy(program.__file__, tmp_path / "saving.py")
    text = "import sys; sys.path.insert(0, sys.argv[1]); import saving\n"
    text += "assert saving.checkpoint() is None and saving.safe_point() is None\n"
    text += "assert not [name for name in sys.modules if name.startswith(('phosd', 'cuda'))]\n"
    subprocess.run([sys.executable, "-I", "-S", "-c", text, str(tmp_path)], check=True)


def test_callables_run_around_a_checkpoint(hook: Hook, calls: list[str]) -> None:
    assert hook.declared == 1
    hook.outcomes = [WAITING, WAITING, SAVED]
    assert program.checkpoint(then="hold") == "saved"
    assert calls == ["second before", "first before", "first after", "second after"]
    assert hook.kinds == [(1, 2)] and hook.left == [1]


def test_an_image_has_the_name_that_is_asked_for(hook: Hook) -> None:
    hook.outcomes = [SAVED]
    assert program.checkpoint(name="best") == "saved"
    assert hook.names == [b"best"]
    assert program.checkpoint() is None
    assert len(hook.names) == 1


@pytest.mark.parametrize(
    "name",
    ["latest", "7", "no\0end", "a b", "x" * 64, "latest\n", "fin\n", "é", "latest.1", "a-b_c"],
)
def test_nothing_runs_for_a_name_that_no_image_can_have(
    hook: Hook, calls: list[str], name: str
) -> None:
    if may_be_given(name):
        assert program.checkpoint(name=name) is None
        return
    with pytest.raises(program.CheckpointFailed, match="cannot be an image's name") as raised:
        program.checkpoint(name=name)
    assert raised.value.name == "InvalidOption"
    assert calls == []


def test_what_can_be_no_argument_is_refused_when_it_is_given() -> None:
    """Not when the program is saved, or by an error of Python's own."""
    calls: list[tuple[Any, object, str]] = [
        (program.before_checkpoint, None, "None cannot be called; give a function, without ()"),
        (program.after_checkpoint, 5, "5 cannot be called"),
        (program.after_restore, "reconnect", "'reconnect' cannot be called"),
        (program.keep_files, 5, "5 is no path; give names"),
        (program.keep_files, "", "'' is no path"),
        (
            program.keep_files,
            "x" * 5000,
            r"a path of 5\d\d\d bytes can be no file; a path has 4095",
        ),
        (program.keep_files, "a\0b", "can be no file"),
    ]
    for call, argument, said in calls:
        with pytest.raises(program.CheckpointFailed, match=f"^InvalidOption: .*{said}") as raised:
            call(argument)
        assert raised.value.name == "InvalidOption"
    unnamed: Any = 5
    with pytest.raises(program.CheckpointFailed, match="5 cannot be an image's name"):
        program.checkpoint(name=unnamed)
    with pytest.raises(program.CheckpointFailed, match="takes numbers; write for example"):
        program.every(minutes="ten")  # type: ignore[arg-type]


def test_a_hook_without_names_is_told_apart(hook: Hook, calls: list[str]) -> None:
    hook.begin_named = None  # type: ignore[assignment,method-assign]
    hook.outcomes = [SAVED]
    with pytest.raises(program.CheckpointFailed, match="start it anew, or give no name") as raised:
        program.checkpoint(name="best")
    assert raised.value.name == "Unsupported"
    assert calls[-1] == "second after"
    assert program.checkpoint() == "saved"


def test_those_of_a_restore_run_in_the_restored_program(hook: Hook, calls: list[str]) -> None:
    hook.outcomes = [RESTORED, RESTORED, STOPPED]
    assert program.checkpoint() == "restored"
    assert program.safe_point() == "restored"
    assert program.safe_point() == "stopped"
    assert calls[2:5] == ["restored", "second before", "first before"]
    assert calls[-2:] == ["first after", "second after"]


def test_a_safe_point_that_nobody_waits_for_is_passed(hook: Hook, calls: list[str]) -> None:
    hook.wants = 0
    assert program.safe_point() is None
    assert calls == [] and hook.kinds == []
    program.end_safe_points()
    assert hook.declared == 0


def test_a_function_is_saved_after_when_it_is_time(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    @program.every(minutes=10)
    def train(batch: int, *, double: bool = False) -> int:
        """Train on a batch."""
        assert len(hook.kinds) == before, "it comes before"
        return batch * (1 + double)

    assert (train.__name__, train.__doc__) == ("train", "Train on a batch.")
    for passed, outcome, kind in (
        (1, STOPPED, 0),
        (598, NOTHING, 0),
        (1, SAVED, 1),  # ten minutes are over
        (599, RESTORED, 0),  # of an image that others asked for: the time begins anew
        (599, NOTHING, 0),
        (1, RESTORED, 1),
        (-5000, SAVED, 1),  # on a machine that has begun later
        (599, NOTHING, 0),
    ):
        now += passed
        before = len(hook.kinds)
        hook.outcomes = [outcome]
        assert train(4, double=True) == 8
        assert hook.kinds[before:] == [(kind, 0)], passed
    with pytest.raises(ValueError, match=r"every\(minutes=10\)"):
        program.every()


def test_a_checkpoint_in_time_that_fails_is_a_warning(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lenient, strict = (
        program.every(hours=1, strict=each)(lambda: "done") for each in (False, True)
    )
    now = 3600.0
    hook.outcomes = [FAILED, NOTHING, FAILED]
    with pytest.warns(RuntimeWarning, match="not saved: Busy: not now"):
        assert lenient() == "done"
    assert lenient() == "done", "and not at once again"
    assert [kind for kind, _ in hook.kinds] == [1, 0]
    with pytest.raises(program.CheckpointFailed):
        strict()


def test_a_checkpoint_that_fails_is_told_by_name(hook: Hook, calls: list[str]) -> None:
    hook.outcomes = [FAILED]
    with pytest.raises(program.CheckpointFailed, match="Busy: not now") as raised:
        program.checkpoint()
    assert raised.value.name == "Busy"
    assert calls[-1] == "second after" and hook.left == [1]


def test_a_wrong_option_is_refused_before_anything_is_called(hook: Hook, calls: list[str]) -> None:
    with pytest.raises(ValueError, match="then='stop' is not possible; give one of run, end, hold"):
        program.checkpoint(then="stop")  # type: ignore[arg-type]
    assert calls == []


def test_who_asks_gets_what_a_callable_raises(hook: Hook, calls: list[str]) -> None:
    def broken() -> None:
        raise OSError("no room")

    program.before_checkpoint(broken)
    with pytest.raises(OSError, match="no room"):
        program.checkpoint()
    assert hook.kinds == [] and hook.refusals == []
    assert calls == ["first after", "second after"]


def test_at_a_safe_point_it_is_a_failure_of_who_asked(hook: Hook, calls: list[str]) -> None:
    def broken() -> None:
        raise OSError("no room")

    program.before_checkpoint(broken)
    with pytest.warns(RuntimeWarning, match="not saved: .*broken raised OSError"):
        assert program.safe_point() is None
    assert hook.kinds == [] and b"broken raised OSError('no room')" in hook.refusals[0]
    assert calls == ["first after", "second after"]


def test_an_interrupt_is_the_programs_own(hook: Hook) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    program.before_checkpoint(interrupt)
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        warnings.simplefilter("error")
        program.safe_point()
    assert len(hook.refusals) == 1
    assert program._state.call is None


def test_an_interrupted_wait_is_left(hook: Hook, calls: list[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    hook.waits = interrupt
    with pytest.raises(KeyboardInterrupt):
        program.checkpoint()
    assert hook.left == [1] and calls[-1] == "second after"
    hook.waits = lambda: None
    hook.outcomes = [SAVED]
    assert program.checkpoint() == "saved"


def test_all_run_afterwards_and_the_first_to_raise_is_told(hook: Hook) -> None:
    made = []

    def broken() -> None:
        raise OSError("no way back")

    program.after_checkpoint(broken)
    program.after_checkpoint(lambda: made.append("after"))
    hook.outcomes = [SAVED]
    with pytest.raises(OSError, match="no way back"):
        program.checkpoint()
    assert made == ["after"]


def test_threads_join_the_one_whose_callables_run(hook: Hook) -> None:
    made: list[int] = []
    waiting = threading.Semaphore(0)
    go_on = threading.Event()

    def wait() -> None:
        waiting.release()
        assert go_on.wait(60)

    program.before_checkpoint(lambda: made.append(threading.get_ident()))
    hook.waits = wait
    hook.outcomes = [SAVED] * 3
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(program.checkpoint())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert waiting.acquire(timeout=60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == ["saved"] * 3 and len(made) == 1
    assert sorted(kind for kind, _ in hook.kinds) == [1, 2, 2]


def test_who_comes_too_late_to_join_asks_anew(hook: Hook) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        assert go_on.wait(60)

    begin = hook.begin
    hook.begin = lambda kind, then: 0 if kind == 2 else begin(kind, then)  # type: ignore[method-assign]
    hook.waits = wait
    hook.outcomes = [SAVED, SAVED]
    found: list[object] = []
    first, second = (
        threading.Thread(target=lambda: found.append(program.checkpoint())) for _ in range(2)
    )
    first.start()
    assert waiting.wait(60)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert found == ["saved", "saved"] and [kind for kind, _ in hook.kinds] == [1, 1]


def test_a_child_that_is_forked_meanwhile_is_free(hook: Hook) -> None:
    held = program._state.lock
    with held:
        child = os.fork()
        if child == 0:
            os._exit(0 if program.checkpoint() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_files_that_are_said_to_be_kept(tmp_path: Path) -> None:
    """In a process of its own: it is said for good. A child of it says something, too."""
    script = """if True:
        import os, sys
        from phosd import program
        from phosd.engine.program.declared import declared_patterns
        assert declared_patterns([os.getpid()], 0) == ()
        program.keep_files("runs", "/data/*.csv")
        child = os.fork()
        if not child:
            program.keep_files("/other")
            os._exit(0)
        os.waitpid(child, 0)
        print(declared_patterns([os.getpid()], 0, [(None, "/all"), (7, "/none")]))
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(program.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(("/all", f"{tmp_path}/runs", "/data/*.csv", "/other"))


def test_files_that_a_c_program_says_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "kept.c"
    source.write_text(
        """
        #include "phos.h"
        int main(void) {
            if (phos_keep_files("/data") || phos_keep_files("/more")) return 1;
            puts("said");
            fflush(stdout);
            getchar();
            return 0;
        }
        """
    )
    include = Path(program.__file__).parent / "include"
    words = ["-Wall", "-Wextra", "-Werror", f"-I{include}", str(source), "-o", "kept", "-ldl"]
    subprocess.run(["cc", *words], cwd=tmp_path, check=True)
    with subprocess.Popen([tmp_path / "kept"], stdin=-1, stdout=-1, text=True) as running:
        assert running.stdin is not None and running.stdout is not None
        assert running.stdout.readline() == "said\n"
        assert sorted(declared_patterns([running.pid], 0)) == ["/data", "/more"]
        running.stdin.close()
    assert running.returncode == 0
