"""Functions for this process alone: device, threads, random states, logging and signals."""
