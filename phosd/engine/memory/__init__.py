"""The device memory of programs: exported, copied, parked, watched."""
