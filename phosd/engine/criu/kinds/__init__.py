"""Kinds of files of a program: what CRIU cannot save, and what only one program can have."""
