"""Record jobs, events and images in a SQLite database, and query it."""
