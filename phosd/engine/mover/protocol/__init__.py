"""Define the messages between an engine and a data mover, their connection and their sockets."""
