"""A booted Debian of the test's own: a container whose first process is systemd.

It is booted by ``systemd-nspawn`` from a folder, in a mount namespace, a network and a cgroup of
its own, so nothing on the host is seen or changed but the folder. CRIU works in it: system calls
are not filtered, and ``/proc/sys`` can be written, unlike in containers that nspawn makes unasked.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.harness import children, wait_until

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UIDS = {"ann": 1000, "bob": 1001}
"""Unprivileged users of the machine."""

PACKAGES = (
    "bash-completion",
    "dbus",
    "libpam-systemd",
    "libstdc++6",
    "passwd",
    "polkitd",
    "procps",
    "python3",
    "systemd-sysv",
)
"""What the machine has; the package under test depends on nothing else."""

MASKED = (
    # These would reach through to the host's kernel.
    "systemd-sysctl.service",
    "systemd-modules-load.service",
    "modprobe@.service",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    # These would only take time.
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
)
BINDS: list[str] = []
"""Options of ``systemd-nspawn`` for what machines share with the host."""
_PATIENCE = 90.0
_NOT_CARRIED = ("__pycache__", "*.cpp", "*.pyx", "*.pxd")

_BOOT = """\
if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
    umount -R /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
mkdir /sys/fs/cgroup/{name}
echo 0 >/sys/fs/cgroup/{name}/cgroup.procs
exec setpriv --pdeathsig TERM systemd-nspawn --quiet --boot --directory={tree} --machine={name} \\
    --register=no --keep-unit --capability=all --private-network {binds} \\
    --console=read-only --resolv-conf=off --timezone=off --tmpfs=/dev/shm:mode=1777
