"""Prints the time of steps on memory with huge pages, and the share of memory that has them.

256 MiB of float32: four million elements from all over it, and all of it in order.
"""

import json
import pathlib
import re
import time

import numpy as np

ELEMENTS = 64 << 20
PICKED = 4 << 20
PAUSE_SECONDS = 0.1


def huge_mib():
    text = pathlib.Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\s+(\d+)", text)[1]) >> 10


def main():
    numbers = np.zeros(ELEMENTS, np.float32)
    numbers += 1
    picked = np.random.default_rng(0).integers(0, ELEMENTS, PICKED)
    while True:
        begun = time.perf_counter()
        numbers[picked].sum()
        between = time.perf_counter()
        numbers *= np.float32(1.0000001)
        ended = time.perf_counter()
        step = {"gather": between - begun, "stream": ended - between, "huge_mib": huge_mib()}
        print(json.dumps(step), flush=True)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
