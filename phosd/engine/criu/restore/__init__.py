"""Restore a process tree, a clone of it, or a rehearsal.

``restore_shim`` also runs as a process of its own: nothing is imported here.
"""
