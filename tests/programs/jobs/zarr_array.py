"""zarr: an array of small chunks, each a file that is replaced, and arrays that are made and resized."""

import zarr
from common import digest, main

ROWS, CHUNK = 400, 10


def run(steps):
    root = zarr.open_group("data.zarr", mode="w")
    root.create_array("x", shape=(ROWS, 256), chunks=(CHUNK, 256), dtype="i8", fill_value=0)
    for number in steps:
        data = root["x"]
        one, other = steps.random.randrange(ROWS), steps.random.randrange(ROWS)
        data[one] = (data[one] * 3 + data[other] + number) % 1000003
        steps.rest()
        data[other : other + 3] = data[other : other + 3] + number
        if number % 20 == 10:
            more = root.create_array(f"more{number}", shape=(30,), chunks=(10,), dtype="i4")
            more[:] = number
            more.resize((15,))
        if number % 40 == 35:
            del root[f"more{number - 25}"]
        root.attrs["number"] = number
        steps.tell(number, int(data[one].sum()), int(data[other].sum()))


def check():
    root = zarr.open_group("data.zarr", mode="r")
    yield str(dict(root.attrs))
    for name in sorted(root.array_keys()):
        yield f"{name} {root[name].shape} {digest(root[name][:].tobytes())}"


main(run, check, 200)
