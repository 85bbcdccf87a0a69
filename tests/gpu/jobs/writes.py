"""Throughput of plain writes to new files, past the page cache as the store writes, in GB/s."""

import argparse
import mmap
import os
import pathlib
import threading
import time

MIB = 1 << 20
BLOCK, FILES = 4 * MIB, 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--mib", type=int, default=4096, help="in each file")
    options = parser.parse_args()

    def write(path):
        # Aligned, as O_DIRECT needs it.
        block = mmap.mmap(-1, BLOCK)
        block.write(os.urandom(BLOCK))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        for _ in range(options.mib * MIB // BLOCK):
            os.write(file, block)
        os.fdatasync(file)
        os.close(file)

    paths = [options.folder / f"writes.{number}" for number in range(FILES)]
    threads = [threading.Thread(target=write, args=(path,)) for path in paths]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{FILES * options.mib * MIB / (time.monotonic() - begun) / 1e9:.1f}")
    for path in paths:
        path.unlink()


if __name__ == "__main__":
    main()
