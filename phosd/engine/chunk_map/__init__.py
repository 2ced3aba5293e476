"""Share the state of chunks between hook and mover during copy-on-write, one word per chunk."""
