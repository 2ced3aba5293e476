"""Dump and restore the CPU side of a process tree with CRIU.

``restore_shim`` and ``file_worker`` also run as processes of their own: nothing is imported here.
"""
