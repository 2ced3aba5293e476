"""Find programs under Landlock rules, which no checkpoint can save and the kernel tells nobody.

A process in a Landlock domain may not look at processes outside of it, not even at its own user's.
So the hook looks at a process that is started for this.
"""

import contextlib
import os
import select
from collections.abc import Iterator

from phosd.engine.criu.run import launch
from phosd.engine.criu.run.program import Criu
from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.tree import TreeProcess
from phosd.engine.system import privileges, procfs
from phosd.errors import Internal, NoSuchProcess, Reason, Timeout, Unsupported

_ANSWER_MILLISECONDS = 10_000
_LONGEST = 16
"""Bytes that are read of what a bystander tells."""


def require_none(criu: Criu, group: CheckpointGroup, progress: Progress) -> None:
    """Raise :class:`Unsupported` if the hook of a process in the group is under Landlock rules.

    This is not known of processes without the hook, nor of threads that came under rules after the
    first ``cuInit``. A note says where it was not looked for: under seccomp filters, and when an
    older hook does not know the question.
    """
    members = {member.pid for member in group.members if member.link is not None}
    for process in (each for tree in group.trees for each in tree if each.pid in members):
        credentials = _credentials(process)
        if process.uid != 0 and not credentials.no_new_privileges:
            continue  # the kernel would not have let it take rules
        if credentials.seccomp_mode:  # the filters may end whoever looks
            progress.note(f"Landlock rules of process {process.pid} are not looked for: seccomp")
            continue
        try:
            with _bystander(criu, process) as pid, HookLink(process.pid, group.runtime_dir) as link:
                free = link.may_see(pid)
        except ProcessLookupError:
            continue  # it has ended, which is found later
        except Internal as error:  # a hook that does not know the question
            progress.note(f"Landlock rules of process {process.pid} are not looked for: {error}")
            continue
        if not free:
            raise Unsupported(
                f"{procfs.describe(process.pid)} is under Landlock rules, which a restore would "
                "not give back",
                hint="the program goes on; start it without its sandbox to save it",
                reason=Reason.LANDLOCK,
            )


def _credentials(process: TreeProcess) -> procfs.Credentials:
    try:
        return procfs.credentials(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        raise NoSuchProcess(
            f"process {process.pid} has ended", hint="see its output for the reason"
        ) from None


@contextlib.contextmanager
def _bystander(criu: Criu, process: TreeProcess) -> Iterator[int]:
    """Run a process with the ids of ``process``, and in its pid namespace, that does nothing.

    Yields the pid by which ``process`` knows it.
    """
    with contextlib.ExitStack() as opened:
        inside = criu.inside(process)
        entrance = [] if inside is None else [inside.entrance()]
        for each in entrance:
            opened.callback(os.close, each)
        told, tell = os.pipe()
        opened.callback(os.close, told)
        os.fchown(tell, process.uid, -1)  # it is opened anew there
        words = privileges.command(
            ["/bin/sh", "-c", 'echo $$ >"$0"; exec sleep 60', f"/proc/self/fd/{tell}"],
            uid=process.uid,
            gid=process.gid,
            groups=process.groups,
            dies_with_parent=True,
            inside=next(iter(entrance), None),
        )
        try:
            started = launch.launch(words, (tell, *entrance), criu.service, tied=True)
        finally:
            os.close(tell)
        opened.callback(started.close)
        opened.callback(started.kill)
        yield _told(told, process)


def _told(told: int, process: TreeProcess) -> int:
    """Return the pid that a bystander has told, which its user may stop, or have say anything."""
    poller = select.poll()
    poller.register(told, select.POLLIN)
    if not poller.poll(_ANSWER_MILLISECONDS):
        raise Timeout(
            f"a process of user {process.uid} does not run, which was started to look whether "
            f"{procfs.describe(process.pid)} is under Landlock rules",
            hint="somebody with that user's rights may have stopped it; try again",
        )
    number, _, _ = os.read(told, _LONGEST).partition(b"\n")
    if not number.isdigit():
        raise NoSuchProcess(
            f"process {process.pid} has ended", hint="see its output for the reason"
        )
    return int(number)
