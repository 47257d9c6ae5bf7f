"""Describe a job once; render, check and submit it. Never imports torch."""
