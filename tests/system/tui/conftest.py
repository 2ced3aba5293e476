"""Fixtures of these tests."""

from tests.support.service import bus, service
from tests.unit.tui.conftest import same_everywhere

__all__ = ["bus", "same_everywhere", "service"]
