"""Inference of a model whose layers are split over all ranks (tensor parallel) for torchrun, a rank on each GPU."""

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch.distributed as group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    run = common.Run(options)
    device = common.join_group(torch, options.device)
    mesh = init_device_mesh(options.device, (group.get_world_size(),))
    network = common.perceptron(torch, device).eval()
    # The two linear layers.
    plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
    parallel.parallelize_module(network, mesh, plan)
    with torch.inference_mode():
        for step in run.steps():
            points, _ = common.batch(torch, step)
            answers = network(points.to(device))
            if group.get_rank() == 0:
                run.say(step, answers.double().sum().item())
    if group.get_rank() == 0:
        run.end()
    group.destroy_process_group()


if __name__ == "__main__":
    main()
