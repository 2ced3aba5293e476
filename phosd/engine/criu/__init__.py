"""Dump and restore the CPU side of a process tree with CRIU.

``files.file_worker`` and ``restore.restore_shim`` also run as processes of their own: nothing is
imported here.
"""
