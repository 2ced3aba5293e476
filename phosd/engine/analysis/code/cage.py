"""Become a command that can do little: a script of its own, which imports nothing of phosd.

    cage.py PROCESSOR_SECONDS MEMORY_BYTES OUTPUT_BYTES COMMAND...

The command gives way to what else wants to run, has limits on what it uses, ends with its parent,
and leaves nothing behind. It can neither make sockets and processes nor look into other processes.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_PRCTL = 157
_IOPRIO_SET, _IOPRIO_WHO_PROCESS, _IOPRIO_IDLE = 251, 1, 3 << 13

_X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000  # the bit of the numbers of another ABI
_CLONE, _FORK, _VFORK, _CLONE3 = 56, 57, 58, 435
_THREAD, _NEW_USER = 0x00010000, 0x10000000
_DENIED = (
    *(41, 53),  # socket, socketpair
    *(101, 310, 311, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    *(165, 272, 308),  # mount, unshare, setns
    *(248, 249, 250),  # add_key, request_key, keyctl
    *(298, 321, 323, 425),  # perf_event_open, bpf, userfaultfd, io_uring_setup
    *(29, 64, 68, 240),  # shmget, semget, msgget, mq_open: what they make stays
)
_UNBOUNDED = 319, 447  # memfd_create, memfd_secret: such memory is not in the limit
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _FAIL, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_DENY = _FAIL | errno.EPERM
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_VERSION = 1  # a flag
_CHANGES = 0x1FF2  # write to a file; remove, or make, a file or folder of any kind
_TRUNCATE, _SINCE_3, _SIGNALS, _SINCE_6 = 1 << 14, 3, 1 << 1, 6
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
_SECOND_ARGUMENT_AT = 24

IDS = range(61184, 65520)
"""systemd's range of dynamic user ids."""
_MOST_THREADS = 256
_NICE = 10
"""A weight of 110, where others have 1,024 (sched_prio_to_weight in Linux)."""


def give_way() -> None:
    """Take a tenth of a processor that others want, the disk when nobody else does, and be ended
    first for memory.

    Not SCHED_IDLE: beside busy processes that is three thousandths of a processor, and on a node
    whose processors are all busy, as many trainings have them, no analysis would come to its end.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.sched_getscheduler(0) == os.SCHED_OTHER:  # from SCHED_IDLE the way back takes rights
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    ctypes.CDLL(None).syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
    with open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")


def limit(seconds: int, memory: int, output: int) -> None:
    """Use no more than this: processor seconds, bytes of address space and of each file. A
    process that has an id of its own, or is going to, is bounded in threads, too: these count in
    the limit of phosd's service.
    """
    for name, value, more in (
        (resource.RLIMIT_CPU, seconds, 5),  # SIGXCPU comes before SIGKILL, and tells why
        (resource.RLIMIT_AS, memory, 0),
        (resource.RLIMIT_FSIZE, output, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, 64, 0),
        *([(resource.RLIMIT_NPROC, _MOST_THREADS, 0)] if os.getuid() in (0, *IDS) else ()),
    ):
        most = resource.getrlimit(name)[1]
        hard = value + more if most == resource.RLIM_INFINITY else min(value + more, most)
        resource.setrlimit(name, (min(value, hard), hard))


def confine() -> None:
    """Never get new rights, a socket, another namespace, or another process's memory, and change no
    file: a filter of system calls, since a sandbox around phosd may forbid it to make namespaces.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        _fail("forbid new rights")
    _keep_to_itself()
    _filter(_DENIED, _NEW_USER, with_flag=_DENY, without=_ALLOW)


def stay_alone() -> None:
    """Start no other process, which would go on when this one has ended, do not go on when the
    parent has ended, and do nothing to it; threads may be started. :func:`confine` and
    :func:`end_with` come before.
    """
    _keep_to_itself()
    denied = _FORK, _VFORK, *_UNBOUNDED
    _filter(denied, _THREAD, with_flag=_ALLOW, without=_DENY)


def _keep_to_itself() -> None:
    """Make, change and remove no file, and send signals to no other process, but those that this
    one starts: by Landlock, if the kernel has it. Open files can be written to, and memory files.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return
    files = _CHANGES | (_TRUNCATE if version >= _SINCE_3 else 0)
    rules = struct.pack("<Q", files)
    if version >= _SINCE_6:
        rules = struct.pack("<QQQ", files, 0, _SIGNALS)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset < 0 or libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
        _fail("forbid changes of files")
    os.close(ruleset)


def _filter(denied: "tuple[int, ...]", flag: int, *, with_flag: int, without: int) -> None:
    """Deny system calls by their numbers, and what undoes :func:`end_with`; ``clone`` goes by
    whether it has a flag.
    """
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _DENY),
    ]
    for number in denied:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY)]
    steps += [
        (_EQUAL, 0, 6, _PRCTL),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_EQUAL, 0, 3, _PR_SET_PDEATHSIG),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_EQUAL, 1, 0, signal.SIGKILL),
        (_RETURN, 0, 0, _DENY),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    steps += [  # clone3's flags are in memory, where a filter cannot look: libc takes clone then
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 0, 1, flag),
        (_RETURN, 0, 0, with_flag),
        (_RETURN, 0, 0, without),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = struct.pack("<H6xQ", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        _fail("forbid system calls")


def end_with(parent: int) -> None:
    """Be killed when the parent ends, or end now if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _fail("be tied to the parent")
    if os.getppid() != parent:
        sys.exit("the parent has ended")


def main() -> None:
    parent = os.getppid()
    give_way()
    limit(*map(int, sys.argv[1:4]))
    confine()
    end_with(parent)
    stay_alone()
    os.execv(sys.argv[4], sys.argv[4:])


def _fail(what: str) -> None:
    sys.exit(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
