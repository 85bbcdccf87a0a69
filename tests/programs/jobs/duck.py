"""DuckDB: transactions, checkpoints, and a database that is closed and opened again at times."""

import duckdb
from common import digest, main

ROWS = 20_000


def open_database():
    db = duckdb.connect("data.db", config={"threads": 1})
    db.execute("set checkpoint_threshold='200KB'")
    return db


def run(steps):
    db = open_database()
    db.execute(f"create table t as select i, i as v, 'a' || i as pad from range({ROWS}) r(i)")
    for number in steps:
        db.execute("begin")
        one, factor = steps.random.randrange(ROWS), steps.random.randrange(2, 9)
        db.execute("update t set v=(v*? + i) % 1000003 where i % 97 = ?", (factor, one % 97))
        steps.rest()
        db.execute("delete from t where i=?", (one,))
        db.execute("insert into t select ?, ?, repeat('n', 500)", (one, number))
        db.execute("rollback" if number % 11 == 5 else "commit")
        if number % 25 == 10:
            db.execute("checkpoint")
        if number % 40 == 39:
            db.close()
            steps.rest()
            db = open_database()
        steps.tell(number, db.execute("select sum(v), count(*) from t").fetchone())
    db.close()


def check():
    with duckdb.connect("data.db", read_only=True) as db:
        yield digest(db.execute("select * from t order by i, v, pad").fetchall())


main(run, check, 160, rests=1)
