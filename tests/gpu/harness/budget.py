"""Time budget, and waits within it."""

import time

from .trials import Failure

POLL_SECONDS = 0.05


class OutOfTime(Failure):
    """The budget is used up, or the run was cancelled."""


class Budget:
    """Ends at its deadline, or when it is cancelled; a part of it ends earlier."""

    def __init__(self, seconds, called_off):
        self.deadline = time.monotonic() + seconds
        self.called_off = called_off

    def left(self):
        return 0 if self.called_off.is_set() else max(0, self.deadline - time.monotonic())

    def part(self, seconds):
        return Budget(min(seconds, self.left()), self.called_off)

    def until(self, condition, what, program=None, poll=POLL_SECONDS):
        """Waits until a condition holds and returns its value; an earlier exit of `program` is a Failure."""
        while not (found := condition()):
            if program and program.code() is not None:
                # Both may have happened since the condition was checked.
                if found := condition():
                    return found
                raise Failure(f"ended with {program.code()} before {what}")
            if not self.left():
                raise OutOfTime(f"no time left while waiting for {what}")
            time.sleep(poll)
        return found
