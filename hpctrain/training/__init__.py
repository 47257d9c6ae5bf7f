"""Training loop: sessions and runs, with their steps, checkpoints and stop requests."""
