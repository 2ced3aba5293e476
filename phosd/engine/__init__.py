"""Implement every operation on a GPU process, usable without the daemon."""
