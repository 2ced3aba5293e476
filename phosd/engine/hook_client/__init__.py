"""The engine's side of the hook: its protocol, the gate, and what programs free."""
