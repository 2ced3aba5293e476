"""Find and run the CRIU program, and explain its failures."""

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Self

from phosd.engine.criu import launch
from phosd.engine.criu.action_script import FROZEN, STARTED, ActionScript
from phosd.engine.criu.cgroup_place import Place, Surroundings
from phosd.engine.criu.hindrance import IDLE_SECONDS, Hindrance
from phosd.engine.criu.launch import Started
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program.tree import TreeProcess
from phosd.engine.system import cgroups, pid_namespaces, privileges, procfs
from phosd.engine.system.native import is_reachable
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.engine.system.privileges import Capability
from phosd.engine.system.unsandboxed import OutsideError
from phosd.errors import Cancelled, Internal, Reason, Timeout, Unsupported

MINIMUM = (4, 2)
"""Older versions cannot dump a process with a TCP or UDP socket on Linux 6.16 or newer."""

_LOG_BYTES = 64 << 10
"""How much of the end of CRIU's log is read for its errors."""
_SOON_MILLISECONDS = 1
_LOOK_MILLISECONDS = 50
"""How often to check whether a job was cancelled; the end of CRIU is noticed at once."""

INSTALL_HINT = (
    "run `make setup` in the checkout, or install CRIU 4.2 or newer and name it with "
    "PHOS_CRIU=/path/to/criu"
)


