"""What phosd does to programs, one protocol a file."""
