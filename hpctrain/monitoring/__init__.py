"""What is seen of a run: progress, trackers, timings, profiles, the watchdog, reports."""
