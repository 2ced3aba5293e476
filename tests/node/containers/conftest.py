"""The node of the core tests, with software GPUs that containers reach, too."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.checkpoint_restore.conftest import node, undisturbed
from tests.support import containers

__all__ = ["node", "undisturbed"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name, which is removed only when no mount is left in it."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))
    yield folder
    containers.unmount_below(folder)
    shutil.rmtree(folder)
