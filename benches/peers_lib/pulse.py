"""Measuring side of a workload's heartbeat: lengths of freezes, and the first beat afterwards."""

import os
import struct
import time

from bare_freeze import Failure
from jobs import heartbeat

WAIT_SECONDS_MAX = 600
POLL_SECONDS = 0.001
# After a snapshot: the last gap has ended once the heart has beaten for this long.
SETTLE_NS = 50_000_000


class Pulse:
    """Reads the file again each time: a restore may have replaced it."""

    def __init__(self, path):
        self.path = path

    def words(self):
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        if len(data) < heartbeat.WORDS * 8:
            return [0] * heartbeat.WORDS
        return struct.unpack(f"<{heartbeat.WORDS}q", data[: heartbeat.WORDS * 8])

    def steps(self):
        return self.words()[heartbeat.STEPS]

    def await_beat(self, after_ns, job):
        """Waits for a beat later than `after_ns`."""
        self.await_that(lambda words: words[heartbeat.BEAT] > after_ns, job, WAIT_SECONDS_MAX)

    def advance(self, steps, job):
        """Lets the job take `steps` steps without pauses."""
        goal = self.steps() + steps
        fd = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(fd, struct.pack("<q", goal), heartbeat.GOAL * 8)
        finally:
            os.close(fd)
        self.await_that(lambda words: words[heartbeat.STEPS] >= goal, job, WAIT_SECONDS_MAX)

    def await_life(self, job, limit):
        """Waits until a restored job beats and takes a step; returns the time at which the beat was seen.

        CRIU continues its clock from the dump, so its beats cannot be compared with our time. A
        beat is an increase; the rollback of the file is a decrease.
        """
        seen = []

        def has_beaten(words):
            beat = words[heartbeat.BEAT]
            if beat:  # else the file is being written
                seen.append(beat)
            return len(seen) > 1 and seen[-1] > seen[-2]

        steps = self.await_that(has_beaten, job, limit)[heartbeat.STEPS]
        now = time.monotonic_ns()
        self.await_that(lambda words: words[heartbeat.STEPS] != steps, job, limit)
        return now

    def await_that(self, condition, job, limit):
        deadline = time.monotonic() + limit
        while not condition(words := self.words()):
            if not job.alive():
                raise Failure(f"the job ended: {job.tail()}")
            if time.monotonic() > deadline:
                raise Failure(f"the job does not go on within {limit} s: {job.tail()}")
            time.sleep(POLL_SECONDS)
        return words

    def gaps(self, since_ns, job):
        """Returns the seconds of each gap that ended after `since_ns`, once the job runs again."""
        self.await_beat(time.monotonic_ns() + SETTLE_NS, job)
        words = self.words()
        ring = words[heartbeat.RING :]
        pairs = list(zip(ring[::2], ring[1::2]))[: words[heartbeat.GAP_COUNT]]
        return [length / 1e9 for end, length in sorted(pairs) if end > since_ns]
