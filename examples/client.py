"""Save a program that uses a GPU, end it, and run it again from where it was.

    python examples/client.py            list the programs that use a GPU, and the images
    python examples/client.py PROGRAM    checkpoint the program of that pid or name, end it, and
                                         restore it

The program must have been started with `phos run`, and phosd must run. Say where it is with
PHOS_BUS if it is not on the system bus.
"""

import sys

from phosd.client import Client, Job
from phosd.errors import PhosError


def show(job: Job) -> None:
    """Show how far a job is; called at each change."""
    done = "" if job.progress is None else f"{job.progress:4.0%}"
    stands = "the program stands still" if job.stopped else ""
    print(f"  {job.operation:<11}{job.phase or job.state:<11}{done:<6}{stands}".rstrip())


def list_all(client: Client) -> None:
    for process in client.processes():
        size = process.device_bytes / 2**20
        print(f"{process.pid:>8}  {process.hook:<12}{size:8.1f} MiB  {' '.join(process.command)}")
    for image in client.images():
        print(f"{image.id}  of process {image.pid}, {image.stored_bytes / 2**20:.1f} MiB")


def find(client: Client, program: str) -> int:
    """Return the pid of a program: this is one, or a name that `phos run --name` has given."""
    if program.isdigit():
        return int(program)
    named = [process.pid for process in client.processes() if process.name == program]
    if not named:
        sys.exit(f"no program is called {program}; {sys.argv[0]} alone lists those that run")
    return min(named)


def save_and_restore(client: Client, pid: int) -> None:
    # Nothing is stopped yet: this says what would stand in the way.
    for check in client.try_checkpoint(pid, then="end"):
        print(f"  {check.what}: {check.text or check.error or 'nothing in the way'}")
    saved = client.checkpoint(pid, then="end").wait(show)
    print(f"process {pid} is saved as {saved.result}, and has ended")
    image = client.image(saved.result)
    print(f"it takes {image.stored_bytes / 2**20:.1f} MiB on the disk")
    restored = client.restore(image.id).wait(show, timeout=600)
    print(f"process {restored.result} goes on from there")


def main() -> int:
    try:
        with Client() as client:
            if len(sys.argv) > 1:
                save_and_restore(client, find(client, sys.argv[1]))
            else:
                list_all(client)
    except PhosError as error:
        # `code` and `reason` are for programs, the text says what happened and what to do.
        reason = f", {error.reason}" if error.reason else ""
        print(f"{error} ({error.code}{reason})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
