"""Start target programs, read what they compute, kill them, and find them again.

A target runs in a session of its own, reads no input, and appends to a log, as under ``phos run``.
"""

import functools
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, TypeVar

from phosd.engine.hook_client.places import hooks_folder
from phosd.engine.node.gpus import list_gpus
from phosd.engine.system import procfs
from phosd.engine.system.cuda import is_software
from phosd.engine.system.freezer import thaw_killed
from phosd.engine.system.native import hook_library, softgpu_folder

PROGRAMS = Path(__file__).parents[1] / "programs"
PATIENCE = 60.0
"""Seconds to wait for anything on a busy machine before a test fails."""
SLOWEST_STEP = 0.05
"""Most seconds for a step of a program on such a machine, without its pause."""
SELDOM = {"PHOS_TEST_PACE": "0.1"}
"""For a program that is computed again, undisturbed, up to where it is after minutes."""

UNDISTURBED = Path(__file__).parents[2] / "build" / "undisturbed"
"""Folder in which values of undisturbed programs are kept between test runs."""
_NVIDIA = "/proc/driver/nvidia/version"
_OF_NO_MATTER = (
    *("PYTHONPATH", "PHOS_TEST_CACHE", "PHOS_TEST_PACE"),
    *("PHOS_SOFTGPU_DIR", "PHOS_SOFTGPU_DEVICE_FILE"),
)
"""Variables that do not affect values."""

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None], what: str, patience: float = PATIENCE, *, every: float = 0.02
) -> T:
    """Return the first true value of ``condition``; fail the test, naming ``what``, on a
    timeout.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(every)
    raise AssertionError(f"waited {patience:.0f} s in vain for {what}")


def environment(
    *, hooked: bool, runtime: Path | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a program on this node's GPU, with or without the hook."""
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "PHOS_RUNTIME_DIR")}
    if is_software():
        env["LD_LIBRARY_PATH"] = str(softgpu_folder())
    if hooked:
        env["LD_PRELOAD"] = str(hook_library())
    if runtime is not None:
        env["PHOS_RUNTIME_DIR"] = str(runtime)
    return env | dict(extra or {})


def users_hooks(runtime: Path, user: int | None = None) -> Path:
    """Make the folder in which hooks of a user, by default this one, listen, as phosd does."""
    folder = hooks_folder(runtime) / str(os.geteuid() if user is None else user)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if user is not None:
        os.chown(folder, user, -1)
    return folder


def compile_kernels(folder: Path) -> None:
    """Compile the kernels of the programs into a folder, for those without a compiler."""
    places = {"PHOS_TEST_CACHE": str(folder.resolve()), "PYTHONPATH": str(PROGRAMS)}
    subprocess.run(
        [sys.executable, "-c", "import gpu; gpu.compile_ptx(gpu.SOURCE)"],
        cwd=PROGRAMS,
        env=os.environ | places,
        check=True,
    )


def has_two_gpus() -> bool:
    """Whether programs can move from one GPU to another: a real one may be alone."""
    return len(list_gpus()) > 1


def moved_to(gpu: int) -> str:
    """Where a program without the hook goes that uses the other one of two GPUs. Only NVML knows
    which it uses, so with the software GPU both take each other's place.
    """
    return "0:1,1:0" if is_software() else str(gpu)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def halt(pid: int) -> None:
    """Send SIGSTOP, and wait until each thread of the process has stopped, or ended.

    A process that holds the software GPU's lock would stop the others that use the GPU, too, as
    no driver does: it goes on until it has let go.
    """

    def halted() -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            found = map(procfs.stat, procfs.threads(pid))
            return all(thread is None or thread.stopped or thread.dead for thread in found)
        return True

    while True:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        wait_until(halted, f"process {pid} to stop")
        if not _locks_the_gpu(pid):
            return
        os.kill(pid, signal.SIGCONT)


def _locks_the_gpu(pid: int) -> bool:
    with suppress(FileNotFoundError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            locked = "lock:" in Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text()
            if locked and descriptor.readlink().is_relative_to(os.environ["PHOS_SOFTGPU_DIR"]):
                return True
    return False


def children(pid: int) -> list[int]:
    """Return all descendants of ``pid``."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the task has ended
            for child in task.read_text().split():
                found += [int(child), *children(int(child))]
    return found


@contextmanager
def running(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process in text mode, and kill it if the block raises, so that a failed test does not
    wait.
    """
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


@dataclass
class Target:
    """A running target program; ``log`` holds its lines, ``errors`` its stderr."""

    program: str
    log: Path
    errors: Path
    process: subprocess.Popen[bytes]
    pids: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def position(self) -> int:
        """Return the present size of the log in bytes."""
        return self.log.stat().st_size

    def values(self, since: int = 0) -> dict[int, str]:
        """Return the digest of each step in the log from byte ``since`` on."""
        return parse(self.log.read_bytes()[since:])

    def wait_for_steps(self, count: int, since: int = 0) -> dict[int, str]:
        """Wait for at least ``count`` values from byte ``since`` on, and return them."""

        def enough() -> dict[int, str] | None:
            values = self.values(since)
            if len(values) < count and not alive(self.pid):
                raise AssertionError(f"{self.program} ended early: {self.errors.read_text()}")
            return values if len(values) >= count else None

        return wait_until(enough, f"{count} steps of {self.program}")

    def more_steps(self, count: int) -> dict[int, str]:
        """Wait for ``count`` further values, and return them."""
        return self.wait_for_steps(count, since=self.position())

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Stop the whole tree until the end of the block."""
        pids = [pid for pid in (self.pid, *children(self.pid)) if alive(pid)]
        for pid in pids:
            halt(pid)
        yield
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the whole tree, and wait until all its pids are free."""
        if alive(self.pid):
            self.pids = [self.pid, *children(self.pid)]
        for pid in self.pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        thaw_killed(self.pids)
        if self.process.returncode is None:
            self.process.wait()
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.pids),
            f"the pids {self.pids} to be free",
        )


