"""Fixtures of these tests."""

from tests.unit.tui.conftest import same_everywhere

__all__ = ["same_everywhere"]
