"""Dump a process tree: what is looked at before, beside and behind ``criu dump``."""
