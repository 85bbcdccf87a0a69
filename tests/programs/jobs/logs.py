"""Logs that are rotated while they are open: by Python's RotatingFileHandler, and by a rename under the writer."""

import logging
import logging.handlers
import os

from common import main, no_check


def open_late():
    return open("late.log", "a", encoding="ascii")


def run(steps):
    handler = logging.handlers.RotatingFileHandler("job.log", maxBytes=20_000, backupCount=3)
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
        if number % 20 == 10:
            # As logrotate does: the writer goes on in the renamed file, and opens the new one later.
            os.rename("late.log", "late.log.1")
        if number % 20 == 14:
            late.close()
            late = open_late()
        steps.tell(number, value, sorted(os.listdir(".")))
    late.close()


main(run, no_check, 300, rests=1)