def parse(text: bytes) -> dict[int, str]:
    """Return ``{step: digest}`` of the complete lines; other lines are ignored."""
    values = {}
    for line in text.decode().split("\n")[:-1]:
        step, _, digest = line.partition(" ")
        if step.isdigit():
            values[int(step)] = digest
    return values


def start(
    program: str,
    folder: Path,
    *,
    hooked: bool = True,
    runtime: Path | None = None,
    interpreter: Sequence[str | Path] = (sys.executable,),
    arguments: Sequence[str] = ("0",),
    extra: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
) -> Target:
    """Start a program of :data:`PROGRAMS`; its log and errors go into ``folder``, under a name that
    no other target has.

    ``interpreter`` are the words before the script; ``stdout`` replaces the log, for programs that
    print elsewhere.
    """
    if hooked and runtime is not None:
        users_hooks(runtime)
    log = _unused(folder, program)
    errors = log.with_suffix(".err")
    with log.open("ab") as out, errors.open("ab") as err:
        process = subprocess.Popen(
            [*interpreter, str(script(program)), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out if stdout is None else stdout,
            stderr=err,
            cwd=folder,
            env=environment(hooked=hooked, runtime=runtime, extra=extra),
            start_new_session=True,
        )
    return Target(program, log, errors, process)


def _unused(folder: Path, program: str) -> Path:
    """A log of its own for each target, since a target is waited for by what its log says."""
    names = (f"{program}{number or ''}.log" for number in itertools.count())
    return next(log for name in names if not (log := folder / name).exists())


def script(program: str) -> Path:
    """Return the file of a program."""
    return PROGRAMS / f"{program}.py"


def undisturbed(
    program: str,
    steps: int,
    *arguments: str,
    extra: Mapping[str, str] | None = None,
    compared: Target | None = None,
    hooked: bool = False,
) -> dict[int, str]:
    """Return the values of at least ``steps`` steps of a run without checkpoints, and without the
    hook, unless it is ``hooked``: the software GPU has no CUDA IPC of its own.

    They are cached in a file whose name includes a hash of everything they depend on. The target
    ``compared`` with them stands still while they are computed: on a busy machine it would come
    further in that time than the run, and the next comparison would take longer still.
    """
    surroundings = {
        name: os.environ[name] for name in os.environ if name.startswith("PHOS_SOFTGPU")
    }
    surroundings |= extra or {}
    matters = sorted((k, v) for k, v in surroundings.items() if k not in _OF_NO_MATTER)
    text = json.dumps([_programs(), program, arguments, matters])
    name = f"{program}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    if name not in _known:
        _known[name] = _read_values(UNDISTURBED / name)
    known = _known[name]
    if len(known) < steps:
        with compared.halted() if compared is not None else nullcontext():
            ahead = max(100, steps + min(steps, 200))
            known = run_to_end(program, ahead, *arguments, hooked=hooked, extra=extra)
        _known[name] = known
        UNDISTURBED.mkdir(parents=True, exist_ok=True)
        draft = UNDISTURBED / f"{name}.{os.getpid()}"
        draft.write_text(json.dumps([known[step] for step in range(len(known))]))
        draft.rename(UNDISTURBED / name)
    return known


_known: dict[str, dict[int, str]] = {}


def _read_values(path: Path) -> dict[int, str]:
    return dict(enumerate(json.loads(path.read_text()))) if path.exists() else {}


@functools.cache
def _programs() -> str:
    """Return a digest of all test programs and of the libraries that they compute with."""
    files = [path for path in sorted(PROGRAMS.iterdir()) if path.is_file()]
    driver = softgpu_folder() / "libcuda.so.1" if is_software() else Path(_NVIDIA)
    digest = hashlib.sha256(sys.version.encode())
    for path in (*files, driver):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for package in ("cuda-bindings", "nvidia-cuda-nvrtc"):
        digest.update(version(package).encode())
    return digest.hexdigest()


def run_to_end(
    program: str,
    steps: int,
    *arguments: str,
    hooked: bool,
    extra: Mapping[str, str] | None = None,
) -> dict[int, str]:
    """Run ``steps`` steps without any daemon, and return their values.

    ``arguments`` follow the number of steps.
    """
    UNDISTURBED.mkdir(parents=True, exist_ok=True)  # some write files where they are
    done = subprocess.run(
        [sys.executable, str(script(program)), str(steps), *arguments],
        cwd=UNDISTURBED,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(hooked=hooked, extra={**(extra or {}), "PHOS_TEST_PACE": "0"}),
        timeout=PATIENCE * 2 + steps * SLOWEST_STEP,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    values = parse(done.stdout)
    assert sorted(values) == list(range(steps))
    return values
