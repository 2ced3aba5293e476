"""What every test of this process must see before the first of them loads a CUDA driver."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from phosd.errors import PhosError
from tests.support import rotation
from tests.support.harness import has_two_gpus
from tests.support.shards import name_of, recorded

# Examples are as slow as the machine is busy, which tells nothing about what is tested.
settings.register_profile("phos", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("phos")

MOST_TIMING = 15
"""Tests that may judge how long something takes: they fail on a busy machine."""

# Terminals in tests have sizes of their own, whatever ours has.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

os.environ.setdefault("PHOS_GPU", "soft")
os.environ.setdefault("PHOS_SOFTGPU_DEVICES", "2")

# Shards play the same part, though there may be a new commit before the last of them is started.
os.environ["PHOS_TEST_SEED"] = str(rotation.SEED)

# The software GPU's memory is the machine's. Tests beside these, and other people's programs, have
# devices of their own.
devices = Path(tempfile.mkdtemp(prefix="phos-test-gpu-"))
devices.chmod(0o755)  # some programs are other users'
os.environ["PHOS_SOFTGPU_DIR"] = str(devices / "gpu")

# Programs compile their kernels once, whoever runs them, and nobody compiles phosd at each start.
kernels = devices / "kernels"
kernels.mkdir()
kernels.chmod(0o1777)
os.environ["PHOS_TEST_CACHE"] = str(kernels)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A job in the background is started with these ignored, and what it starts would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)


def pytest_report_header() -> str:
    part = "everything" if rotation.EVERYTHING else "a part of what is random or a product"
    return f"plays {part} (PHOS_TEST_SEED={rotation.SEED})"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what programs have said that phosd ran, as CRIU: the message has a line of it only."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, PhosError) and error.details:
        report.sections.append(("What was said", "\n".join(error.details)))
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is left to other commits: of the mark ``rotated``, and of slow tests."""
    played: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    named = any("::" in word for word in config.args)
    for item in items:
        (played if named or is_played(item) else left_out).append(item)
    items[:] = played
    timing = [item for item in played if item.get_closest_marker("timing")]
    if len(timing) > MOST_TIMING:
        raise pytest.UsageError(f"more than {MOST_TIMING} tests judge time: {timing}")
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def is_played(item: pytest.Item) -> bool:
    """Whether this run plays a test that was not asked for by name."""
    mark = item.get_closest_marker("rotated")
    of = mark.kwargs["of"] if mark is not None else 1
    if not item.get_closest_marker("always"):
        of = max(of, rotation.period(recorded("tests").get(name_of(item.nodeid), 0.0)))
    name, _, case = item.name.partition("[")
    return rotation.plays(name, case.removesuffix("]"), of)


def left() -> dict[int, str]:
    """Processes that tests have started and that still run: pid and command. Buses are left out,
    which are the session's.
    """
    mark = f"PHOS_SOFTGPU_DIR={os.environ['PHOS_SOFTGPU_DIR']}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is none of ours
    found.pop(os.getpid(), None)
    return {pid: line for pid, line in found.items() if "dbus-daemon" not in line}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What a test leaves running would slow down all that come after it.

    Movers whose engine was killed wait half a minute for the next, by design, and use their GPU
    meanwhile, where the next module's programs may be alone: they are ended.
    """
    before = left()
    yield
    deadline = time.monotonic() + 60
    while new := {pid: command for pid, command in left().items() if pid not in before}:
        assert time.monotonic() < deadline, f"left running: {new}"
        for pid in (pid for pid, command in new.items() if "-m phosd.engine.mover" in command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.fixture
def two_gpus() -> None:
    """For tests that move programs between GPUs; the software GPU is two."""
    if not has_two_gpus():
        pytest.skip("this node has one GPU")


def pytest_unconfigure() -> None:
    shutil.rmtree(devices)
