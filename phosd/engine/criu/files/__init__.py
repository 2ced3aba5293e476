"""Work on files with their users' rights, and keep the output of programs.

``file_worker`` also runs as a process of its own: nothing is imported here.
"""
