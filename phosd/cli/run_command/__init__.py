"""Implement ``phos run``: start a program, relay its output and its signals, and save it."""
