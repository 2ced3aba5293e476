"""Fixtures of these tests."""

from tests.support.service import bus

__all__ = ["bus"]
