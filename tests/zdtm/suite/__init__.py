"""The parts of `tests/zdtm/run`."""
