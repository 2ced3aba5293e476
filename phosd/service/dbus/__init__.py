"""Describe interfaces, publish objects, and schedule calls fairly between callers."""
