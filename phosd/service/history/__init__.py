"""What phosd did: the database, its schema and its queries."""
