"""State that is read from a file and written back in each step, with the file closed in between: `closed_state.py SECONDS
inplace|rename`. With `rename`, a synced new file takes the old one's place; with `inplace`, the file is overwritten."""

import json
import os
import sys

from common import digest, main, no_check, text


def write(name, value, steps):
    with open(name, "w", encoding="ascii") as file:
        file.write(value[: len(value) // 2])
        file.flush()
        steps.rest()
        file.write(value[len(value) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def sync_folder():
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)


def run(steps):
    how = sys.argv[2]
    for number in steps:
        state = json.loads(text("state")) if os.path.exists("state") else {"count": 0, "hash": ""}
        steps.rest()
        state = {
            "count": state["count"] + 1,
            "hash": digest((state, number)),
            "pad": "p" * steps.random.randrange(20_000),
        }
        write("state" if how == "inplace" else "state.new", json.dumps(state), steps)
        if how == "rename":
            os.replace("state.new", "state")
            sync_folder()
        with open("log", "a", encoding="ascii") as log:
            log.write(f"{state['count']} {state['hash']}\n")
        steps.tell(number, state)


main(run, no_check, 300, rests=2)
