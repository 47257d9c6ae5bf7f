"""Interfaces of other libraries for older scripts, built on torch."""
