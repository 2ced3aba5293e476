"""What ``phos`` and ``phos-tui`` share: errors in words, times, text and rows."""
