"""The processes behind the command line: mount daemon, supervisor, worker for commands that need no mount."""
