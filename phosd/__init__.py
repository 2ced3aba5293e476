"""phosd: checkpoint, restore and move GPU processes that know nothing of it."""

__version__ = "0.1.0"
