"""Take part in a Slurm job that was submitted with ``--phos=save``.

There ``phos run`` saves its program when the job is to end, requeues the job, and goes on with
the program when the job runs again. The option comes from ``phosd/slurm_plugin``. Slurm sends its
signals to the first process of each task, and ends, accounts and limits what is in the cgroup of
the step: so `phos run` is that process, and its program is in that cgroup. The first process of a
batch script is its shell, so that there `phos run` starts itself as a step of its own.
"""

import hashlib
import itertools
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from phosd.cli.run_command import job_images
from phosd.cli.run_command.job_images import JobImages, Saved
from phosd.cli.run_command.relay import SAVED
from phosd.cli.run_command.scontrol import (
    SlurmError,
    address_of,
    end_script,
    is_preempted,
    job_fields,
    release,
    scontrol,
)
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.engine.system.slurm_steps import step_of

if TYPE_CHECKING:
    from phosd.client import Client, Image

_OUTPUTS = "PHOS_SLURM_OUTPUTS"
"""Where a step of a batch script writes to, which is told by the script: a list in JSON."""
_IMAGES = "PHOS_SLURM_IMAGES"
_KEY = "PHOS_SLURM_KEY"
"""What a job was submitted with besides: `--phos-images`, `--phos-key`."""
_WISHES = ("save", "none")
_SECONDS = 30.0
"""How long the controller may take to answer: it may be busy with many jobs at once."""
_AGAIN_SECONDS = 5.0
_MOMENT = 0.2
_RUNS = ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "CONFIGURING")
"""The states of a job that has not been ended."""
_PREEMPTED_IF_ENDED = (24, 5)
"""From this release on Slurm requeues a job that ends in the grace of its preemption, and one that
was requeued in it a second time, whenever it ends next."""


@dataclass(frozen=True)
class SavingStep:
    """The step of a job that is to be saved. ``address`` is what the controller knows the job by,
    ``run`` how often it was requeued.
    """

    job: str
    address: str
    run: str
    node: str
    images: JobImages | None
    """Where images go besides this node."""

    @contextmanager
    def part_of_job(
        self, name: str | None, words: Sequence[str], settings: Settings
    ) -> Iterator[str]:
        """Requeue the job if the program that runs in this context is saved in it. Yields the
        program's name: the ``name`` that it was given, or one by its job and its ``words``.

        The same words may come several times in a script, which begins anew with each run of the
        job: the second program of them in one run is the second one in the next. A program that has
        come to its end in this run keeps its place; one that was saved, or not started, gives it
        back.
        """
        place = None
        if name is None:
            place = _place(self, words)
            name = place.stem
        ended = False
        try:
            yield name
        except SystemExit as end:
            ended = end.code != SAVED
            if not ended:
                self._requeue(name, settings)
            raise
        finally:
            if place is not None and not ended:
                place.unlink(missing_ok=True)

    def gpus_for(self, image: "Image", client: "Client") -> str:
        """Return where the GPUs of an image are to be, as ``OLD:NEW,...``: those that the job has
        now. Empty for a job that asked for none, whose program is to be where it was.

        Slurm and phosd number the GPUs of a node in the same order. Raises :class:`CommandError` if
        the job has too few.
        """
        given = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS", "")
        numbers = [int(number) for number in given.split(",") if number.isdigit()]
        if not numbers:
            return ""
        here = {gpu.ordinal: gpu.uuid for gpu in client.gpus()}
        job = [here[number] for number in numbers if number in here]
        old = [uuid for uuid, _ in image.gpus]
        free = [uuid for uuid in job if uuid not in old]
        moves = [(uuid, uuid if uuid in job else "") for uuid in old]
        if len(free) < sum(not new for _, new in moves):
            raise _unsupported(
                f"it was on {len(old)} GPUs, and this job has {len(job)} GPUs of this node "
                f"({given}); submit it with as many as before"
            )
        return ",".join(f"{uuid}:{new or free.pop(0)}" for uuid, new in moves)

    def keep_node(self, name: str) -> None:
        """Write down that the program ``name`` was saved on this node."""
        job_images.keep(name, Saved(self.node))

    def keep_end(self, name: str) -> None:
        """Write down that the program ``name``, if it was saved, has come to its end with 0."""
        if (saved := job_images.saved(name)) is not None:
            job_images.keep(name, Saved(self.node, saved.image, ended=True))

    def fetch(self, name: str, settings: Settings, client: "Client") -> bool:
        """Bring the program ``name`` here if it was saved on another node. Returns whether it has
        ended there. Raises :class:`CommandError` if its image cannot be brought here, and
        :class:`PhosError` if no image could be brought anywhere.
        """
        if self.images is not None:
            self.images.require_possible()
        saved = job_images.saved(name)
        if saved is None or saved.node == self.node or job_images.is_newer(client, name):
            return False
        if saved.ended:
            return True
        if not saved.image or self.images is None:
            raise _unsupported(
                f"{name} was saved on node {saved.node}, and its image is not on this one, "
                f"{self.node}; run the job there (`scontrol requeuehold {self.address}`, "
                f"`scontrol update JobId={self.address} ReqNodeList={saved.node}`, `scontrol "
                f"release {self.address}`), or bring the image here (`phos push`, `phos pull`); "
                "with `--phos-images` jobs do so"
            )
        self.images.pull(settings, name, saved.image)
        return False

    def _requeue(self, name: str, settings: Settings) -> None:
        """Bring the job back: to this node until the image is where all nodes find it. Slurm
        kills the step KillWait after that.
        """
        saved = job_images.saved(name)
        if saved is None or (saved.image and self.images is not None):
            _requeue(self, "", settings.note)
            return
        free = _requeue(self, saved.node, settings.note)
        if self.images is None or not self.images.push(settings, name, self.node):
            return
        if free and not job_images.on_one_node(self.job):
            with suppress(SlurmError):  # it is bound, and goes on here
                scontrol("update", f"JobId={self.address}", "ReqNodeList=", seconds=_SECONDS)


