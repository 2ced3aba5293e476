"""The memory that hook and mover share during copy-on-write: a word a chunk."""
