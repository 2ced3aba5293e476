"""Process trees of which something cannot be read."""

import os
from pathlib import Path

import pytest

from phosd.engine.program import tree
from phosd.errors import Unsupported


def test_a_process_that_is_closed_even_to_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pid 1 of a container whose user namespace is another's."""

    def closed(path: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "readlink", closed)
    with pytest.raises(Unsupported, match=f"{os.getpid()} lets nobody look at it.*`phos ps`"):
        tree.scan(os.getpid())
