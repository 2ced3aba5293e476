"""What these tests share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a short name: the paths of unix sockets end after 108 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="phos-"))
    yield folder
    shutil.rmtree(folder)
