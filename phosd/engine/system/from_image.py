"""Start phosd from its OCI image: install it on the host, and go on there.

The programs that phosd saves are the host's: CRIU saves and restores what is in its own namespaces
and sees the same files. So the container is how phosd comes to a host, and what starts and ends it;
phosd itself runs in the namespaces of the host's first process, from a copy of the image's
``/usr/lib/phos``, which programs load the hook from as well.

Nothing is touched before every check has passed. What programs may have loaded (``kept``) is only
added to; all else is replaced, under a lock that phosd holds as long as it runs. An installation
that was interrupted is done again from its beginning: the file ``image`` is written last.
"""

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phosd.engine.system import cgroups, privileges, procfs
from phosd.errors import Busy, Internal, PhosError, Reason, Unsupported

HOME = Path("/usr/lib/phos")
MARK = "image"
"""The file that tells which image was installed, in the image and on the host."""
PROGRAM = HOME / "bin/phosd"
CGROUP = "phosd"
"""The cgroup of phosd, its movers and CRIU, at the top of each hierarchy."""
SHARE = Path("/usr/share")
_SETTINGS = ("dbus-1/system.d/org.phos.conf", "polkit-1/actions/org.phos.policy")
"""What the host's bus and polkit must know. dbus-daemon reads its folder again by itself."""
ETC = Path("/etc")
"""Where they look as well."""
_PACKAGE = Path("/var/lib/dpkg/info/phosd.prerm")
"""Is there as long as the Debian package is installed."""
_LOCK = Path("/run/phos/image.lock")
_HOOKS = Path("/run/phos/hook")
_NO_PRIVILEGES = 2 | 4 | 8
"""No set-user-id, no devices, no programs (``sys/mount.h``)."""
_SMALL = b"mode=755,size=4m,nr_inodes=16k"
_OPTIONS = "start the container as docs/operate/image.md says"
_KINDS = ("mnt", "net", "ipc", "uts", "cgroup")
_INITIAL = ["0", "0", "4294967295"]
"""The ids of a user namespace that is the first one (``user_namespaces(7)``)."""
_ENDING_SECONDS = 10.0
"""How long the phosd of a container that was killed may take to end."""
_LOOK_SECONDS = 0.1
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FIRST = 1
_LIMITS = ("NOFILE", "MEMLOCK", "NPROC", "CORE", "SIGPENDING", "MSGQUEUE", "RTPRIO", "NICE")
_DESCRIPTORS = 524288
"""As in ``phosd.service``: parked memory takes one for each block."""
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    try:
        require_rights()
        with opened(HOME, SHARE) as (home, share):
            enter_host()
            require_host()
            hold_lock()
            install(home, share)
        mount_hooks()
        supervise()
        leave_cgroups()
        raise_limits()
    except PhosError as error:
        sys.exit(f"phosd does not start from its image: {error}")
    os.execv(PROGRAM, [str(PROGRAM), *sys.argv[1:]])


def supervise() -> None:
    """Return in a child, which ends with this process at the latest. This process stays what the
    container's runtime signals: it passes signals on, and exits as the child does.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *_PASSED_ON})
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        privileges.end_with(parent)
        return
    while True:
        number = signal.sigwait({signal.SIGCHLD, *_PASSED_ON})
        if number != signal.SIGCHLD:
            os.kill(child, number)
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            sys.exit(code if code >= 0 else 128 - code)


def require_rights() -> None:
    """Raise :class:`Unsupported` for what the container lacks, or what restored programs would
    inherit of it.
    """
    own = procfs.status(os.getpid())
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split() != _INITIAL:
        raise Unsupported(
            "the container has a user namespace, or runs as another user than root",
            hint="start it as root, without user namespaces (not by rootless podman)",
            reason=Reason.CONTAINER,
        )
    try:
        alone = procfs.namespace(_FIRST, "mnt") == procfs.namespace(os.getpid(), "mnt")
    except OSError as error:
        raise _refused("mnt", error, "CAP_SYS_PTRACE") from error
    if alone:
        raise Unsupported(
            "the container has a pid namespace of its own, in which there are no programs to save",
            hint="start it with --pid=host (Kubernetes: hostPID)",
            reason=Reason.CONTAINER,
        )
    if own.seccomp:
        raise Unsupported(
            "a seccomp filter is on, which every restored program would inherit",
            hint="start the container with --security-opt=seccomp=unconfined",
            reason=Reason.CONTAINER,
        )


@contextmanager
def opened(*folders: Path) -> Iterator[list[Path]]:
    """Open folders of the image, in whose places the host's will be; paths that lead there."""
    found = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in folders]
    yield [Path(f"/proc/self/fd/{descriptor}") for descriptor in found]
    for descriptor in found:
        os.close(descriptor)


