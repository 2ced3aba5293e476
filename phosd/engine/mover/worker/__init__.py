"""The data mover's own process: its GPU, its pinned ring, and what it copies."""
