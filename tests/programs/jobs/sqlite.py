"""SQLite: `sqlite.py SECONDS journal|wal`. A small cache spills pages in the middle of transactions; the database is
closed and opened again at times, so that it is a closed file then, too. With `wal` it has 30 MB."""

import sqlite3
import sys

from common import digest, main

ROWS = {"journal": 4000, "wal": 32_000}


def open_database(mode):
    db = sqlite3.connect("data.db", isolation_level=None)
    db.execute("pragma cache_size=10")
    db.execute(f"pragma journal_mode={'delete' if mode == 'journal' else 'wal'}")
    if mode == "wal":
        db.execute("pragma wal_autocheckpoint=200")
    return db


def run(steps):
    mode = sys.argv[2]
    rows = ROWS[mode]
    db = open_database(mode)
    db.execute("create table t(i integer primary key, v integer, pad text)")
    db.execute("create index by_v on t(v)")
    db.execute("begin")
    db.executemany("insert into t values(?,?,?)", ((i, i, "a" * 900) for i in range(rows)))
    db.execute("commit")
    for number in steps:
        if number % 40 == 39:
            db.close()
            steps.rest()
            db = open_database(mode)
        db.execute("begin")
        for _ in range(30):
            one, other = steps.random.randrange(rows), steps.random.randrange(rows)
            change = "update t set v=(v*3+(select v from t where i=?)) % 1000003, pad=? where i=?"
            db.execute(change, (other, chr(97 + number % 26) * steps.random.randrange(1200), one))
        steps.rest()
        db.execute("delete from t where i=?", (rows + number - 7,))
        db.execute("insert into t values(?,?,?)", (rows + number, number, "n" * 3000))
        steps.rest()
        db.execute("rollback" if number % 11 == 5 else "commit")
        if number % 30 == 10 and mode == "wal":
            db.execute("pragma wal_checkpoint(truncate)")
        one = steps.random.randrange(rows)
        steps.tell(number, db.execute("select v, length(pad) from t where i=?", (one,)).fetchone())
    db.close()


def check():
    db = sqlite3.connect("data.db")
    verdict = db.execute("pragma integrity_check").fetchone()[0]
    yield verdict if verdict == "ok" else f"BAD {verdict[:300]}"
    yield digest(db.execute("select * from t order by i").fetchall())
    db.close()


main(run, check, 200)
