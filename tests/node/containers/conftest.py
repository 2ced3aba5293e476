"""The node of the core tests, with software GPUs that containers reach, too."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.node.node import Node
from phosd.engine.program.process import GpuProcess
from tests.node.checkpoint_restore.conftest import node, undisturbed
from tests.support import containers
from tests.support.harness import wait_until

__all__ = ["node", "undisturbed"]


def seen(node: Node, pid: int) -> GpuProcess:
    """A process as it is listed when its hook listens, for which the first list makes a folder."""

    def hooked() -> GpuProcess | None:
        found = next(each for each in node.processes() if each.pid == pid)
        return found if found.hook_state == "hooked" else None

    return wait_until(hooked, "the hook to listen")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name, which is removed only when no mount is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))
    yield folder
    containers.unmount_below(folder)
    shutil.rmtree(folder)