"""
_END = """\
[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || {{
    umount -R /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
}}
cd /sys/fs/cgroup/{name} || exit 0
echo 1 >cgroup.kill
find . -depth -mindepth 1 -type d -exec rmdir {{}} +
cd .. && rmdir {name}
"""


class Failed(AssertionError):
    """A command in the machine failed: its exit status, or how else, and what it said."""

    def __init__(self, command: str, status: int | str, output: str) -> None:
        super().__init__(f"`{command}` returned {status} in the machine:\n{output}")
        self.status = status
        self.output = output


@dataclass
class Machine:
    """A tree that is booted, and the way into it."""

    tree: Path
    console: Path
    """What the machine says while it starts and stops."""
    name: str = field(default_factory=lambda: f"phos-boot-{os.urandom(4).hex()}")
    _boots: int = 0
    _nspawn: subprocess.Popen[bytes] | None = None
    _leader: int = 0

    def start(self) -> None:
        """Boot, and wait until systemd has started everything."""
        tree = shlex.quote(str(self.tree))
        script = _BOOT.format(tree=tree, name=self.name, binds=shlex.join(BINDS))
        variables = {"SYSTEMD_SECCOMP": "0", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "yes"}
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                ["unshare", "--mount", "--propagation=private", "sh", "-ec", script],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": PATH, **variables},
            )
        wait_until(self._is_up, f"the machine to boot; see {self.console}", _PATIENCE)
        # Each boot has pids of its own, so what ran before can be restored under its old pid.
        self._boots += 1
        self.run(f"echo {self._boots * 5000} >/proc/sys/kernel/ns_last_pid", unit=False)

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            raise AssertionError(f"systemd-nspawn ended:\n{self.console.read_text()}")
        found = [pid for pid in children(self._nspawn.pid) if _is_init(pid)]
        if not found:
            return False
        self._leader = found[0]
        state = self._enter(["systemctl", "is-system-running"]).stdout.strip()
        return state in ("running", "degraded")

    def _enter(
        self, words: Sequence[str], *, text: str | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run ``words`` as root in the machine's namespaces, but in no unit of its systemd."""
        enter = ["nsenter", f"--target={self._leader}", "--all", "--wdns=/", "--", *words]
        return subprocess.run(
            enter,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            env={"PATH": PATH, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""},
        )

    def run(
        self,
        command: str,
        *,
        user: str = "root",
        check: bool = True,
        timeout: float = 120,
        unit: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a line of shell in the machine; what it printed, both outputs together.

        A user's command runs in a session of theirs, root's in a transient unit; what it leaves
        running stays. With ``unit`` false it runs as root outside any unit and needs
        neither the bus nor a working systemd. Raises :class:`Failed` when ``check`` and it fails.
        """
        words = ["sh", "-c", command]
        if unit:
            escaped = command.replace("$", "$$")  # systemd looks for its own variables first
            words = [*self._in_a_unit(user, variables or {}), "sh", "-c", escaped]
        elif user != "root" or variables:
            raise ValueError("only root, without variables, runs outside of units")
        try:
            done = self._enter(words, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            processes = self._enter(["ps", "-e", "-o", "pid,stat,wchan:20,args"]).stdout
            raise Failed(command, f"nothing within {timeout} s", processes) from error
        if check and done.returncode != 0:
            raise Failed(command, done.returncode, done.stdout)
        return done.stdout

    def _in_a_unit(self, user: str, variables: Mapping[str, str]) -> list[str]:
        home = "/root" if user == "root" else f"/home/{user}"
        session = ("PAMName=login", "KillMode=mixed") if user != "root" else ("KillMode=process",)
        return [
            *("systemd-run", "--quiet", "--collect", "--wait", "--pipe", f"--uid={user}"),
            *(f"--property={setting}" for setting in session),
            f"--working-directory={home}",
            *(f"--setenv={name}={value}" for name, value in variables.items()),
            "--",
        ]

    def put(self, path: str, text: str, mode: int = 0o644, owner: str = "root") -> None:
        """Write a file in the machine, and the folders above it."""
        done = self._enter(
            ["install", "-D", f"--mode={mode:o}", f"--owner={owner}", "/dev/stdin", path], text=text
        )
        if done.returncode != 0:
            raise Failed(f"write {path}", done.returncode, done.stdout)

    def carry(self, source: Path, path: str) -> None:
        """Copy a file or a folder of the host into the machine; every user there can read it."""
        inside = self.tree / path.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, inside, ignore=shutil.ignore_patterns(*_NOT_CARRIED))
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, inside)
        self.run(f"chmod -R a+rX {shlex.quote(path)}", unit=False)

    def journal(self, unit: str = "phosd.service") -> str:
        """What a unit has said since the machine's boot."""
        return self.run(f"journalctl --boot --no-pager --unit={unit}", unit=False)

    def last_words(self) -> str:
        """The end of the journal, also of a machine that is down."""
        journal = ["journalctl", f"--directory={self.tree}/var/log/journal", "--lines=80"]
        done = subprocess.run(
            [*journal, "--no-pager", "--quiet"], capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    def reboot(self) -> None:
        """Shut down in good order, and boot again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Shut down in good order; what does not stop in time is killed, and that is a failure."""
        if self._nspawn is None:
            return
        nspawn, self._nspawn = self._nspawn, None
        if nspawn.poll() is None:
            os.kill(self._leader or nspawn.pid, signal.SIGRTMIN + 4)  # systemd: power off
        try:
            nspawn.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no shutdown in {_PATIENCE} s; see {self.console}") from None
        finally:
            if nspawn.poll() is None:
                nspawn.kill()
                nspawn.wait()
            end = ["unshare", "--mount", "--propagation=private", "sh", "-c"]
            subprocess.run([*end, _END.format(name=self.name)], check=True)


def _is_init(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "systemd\n"
    except OSError:
        return False


def prepare(tree: Path) -> None:
    """Make a Debian tree into one that boots quickly, does nothing by itself, and has users."""
    units = tree / "etc/systemd/system"
    for unit in MASKED:
        (units / unit).symlink_to("/dev/null")
    (tree / "etc/hostname").write_text("phos-boot\n")
    (tree / "etc/machine-id").write_text("")
    (tree / "etc/fstab").write_text("")
    (tree / "var/log/journal").mkdir(parents=True, exist_ok=True)
    for folder in ("var/lib/apt/lists", "var/cache/apt/archives"):
        shutil.rmtree(tree / folder)
        (tree / folder / "partial").mkdir(parents=True)
    for user, uid in UIDS.items():
        add = ["useradd", "--create-home", f"--uid={uid}", "--shell=/bin/bash", user]
        subprocess.run(["chroot", tree, *add], check=True, env={"PATH": PATH})


@contextlib.contextmanager
def booted(
    base: Path, before_boot: Callable[[Path], None] = lambda tree: None
) -> Iterator[Machine]:
    """A machine that runs from a copy of the tree ``base``, until the end of the context.

    ``before_boot`` may change the copy.
    """
    with tempfile.TemporaryDirectory(prefix="machine-", dir=base.parent) as folder:
        tree = Path(folder) / "root"
        subprocess.run(["cp", "--archive", "--reflink=auto", base, tree], check=True)
        before_boot(tree)
        machine = Machine(tree, Path(folder) / "console")
        try:
            machine.start()
            yield machine
        finally:
            machine.stop()
