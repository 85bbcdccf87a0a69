"""Training that reads the GPU's state from NVML at each step, as monitors inside a job do."""

import ctypes

import common


def reader():
    """Returns a function that reads memory and utilisation, and counts as one successful read."""
    try:
        import pynvml
    except ImportError:
        return plain_reader()
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read():
        pynvml.nvmlDeviceGetUtilizationRates(gpu)
        return pynvml.nvmlDeviceGetMemoryInfo(gpu).used > 0

    return read


def plain_reader():
    """Does the same without pynvml."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    gpu, memory, rates = ctypes.c_void_p(), (ctypes.c_uint64 * 3)(), (ctypes.c_uint * 2)()
    for code in (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)),
    ):
        if code != 0:
            raise SystemExit(f"nvml.py: NVML cannot be used: error {code}")

    def read():
        codes = (
            library.nvmlDeviceGetUtilizationRates(gpu, rates),
            library.nvmlDeviceGetMemoryInfo(gpu, memory),
        )
        return codes == (0, 0) and memory[2] > 0

    return read


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    read = reader() if options.device == "cuda" else lambda: True
    good = []
    common.train(run, network, optimizer, torch, lambda step, loss: good.append(bool(read())))
    run.end(weights=common.torch_digest(torch, network.state_dict()), reads=sum(good))


if __name__ == "__main__":
    main()