@dataclass(frozen=True)
class Owner:
    """The user that owns a program, in numeric ids."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    @property
    def is_root(self) -> bool:
        return self.uid == 0


@dataclass(frozen=True)
class Invocation:
    """A run of ``criu action words`` as ``owner``.

    The folders ``images`` and ``work`` may be inside private ones. ``descriptors`` are inherited;
    ``environment`` is added to CRIU's, which loads the plugins of the folder ``plugins`` and no
    others; ``capabilities`` are all that CRIU has, unless the owner is
    root. ``wrap`` may put a command around CRIU's. ``place``: see :func:`launch.launch`.
    ``inside``: the namespace that it runs in, and those that come with it. ``bounded``: see
    :func:`privileges.command`.
    """

    action: str
    words: Sequence[str]
    owner: Owner
    images: Path
    work: Path
    descriptors: Sequence[int] = ()
    environment: Mapping[str, str] | None = None
    capabilities: Collection[Capability] = (Capability.CHECKPOINT_RESTORE,)
    dies_with_us: bool = False
    place: Place | None = None
    plugins: Path | None = None
    inside: PidNamespace | None = None
    bounded: bool = False
    wrap: Callable[[list[str]], list[str]] = list


@dataclass(frozen=True)
class Criu:
    """A CRIU program. ``socket`` leads to the service for commands outside of the sandbox.
    ``runtime_dir`` is where pid namespaces are recorded that were made for programs.

    If the service does not exist at the first use, CRIU runs as a child.
    """

    path: Path
    socket: Path | None = None
    runtime_dir: Path | None = None

    @classmethod
    def find(
        cls,
        path: Path | None = None,
        socket: Path | None = None,
        runtime_dir: Path | None = None,
    ) -> Self:
        """Return the CRIU to use: ``path`` if given, else the first of :func:`candidates`.

        Raises :class:`Internal` if there is none, or if ``path`` is too old.
        """
        if path is not None and not path.is_file():
            raise Internal(f"there is no CRIU at {path}", hint=INSTALL_HINT)
        for candidate in [path] if path is not None else candidates():
            found = cls(candidate.resolve(), socket, runtime_dir)
            if _numbers(found.version) >= MINIMUM:
                return found
            if path is not None:
                raise Internal(
                    f"CRIU {found.version} at {path} is too old for current kernels",
                    hint=INSTALL_HINT,
                )
        raise Internal("CRIU 4.2 or newer was not found", hint=INSTALL_HINT)

    @cached_property
    def version(self) -> str:
        """The version, such as ``4.2.1``. Raises :class:`Internal` if CRIU does not start."""
        try:
            done = subprocess.run(
                [self.path, "--version"], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Internal(f"CRIU at {self.path} does not start: {error}", INSTALL_HINT) from error
        found = re.search(r"Version: (\S+)", done.stdout)
        return found.group(1) if found else "0"

    @cached_property
    def service(self) -> Path | None:
        """The socket of the service, or None if it does not exist.

        Decided once: CRIU must not run inside the sandbox because the service is away for a moment.
        """
        return self.socket if self.socket is not None and self.socket.is_socket() else None

    @property
    def surroundings(self) -> Surroundings:
        """Where it starts."""
        if self.service is None:
            return Surroundings(cgroups.memberships(os.getpid()))
        return Surroundings(None, scopes=launch.makes_scopes(self.service))

    @cached_property
    def namespaces(self) -> dict[str, str]:
        """The namespaces that CRIU runs in, by kind. It saves only processes in the same ones.

        Raises :class:`Internal`.
        """
        return launch.namespaces(self.service)

    def made_for(self, pid: int) -> PidNamespace | None:
        """Return the pid namespace of phosd's that a process is in; None if it is in none."""
        if self.runtime_dir is None:
            return None
        return pid_namespaces.made_for(self.runtime_dir, pid)

    def inside(self, process: TreeProcess) -> PidNamespace | None:
        """Return where CRIU knows a process by its own ids; None if that is where CRIU starts.

        Raises :class:`Unsupported` if it is in namespaces that phosd has not made.
        """
        made = self.made_for(process.pid)
        if made is None and process.own_ids:
            raise Unsupported(
                f"{procfs.describe(process.pid)} is in a container or sandbox, or has got itself "
                "one just now",
                hint="the program goes on; a container's runtime can save it with phosd's plugin "
                "(`phos setup-container-runtime --help`), and phosd suspend and move it",
                reason=Reason.PROCESS_STATE,
            )
        return made

    def namespaces_for(self, pid: int) -> dict[str, str]:
        """The namespaces that CRIU runs in to save the tree below ``pid``: that of a program that
        phosd has started in a pid namespace of its own, too.
        """
        made = self.made_for(pid)
        if made is None:
            return self.namespaces
        keeper = made.keeper.pid
        own = {kind: procfs.namespace(keeper, kind) for kind in pid_namespaces.KINDS}
        return self.namespaces | own

    def require_reachable(self, owner: Owner) -> None:
        """Raise :class:`Internal` if ``owner`` may not execute it (a checkout below ``/root``)."""
        if owner.is_root:
            return
        for part in (self.path, *self.path.parents):
            if not privileges.may(privileges.EXECUTE, part, owner.uid, (owner.gid, *owner.groups)):
                raise Internal(
                    f"user {owner.uid} may not execute {self.path} (because of {part})",
                    hint="copy CRIU's folder to /usr/lib/phos/criu and run "
                    "packaging/install_criu.py on it",
                )

    def start(self, invocation: Invocation) -> "Running":
        """Start CRIU. It gets both folders as descriptors, so that even a user who temporarily owns
        them cannot reach them by path.
        """
        owner, work = invocation.owner, invocation.work
        self.require_reachable(owner)
        # Not its CUDA plugin, which would interfere with the driver checkpoint that phosd makes.
        plugins = invocation.plugins or work / "no-plugins"
        if not invocation.plugins:
            plugins.mkdir(mode=0o755, exist_ok=True)
        descriptors = [
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            for folder in (invocation.images, work, plugins)
        ]
        name = f"{invocation.action}.log"
        log: BinaryIO | None = None
        inside = None
        try:
            if invocation.inside is not None:
                inside = invocation.inside.entrance()
                descriptors.append(inside)
            log = _new_log(work / name, owner)
            places = [f"/proc/self/fd/{folder}" for folder in descriptors]
            line = [str(self.path), invocation.action, "--no-default-config", "-v2", "-o", name]
            line += ["-D", places[0], "-W", places[1], "-L", places[2]]
            if not owner.is_root:
                line.append("--unprivileged")
            command = privileges.command(
                [*line, *invocation.words],
                uid=owner.uid,
                gid=owner.gid,
                groups=owner.groups,
                capabilities=invocation.capabilities,
                dies_with_parent=invocation.dies_with_us,
                environment=invocation.environment,
                inside=inside,
                as_others=invocation.action == "restore",
                bounded=invocation.bounded,
            )
            started = launch.launch(
                invocation.wrap(command),
                (*descriptors, *invocation.descriptors),
                self.service,
                tied=invocation.dies_with_us,
                place=invocation.place,
            )
        except BaseException:
            if log is not None:
                log.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Running(started, invocation.action, log)


