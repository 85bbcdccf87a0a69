"""Training with fully sharded parameters and activation checkpointing (FSDP2) for torchrun, a rank on each GPU."""

import functools

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch.distributed as group
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    run = common.Run(options)
    device = common.join_group(torch, options.device)
    network = common.perceptron(torch, device)
    checkpoint_wrapper.apply_activation_checkpointing(
        network,
        checkpoint_wrapper_fn=functools.partial(
            checkpoint_wrapper.checkpoint_wrapper,
            checkpoint_impl=checkpoint_wrapper.CheckpointImpl.NO_REENTRANT,
        ),
        check_fn=lambda part: isinstance(part, torch.nn.Linear),
    )
    fully_shard(network, mesh=init_device_mesh(options.device, (group.get_world_size(),)))
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
        if group.get_rank() == 0:
            run.say(step, mean.item())
    whole = {name: part.full_tensor() for name, part in network.state_dict().items()}
    if group.get_rank() == 0:
        run.end(weights=common.torch_digest(torch, whole))
    group.destroy_process_group()


if __name__ == "__main__":
    main()
