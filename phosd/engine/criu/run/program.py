"""Find the CRIU program, and start it."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Self

from phosd.engine.criu.run import launch
from phosd.engine.criu.run.cgroup_place import Surroundings
from phosd.engine.criu.run.invocation import Invocation, Owner
from phosd.engine.criu.run.running import Running
from phosd.engine.program.tree import TreeProcess
from phosd.engine.system import cgroups, pid_namespaces, privileges, procfs
from phosd.engine.system.native import is_reachable
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.errors import Internal, NoSuchProcess, Reason, Unsupported

MINIMUM = (4, 2)
"""Older versions cannot dump a process with a TCP or UDP socket on Linux 6.16 or newer."""


INSTALL_HINT = (
    "run `make setup` in the checkout, or install CRIU 4.2 or newer and name it with "
    "PHOS_CRIU=/path/to/criu"
)


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
        """Return the pid namespace made by phosd that a process is in; None if it is in none."""
        if self.runtime_dir is None:
            return None
        return pid_namespaces.made_for(self.runtime_dir, pid)

    def inside(self, process: TreeProcess) -> PidNamespace | None:
        """Return where CRIU knows a process by its own ids; None if that is where CRIU starts.

        Raises :class:`Unsupported` if it is in namespaces that phosd has not made, and
        :class:`NoSuchProcess` if it has ended.
        """
        made = self.made_for(process.pid)
        if made is None and process.own_ids and not process.alive:  # nor is its namespace there
            raise NoSuchProcess(
                f"process {process.pid} has ended", hint="see its output for why it ended"
            )
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

    def start(self, invocation: Invocation) -> Running:
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
                bounding=invocation.bounding,
                dies_with_parent=invocation.dies_with_us,
                environment=invocation.environment,
                inside=inside,
                as_others=invocation.action == "restore",
                bounded=invocation.bounded,
                loginuid=invocation.loginuid,
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


def candidates() -> list[Path]:
    """Return where CRIU may be: ``PHOS_CRIU``, the checkout's, the package's, the system's."""
    named = os.environ.get("PHOS_CRIU")
    if named:
        return [Path(named)]
    places = [
        Path(__file__).parents[4] / ".criu/criu",
        Path("/usr/lib/phos/criu/criu"),
    ]
    system = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin")
    if system:
        places.append(Path(system))
    return list(filter(is_reachable, places))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
