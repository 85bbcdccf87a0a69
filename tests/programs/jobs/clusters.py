"""Programs of several processes that talk to each other: MPI, Dask, and a notebook with its kernel."""

import hashlib
import os
import pathlib
import subprocess
import sys
import time

from common import main, no_check

NAME = sys.argv[2]
MPI = """\
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    static double mine[20000], sum[20000];
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 0; i < 20000; i++) mine[i] = i * rank + 1;
    for (int step = 0; step < 1500; step++) {
        double from;
        for (int i = 0; i < 20000; i++) mine[i] = mine[i] * .999 + step * .001 * (rank + 1);
        MPI_Allreduce(mine, sum, 20000, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        MPI_Sendrecv(sum + step, 1, MPI_DOUBLE, (rank + 1) % ranks, 1, &from, 1, MPI_DOUBLE,
                     (rank + ranks - 1) % ranks, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        mine[0] += from * 1e-9;
        if (rank == 0 && step % 50 == 0) { printf("%d %.12g\\n", step, sum[step]); fflush(stdout); }
        usleep(PAUSE);
    }
    MPI_Finalize();
}
"""
CELL = """\
import random, time
x = globals().get("x", 0)
for i in range(10):
    time.sleep({pause})
    x = (x * 31 + random.Random(i).randrange(10**6)) % 10**9
x
"""


def mpi(_):
    pathlib.Path("a.c").write_text(MPI, encoding="ascii")
    pause = round(float(sys.argv[1]) / 1500 * 1e6)
    subprocess.run(["mpicc", "-O2", f"-DPAUSE={pause}", "a.c", "-o", "a"], check=True)
    # The suite's settings are for programs of one rank.
    for name in ("OMPI_MCA_btl", "OMPI_MCA_ess_singleton_isolated"):
        os.environ.pop(name, None)
    options = ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1", "-np", "3"]
    os.execvp("mpirun", ["mpirun", *options, "./a"])


def work(number):
    """A task of 50 ms."""
    time.sleep(0.05)
    return int(hashlib.sha256(str(number).encode()).hexdigest()[:8], 16)


def dask(steps):
    # By default, Dask keeps locks in a folder that all users' programs share.
    os.environ["DASK_TEMPORARY_DIRECTORY"] = os.getcwd()
    from distributed import Client

    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        for number in steps:
            found = client.gather(client.map(work, range(number * 100, number * 100 + 8)))
            steps.tell(number, sum(found))


def notebook(steps):
    import nbclient
    import nbformat

    code = CELL.format(pause=steps.pause / 5)
    cells = [nbformat.v4.new_code_cell(code) for _ in range(steps.count)]
    book = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(book, kernel_name="python3")
    with client.setup_kernel():
        for number in steps:
            ran = client.execute_cell(book.cells[number], number)
            steps.tell(number, ran.outputs[0]["data"]["text/plain"])


if __name__ == "__main__":
    main({"mpi": mpi, "dask": dask, "notebook": notebook}[NAME], no_check, 30, rests=1)
