"""A GPU program in a containerd container is saved and restored by ``ctr``.

containerd freezes a container before it has runc save it.
"""

from pathlib import Path

import pytest

from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, undisturbed
from tests.support import containers
from tests.support.containerd import run_by_ctr
from tests.support.service import bus
from tests.system.containers.test_runc import LIBDIR, right
from tests.system.service.test_end_to_end import phosd

__all__ = ["bus", "place", "undisturbed"]

pytestmark = pytest.mark.skipif(
    not containers.installed("containerd", "ctr"),
    reason="`make setup-containers` installs containerd",
)


@pytest.mark.parametrize("number", range(containers.ROUNDS))
def test_saved_while_it_is_frozen_then_ended_and_restored(
    number: int, bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """Each time another container: containerd 1.6 does not restore the image of a restored one."""
    with phosd(bus, place), run_by_ctr("single", place, LIBDIR) as (target, ctr):
        target.wait_for_steps(3)
        ctr.do("tasks", "checkpoint", f"--image-path={place / 'image'}", ctr.name)
        target.more_steps(2)
        ctr.do("containers", "checkpoint", "--task", "--image", "--rw", ctr.name, "saved")
        target.more_steps(2)
        ctr.end(target)
        restored = ctr.restored("restored", "saved")
        restored.follow(target, restored.pid)
        target.more_steps(2)
        right(target, undisturbed)
        restored.do("tasks", "checkpoint", f"--image-path={place / 'last'}", "--exit", "restored")
        assert [*place.glob("last/phos-*.json")]
        restored.do("tasks", "rm", "restored")