class Running:
    """A running CRIU. Leaving the context before its end kills it."""

    def __init__(self, process: Started, action: str, log: BinaryIO) -> None:
        self._process = process
        self._action = action
        self._log = log
        self._hindrance = Hindrance(process.pid)

    def goes_on(self) -> bool:
        """Return whether CRIU has not ended. Raises :class:`Internal` if that cannot be told."""
        return self._poll() is None

    def wait(
        self,
        deadline: float,
        cancellation: Cancellation | None = None,
        script: ActionScript | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Wait until CRIU has ended, for at most ``deadline`` seconds. Answers ``script``.

        Raises :class:`Internal` with CRIU's last error lines, :class:`Timeout`, and
        :class:`Cancelled`; and what the script's action, or ``watch`` in the meantime, raised.
        """
        began = time.monotonic()
        watched = 0.0
        while self._look([script] if script else (), soon=script is not None and script.waits):
            if script is not None:
                script.attend()
                if script.error is not None:
                    raise script.error
            if watch is not None and time.monotonic() - watched > _LOOK_MILLISECONDS / 1000:
                watch()
                watched = time.monotonic()
            self._require_in_time(began, deadline)
            if cancellation is not None:
                cancellation.check()
            self._hindrance.look()
            self._require_unhindered()
        self._require_success()

    def wait_until_started(self, deadline: float, script: ActionScript) -> None:
        """Wait until CRIU has reached the first point of ``script``."""
        began = time.monotonic()
        while STARTED not in script.reached and self._look([script]):
            self._require_in_time(began, deadline)
            script.attend()
            self._hindrance.look()
            self._require_unhindered()
        if STARTED not in script.reached:
            self._require_success()

    def wait_and_answer(
        self,
        deadline: float,
        cancellation: Cancellation | None,
        script: ActionScript,
        released: Callable[[], bool],
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait and answer ``script``, until CRIU has ended or ``released`` the tree.

        After a release CRIU only cleans up; :meth:`wait` then tells whether it succeeded. If the
        job is cancelled or the ``deadline`` has passed, CRIU is not killed but told to give up:
        nothing is raised while it holds the tree. Only if its user does not let it do that, CRIU is
        killed after a while, and perhaps their program with it; and while it waits for a file
        system that does not answer, so does the job. While CRIU is ``excused``, it waits for us.
        """
        began = time.monotonic()  # CRIU may have waited long before it was allowed to continue
        given_up: Cancelled | Timeout | Internal | None = None
        while self._look([script], soon=FROZEN in script.reached):
            script.attend()
            self._hindrance.look(helpers=True)
            if excused():
                self._hindrance.forget()
            if given_up is not None:
                if self._hindrance.persists or self._hindrance.idle > IDLE_SECONDS:
                    if not self._hindrance.waits:
                        self._process.kill()
                        continue
                    if cancellation is not None:
                        cancellation.held_up()
                    if isinstance(given_up, Timeout):
                        given_up = self._lost()
                continue
            try:
                self._require_in_time(began, deadline)
                if cancellation is not None:
                    cancellation.check()
                self._require_unhindered()
            except (Cancelled, Timeout, Internal) as error:
                given_up = error
                script.refuse()
                self._hindrance.forget()
                continue
            if FROZEN in script.reached and released():
                return
        if given_up is not None:
            raise given_up
        self._require_success()

    def _look(self, readable: Sequence[ActionScript], *, soon: bool = False) -> bool:
        """Wait briefly, or until something happens. Returns whether CRIU still runs."""
        if self._poll() is not None:
            return False
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        for one in readable:
            poller.register(one, select.POLLIN)
        poller.poll(_SOON_MILLISECONDS if soon else _LOOK_MILLISECONDS)
        return True

    def _require_in_time(self, began: float, deadline: float) -> None:
        if time.monotonic() - began > deadline:
            raise Timeout(
                f"criu {self._action} did not finish within {deadline:g} s",
                hint="the program goes on; try again when the machine is less busy",
            )

    def _lost(self) -> Timeout:
        return Timeout(
            f"criu {self._action} waited for a file system that did not answer",
            hint="the program, which had to wait as long, goes on",
        )

    def _require_unhindered(self) -> None:
        if self._hindrance.persists:
            raise Internal(
                f"criu {self._action} was stopped again and again",
                hint="it runs with the id of the program's user, who must not send it signals",
            )

    def _require_success(self) -> None:
        if code := self._process.returncode:
            raise self._failure(code, self._process.said)

    def _poll(self) -> int | None:
        try:
            return self._process.poll()
        except OutsideError as error:
            raise Internal(
                f"criu {self._action} cannot be watched any more: {error}",
                hint="see `journalctl -u 'phosd-criu@*'`",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self._process.close()
        self._log.close()

    def _failure(self, code: int, said: str) -> Internal:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - _LOG_BYTES))
        text = self._log.read(_LOG_BYTES).decode(errors="replace")
        errors = [re.sub(r"^\(\d+\.\d+\)\s*", "", x) for x in text.splitlines() if "Error" in x]
        # Root without CAP_SYS_RESOURCE always gets this error, which is harmless.
        errors = [line for line in errors if "RLIMIT_NOFILE for self" not in line]
        shown = errors[-6:] or said.strip().splitlines()[-3:] or ["it said nothing"]
        hint = next((hint for text, hint in _HINTS if any(text in line for line in shown)), "")
        return Internal(
            f"criu {self._action} failed (it returned {code}): " + " | ".join(shown),
            hint=hint or "`phos doctor` checks CRIU on this machine",
        )


