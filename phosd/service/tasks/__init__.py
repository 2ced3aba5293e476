"""What starts jobs: requests, schedules, retention; and the engine on the real node."""
