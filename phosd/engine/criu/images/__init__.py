"""Read and change CRIU's image files. They may be a user's, so all of it is checked."""
