"""Checkpoint a program from inside: when it is saved, and what it does before and after.

    from phosd import program

    program.before_checkpoint(log.flush)
    program.after_restore(reconnect)
    for step in range(steps):
        train(step)
        program.safe_point()            # checkpoints that others ask for happen here
        if step % 1000 == 999:
            program.checkpoint()        # "saved", and "restored" in the restored program

Nothing happens, and every call returns None, where the program does not run under `phos run`, where
phosd does not run, and before the first CUDA call of the process. This file needs the standard
library alone, and may be copied into a program. docs/operate/programs.md explains it; `phos.h` is
the same for C.
"""

import ctypes
import fcntl
import functools
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal, ParamSpec, TypeVar

__all__ = [
    "CheckpointFailed",
    "after_checkpoint",
    "after_restore",
    "before_checkpoint",
    "checkpoint",
    "end_safe_points",
    "every",
    "keep_files",
    "safe_point",
]

Then = Literal["run", "end", "hold"]
Checkpointed = Literal["saved", "restored"]
Passed = Literal["stopped", "restored"]
Callback = Callable[[], object]
_P = ParamSpec("_P")
_R = TypeVar("_R")

# As in phos.h.
_THENS = ("run", "end", "hold")
_AT_SAFE_POINT, _ASKS, _JOINS = 0, 1, 2
_FAILED, _NOTHING, _SAVED, _RESTORED, _STOPPED, _WAITING = -1, 0, 1, 2, 3, 4
_SLICE = 1000
"""Milliseconds after which a wait comes back to Python, which runs signal handlers only there."""

_NAME = re.compile(r"(?!latest$)[A-Za-z][A-Za-z0-9._-]{0,62}")
"""What an image may be called, as in phosd/engine/image/name.py."""
_MOST_PATH = 4095
"""Bytes of the longest path that Linux takes."""
_KEPT = "phos-keep-files"
"""Name of the file in memory in which phosd looks for what was said: each name, and a zero byte."""

_before: list[Callback] = []
_after: list[Callback] = []
_restored: list[Callback] = []


class CheckpointFailed(Exception):
    """There is no image, and the program goes on; or an argument is wrong (``InvalidOption``).
    ``name`` is the error's name, as on D-Bus.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.name = text.partition(":")[0]


def checkpoint(*, then: Then = "run", name: str = "") -> Checkpointed | None:
    """Save this process and its children, and wait until the image is complete.

    Returns ``"saved"``; in the restored program ``"restored"``; None if nothing happened, because
    phosd is not there. ``then``: the program is to go on (``run``), to end (``end``), or to stand
    still until ``phos continue`` (``hold``), once the image is complete. ``name`` is what the image
    is called, instead of what `phos run --name` says. Threads that ask for the same at the same
    time share an image. Raises :class:`CheckpointFailed`, and what a callable raises.
    """
    if then not in _THENS:
        raise ValueError(f"then={then!r} is not possible; give one of {', '.join(_THENS)}")
    # Before the callables run for nothing.
    if name and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise CheckpointFailed(
            f"InvalidOption: {name!r} cannot be an image's name; a name is a letter, then letters, "
            "digits and '.', '_' or '-', at most 63 in all, and not latest"
        )
    outcome = _take_part(_ASKS, then, name)
    return "saved" if outcome == _SAVED else "restored" if outcome == _RESTORED else None


def safe_point() -> Passed | None:
    """Be saved, moved or suspended here, if somebody waits for that.

    The first call says that the program has safe points: from then on whoever stops the program
    waits for the next one, or for :func:`checkpoint`. Returns ``"stopped"`` if it was stopped here,
    in the restored program ``"restored"``, otherwise None; that costs about a microsecond.

    A callable of :func:`before_checkpoint` that raises is a failure of what was asked for from
    outside. The program goes on with a warning.
    """
    hook = _hook()
    if hook is None or not hook.wanted():
        return None
    outcome = _take_part(_AT_SAFE_POINT, "run", "")
    return "stopped" if outcome == _STOPPED else "restored" if outcome == _RESTORED else None


def every(
    *, hours: float = 0, minutes: float = 0, seconds: float = 0, strict: bool = False
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Save the program after a call of the decorated function, when so much time has passed.

        @program.every(minutes=10)
        def train(batch): ...

    After its other calls the program is at a safe point. A checkpoint that fails is a warning, and
    if ``strict`` an error; the next one is made when as much time has passed again.
    """
    try:
        period = 3600 * float(hours) + 60 * float(minutes) + float(seconds)
    except (TypeError, ValueError):
        raise _invalid("every() takes numbers", "write for example every(minutes=10)") from None
    if not period > 0:
        raise ValueError("every() is given no time; write for example every(minutes=10)")

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        last = time.monotonic()

        @functools.wraps(function)
        def call(*args: _P.args, **named: _P.kwargs) -> _R:
            nonlocal last
            result = function(*args, **named)
            # Where an image is restored, the clock may be behind that of before.
            if not 0 <= time.monotonic() - last < period:
                _save_or_warn(strict)
                last = time.monotonic()
            elif safe_point() == "restored":
                last = time.monotonic()
            return result

        return call

    return decorate


