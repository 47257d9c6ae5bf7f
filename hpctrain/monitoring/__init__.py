"""Monitoring of a run: progress, trackers, timings, profiles, watchdog and reports."""
