"""Provide the widgets of the screens."""
