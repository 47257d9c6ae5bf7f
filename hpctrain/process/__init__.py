"""What concerns this one process: its device, threads, random states, logging and signals."""
