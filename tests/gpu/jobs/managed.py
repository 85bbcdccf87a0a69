"""Counts in managed memory (UVM), which the driver cannot suspend; needs nothing but the driver.

Without a GPU it holds a pipe made with O_DIRECT instead, which CRIU cannot dump.
"""

import ctypes
import os
import zlib

import common

WORDS = 1 << 18
ATTACH_GLOBAL = 1


def gpu_words():
    """Returns managed memory, and a function that fills it on the GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def must(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            raise SystemExit(f"managed.py: {name} failed with CUDA error {code}")

    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    must("cuInit", 0)
    must("cuDeviceGet", ctypes.byref(device), 0)
    must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    must("cuCtxSetCurrent", context)
    must("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(WORDS * 4), ATTACH_GLOBAL)

    def fill(value):
        must("cuMemsetD32_v2", address, ctypes.c_uint(value), ctypes.c_size_t(WORDS))
        must("cuCtxSynchronize")

    return (ctypes.c_uint32 * WORDS).from_address(address.value), fill


def host_words():
    words = (ctypes.c_uint32 * WORDS)()
    pipe = os.pipe2(os.O_DIRECT)

    def fill(value):
        os.write(pipe[1], value.to_bytes(4, "little"))
        words[:] = [int.from_bytes(os.read(pipe[0], 4), "little")] * WORDS

    return words, fill


def main():
    options = common.parse(__doc__)
    run = common.Run(options)
    words, fill = gpu_words() if options.device == "cuda" else host_words()
    total = 0
    for step in run.steps():
        fill(total ^ step)
        total = zlib.crc32(words, total)
        run.line(f"{step} {total:08x}")
    run.end(total=total)


if __name__ == "__main__":
    main()
