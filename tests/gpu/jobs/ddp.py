"""Data-parallel training for torchrun: NCCL with one GPU a rank, gloo without GPUs.

--refusable holds a pipe made with O_DIRECT where there are no GPUs, which CRIU cannot dump.
"""

import os

import common


def main():
    options = common.parse(
        __doc__, lambda parser: parser.add_argument("--refusable", action="store_true")
    )
    if options.refusable and options.device == "cpu":
        os.pipe2(os.O_DIRECT)
    torch = common.prepare_torch()
    import torch.distributed as group
    from torch.nn.parallel import DistributedDataParallel

    run = common.Run(options)
    rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{rank}" if options.device == "cuda" else "cpu"
    if options.device == "cuda":
        torch.cuda.set_device(rank)
        group.init_process_group("nccl", device_id=torch.device(device))
    else:
        group.init_process_group("gloo")
    network = DistributedDataParallel(common.perceptron(torch, device))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in run.steps():
        mine = step * group.get_world_size() + group.get_rank()
        points, classes = (part.to(device) for part in common.batch(torch, mine))
        loss = torch.nn.functional.cross_entropy(network(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        group.all_reduce(mean)
        if rank == 0:
            run.say(step, mean.item())
    if rank == 0:
        run.end(weights=common.torch_digest(torch, network.state_dict(), optimizer.state_dict()))
    group.destroy_process_group()


if __name__ == "__main__":
    main()