def _save_or_warn(strict: bool) -> None:
    try:
        checkpoint()
    except CheckpointFailed as error:
        if strict:
            raise
        warnings.warn(f"not saved: {error}", RuntimeWarning, stacklevel=3)


def before_checkpoint(call: Callback) -> Callback:
    """Call ``call`` before the program is saved, moved or suspended.

    It runs in the thread that calls :func:`safe_point` or :func:`checkpoint`, as all callables do.
    Those that were registered last run first. From now on the program has safe points.
    """
    return _register(_before, call)


def after_checkpoint(call: Callback) -> Callback:
    """Call ``call`` in the program that goes on afterwards, whether it was saved or not, in
    the order of registration.
    """
    return _register(_after, call)


def after_restore(call: Callback) -> Callback:
    """Call ``call`` in the restored program, in the order of registration."""
    return _register(_restored, call)


def keep_files(*paths: str | os.PathLike[str]) -> None:
    """Say that these files and folders belong to the program, whether it has them open or not:
    images have their bytes, and a restore brings those back, as with `phos run --keep-files`, whose
    patterns are possible, too. It is said for good, also in the restored program.

    No hook is needed, and no CUDA call before. Raises :class:`CheckpointFailed` for what is no
    path.
    """
    os.write(_kept_file(), b"".join(_kept(path) + b"\0" for path in paths))


def _kept(path: str | os.PathLike[str]) -> bytes:
    """Return a path from the root on. Raises :class:`CheckpointFailed` for what can be none."""
    if not path:  # it would be the folder that the program is in
        raise _invalid("'' is no path", "give names of files and folders")
    try:
        found = os.fsencode(os.path.abspath(path))  # noqa: PTH100, links are not followed
    except (TypeError, ValueError):
        raise _invalid(f"{path!r} is no path", "give names of files and folders, as text") from None
    if b"\0" in found or len(found) > _MOST_PATH:
        what = f"a path of {len(found)} bytes" if len(found) > _MOST_PATH else f"{path!r}"
        raise _invalid(
            f"{what} can be no file",
            f"a path has {_MOST_PATH} bytes at most, and no zero byte; name a folder above it",
        )
    return found


@functools.cache
def _kept_file() -> int:
    """Return the file, in memory, which phosd finds among the program's open files."""
    descriptor = os.memfd_create(_KEPT, os.MFD_CLOEXEC)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # a forked child may have something to say
    return descriptor


def end_safe_points() -> None:
    """Say that no safe point comes any more, as after a training loop: nobody waits for one."""
    hook = _hook()
    if hook is not None:
        hook.declare(0)


def _invalid(what: str, hint: str) -> CheckpointFailed:
    """Return the error for an argument that nothing can be done with."""
    return CheckpointFailed(f"InvalidOption: {what}; {hint}")


def _register(calls: list[Callback], call: Callback) -> Callback:
    if not callable(call):  # or no checkpoint would succeed
        raise _invalid(f"{call!r} cannot be called", "give a function, without () behind its name")
    calls.append(call)
    hook = _hook()
    if hook is not None:
        hook.declare(1)
    return call


