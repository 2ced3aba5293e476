"""phosd: checkpoint, restore and move unmodified GPU programs."""

__version__ = "0.1.0"
