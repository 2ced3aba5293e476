"""Find programs under Landlock rules, which no checkpoint can save and the kernel tells nobody.

A process in a Landlock domain may not look at processes outside of it, not even at its own user's.
So the hook looks at a process that is started for this.
"""

import contextlib
import subprocess
from collections.abc import Iterator

from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.tree import TreeProcess
from phosd.engine.system import procfs
from phosd.errors import Internal, NoSuchProcess, Reason, Unsupported


def require_none(group: CheckpointGroup, progress: Progress) -> None:
    """Raise :class:`Unsupported` if the hook of a process in the group is under Landlock rules.

    Of processes without the hook this is not known, nor of threads that came under rules after the
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
            with _bystander(process) as pid, HookLink(process.pid, group.runtime_dir) as link:
                free = link.may_see(pid)
        except Internal as error:  # a hook that does not know the question
            progress.note(f"Landlock rules of process {process.pid} are not looked for: {error}")
            continue
        if not free:
            raise Unsupported(
                f"{procfs.describe(process.pid)} is under Landlock rules, which a restore would "
                "not give back",
                hint="the program goes on; start it without its sandbox to have it saved",
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
def _bystander(process: TreeProcess) -> Iterator[int]:
    """Run a process with the ids of ``process`` that does nothing; yields its pid."""
    with subprocess.Popen(
        ["/bin/sleep", "60"],
        cwd="/",
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=process.uid,
        group=process.gid,
        extra_groups=process.groups,
    ) as started:
        try:
            yield started.pid
        finally:
            started.kill()
