"""Start jobs from requests and schedules, delete old images, and run the engine of this node."""