def saving_step(wish: str) -> SavingStep | None:
    """Return the step that this process is the task of, if its job is to be saved (``wish``).

    In a batch script it does not return: this process becomes the `srun` that starts it as a step.
    Raises :class:`CommandError` for a step that cannot be saved.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if wish not in _WISHES:
        raise _unsupported(f"PHOS_SLURM is {wish!r}, not one of {', '.join(_WISHES)}; correct it")
    if wish == "none" or not job:
        return None
    tasks, nodes = (os.environ.get(f"SLURM_STEP_NUM_{kind}", "1") for kind in ("TASKS", "NODES"))
    if (tasks, nodes) != ("1", "1"):
        raise _unsupported(
            f"this step of job {job} has {tasks} tasks on {nodes} nodes, and phosd saves steps of "
            "one task; start it with `srun --nodes=1 --ntasks=1 phos run`, or without saving: "
            "`srun --phos=none phos run`"
        )
    found = step_of(os.getpid())
    if found is None or str(found.job) != job:
        raise _unsupported(
            f"this process is in no cgroup of job {job}, where Slurm would find the program once "
            "it is restored; set ProctrackType=proctrack/cgroup in slurm.conf, or submit the job "
            "without --phos=save"
        )
    node = os.environ.get("SLURMD_NODENAME", "")
    if found.name == "batch":
        _become_step(node)
    if os.environ.get("SLURM_TASK_PID") != str(os.getpid()):
        raise _unsupported(
            f"Slurm sends its signals to process {os.environ.get('SLURM_TASK_PID')}, the first one "
            f"of step {found}, and not to this one; write `srun phos run`, or `exec phos run` in a "
            "script that srun starts"
        )
    _write_to(json.loads(os.environ.pop(_OUTPUTS, "[]")))
    return SavingStep(
        job, address_of(job), os.environ.get("SLURM_RESTART_COUNT", "0"), node, _images()
    )


def _images() -> JobImages | None:
    url = os.environ.pop(_IMAGES, "")
    key = os.environ.pop(_KEY, "")
    return JobImages(url, Path(key) if key else None) if url else None


def _become_step(node: str) -> NoReturn:
    """Become the `srun` of this command, as a step beside others that the job may have."""
    place = ["--overlap", "--input=none", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    # What goes through `srun` is lost when Slurm ends that first, with the script's shell.
    os.environ[_OUTPUTS] = json.dumps([_regular_file(1), _regular_file(2)])
    try:
        os.execvp("srun", ["srun", *place, *sys.orig_argv])
    except OSError as error:
        raise _unsupported(
            f"`srun` cannot be run, which would make it a step: {error.strerror}; put the folder "
            "of Slurm's commands into PATH"
        ) from error


def _regular_file(descriptor: int) -> str:
    """Return the path of the file that a descriptor leads to; empty if it is something else."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return ""
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _write_to(outputs: Sequence[str]) -> None:
    """Redirect standard output and error to these files, where there is one."""
    for descriptor, path in enumerate(outputs, 1):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(file, descriptor)
            os.close(file)