def _new_log(path: Path, owner: Owner) -> BinaryIO:
    """Make the log before CRIU runs, and open it: later the owner may put another file there."""
    path.unlink(missing_ok=True)
    log = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "rb")
    try:
        os.fchown(log.fileno(), owner.uid, owner.gid)
    except BaseException:
        log.close()
        raise
    return log


_HINTS = (
    ("Permission denied", "the owner of the program may not open that file (any more)"),
    (
        "get rlimit",
        "root needs CAP_SYS_RESOURCE to save a program of other users or under seccomp filters",
    ),
    ("Unable to load", "CRIU could not load its plugin; run `make build`, or install the package"),
    (
        "Can't link remap",
        "another program is being saved whose shared memory needs such a link, or somebody left "
        "/dev/shm/link_remap.*; try again, or remove it",
    ),
    ("No space left", "make room and try again"),
    ("tcp", "see the option tcp=close"),
    ("bad size", "the file has changed since the checkpoint"),
    ("build-id", "a library of the program was replaced since the checkpoint"),
)


def candidates() -> list[Path]:
    """Return where CRIU may be: ``PHOS_CRIU``, the checkout's, the package's, the system's."""
    named = os.environ.get("PHOS_CRIU")
    if named:
        return [Path(named)]
    places = [
        Path(__file__).parents[3] / ".criu/criu",
        Path("/usr/lib/phos/criu/criu"),
    ]
    system = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin")
    if system:
        places.append(Path(system))
    return list(filter(is_reachable, places))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