def enter_host() -> None:
    """Go on in the namespaces of the host's first process. Raises :class:`Unsupported`."""
    for kind in _KINDS:
        try:
            namespace = os.open(procfs.PROC / str(_FIRST) / "ns" / kind, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _refused(kind, error, "CAP_SYS_PTRACE") from error
        done = _libc.setns(namespace, 0)
        os.close(namespace)
        if done != 0:
            number = ctypes.get_errno()
            refusal = OSError(number, os.strerror(number))
            raise _refused(kind, refusal, "CAP_SYS_ADMIN and CAP_SYS_CHROOT")
    os.chdir("/")


def _refused(kind: str, error: OSError, capability: str) -> Unsupported:
    return Unsupported(
        f"the host's {kind} namespace cannot be entered: {error.strerror}",
        hint=f"give the container {capability}, and no AppArmor profile or SELinux label; "
        f"{_OPTIONS}",
        reason=Reason.CONTAINER,
    )


def require_host() -> None:
    """Raise :class:`Unsupported` if the host has a phosd that is not from an image."""
    if _PACKAGE.exists() or ((HOME / "python").exists() and not (HOME / MARK).exists()):
        raise Unsupported(
            f"the host has a phosd of its own in {HOME}",
            hint="remove its package (`apt remove phosd`), or do without the image",
            reason=Reason.CONTAINER,
        )


def hold_lock() -> None:
    """Take the lock, which the phosd that this process becomes holds until it ends. Raises
    :class:`Busy`.
    """
    _LOCK.parent.mkdir(mode=0o755, exist_ok=True)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    give_up = time.monotonic() + _ENDING_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise Busy(
                    "a phosd from an image runs on this host already",
                    hint="stop that container first; programs run on",
                ) from None
            time.sleep(_LOOK_SECONDS)
        else:
            os.set_inheritable(lock, True)
            return


def install(home: Path, share: Path) -> None:
    """Put these folders of the image on the host, unless it has this image. Raises
    :class:`Unsupported` if the host cannot be written, and :class:`Internal` if not to the end.
    """
    mark = (home / MARK).read_text()
    with suppress(FileNotFoundError):
        if (HOME / MARK).read_text() == mark:
            return
    try:
        writable = ETC if os.statvfs(SHARE).f_flag & os.ST_RDONLY else SHARE
        for name in _SETTINGS:
            (writable / name).parent.mkdir(parents=True, exist_ok=True)
            _put(share / name, writable / name)
        HOME.mkdir(parents=True, exist_ok=True)
        (HOME / MARK).write_text("unfinished\n")
        (HOME / "kept").mkdir(exist_ok=True)
        for path in (home / "kept").iterdir():
            if not (HOME / "kept" / path.name).exists():
                _put(path, HOME / "kept" / path.name)
        for path in home.iterdir():
            if path.name not in ("kept", MARK):
                _put(path, HOME / path.name)
        _put(home / MARK, HOME / MARK)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise Unsupported(
                f"{error.filename} of the host cannot be written: its file system is read-only",
                hint=f"mount one that can be written at the host's {HOME}, and start the container "
                "again",
                reason=Reason.CONTAINER,
            ) from error
        raise Internal(
            f"phosd could not be installed on the host: {error}",
            hint="make room there, and start the container again; programs are not touched",
        ) from error


def _put(source: Path, place: Path) -> None:
    """Copy a file, a link or a folder, and put it in its place when it is whole."""
    new, old = (place.with_name(f".{place.name}.{kind}") for kind in ("new", "old"))
    for left in (new, old):
        _remove(left)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, new, symlinks=True)
        if place.is_dir():
            place.rename(old)  # no folder takes the place of one with something in it
    else:
        shutil.copy2(source, new, follow_symlinks=False)
    new.rename(place)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mount_hooks() -> None:
    """Mount what ``run-phos-hook.mount`` mounts: every user may write to a folder there, and must
    not fill ``/run``. Sockets that are there already stay visible. Raises :class:`Unsupported`.
    """
    _HOOKS.mkdir(parents=True, exist_ok=True)
    if os.path.ismount(_HOOKS) or any(_HOOKS.iterdir()):
        return
    if _libc.mount(b"phos-hooks", bytes(_HOOKS), b"tmpfs", _NO_PRIVILEGES, _SMALL) != 0:
        raise Unsupported(
            f"{_HOOKS} cannot be mounted: {os.strerror(ctypes.get_errno())}",
            hint=f"give the container CAP_SYS_ADMIN; {_OPTIONS}",
            reason=Reason.CONTAINER,
        )


def leave_cgroups() -> None:
    """Leave the container's cgroups: its runtime ends all that is in them. But movers keep the
    memory of programs, CRIU must not be killed, and what was restored is no part of phosd.

    Raises :class:`Unsupported` if they cannot be written.
    """
    for hierarchy, path in cgroups.memberships(os.getpid()).items():
        place = cgroups.folder(hierarchy, f"/{CGROUP}")
        if place is None or path == f"/{CGROUP}":
            continue
        try:
            place.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):  # of v1: nobody enters without
                if hierarchy and (place / name).exists() and not (place / name).read_text().strip():
                    (place / name).write_text((place.parent / name).read_text())
            (place / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise Unsupported(
                f"phosd cannot leave the container's cgroup for {place}: {error.strerror}",
                hint=_OPTIONS,
                reason=Reason.CONTAINER,
            ) from error


def raise_limits() -> None:
    """Take the limits of the host's first process, which are the most that its programs had: those
    that are restored get theirs again. Raises :class:`Unsupported`.
    """
    for name in _LIMITS:
        kind = getattr(resource, f"RLIMIT_{name}")
        soft, hard = resource.getrlimit(kind)
        _, most = resource.prlimit(_FIRST, kind)
        if name == "NOFILE":
            soft = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
        try:
            resource.setrlimit(kind, (soft, most))
        except (OSError, ValueError) as error:
            raise Unsupported(
                f"a restored program could not have the host's limits ({name.lower()}: {most}, the "
                f"container's {hard})",
                hint="give the container CAP_SYS_RESOURCE, or --ulimit=host",
                reason=Reason.CONTAINER,
            ) from error


if __name__ == "__main__":
    main()
