"""A program that lives through faults, and which faults each kind of job meets."""

from collections.abc import Sequence

from phosd.engine.faults import Kind, Point
from phosd.engine.hook_client.link import HookLink
from phosd.engine.node.suspended import Register
from phosd.engine.program.process_gpus import gpus_of
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import Target
from tests.support.rotation import plays
from tests.system.faults.daemon_under_fault import DIED, Plant, partial

UNSEEN_GPU = (Point.HOOK_MAKE,)
"""Met on GPUs that a program did not see at first (tests/node/moves/test_unseen_gpus.py)."""
HOOK = tuple(p for p in Point if p.startswith("hook-") and p not in UNSEEN_GPU)
LARGE_MEMORY = (Point.RESTORE_PAGES,)
"""Met by programs with more memory than those here (tests/node/criu/test_parallel_pages.py)."""
RESTORE = tuple(
    p
    for p in Point
    if p not in LARGE_MEMORY
    and (p.startswith("restore-") or p in (Point.MOVER_READ, Point.MOVER_COPY_IN))
)
REHEARSE = tuple(p for p in Point if p.startswith("rehearse-"))
"""Met by rehearsals (test_namespaces.py)."""
DELETE = tuple(p for p in Point if p.startswith("delete-"))
COMPACT = tuple(p for p in Point if p.startswith("compact-"))
"""Met when a phosd has nothing else to do (tests/node/image/test_repack.py)."""
MIGRATE = tuple(p for p in Point if p.startswith("migrate-") or p is Point.MOVER_FETCH)
SUSPEND = tuple(p for p in Point if p.startswith("suspend-"))
RESUME = tuple(p for p in Point if p.startswith("resume-"))
TRANSFER = tuple(p for p in Point if p.startswith(("export-", "import-")))
WRITE_BACK = tuple(p for p in Point if p.startswith("write-back-"))
GROUP_STOP = tuple(p for p in Point if p.startswith("group-stop-"))
"""Met by programs without the hook (tests/node/moves/test_stopped.py)."""
STANDING = tuple(p for p in Point if p.startswith("standing-"))
"""Met by programs that do not run on (tests/node/checkpoint_restore/test_standing.py)."""
RUNTIME = tuple(p for p in Point if p.startswith("runtime-"))
"""Met by checkpoints of containers' runtimes (tests/system/containers)."""
SAVED_FILES = (Point.FILES_READ, Point.FILES_FROZEN, Point.FILES_COMPLETE)
FILES = tuple(p for p in Point if p.startswith("files-"))
"""Those of files that a program writes to, of which ``single`` has none."""
SAFE_POINT = (Point.SAFE_POINT,)
"""Met by programs that have safe points."""
_SPECIAL = (*FILES, *GROUP_STOP, *STANDING, *RUNTIME, *SAFE_POINT, *LARGE_MEMORY, *UNSEEN_GPU)
_OF_IMAGES = (*WRITE_BACK, *REHEARSE, *DELETE, *COMPACT, *TRANSFER)
OTHERS = (*_OF_IMAGES, *HOOK, *RESTORE, *MIGRATE, *SUSPEND, *RESUME, *_SPECIAL)
CHECKPOINT = tuple(p for p in Point if p not in OTHERS)
FAILING = (Kind.RAISE, Kind.ENOSPC, Kind.SHORT)
ENDING = (Kind.KILL, Kind.HANG)


def played(points: Sequence[Point], kind: Kind, of: int) -> list[Point]:
    """The points at which this run plays faults of a kind: one in ``of``."""
    return [point for point in points if plays("faults", f"{point} {kind}", of)]


_LOST = ("disconnected", "was not provided")
"""What busctl says when the daemon, not the job, has failed."""


class Case:
    """A target that lives through all faults of one kind, and the plant that saves it."""

    def __init__(self, plant: Plant, target: Target, undisturbed: Undisturbed, kind: Kind) -> None:
        self.plant, self.target, self.undisturbed, self.kind = plant, target, undisturbed, kind

    def save(self, mode: str = "stop") -> str:
        """A checkpoint to its end, whatever that is."""
        return self.plant.end_of(self.plant.checkpoint(self.target.pid, mode))

    def save_durably(self) -> str:
        """A checkpoint into memory, which waits until its image is on the disk."""
        return self.plant.end_of(self.plant.checkpoint(self.target.pid, "stop", durable=True))

    def restore(self) -> str:
        """The target is brought to life from the last image; how that ended."""
        self.target.kill()
        image = self.plant.images()[-1]
        return self.plant.end_of(self.plant.begin("Restore", "sa{sv}", image, 0))

    def delete(self) -> str:
        """All images are deleted, since one whose chunks another needs keeps its packs."""
        if not self.plant.images():
            assert self.save() == "done"
        try:
            for image in self.plant.images():
                self.plant.call("DeleteImage", "sa{sv}", image, 0)
        except RuntimeError as error:
            lost = any(words in str(error) for words in _LOST)
            return DIED if lost and self.plant.ends() else "failed"
        return "done"

    @property
    def asleep(self) -> bool:
        """Whether the target is suspended."""
        return bool(Register(self.plant.place / "run").living())

    def begin_move(self) -> str:
        """The target goes to the other of two GPUs; the job's path."""
        with HookLink(self.target.pid, self.plant.place / "run") as link:
            here = gpus_of(link.hello())[0]
        return self.plant.begin("Migrate", "usa{sv}", self.target.pid, 1 - here, 0)

    def move(self) -> str:
        return self.plant.end_of(self.begin_move())

    def begin_nap(self) -> str:
        return self.plant.begin("Suspend", "ua{sv}", self.target.pid, 0)

    def begin_waking(self) -> str:
        return self.plant.begin("Resume", "ua{sv}", self.target.pid, 0)

    def nap(self) -> str:
        """The target is suspended, if it is not yet, and resumed; how the last of it ended."""
        if not self.asleep:
            outcome = self.plant.end_of(self.begin_nap())
            if outcome != "done":
                return outcome
        return self.plant.end_of(self.begin_waking())

    def require_well(self, points: Sequence[Point], *, runs: bool = True) -> None:
        """What must hold after each fault."""
        if runs:
            computes_right(self.target, self.undisturbed)
        seen = {*self.plant.images()}
        hidden = {folder.name for folder in partial(self.plant.place)}
        assert not hidden & seen, points
        # What is left of a deleted image the next phosd removes.
        assert not hidden or {*points} <= {*DELETE}, points
        last = self.plant.last()
        assert last["state"] in ("done", "failed", "interrupted"), (points, last)
        assert last["state"] == "done" or last["message"], points

    def require_images_whole(self) -> None:
        """Those that there are: the last may have been deleted."""
        assert {self.plant.verify(image) for image in self.plant.images()} <= {"done"}
