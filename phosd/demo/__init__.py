"""The demonstration: train, checkpoint, kill, restore, compare. ``python -m phosd.demo``."""
