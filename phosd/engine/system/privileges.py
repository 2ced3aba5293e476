"""Run a command, or this process, with the ids of a program's owner instead of those of root.

Files that a restore opens, cuts or creates must be opened as the user who owns the program: root
would follow a path that the user has since pointed at another user's file. As a script, this file
takes the ids from a JSON object and becomes the command. It imports nothing of phosd, so that it
starts in milliseconds and can be reviewed alone.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum


class Capability(IntEnum):
    """Capabilities that CRIU may have for a user's program, as in ``linux/capability.h``.

    No others: the user can get hold of CRIU's memory at any moment.
    """

    SYS_PTRACE = 19
    CHECKPOINT_RESTORE = 40


LOGINUID = "/proc/self/loginuid"
NO_LOGINUID = 0xFFFFFFFF
"""What the kernel says of a process that no login has begun."""
EXECUTE = 0o001
"""A permission bit, as a file's mode has it for others."""

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PID_AND_MOUNTS = 0x20000000 | 0x00020000
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_WORDS = struct.Struct("6I")
"""The low words of the effective, permitted and inheritable set, and then the high ones."""
_KEYCTL, _JOIN_SESSION_KEYRING = 250, 1  # x86-64

_libc = ctypes.CDLL(None, use_errno=True)


def become(
    uid: int,
    gid: int,
    groups: Iterable[int],
    capabilities: Iterable[Capability] = (),
    bounding: int | None = None,
) -> None:
    """Give up root for good: take the ids, and keep only ``capabilities``, also across an exec.
    Root's keys are left, too, which root's session keyring would give to whoever has it.

    ``bounding`` is the mask of the bounding set; without it, the set stays as it is. CRIU passes it
    to what it restores, and a program restored with less than it had crashes. Call it in a process
    with one thread. Raises :class:`OSError`.
    """
    kept = sorted(set(capabilities))
    mask = sum(1 << capability for capability in kept)
    _leave_session_keyring()
    if bounding is not None:
        # Once a capability is missing in the bounding set, nobody can make it inheritable, and
        # what is not inheritable cannot be kept across an exec.
        effective, permitted, inheritable = _capability_sets()
        _set_capabilities(effective, permitted, inheritable | mask)
        limit_bounding_set(bounding)
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1 if kept else 0, 0, 0, 0), "keep capabilities")
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _set_capabilities(mask, mask, mask)
    for capability in kept:
        raised = _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, int(capability), 0, 0)
        _check(raised, f"pass on {capability.name}")


def _capability_sets() -> tuple[int, int, int]:
    """Return the masks of the effective, permitted and inheritable set."""
    data = ctypes.create_string_buffer(_CAPABILITY_WORDS.size)
    _check(_libc.capget(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), data), "read capabilities")
    words = _CAPABILITY_WORDS.unpack(data.raw)
    effective, permitted, inheritable = (words[at] | words[at + 3] << 32 for at in range(3))
    return effective, permitted, inheritable


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    sets = (effective, permitted, inheritable)
    words = [*(each & 0xFFFFFFFF for each in sets), *(each >> 32 for each in sets)]
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, _CAPABILITY_WORDS.pack(*words)), "set capabilities")


def _leave_session_keyring() -> None:
    """Get a session keyring of our own: as root, since a user may have used up the own quota."""
    if _libc.syscall(_KEYCTL, _JOIN_SESSION_KEYRING, None) < 0:
        number = ctypes.get_errno()
        # A container forbids all to do with keys, to programs in it as well.
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, f"cannot leave root's session keyring: {os.strerror(number)}")


def _leave_oom_score(uid: int) -> None:
    """Take the OOM score of an ordinary process, if this one has a lower one. Where root has
    written it, nobody else can take a lower one again; where a user has, down to that which root
    wrote before.
    """
    score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    if int(os.read(score, 16)) < 0:
        os.seteuid(uid)
        os.write(score, b"0")
        os.seteuid(0)
    os.close(score)


def take_loginuid(loginuid: int) -> None:
    """Take an audit identity, which what this process starts inherits: the uid with which its user
    has logged in. The kernel lets a process that has none take any, and one that has one take
    another with CAP_AUDIT_CONTROL at the most.

    Where the kernel has no audit, nobody has one. Raises :class:`OSError` if it cannot be taken;
    if that is :data:`NO_LOGINUID`, the other one stays, which says more of who has begun this.
    """
    try:
        file = os.open(LOGINUID, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        if int(os.read(file, 16)) != loginuid:
            os.pwrite(file, str(loginuid).encode(), 0)
    except PermissionError as error:
        if loginuid != NO_LOGINUID:
            raise PermissionError(
                error.errno,
                f"cannot take the audit identity (loginuid) {loginuid}, for which phosd needs "
                "CAP_AUDIT_CONTROL, or to be started by systemd",
            ) from error
    finally:
        os.close(file)


def drop_from_bounding_set(capability: int) -> None:
    """Never have this capability again, nor what this process starts. Raises :class:`OSError`."""
    _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), f"drop capability {capability}")


