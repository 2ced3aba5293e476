"""CRIU: the CPU side of a process tree, dumped and restored.

``restore_shim`` and ``file_worker`` also run as processes of their own: nothing is imported here.
"""
