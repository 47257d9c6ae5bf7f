"""Where this process is: its place among the ranks, its job, its host. Never imports torch."""
