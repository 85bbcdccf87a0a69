"""RocksDB: a log, tables that threads write and merge, and names that count upwards."""

from common import digest, main
from rocksdict import Options, Rdict

KEYS = 3_000


def open_database():
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(200_000)
    options.set_max_background_jobs(2)
    return Rdict("db", options)


def run(steps):
    db = open_database()
    for number in steps:
        total = 0
        for _ in range(40):
            key = str(steps.random.randrange(KEYS)).encode()
            total += len(db.get(key) or b"")
            db[key] = digest((number, total)).encode() * steps.random.randrange(1, 60)
        steps.rest()
        db.delete(str(steps.random.randrange(KEYS)).encode())
        if number % 20 == 10:
            db.flush()
        if number % 60 == 59:
            db.close()
            steps.rest()
            db = open_database()
        steps.tell(number, total)
    db.close()


def check():
    db = open_database()
    yield digest(list(db.items()))
    db.close()


main(run, check, 300, rests=1)
