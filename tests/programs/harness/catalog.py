"""The programs: how each is run, what it needs, and how its files are compared."""

import dataclasses
import pathlib

JOBS = pathlib.Path(__file__).resolve().parent.parent / "jobs"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and its job.

    `job` is the script in jobs/ with its further arguments after the seconds. Patterns are of paths in the job's
    folder: `contents` of files whose bytes differ between two runs, `names` of files whose names do, too. Both are
    compared by the script's check alone.
    """

    name: str
    job: str
    pip: tuple = ()
    apt: tuple = ()
    commands: tuple = ()
    contents: tuple = ()
    names: tuple = ()
    # The lines of the output that differ between two runs.
    lines: str = ""
    seconds: float = 6
    kills: int = 3
    # A user namespace has no other users.
    becomes_a_user: bool = False

    def words(self, python, seconds):
        script, *more = self.job.split()
        return [python, "-B", "-u", str(JOBS / script), f"{seconds:g}", *more]

    def check_words(self, python):
        script, *more = self.job.split()
        return [python, "-B", str(JOBS / script), "check", *more]


PROGRAMS = (
    Program("sqlite-journal", "sqlite.py journal"),
    Program("sqlite-wal", "sqlite.py wal"),
    Program("mmap", "mapped.py"),
    Program("dbm", "dumb.py"),
    Program("state-inplace", "closed_state.py inplace"),
    Program("state-rename", "closed_state.py rename"),
    Program("temporary", "temporary.py"),
    Program("folders", "folders.py"),
    Program("logs", "logs.py 5"),
    # A log that was open at a snapshot may be removed before the kill: ckpt-run saves what is appended to by its size.
    Program("logs-short", "logs.py 1"),
    Program("make", "build.py", commands=("make", "gcc")),
    Program(
        "git",
        "repository.py",
        commands=("git",),
        # The index has inodes and times; packs depend on the order of loose objects.
        contents=(".git/index",),
        names=(".git/objects/*",),
    ),
    Program("memmap", "memmap.py", pip=("numpy",)),
    Program("h5py", "hdf5.py", pip=("h5py",)),
    Program("zarr", "zarr_array.py", pip=("zarr",)),
    Program("lmdb", "lightning.py", pip=("lmdb",), contents=("env/*",)),
    Program("duckdb", "duck.py", pip=("duckdb",), contents=("data.db*",)),
    Program("leveldb", "level.py", pip=("plyvel",), names=("db/*",)),
    Program("rocksdb", "rocks.py", pip=("rocksdict",), names=("db/*",)),
    Program("tensorboard", "events.py", pip=("tensorboard",), names=("logs/*",)),
    Program("mlflow", "tracking.py", pip=("mlflow-skinny",), names=("mlruns/*",)),
    Program(
        "lammps",
        "molecules.py",
        apt=("lammps",),
        commands=("lmp",),
        contents=("log.lammps",),
        lines="CPU|^(Loop|Performance|Total wall|Pair|Neigh|Comm|Output|Modify|Other)",
    ),
    Program(
        "espresso",
        "espresso.py",
        apt=("quantum-espresso",),
        commands=("pw.x",),
        contents=("pw.out", "*.xml"),
    ),
    Program(
        "mariadb",
        "servers.py mariadb",
        apt=("mariadb-server-core", "mariadb-client-core"),
        commands=("mariadbd", "mariadb"),
        contents=("*",),
        names=("data/*",),
        seconds=8,
    ),
    # The suite does not install it: its package would start a server on the machine.
    Program(
        "postgres",
        "servers.py postgres",
        commands=("psql", "pg_lsclusters"),
        contents=("*",),
        names=("data/*",),
        seconds=8,
        becomes_a_user=True,
    ),
    Program(
        "redis",
        "servers.py redis",
        apt=("redis-tools",),
        commands=("redis-server",),
        contents=("*",),
        names=("appendonlydir/*",),
        seconds=8,
    ),
    Program(
        "mpi",
        "clusters.py mpi",
        apt=("openmpi-bin", "libopenmpi-dev"),
        commands=("mpicc", "mpirun"),
    ),
    Program(
        "dask",
        "clusters.py dask",
        pip=("distributed",),
        names=("*",),
        seconds=10,
    ),
    Program(
        "notebook",
        "clusters.py notebook",
        pip=("nbclient", "ipykernel"),
        seconds=10,
    ),
)
