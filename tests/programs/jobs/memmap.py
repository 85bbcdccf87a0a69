"""A NumPy memmap of 40 MB, changed in place; it is unmapped and mapped again at times."""

import numpy as np
from common import digest, main

ROWS = 5_000


def run(steps):
    array = np.memmap("array.bin", "i8", "w+", shape=(ROWS, 1024))
    for number in steps:
        for _ in range(10):
            one, other = steps.random.randrange(ROWS), steps.random.randrange(ROWS)
            array[one] = (array[one] * 3 + array[other] + number) % 1000003
            if _ == 5:
                steps.rest()
        if number % 7 == 0:
            array.flush()
        if number % 50 == 49:
            del array
            steps.rest()
            array = np.memmap("array.bin", "i8", "r+", shape=(ROWS, 1024))
        steps.tell(number, int(array[one].sum()))


def check():
    yield digest(np.fromfile("array.bin", "i8").tobytes())


main(run, check, 400, rests=1)
