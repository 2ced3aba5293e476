"""Fixtures of these tests."""

from tests.support.service import bus, service

__all__ = ["bus", "service"]
