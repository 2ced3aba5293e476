"""Load the memory of a hollow program before somebody resumes it (docs/design/protocols.md)."""

from contextlib import ExitStack

from phosd.engine.faults import Point, point
from phosd.engine.image.store import Image
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.node.readied import Ready
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import require_device_memory
from phosd.engine.operations.coming_back import require_resumable
from phosd.engine.operations.places_back import gpus_as_before
from phosd.engine.operations.restore.load import device_bytes, loaded
from phosd.errors import Busy


def make_ready(node: Node, hollow: Suspended, image: Image, progress: Progress) -> dict[int, int]:
    """Load the memory of a hollow program, which stays frozen, until it is resumed. Nothing of the
    program is touched, and no other program that is ready has to give way. Returns the GPUs that it
    is on, each with itself.
    """
    if hollow.image in node.readied.images():
        raise Busy(
            f"the memory of process {hollow.pid} is on its GPUs already",
            hint=f"`phos resume {hollow.pid}` lets it run",
        )
    gpus_as_before(image.manifest)
    needs = device_bytes(image.manifest)
    node.movers.begin(needs)
    require_device_memory(node, needs, "the program", give_way=False)
    progress.phase("load", bytes_total=image.manifest.device_bytes)
    point(Point.READY_LOAD)
    with ExitStack() as held:
        memory = held.enter_context(loaded(node, image, progress))
        progress.check()
        point(Point.READY_KEEP)
        node.readied.keep(Ready(hollow, image.manifest, memory, held.pop_all()))
    progress.finish()
    return {gpu: gpu for gpu in hollow.gpus}


def make_unready(node: Node, ready: Suspended, caller: int, progress: Progress) -> None:
    """Free what a program that is ready has on its GPUs but for its contexts: it is hollow."""
    progress.phase("release")
    with node.claim(ready.pids):
        require_resumable(ready, caller)
        node.readied.drop(ready)
    progress.finish()
