"""Throughput of NCCL's all-reduce in bytes per second, for messages of several sizes; gloo without GPUs."""

import time

import common

MIB = 1 << 20
ROUNDS, WARM_ROUNDS = 20, 5


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch.distributed as group

    on_gpu = options.device == "cuda"
    device = common.join_group(torch, options.device)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    told = []
    for size in (1, 16, 256) if on_gpu else (1,):
        tensor = torch.zeros(size * MIB // 4, device=device)
        for number in range(WARM_ROUNDS + ROUNDS):
            if number == WARM_ROUNDS:
                wait()
                begun = time.monotonic()
            group.all_reduce(tensor)
        wait()
        rate = size * MIB * ROUNDS / (time.monotonic() - begun)
        told.append(f"{size} MiB {rate / 1e9:.1f} GB/s")
    if group.get_rank() == 0:
        common.write(options.result, [", ".join(told)])
        print("done", flush=True)
    group.destroy_process_group()


if __name__ == "__main__":
    main()
