"""The first process of a pid namespace that phosd makes: it starts a program, and waits for that.

Two processes of root's make a namespace: the first one stays outside and tells phosd the pid of the
second, the keeper, which is pid 1 inside. phosd records the namespace before the keeper does
anything. From then on the keeper is a process of the program's user, in the program's cgroup. It
collects what the program leaves behind, and when nothing is left, it ends, and the namespace with
it. Signals that it has no handler for do not reach it: it ends by SIGKILL alone.

As a script, this file starts a program for ``phos run``, which has told phosd the name of a socket.
The keeper connects to it, with its user's rights, and is told the command, the environment and the
paths of the output: what was opened outside could not be saved inside. A restore has its own script
(:mod:`phosd.engine.criu.restore.restore_shim`).
"""

import contextlib
import errno
import fcntl
import json
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from phosd import unix_sockets
from phosd.engine.program.own_proc import MS_BIND, MS_REC, MS_SLAVE, check, libc, mount, mount_proc
from phosd.engine.system.privileges import (
    become,
    die_with_parent,
    drop_from_bounding_set,
    open_for_appending,
    take_loginuid,
)

_NEW_PID, _NEW_MOUNTS = 0x20000000, 0x00020000
_NEW_NETWORK, _NEW_IPC = 0x40000000, 0x08000000
_SET_FLAGS, _UP = 0x8914, 0x41
"""``SIOCSIFFLAGS``, and the flags of an interface that is up and runs (``linux/if.h``)."""
_ANY_ADDRESS = ("ipv4", "ipv6")
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 8 << 20
"""execve(2) takes less."""
_TIMEOUT = 30.0
_ROOM = 1000
"""Ids that CRIU needs at a restore, at the most."""
_CHUNK = 1 << 16
_MOST_LEFT = 1000


class Making:
    """Makes namespaces in this process and its child: see the module.

    ``orders`` are those of :attr:`phosd.engine.program.namespace_maker.NamespaceMaker.orders`.
    """

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders = orders
        self._ids = -1
        self._tied, self._tie = os.pipe()
        self._apart = bool(orders.get("apart"))
        kinds = _NEW_PID | _NEW_MOUNTS | (_NEW_NETWORK | _NEW_IPC if self._apart else 0)
        check(libc.unshare(kinds), "make a pid namespace")

    def tell(self, keeper: int) -> None:
        """Tell phosd the pid of the keeper, a child, when that is sure to end with this process."""
        os.close(self._tie)
        if os.read(self._tied, 1):
            os.write(self._orders["told"], f"{keeper}\n".encode())
        os.close(self._tied)

    def keep(self) -> None:
        """Go on as the keeper, when phosd has recorded that. Raises :class:`OSError`."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with_parent()
        os.close(self._tied)
        os.write(self._tie, b"t")
        os.close(self._tie)
        told = os.read(self._orders["go"], 16)
        for number in (self._orders["go"], self._orders["told"]):
            os.close(number)  # CRIU, which is the user's, must not have them
        if not told:
            sys.exit(1)  # phosd has ended
        outside = int(told)
        mount("", "/", "", MS_REC | MS_SLAVE)
        if self._apart:  # nothing of the program ever runs here
            self._ids = mount_proc(self._orders["hooks"])
            open_network()
            self._begin_ids_after(_clear_of(self._orders["ids"]))
            return
        own = Path(self._orders["places"]) / str(Path("/proc/self/ns/pid").stat().st_ino)
        _make_anew(own)
        own.chmod(0o1777)  # as the other one
        self._ids = mount_proc(self._orders["hooks"])
        if self._orders.get("comm"):
            Path("/proc/self/comm").write_text(self._orders["comm"])
        mount(str(own), self._orders["hooks"], "", MS_BIND)
        taken: list[int] = self._orders["ids"]
        # Ids of different namespaces are seldom the same, which is not needed, but good to read.
        self._begin_ids_after(_clear_of(taken) if taken else outside)

    def settle(self) -> None:
        """Give the program's next processes the ids that they would have got before."""
        taken: list[int] = self._orders["ids"]
        if taken:
            self._begin_ids_after(max(taken))

    def _begin_ids_after(self, number: int) -> None:
        os.pwrite(self._ids, str(number).encode(), 0)


def open_network() -> None:
    """Bring up a new network's loopback interface, and allow any address to be bound to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    for family in _ANY_ADDRESS:
        # IPv6 may be switched off, and a container may forbid it: then only its own are bound to.
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/{family}/ip_nonlocal_bind").write_text("1")


def _make_anew(folder: Path) -> None:
    """Make a folder. A namespace that has ended may have had this number."""
    left = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.old")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(left)
        # What its users made there beside sockets waits for phosd's next start.
        with os.scandir(left) as entries:
            for entry in islice(entries, _MOST_LEFT):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108
        with contextlib.suppress(OSError):
            left.rmdir()
    folder.mkdir(mode=0o755)


def _clear_of(taken: Collection[int]) -> int:
    """Return an id after which many are free."""
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    before = 1
    for each in (*sorted(taken), most):
        if each - before > _ROOM:
            return before
        before = each
    return max(taken)


def hold(
    child: int | None,
    inputs: Collection[int] = (),
    output: int | None = None,
    ended: Callable[[int], None] = lambda _status: None,
) -> None:
    """Pass on to ``output`` what is read from the ``inputs``, and collect all processes that have
    ended, until both are over. ``ended`` is called with the wait status of ``child``.
    """
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    poller = select.poll()
    for descriptor in (woken, *inputs):
        poller.register(descriptor, select.POLLIN)
    left = set(inputs)
    children = True
    while left or children:
        children = _collect(child, ended)
        for descriptor, _ in poller.poll() if left or children else ():
            try:
                data = os.read(descriptor, _CHUNK)
            except OSError:  # EIO: all have closed the terminal
                data = b""
            if descriptor == woken:
                continue
            if not data:
                poller.unregister(descriptor)
                left.discard(descriptor)
                os.close(descriptor)
            elif output is not None:
                write(output, data)


def _collect(child: int | None, ended: Callable[[int], None]) -> bool:
    """Collect those that have ended. Returns whether others are left."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            if pid == child:
                ended(status)
    return False


