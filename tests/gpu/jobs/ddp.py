"""Data-parallel training for torchrun: NCCL with one GPU a rank, gloo without GPUs.

--refusable holds a pipe made with O_DIRECT where there are no GPUs, which CRIU cannot dump. --gib adds a tensor of this
size to each rank, which every step changes.
"""

import os

import common


def main():

    def add(parser):
        parser.add_argument("--refusable", action="store_true")
        parser.add_argument("--gib", type=float, default=0)

    options = common.parse(__doc__, add)
    if options.refusable and options.device == "cpu":
        os.pipe2(os.O_DIRECT)
    torch = common.prepare_torch()
    import torch.distributed as group
    from torch.nn.parallel import DistributedDataParallel

    run = common.Run(options)
    device = common.join_group(torch, options.device)
    rank = group.get_rank()
    network = DistributedDataParallel(common.perceptron(torch, device))
    ballast = torch.rand(int(options.gib * (1 << 28)), device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in run.steps():
        mine = step * group.get_world_size() + group.get_rank()
        points, classes = (part.to(device) for part in common.batch(torch, mine))
        loss = torch.nn.functional.cross_entropy(network(points), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ballast += 1
        mean = loss.detach().clone()
        group.all_reduce(mean)
        if rank == 0:
            run.say(step, mean.item())
    if rank == 0:
        run.end(weights=common.torch_digest(torch, network.state_dict(), optimizer.state_dict(), ballast))
    group.destroy_process_group()


if __name__ == "__main__":
    main()
