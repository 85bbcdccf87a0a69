"""LevelDB: a log, tables that are written and merged, and names that count upwards."""

import plyvel
from common import digest, main

KEYS = 3_000


def open_database():
    return plyvel.DB("db", create_if_missing=True, write_buffer_size=100_000, max_file_size=100_000)


def run(steps):
    db = open_database()
    for number in steps:
        total = 0
        with db.write_batch(sync=number % 3 == 0) as batch:
            for _ in range(40):
                key = str(steps.random.randrange(KEYS)).encode()
                total += len(db.get(key, b""))
                batch.put(key, digest((number, total)).encode() * steps.random.randrange(1, 60))
            steps.rest()
            batch.delete(str(steps.random.randrange(KEYS)).encode())
        if number % 60 == 30:
            db.compact_range()
        if number % 50 == 49:
            db.close()
            steps.rest()
            db = open_database()
        steps.tell(number, total)
    db.close()


def check():
    db = plyvel.DB("db", paranoid_checks=True)
    yield digest(list(db.iterator(verify_checksums=True)))
    db.close()


main(run, check, 300, rests=1)
