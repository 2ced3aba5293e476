"""What an engine and a data mover say to each other, and where."""
