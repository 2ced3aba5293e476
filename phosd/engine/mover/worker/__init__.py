"""Implement the data mover's process: its GPU, its pinned ring, and its copies."""
