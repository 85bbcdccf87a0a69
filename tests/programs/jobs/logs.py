"""Logs that are rotated while they are open: `logs.py SECONDS BACKUPS`. Python's RotatingFileHandler removes the oldest
after some rotations; another log is renamed under its writer, as logrotate does it."""

import logging
import logging.handlers
import os
import sys

from common import main, no_check


def open_late():
    return open("late.log", "a", encoding="ascii")


def run(steps):
    backups = int(sys.argv[2])
    handler = logging.handlers.RotatingFileHandler("job.log", maxBytes=40_000, backupCount=backups)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    late = open_late()
    for number in steps:
        for part in range(20):
            value = steps.random.random()
            logging.info("step %d part %d value %f", number, part, value)
            late.write(f"{number} {value}\n")
            if part == 10:
                steps.rest()
        late.flush()
        if number % 40 == 20:
            os.rename("late.log", f"late.log.{number}")
        if number % 40 == 30:
            # Until here, the writer continues in the renamed file.
            late.close()
            late = open_late()
        steps.tell(number, value, sorted(os.listdir(".")))
    late.close()


main(run, no_check, 300, rests=1)
