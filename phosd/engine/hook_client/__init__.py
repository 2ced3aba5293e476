"""Talk to the hook: its protocol, the gate, and the blocks that programs free."""
