"""Start a data mover, send it requests, and ask it for guarded memory."""
