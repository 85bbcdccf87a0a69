"""h5py: a dataset of 20 MB that is changed in place; the file is closed and opened again at times."""

import h5py
from common import digest, main

ROWS = 2_500


def run(steps):
    file = h5py.File("data.h5", "w")
    file.create_dataset("x", (ROWS, 1024), "i8", chunks=(8, 1024))[:] = 0
    file.create_dataset("growing", (0,), "i8", maxshape=(None,), chunks=(512,))
    for number in steps:
        data, growing = file["x"], file["growing"]
        for _ in range(3):
            one, other = steps.random.randrange(ROWS), steps.random.randrange(ROWS)
            data[one] = (data[one] * 3 + data[other] + number) % 1000003
        steps.rest()
        growing.resize((len(growing) + 100,))
        growing[-100:] = number
        if number % 50 == 20:
            file.create_group(f"group{number}").attrs["number"] = number
        if number % 4 == 0:
            file.flush()
        steps.tell(number, int(data[one].sum()), int(growing[:].sum()))
        if number % 50 == 49:
            file.close()
            steps.rest()
            file = h5py.File("data.h5", "r+")
    file.close()


def check():
    with h5py.File("data.h5", "r") as file:
        for name in sorted(file):
            found = file[name]
            yield f"{name} {digest(found[:].tobytes()) if hasattr(found, 'shape') else dict(found.attrs)}"


main(run, check, 250)
