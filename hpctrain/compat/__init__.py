"""What scripts that were written for other libraries call, on torch."""
