"""The parts of `tests/programs/run`."""
