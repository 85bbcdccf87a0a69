"""Shared heartbeat of the workloads, which shows from outside how long the process was frozen.

A thread writes CLOCK_MONOTONIC into a small file every millisecond. When more than `GAP_NS` passed
since its last beat, it notes when that ended and how long it was. The measuring side writes a goal
into the same file: until that many steps are done, the job does not pause between steps.

The file is 64-bit words: beat, steps, goal, number of gaps, then a ring of (end, length) of gaps.
"""

import os
import struct
import sys
import threading
import time

BEAT_SECONDS = 0.001
GAP_NS = 20_000_000  # several times the delays by the interpreter's lock and the scheduler
GAPS = 126
WORDS = 4 + 2 * GAPS
BEAT, STEPS, GOAL, GAP_COUNT, RING = 0, 1, 2, 3, 4


class Heart:
    """Heartbeat from its creation until the process ends."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self.fd, WORDS * 8)
        self.gaps = self.word(GAP_COUNT)
        self.steps = 0
        # The default of 5 ms would look like a pause.
        sys.setswitchinterval(BEAT_SECONDS)
        threading.Thread(target=self.beat, daemon=True).start()

    def word(self, index):
        return struct.unpack("<q", os.pread(self.fd, 8, index * 8))[0]

    def put(self, index, *values):
        os.pwrite(self.fd, struct.pack(f"<{len(values)}q", *values), index * 8)

    def beat(self):
        last = time.monotonic_ns()
        while True:
            time.sleep(BEAT_SECONDS)
            now = time.monotonic_ns()
            if now - last > GAP_NS:
                self.put(RING + 2 * (self.gaps % GAPS), now, now - last)
                self.gaps += 1
                self.put(GAP_COUNT, self.gaps)
            self.put(BEAT, now)
            last = now

    def step(self, pause):
        """Counts a step. Sleeps `pause` seconds unless the goal is still ahead."""
        self.steps += 1
        self.put(STEPS, self.steps)
        if self.steps >= self.word(GOAL):
            time.sleep(pause)
