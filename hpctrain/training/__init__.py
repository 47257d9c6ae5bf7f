"""The loop: sessions and runs, and what they do at each step, save and stop."""
