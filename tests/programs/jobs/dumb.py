"""Python's dbm.dumb: two files that are opened for each change, and one that is replaced through renames."""

import dbm.dumb

from common import digest, main


def run(steps):
    for number in steps:
        with dbm.dumb.open("data") as db:
            for _ in range(5):
                key = str(steps.random.randrange(200))
                db[key] = db.get(key, b"")[-600:] + str(number).encode()
            steps.rest()
            if number % 5 == 4:
                db.sync()
                db.pop(str(steps.random.randrange(200)), None)
            steps.rest()
            steps.tell(number, db.get(key))


def check():
    with dbm.dumb.open("data", "r") as db:
        yield digest([(key, db[key]) for key in sorted(db.keys())])


main(run, check, 250)
