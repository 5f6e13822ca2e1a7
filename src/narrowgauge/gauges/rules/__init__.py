"""Rules: turn step numbers and tensor readings into findings."""
