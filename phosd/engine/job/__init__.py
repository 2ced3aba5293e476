"""Provide what every job of the engine needs: progress, journal, rollback, affected processes."""
