"""Interfaces as data, the object tree, and whose call is next."""
