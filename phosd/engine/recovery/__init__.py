"""After a crash: ``startup`` replays the journal, ``rescue`` brings parked programs back."""
