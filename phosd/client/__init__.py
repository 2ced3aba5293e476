"""Provide what ``phos`` and ``phos-tui`` share: error messages, times, text and rows."""