def limit_bounding_set(kept: int) -> None:
    """Drop from the bounding set what is not in the mask ``kept``.

    Raises :class:`OSError`, also if something of ``kept`` is missing: nobody gets it back.
    """
    own, number = 0, 0
    while (there := _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:  # the kernel knows it
        own |= there << number
        number += 1
    if lacking := kept & ~own:
        numbers = [str(each) for each in range(lacking.bit_length()) if lacking >> each & 1]
        raise OSError(
            errno.EPERM,
            "what starts CRIU lacks capabilities that the program has in its bounding set "
            f"(numbers {', '.join(numbers)} of linux/capability.h)",
        )
    for capability in range(number):
        if own & ~kept & 1 << capability:
            drop_from_bounding_set(capability)


def enter(process: int) -> int:
    """Go on in the pid and mount namespaces of a process, given by a pidfd, as a child of this one.

    This process stays outside, and ends as its child does. Returns a descriptor for
    :func:`end_with_outside`.
    """
    _check(_libc.setns(process, _PID_AND_MOUNTS), "enter the program's namespaces")
    os.close(process)
    outside, inside = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(inside)
        return outside
    os.close(outside)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end_with_outside(outside: int) -> None:
    """Be killed when the process outside ends, or now if it has. A change of ids undoes it."""
    die_with_parent()
    os.set_blocking(outside, False)
    try:
        os.read(outside, 1)
    except BlockingIOError:  # it is there
        return
    sys.exit(1)


def may(permission: int, path: "os.PathLike[str]", uid: int, groups: Sequence[int]) -> bool:
    """Return whether the mode of ``path`` gives a permission to a user who is not root."""
    status = os.stat(path)  # noqa: PTH116
    if status.st_uid == uid:
        return bool(status.st_mode & permission << 6)
    if status.st_gid in groups:
        return bool(status.st_mode & permission << 3)
    return bool(status.st_mode & permission)


def open_for_appending(path: str, *, uid: int, gid: int, groups: Sequence[int]) -> int:
    """Open or create ``path`` with this user's rights, then be root again.

    The kernel drops root's capabilities while the effective user is another. Call it in a process
    with one thread. Raises :class:`OSError`, also of a pipe without a reader.
    """
    before = os.getgroups()
    os.setgroups(list(groups))
    os.setegid(gid)
    os.seteuid(uid)
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NOCTTY
        file = os.open(path, flags | os.O_NONBLOCK, 0o600)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
    os.set_blocking(file, True)
    return file


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal (0: none) when the parent ends. A change of ids clears it."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "tie to the parent")


def end_with(parent: int) -> None:
    """Be killed when ``parent`` ends, or now if it has: the kernel signals later ends only."""
    die_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")


def command(
    words: Sequence[str],
    *,
    uid: int,
    gid: int,
    groups: Sequence[int],
    capabilities: Iterable[Capability] = (),
    bounding: int | None = None,
    dies_with_parent: bool = False,
    environment: Mapping[str, str] | None = None,
    inside: int | None = None,
    as_others: bool = False,
    bounded: bool = False,
    loginuid: int | None = None,
) -> list[str]:
    """Return the command line that runs ``words`` as this user.

    It keeps ``capabilities``; root keeps all. ``bounding``: the mask of its bounding set, see
    :func:`become`. ``environment`` is added to that of ``words``.
    ``inside``: an inherited pidfd, of a process in whose pid and mount namespaces they run, and
    which no user can move into others. ``as_others``: it is ended for its memory like any other
    process, not as late as phosd, unless it says otherwise. ``bounded``: nor may it say so, nor get
    a priority above others'. ``loginuid``: its audit identity, if not phosd's
    (:func:`take_loginuid`).
    """
    orders = {
        "uid": uid,
        "gid": gid,
        "groups": list(groups),
        "capabilities": [int(capability) for capability in capabilities],
        "bounding": bounding,
        "dies_with_parent": dies_with_parent,
        "environment": dict(environment or {}),
        "inside": inside,
        "as_others": as_others,
        "bounded": bounded,
        "loginuid": loginuid,
    }
    return [sys.executable, "-I", "-S", __file__, json.dumps(orders), *words]


def main() -> None:
    parent = os.getppid()
    orders, words = json.loads(sys.argv[1]), sys.argv[2:]
    outside = None if orders["inside"] is None else enter(orders["inside"])
    if orders["as_others"]:
        _leave_oom_score(0 if orders["bounded"] else orders["uid"])
    if orders["bounded"]:
        for limit in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
            resource.setrlimit(limit, (0, 0))
    if orders["loginuid"] is not None:
        take_loginuid(orders["loginuid"])
    if orders["uid"] != 0 or orders["gid"] != 0:
        kept = map(Capability, orders["capabilities"])
        become(orders["uid"], orders["gid"], orders["groups"], kept, orders["bounding"])
    if outside is not None:
        end_with_outside(outside)
    elif orders["dies_with_parent"]:
        end_with(parent)
    os.execve(words[0], words, {**os.environ, **orders["environment"]})


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
