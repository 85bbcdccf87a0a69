"""A mapped file of 8 MB from Python's own mmap, changed in place; it is closed and opened again at times."""

import mmap

from common import main, no_check

PAGES = 2048


def open_map():
    with open("map.bin", "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def run(steps):
    with open("map.bin", "wb") as file:
        file.truncate(PAGES * 4096)
    view = open_map()
    for number in steps:
        for part in range(20):
            one, other = (steps.random.randrange(PAGES) * 4096 for _ in range(2))
            value = int.from_bytes(view[one : one + 8], "little") * 3 + view[other] + number
            view[one : one + 8] = (value % 1000003).to_bytes(8, "little")
            if part == 10:
                steps.rest()
        if number % 40 == 39:
            view.close()
            steps.rest()
            view = open_map()
        steps.tell(number, value)
    view.close()


main(run, no_check, 400, rests=1)
