"""One library of CUDA in each run: --use names it. Each step's line has a digest of what it computed."""

import os

import common

SIDE = 256


def fourier(torch, device):
    """cuFFT, whose plans are kept."""
    signal = torch.randn(64, 1024, device=device)

    def step(number):
        nonlocal signal
        signal = torch.fft.irfft(torch.fft.rfft(signal * 1.001, n=1000 + number % 5), n=1024)
        return signal

    return step


def algebra(torch, device):
    """cuSOLVER and MAGMA."""
    matrix = torch.randn(SIDE, SIDE, device=device, dtype=torch.float64)

    def step(number):
        symmetric = matrix @ matrix.T + number * torch.eye(SIDE, device=device)
        inverse = torch.linalg.inv(symmetric)
        return [torch.linalg.cholesky(symmetric), inverse, torch.linalg.eigvalsh(symmetric)]

    return step


def sparse(torch, device):
    """cuSPARSE."""
    matrix = torch.eye(SIDE, device=device) + torch.diag(torch.ones(SIDE - 3, device=device), 3)
    matrix, vector = matrix.to_sparse_csr(), torch.ones(SIDE, 8, device=device)

    def step(number):
        nonlocal vector
        vector = (matrix @ vector) / (2 + number % 3)
        return vector

    return step


def randomness(torch, device):
    """cuRAND's generators of PyTorch: the default and another one."""
    other = torch.Generator(device).manual_seed(5)

    def step(number):
        drawn = [torch.rand(1000, device=device), torch.randn(1000, device=device, generator=other)]
        return [*drawn, torch.randperm(500 + number, device=device), torch.randint(9, (99,))]

    return step


def recurrent(torch, device):
    """A recurrent layer of cuDNN with dropout, whose random state cuDNN keeps."""
    layer = torch.nn.LSTM(64, 128, num_layers=3, dropout=0.3).to(device)
    state = None

    def step(number):
        nonlocal state
        result, state = layer(torch.ones(5, 8, 64, device=device) * number, state)
        result.sum().backward()
        state = [part.detach() for part in state]
        return [result, *(weight.grad for weight in layer.parameters())]

    return step


def attention(torch, device):
    """Fused attention in bfloat16, forwards and backwards."""
    parts = [torch.randn(2, 8, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]

    def step(number):
        parts[0].requires_grad_().grad = None
        result = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, scale=1 / (number + 8))
        result.float().sum().backward()
        return [result, parts[0].grad]

    return step


def narrow(torch, device):
    """Products in 8-bit floating point by cuBLASLt."""
    one = torch.ones((), device=device)
    matrix = torch.randn(SIDE, SIDE, device=device)

    def step(number):
        narrow = [(matrix * (1 + number % 7)).to(torch.float8_e4m3fn), matrix.to(torch.float8_e4m3fn).t()]
        return torch._scaled_mm(*narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return step


def alone_in_nccl(torch, device):
    """A process group of one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    tensor = torch.ones(SIDE, device=device)

    def step(number):
        nonlocal tensor
        tensor = tensor * 1.01 + number
        torch.distributed.all_reduce(tensor)
        return tensor

    return step


def profiler(torch, device):
    """PyTorch's profiler (CUPTI), on for ten steps of twenty."""
    from torch.profiler import ProfilerActivity, profile

    matrix, running = torch.randn(SIDE, SIDE, device=device), None

    def step(number):
        nonlocal matrix, running
        if number % 20 == 0:
            running = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            running.start()
        matrix = torch.tanh(matrix @ matrix)
        if number % 20 == 10:
            running.stop()
            names = {event.key for event in running.key_averages()}
            assert any("matmul" in name or "mm" in name for name in names), names
        return matrix

    return step


def kernel(torch, device):
    """A kernel of Triton, which Triton compiles and loads itself."""
    import triton_kernel

    tensor = torch.arange(10000, device=device)

    def step(number):
        triton_kernel.change(tensor, number)
        return tensor

    return step


def pools(torch, device):
    """A pool of memory beside the usual one."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.ones(1 << 20, device=device)

    def step(number):
        with torch.cuda.use_mem_pool(pool):
            passing = kept * number
        kept.add_(passing, alpha=1e-3)
        return kept

    return step


def cupy_libraries(_, __):
    """CuPy's cuFFT, cuRAND, cuBLAS and kernels compiled by NVRTC while it runs."""
    import cupy

    random = cupy.random.default_rng(3)
    values = random.random((SIDE, SIDE))

    def step(number):
        nonlocal values
        own = cupy.ElementwiseKernel("float64 x", "float64 y", f"y = x * {number % 50 + 1} - floor(x)", f"own_{number % 50}")
        values = cupy.abs(cupy.fft.fft2(own(values) + random.random((SIDE, SIDE)))) % 1.0
        return cupy.asnumpy(values @ values)

    return step


USES = {
    use.__name__: use
    for use in (
        *(fourier, algebra, sparse, randomness, recurrent, attention, narrow),
        *(alone_in_nccl, profiler, kernel, pools, cupy_libraries),
    )
}


def main():
    options = common.parse(__doc__, lambda parser: parser.add_argument("--use", choices=USES, required=True))
    torch = common.prepare_torch()
    run = common.Run(options)
    step = USES[options.use](torch, options.device)
    for number in run.steps():
        found = step(number)
        found = common.digest(found) if hasattr(found, "tobytes") else common.torch_digest(torch, [found])
        run.line(f"{number} {found}")
    run.end()


if __name__ == "__main__":
    main()
