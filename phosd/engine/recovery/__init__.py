"""Recover after a crash: ``startup`` settles journaled jobs, ``rescue`` frees stopped programs, and
``stranded`` finds them.
"""
