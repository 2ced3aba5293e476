"""Restore an image, or rehearse that: its device memory, its processes, and its GPUs."""
