"""The engine's side of a data mover."""
