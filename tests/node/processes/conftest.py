"""Fixtures of these tests."""

from tests.unit.engine.conftest import runtime

__all__ = ["runtime"]
