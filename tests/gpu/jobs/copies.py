"""Throughput of plain copies from all GPUs to pinned host memory at the same time, in GB/s."""

import argparse
import threading
import time

GIB, CHUNK = 1 << 30, 64 << 20
ROUNDS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    gpus = parser.parse_args().gpus
    import torch

    barrier = threading.Barrier(gpus + 1)

    def copy(gpu):
        source = torch.zeros(GIB, dtype=torch.uint8, device=f"cuda:{gpu}")
        target = torch.zeros(CHUNK, dtype=torch.uint8).pin_memory()
        target.copy_(source[:CHUNK])
        barrier.wait()
        for _ in range(ROUNDS):
            for start in range(0, GIB, CHUNK):
                target.copy_(source[start : start + CHUNK], non_blocking=True)
        torch.cuda.synchronize(gpu)
        barrier.wait()

    for gpu in range(gpus):
        threading.Thread(target=copy, args=(gpu,)).start()
    barrier.wait()
    begun = time.monotonic()
    barrier.wait()
    print(f"{gpus * ROUNDS * GIB / (time.monotonic() - begun) / 1e9:.1f}")


if __name__ == "__main__":
    main()
