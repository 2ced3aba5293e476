"""Implement ``phos``: a D-Bus client of phosd, and ``phos run``, which needs no daemon."""
