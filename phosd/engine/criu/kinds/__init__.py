"""Kinds of files of a program: what CRIU cannot save of them, and the help that it needs."""
