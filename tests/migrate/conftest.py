"""The node and the targets of the core tests."""

from tests.core.conftest import node, place, start, undisturbed

__all__ = ["node", "place", "start", "undisturbed"]
