"""The environment of this process: rank, job, host and GPUs. Never imports torch."""
