"""Implement phos-tui: show and control the node's GPU processes on a terminal, over D-Bus alone."""
