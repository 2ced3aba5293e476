"""What is said of device memory that cannot be saved."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.memory.dump import MemoryDump
from phosd.errors import NoSuchProcess


def test_a_process_ends_between_its_digest_and_the_copy() -> None:
    """Its memory is let go of as soon as its end is seen, on another thread."""
    memory = cast(Any, SimpleNamespace(all=list))
    with (
        MemoryDump(memory, [], cast(Any, None)) as dump,
        pytest.raises(NoSuchProcess, match="has ended before its device memory was saved"),
    ):
        dump.save({7: [bytes(16)]}, Progress())