class _Hook:
    """The functions of the hook, which is in the program from its start or never."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, result: type | None, *takes: type) -> Callable[..., int]:
            found = getattr(library, f"phos_program_{name}")
            found.restype, found.argtypes = result, takes
            return found  # type: ignore[no-any-return]

        self.wanted = function("wanted", ctypes.c_int)
        self.declare = function("declare", None, ctypes.c_int)
        self.refuse = function("refuse", None, ctypes.c_char_p)
        self.begin = function("begin", ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        # A program runs on with the hook that it was started with, which may be an older one.
        self.begin_named = (
            function("begin_named", ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
            if hasattr(library, "phos_program_begin_named")
            else None
        )
        self.leave = function("leave", None, ctypes.c_uint64)
        self.wait = function(
            *("wait", ctypes.c_int, ctypes.c_uint64),
            *(ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
        )


@functools.cache
def _hook() -> _Hook | None:
    try:
        return _Hook(ctypes.CDLL(None))
    except AttributeError:
        return None


class _Call:
    """A call that is under way. Only its thread runs callables; others join it in the hook."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.begun = threading.Event()
        self.over = threading.Event()


class _State:
    """The call that is under way. A forked child gets a new one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.call: _Call | None = None


_state = _State()


def _forget() -> None:
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_forget)


def _take_part(kind: int, then: str, name: str) -> int:
    """Wait in the hook, alone or with the threads that wait already; return the outcome."""
    hook = _hook()
    if hook is None:
        return _NOTHING
    while True:
        with _state.lock:
            call = _state.call
            if call is None:
                mine = _state.call = _Call()
                break
        if call.thread == threading.get_ident():
            if kind == _AT_SAFE_POINT:
                return _NOTHING
            raise RuntimeError("a callable cannot ask for the checkpoint that it is called for")
        call.begun.wait()
        outcome = _wait(hook, _JOINS if kind == _ASKS else kind, then, name)
        call.over.wait()  # its callables have run
        if kind == _AT_SAFE_POINT or outcome != _NOTHING:
            return outcome
    try:
        return _lead(hook, mine, kind, then, name)
    finally:
        with _state.lock:
            _state.call = None
        mine.begun.set()
        mine.over.set()


def _lead(hook: _Hook, call: _Call, kind: int, then: str, name: str) -> int:
    """Run the callables around the wait."""
    outcome = _NOTHING
    with ExitStack() as afterwards:

        def after() -> None:
            with ExitStack() as each:
                for done in reversed(_restored if outcome == _RESTORED else _after):
                    each.callback(done)

        afterwards.callback(after)
        try:
            for prepare in reversed(_before):
                prepare()
        except BaseException as error:
            if kind != _AT_SAFE_POINT:
                raise
            text = f"{getattr(prepare, '__qualname__', prepare)} raised {error!r}"
            hook.refuse(text.encode(errors="replace"))
            if not isinstance(error, Exception):
                raise
            warnings.warn(f"not saved: {text}", RuntimeWarning, stacklevel=5)
            return _NOTHING
        outcome = _wait(hook, kind, then, name, call.begun.set)
    return outcome


def _begin(hook: _Hook, kind: int, then: int, name: str) -> int:
    if not name:
        return hook.begin(kind, then)
    if hook.begin_named is None:
        raise CheckpointFailed(
            "Unsupported: this program was started by a phosd without names of images; start it "
            "anew, or give no name"
        )
    return hook.begin_named(kind, then, name.encode())


def _wait(hook: _Hook, kind: int, then: str, name: str, begun: Callback = lambda: None) -> int:
    """Wait in the hook. Raises :class:`CheckpointFailed`."""
    ticket = _begin(hook, kind, _THENS.index(then), name)
    try:
        begun()
        if not ticket:
            return _NOTHING
        why = ctypes.create_string_buffer(256)
        outcome = _WAITING
        while outcome == _WAITING:
            outcome = hook.wait(ticket, _SLICE, why, len(why))
    finally:
        hook.leave(ticket)
    if outcome == _FAILED:
        raise CheckpointFailed(why.value.decode(errors="replace"))
    return outcome
