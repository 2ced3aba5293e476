"""The hook changes nothing: without any daemon, a program computes the same with and without it."""

import pytest

from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.harness import run_to_end

PROGRAMS = (
    "single", "threads", "features", "churn", "workers", "two_devices", "shared_pair", "managed",
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_values_with_and_without_the_hook(program: str, undisturbed: Undisturbed) -> None:
    hooked = run_to_end(program, 60, hooked=True)
    assert hooked.items() <= undisturbed(program).items()