def write(output: int, data: bytes) -> None:
    """Write ``data``. What does not fit on the disk is lost: the program must not stop."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(output, data) :]


def note_end(end: int | None, status: int) -> None:
    """Write to the file ``end`` how a process has ended: ``exit CODE`` or ``signal NUMBER``."""
    if end is not None:
        code = os.waitstatus_to_exitcode(status)
        write(end, f"exit {code}\n".encode() if code >= 0 else f"signal {-code}\n".encode())


def close_all_but(kept: Collection[int | None]) -> None:
    """Close what was inherited; the standard descriptors lead nowhere."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if descriptor not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor, closed by now
                os.close(descriptor)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard not in kept:
            os.dup2(null, standard)
            os.set_inheritable(standard, True)  # also where it is the one that was opened


# -- a program's first start -----------------------------------------------------------------------


def main() -> None:
    orders = json.loads(sys.argv[1])
    making = Making(orders["namespace"])
    waits, ready = os.pipe()
    keeper = os.fork()
    if keeper != 0:
        os.close(ready)
        making.tell(keeper)
        sys.exit(0 if os.read(waits, 1) else 1)  # it has said why
    os.close(waits)
    making.keep()
    os.setsid()
    uid, gid, groups = orders["user"]
    end = None
    if orders["end"]:
        end = open_for_appending(orders["end"], uid=uid, gid=gid, groups=groups)
    _limit(orders["caller"])
    if orders["caller"]["loginuid"] is not None:
        take_loginuid(orders["caller"]["loginuid"])
    become(uid, gid, groups)
    die_with_parent(0)
    os.chdir("/")
    os.write(ready, b"r")
    close_all_but({end})
    program = _start(orders["socket"])
    hold(program, ended=partial(note_end, end))


def _limit(caller: Mapping[str, Any]) -> None:
    """Take the limits of the process that has asked: its program must not have more."""
    for name, (soft, hard) in caller["limits"].items():
        _, most = resource.getrlimit(int(name))
        try:
            resource.setrlimit(int(name), (soft, hard))
        except ValueError:  # without CAP_SYS_RESOURCE
            resource.setrlimit(int(name), (soft if 0 <= soft <= most else most, most))
    os.sched_setaffinity(0, caller["cpus"])
    if caller["scheduler"] in (os.SCHED_BATCH, os.SCHED_IDLE):  # the others are no less than ours
        os.sched_setscheduler(0, caller["scheduler"], os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, caller["nice"])
    Path("/proc/self/oom_score_adj").write_text(str(caller["oom_score"]))
    for capability in caller["without"]:
        drop_from_bounding_set(capability)


def _start(name: str) -> int:
    """Start the program that is told by the abstract socket ``name``. Returns its pid.

    The child sends its credentials, which have its pid as ``phos run`` sees it; then, if the
    command cannot be executed, why. When it is executed, the socket is closed.
    """
    asking = _connected(name)
    try:
        order = _receive(asking)
    except BaseException:
        unix_sockets.close(asking)
        raise
    with asking:
        pid = os.fork()
        if pid == 0:
            _execute(asking, order)
        return pid


def _connected(name: str) -> socket.socket:
    asking = unix_sockets.unix_socket()
    try:
        # Anybody may connect, and fill the queue. Python's timeout would not wait for a place.
        seconds = struct.pack("ll", int(_TIMEOUT), 0)
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        asking.connect(f"\0{name}")
        asking.settimeout(_TIMEOUT)
        _, user = unix_sockets.peer_of(asking)
        if user not in (0, os.getuid()):
            raise PermissionError(errno.EPERM, "another user answers", name)
    except BaseException:
        unix_sockets.close(asking)
        raise
    return asking


def _receive(asking: socket.socket) -> dict[str, Any]:
    data = b""
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        more = unix_sockets.receive(asking, _CHUNK)
        if not more or len(data) > _MOST_BYTES:
            raise OSError(0, "phos run has ended, or sent too much")
        data += more
    order: dict[str, Any] = json.loads(data[_LENGTH.size :])
    return order


def _execute(asking: socket.socket, order: Mapping[str, Any]) -> NoReturn:
    words = [os.fsencode(word) for word in order["words"]]
    variables = {os.fsencode(k): os.fsencode(v) for k, v in order["environment"].items()}
    try:
        os.setsid()
        ids = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
        asking.sendmsg([b"p"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, ids)])
        os.chdir(order["folder"])
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        for number, name in ((1, "stdout"), (2, "stderr")):
            # Append-only, since CRIU restores such files even if they have grown.
            file = os.open(order[name], flags, 0o600)
            os.dup2(file, number)
            os.close(file)
        os.umask(order["umask"])
        for number in order["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        for number in {signal.SIGPIPE, signal.SIGXFSZ} - {*order["ignored"]}:
            signal.signal(number, signal.SIG_DFL)  # Python ignores them
        os.execvpe(words[0], words, variables)
    except OSError as error:
        asking.send(b"%d" % (error.errno or errno.ENOEXEC))
    finally:
        os._exit(127)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
