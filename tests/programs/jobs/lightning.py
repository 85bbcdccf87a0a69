"""LMDB: a mapped database that is changed by transactions, some of which are aborted."""

import lmdb
from common import digest, main

KEYS = 3_000


def open_environment(**options):
    return lmdb.open("env", map_size=64 << 20, max_dbs=2, **options)


def run(steps):
    env = open_environment(writemap=False)
    for number in steps:
        total = 0
        with env.begin(write=True) as change:
            for _ in range(30):
                key = str(steps.random.randrange(KEYS)).encode()
                total += len(change.get(key, b""))
                change.put(key, digest((number, total)).encode() * steps.random.randrange(1, 60))
            steps.rest()
            change.delete(str(steps.random.randrange(KEYS)).encode())
            if number % 9 == 4:
                change.abort()
        if number % 40 == 39:
            env.close()
            steps.rest()
            env = open_environment(writemap=number % 80 == 39)
        steps.tell(number, total)
    env.close()


def check():
    with open_environment(readonly=True) as env, env.begin() as read:
        yield digest(list(read.cursor()))
        yield str(read.stat()["entries"])


main(run, check, 250, rests=1)