def _place(step: SavingStep, words: Sequence[str]) -> Path:
    """Take the next place of a program with these words in this run of the job: a file."""
    folder = job_images.folder()
    digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]
    for number in itertools.count(1):
        place = folder / f"slurm-{step.job}-{digest}-{number}.{step.run}"
        with suppress(FileExistsError):
            place.touch(mode=0o600, exist_ok=False)
            break
    return place


def _requeue(step: SavingStep, node: str, note: Callable[[str], None]) -> bool:
    """Bring a job back, to the ``node`` that has its image, if there is one. Returns whether
    it could have run on others before. A job that is ended already is requeued by Slurm, or by
    whoever has ended it.

    Waits for a controller that is down: the job would otherwise be over when that is back.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes when the job is requeued
    where = f", on node {node}, which has the image" if node else ""
    by_hand = f"`scontrol requeue {step.address}` goes on with what was saved"
    told, ended = "", False
    while True:
        try:
            fields = job_fields(step.address, seconds=_SECONDS)
            state = fields.get("JobState", "unknown")
            if state == "SIGNALING":  # whatever it is besides is told when the signal is sent
                time.sleep(_MOMENT)
                continue
            if state in _RUNS and is_preempted(fields) and _requeues_preempted():
                if not ended:
                    note(f"phos: job {step.job} is preempted; Slurm requeues it{where}")
                    end_script(step.address, seconds=_SECONDS)
                    ended = True
                time.sleep(_MOMENT)
                continue
            if state in _RUNS:
                scontrol("requeue", step.address, seconds=_SECONDS)
                note(f"phos: job {step.job} is requeued{where}")
            elif not (ended and state == "PENDING"):
                note(f"phos: job {step.job} is {state}; if Slurm does not requeue it, {by_hand}")
            if node:
                there = [f"JobId={step.address}", f"ReqNodeList={node}"]
                scontrol("update", *there, seconds=_SECONDS)
        except SlurmError as why:
            if _controller_answers():
                note(f"phos: job {step.job}: {why}; if it does not come back{where}, {by_hand}")
                return False
            if str(why) != told:
                note(f"phos: job {step.job} is requeued as soon as the controller answers: {why}")
                told = str(why)
            time.sleep(_AGAIN_SECONDS)
        else:
            return fields.get("ReqNodeList", "(null)") == "(null)"


def _requeues_preempted() -> bool:
    """Return whether Slurm requeues a preempted job when its script ends."""
    return release(seconds=_SECONDS) >= _PREEMPTED_IF_ENDED


def _controller_answers() -> bool:
    try:
        scontrol("ping", seconds=_SECONDS)
    except SlurmError:
        return False
    return True


def _unsupported(text: str) -> CommandError:
    return CommandError("Unsupported", f"the program was not started: {text}")
