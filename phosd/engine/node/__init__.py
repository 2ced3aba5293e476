"""Manage the resources of this node: GPUs, movers, folders, and claims on processes."""
