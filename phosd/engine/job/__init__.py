"""What every job of the engine has: progress, journal, rollback, and whom it affects."""
