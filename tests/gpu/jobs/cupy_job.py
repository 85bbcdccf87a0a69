"""Power iteration, a Fourier transform and a kernel of its own in CuPy; NumPy without a GPU.

--managed has CuPy allocate managed memory, which the driver cannot suspend; without a GPU it holds a
pipe made with O_DIRECT instead, which CRIU cannot dump.
"""

import os

import common

SIZE = 512

os.environ["CUPY_CACHE_DIR"] = os.path.abspath("cupy")


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--managed", action="store_true")
    )
    import numpy

    numbers = numpy
    if options.device == "cuda":
        import cupy as numbers

        if options.managed:
            numbers.cuda.set_allocator(numbers.cuda.MemoryPool(numbers.cuda.malloc_managed).malloc)
    elif options.managed:
        os.pipe2(os.O_DIRECT)
    run = common.Run(options)
    source = numpy.random.default_rng(0)
    matrix = numbers.asarray(source.standard_normal((SIZE, SIZE)))
    vector = numbers.asarray(source.standard_normal(SIZE))
    for step in run.steps():
        vector = matrix @ vector
        vector /= numbers.linalg.norm(vector)
        vector = numbers.fft.irfft(numbers.fft.rfft(vector) * (1 + step % 7), n=SIZE)
        run.say(step, vector[step % SIZE])
    host = vector if numbers is numpy else numbers.asnumpy(vector)
    run.end(vector=common.digest(host))


if __name__ == "__main__":
    main()
