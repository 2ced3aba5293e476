"""The client's own parts: its exports, its options, its errors, its twins."""

import asyncio
import inspect
import subprocess
import sys
import threading
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

import phosd.client
from phosd.bus import CallError, NoBusError
from phosd.client import options
from phosd.client.async_client import AsyncClient
from phosd.client.errors import Exit, in_words, typed
from phosd.client.job_handle import AsyncJobHandle
from phosd.client.loop import Loop
from phosd.client.sync_client import Client
from phosd.client.sync_job import JobHandle
from phosd.errors import Internal, NoBus, NoDaemon, NotAuthorized, OtherError, Unsupported
from phosd.service.history.queries import EventOptions, HistoryOptions
from phosd.service.jobs.options import (
    CheckpointRequest,
    JobOptions,
    MigrateRequest,
    RestoreRequest,
    ResumeRequest,
    SuspendRequest,
)
from tests.support.harness import wait_until


def test_who_has_lost_the_bus_is_told_to_connect_again() -> None:
    lost = CallError("org.freedesktop.DBus.Error.Disconnected", "GetJob has no answer")
    error = typed(lost, "system")
    assert isinstance(error, NoBus) and "connect again" in error.hint


def test_what_is_exported_is_there() -> None:
    for name in phosd.client.__all__:
        assert getattr(getattr(phosd.client, name), "__name__", "Record") == name
    with pytest.raises(AttributeError, match=r"'phosd\.client' has no attribute 'Cleint'"):
        _ = phosd.client.Cleint  # type: ignore[attr-defined]


def test_an_export_imports_what_it_needs_and_no_more() -> None:
    code = "import sys, phosd.client; print('asyncio' in sys.modules, end=' ');"
    code += "phosd.client.Event; print('phosd.client.sync_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
    assert done.stdout.split()[1] == "False"


@pytest.mark.parametrize(
    ("ours", "theirs", "apart"),
    [
        (options.JobOptions, JobOptions, set()),
        (options.CheckpointOptions, CheckpointRequest, set()),
        (options.RestoreOptions, RestoreRequest, set()),
        (options.MigrateOptions, MigrateRequest, set()),
        (options.SuspendOptions, SuspendRequest, set()),
        (options.ResumeOptions, ResumeRequest, set()),
        # `limit` is an argument, and `before` is for reading page after page.
        (options.HistoryOptions, HistoryOptions, {"limit", "before"}),
        (options.EventOptions, EventOptions, set()),
    ],
)
def test_options_are_those_of_the_service(ours: Any, theirs: Any, apart: set[str]) -> None:
    hints = get_type_hints(ours)
    fields = {f.name: f.type for f in msgspec.structs.fields(theirs) if f.name not in apart}
    assert hints.keys() == fields.keys()
    for name, hint in hints.items():
        if get_args(hint):
            assert set(get_args(hint)) == words(fields[name]), name


def words(kind: Any) -> set[str]:
    """The words that an option may be."""
    found = set()
    for each in get_args(kind):
        found |= {each} if isinstance(each, str) else words(each)
    return found


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (JobHandle, AsyncJobHandle)])
def test_both_clients_have_the_same_methods(one: type, other: type) -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        signatures = {n: inspect.signature(f) for n, f in found if not n.startswith("_")}
        return {n: [str(p) for p in s.parameters.values()] for n, s in signatures.items()}

    assert methods(one) == methods(other)


TEXT = "it does; stop it; a note"


def test_errors_are_typed() -> None:
    said = CallError.of_reply("org.phos.Error.Unsupported", f"{TEXT} [multicast]")
    error = typed(said, "system")
    assert type(error) is Unsupported
    assert (error.what, error.hint, error.reason) == ("it does", "stop it; a note", "multicast")
    assert str(error) == said.text == TEXT
    command = in_words(said, "system")
    assert (command.exit, command.reason) == (Exit.UNSUPPORTED, "multicast")
    assert command.row == {"error": "Unsupported", "reason": "multicast", "message": said.text}


@pytest.mark.parametrize(
    ("name", "text", "shown", "reason"),
    [
        ("Unsupported", "it does [no-hook]", "it does", "no-hook"),
        ("Unsupported", "two\nlines [old] [no-hook]", "two\nlines [old]", "no-hook"),
        ("Unsupported", "of an older phosd", "of an older phosd", ""),
        ("Unsupported", "it does [No hook]", "it does [No hook]", ""),
        ("Busy", "/tmp/file [no-hook]", "/tmp/file [no-hook]", ""),  # which a user may have named
    ],
)
def test_the_reason_is_behind_the_text(name: str, text: str, shown: str, reason: str) -> None:
    error = typed(CallError.of_reply(f"org.phos.Error.{name}", text), "system")
    assert (str(error), error.reason) == (shown, reason)


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("org.freedesktop.DBus.Error.ServiceUnknown", NoDaemon, "NoDaemon"),
        ("org.freedesktop.DBus.Error.Spawn.Failed", NoDaemon, "NoDaemon"),
        ("org.freedesktop.DBus.Error.AccessDenied", NotAuthorized, "NotAuthorized"),
        ("org.freedesktop.DBus.Error.LimitsExceeded", OtherError, "LimitsExceeded"),
        ("org.phos.Error.FromTomorrow", OtherError, "FromTomorrow"),
        ("org.phos.Error.Internal", Internal, "Internal"),
    ],
)
def test_every_error_of_the_bus_has_a_type(name: str, kind: type, code: str) -> None:
    error = typed(CallError(name, "a text"), "system")
    assert (type(error), error.code) == (kind, code)


def test_other_exceptions_are_left_alone() -> None:
    assert type(typed(NoBusError("no D-Bus at nowhere"), "system")) is NoBus
    with pytest.raises(ZeroDivisionError):
        typed(ZeroDivisionError(), "system")


def test_nothing_is_given_to_a_loop_that_closes() -> None:
    """It would never be done, and whoever waits for it would wait for ever."""
    loop, held = Loop(), threading.Event()
    loop._loop.call_soon_threadsafe(held.wait)  # so it cannot end yet
    closing = threading.Thread(target=loop.close)
    closing.start()
    try:
        wait_until(lambda: loop.closed, "the loop to close")
        with pytest.raises(RuntimeError, match="is closed"):
            loop.run(asyncio.sleep(0))
    finally:
        held.set()
        closing.join()


def test_what_still_runs_ends_with_its_loop() -> None:
    """An interrupt leaves it behind, and it would complain that its loop is closed."""
    loop, begun, ended = Loop(), threading.Event(), threading.Event()

    async def connect() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    left = asyncio.run_coroutine_threadsafe(connect(), loop._loop)  # else it might be collected
    assert begun.wait(60)
    loop.close()
    assert ended.is_set() and left.cancelled()


def test_a_shell_completes_what_is_exported() -> None:
    shown = {name for name in dir(phosd.client) if not name.startswith("__")}
    assert shown == set(phosd.client.__all__)
    assert {"__all__", "__doc__"} <= set(dir(phosd.client))
