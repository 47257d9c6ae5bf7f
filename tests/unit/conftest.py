"""What the unit tests share."""

from hypothesis import settings

# Slow machines are no failure, and a test that passed passes again.
settings.register_profile("unit", deadline=None, max_examples=100, derandomize=True, database=None)
settings.load_profile("unit")
