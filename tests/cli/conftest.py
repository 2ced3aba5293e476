"""Fixtures of these tests."""

from tests.service.running import bus, service

__all__ = ["bus", "service"]
