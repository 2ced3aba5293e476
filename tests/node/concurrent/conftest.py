"""A node, programs that copy-on-write has to follow, and what they compute undisturbed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from phosd.engine.node.node import Node
from tests.node.checkpoint_restore.conftest import Starter, place
from tests.node.checkpoint_restore.conftest import node as plain_node
from tests.node.checkpoint_restore.conftest import start as start_plainly
from tests.support import harness

__all__ = ["Starter", "Undisturbed", "place", "plain_node", "start_plainly"]

Undisturbed = Callable[..., dict[int, str]]


@pytest.fixture(scope="session")
def surroundings() -> dict[str, str]:
    """The environment of the programs: quick steps."""
    return {"PYTHONPATH": str(harness.PROGRAMS), "PHOS_TEST_PACE": "0.01"}


@pytest.fixture
def snapshots() -> bool:
    """Whether memory may be copied inside the stop, for which these programs are small enough."""
    return False


@pytest.fixture
def node(plain_node: Node, snapshots: bool) -> Node:
    """A node that copies on write, unless a test wants ``snapshots``."""
    plain_node.config = replace(plain_node.config, snapshots=snapshots)
    return plain_node


@pytest.fixture
def start(start_plainly: Starter, surroundings: dict[str, str]) -> Starter:
    """Start ``program`` for ever, in the way that ``variant`` names if it has several."""

    def starter(program: str, variant: str = "", **extra: str) -> harness.Target:
        arguments = ("0", variant) if variant else ("0",)
        return start_plainly(program, arguments=arguments, extra={**surroundings, **extra})

    return starter


@pytest.fixture(scope="session")
def undisturbed(surroundings: dict[str, str]) -> Undisturbed:
    """The values that a program computes when nobody touches it, without the hook: of so many
    steps, at least.
    """

    def values(
        program: str,
        variant: str = "",
        steps: int = 100,
        compared: harness.Target | None = None,
        **extra: str,
    ) -> dict[int, str]:
        arguments = (variant,) if variant else ()
        known = {**surroundings, **extra}
        return harness.undisturbed(program, steps, *arguments, extra=known, compared=compared)

    return values
