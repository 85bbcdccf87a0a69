"""Database servers with their clients in one job: MariaDB, PostgreSQL and Redis. Each step is a transaction."""

import glob
import os
import pathlib
import pwd
import subprocess
import sys
import time

from common import digest, main

HERE = pathlib.Path.cwd()
SOCKET = HERE / "socket"
SCHEMA = "create table t (i int primary key, v int, pad varchar(600))"
# Settings and users of the machine have no effect.
MARIADB = ["--no-defaults", f"--socket={SOCKET}"]


def call(words, text=""):
    """Runs a program; returns its output."""
    done = subprocess.run(
        [str(word) for word in words], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout


class Server:
    """A server as a child, and the command of its client, which reads statements from its stdin."""

    def __init__(self, words, client, quit_words, question=("select 1", "1")):
        self.client, self.quit_words = client, quit_words
        with open("server.log", "ab") as log:
            self.process = subprocess.Popen(
                [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        asked, expected = question
        answer = {"input": asked, "capture_output": True, "text": True, "check": False}
        while subprocess.run(client, **answer).stdout.strip() != expected:
            if self.process.poll() is not None:
                sys.exit("the server does not start; see server.log")
            time.sleep(0.05)

    def do(self, text):
        return call(self.client, text)

    def end(self):
        call(*self.quit_words)
        self.process.wait()


def mariadb(is_new):
    if is_new:
        words = ["--no-defaults", f"--datadir={HERE}/data", "--skip-test-db"]
        call(["mariadb-install-db", *words, "--auth-root-authentication-method=normal"])
    user = ["--user=root"] if os.geteuid() == 0 else []
    server = ["mariadbd", *MARIADB, *user, f"--datadir={HERE}/data", "--skip-networking"]
    client = ["mariadb", *MARIADB, "--user=root", "--skip-column-names", "--batch"]
    made = Server(server, client, (client, "shutdown"))
    if is_new:
        made.do("create database d")
    made.client = [*client, "d"]
    return made


def postgres(is_new):
    if os.geteuid() == 0:
        # It refuses to run as root.
        own = pwd.getpwnam("postgres")
        for path in (HERE, *HERE.rglob("*")):
            os.chown(path, own.pw_uid, own.pw_gid, follow_symlinks=False)
        os.setgroups([])
        os.setgid(own.pw_gid)
        os.setuid(own.pw_uid)
    folder = pathlib.Path(max(glob.glob("/usr/lib/postgresql/*/bin")))
    if is_new:
        call([folder / "initdb", "-D", "data", "-U", "u", "-A", "trust"])
    server = [folder / "postgres", "-D", "data", "-k", HERE, "-h", ""]
    client = ["psql", "-h", HERE, "-U", "u", "-d", "postgres", "-Atq", "-v", "ON_ERROR_STOP=1"]
    client = [str(word) for word in client]
    return Server(server, client, ([folder / "pg_ctl", "-D", "data", "-m", "fast", "stop"],))


def redis(_):
    options = ["--port", 0, "--unixsocket", SOCKET, "--dir", HERE, "--appendonly", "yes"]
    options += ["--save", "1 1", "--enable-debug-command", "yes"]
    client = ["redis-cli", "-e", "-s", str(SOCKET)]
    return Server(["redis-server", *options], client, (client, "shutdown"), ("ping", "PONG"))


def statements(number, one):
    """A transaction in SQL."""
    row = "({}, {}, '{}')".format
    rows = [row(number * 500 + i, i * one % 1009, "n" * (i % 97)) for i in range(500)]
    return f"""
        begin;
        insert into t values {",".join(rows)};
        update t set v = (v * 31 + {number}) % 1000003 where i % 17 = {one % 17};
        delete from t where i % 101 = {one % 101};
        {"rollback" if number % 11 == 5 else "commit"};
    """


def commands(one):
    """The same for Redis: it has no rollback."""
    change = "incrby k{} {}\nlpush l{} {}\nltrim l{} 0 50".format
    lines = [change(i * one % 997, i, i % 7, i, i % 7) for i in range(150)]
    return "\n".join(["multi", *lines, "exec"])


SERVERS = {"mariadb": mariadb, "postgres": postgres, "redis": redis}
NAME = sys.argv[2]
SQL_STATE = "select * from t order by i"


def run(steps):
    server = SERVERS[NAME](True)
    if NAME != "redis":
        server.do(SCHEMA)
    for number in steps:
        one = steps.random.randrange(1, 1009)
        if NAME == "redis":
            said = server.do(commands(one))
            steps.rest()
            steps.tell(number, said)
        else:
            server.do(statements(number, one))
            steps.rest()
            steps.tell(number, server.do("select count(*), sum(v) from t"))
        if number == 15:
            server.end()
            server = SERVERS[NAME](False)
    server.end()


def check():
    server = SERVERS[NAME](False)
    yield digest(server.do("debug digest" if NAME == "redis" else SQL_STATE))
    server.end()


main(run, check, 30, rests=1)
