"""Two processes that share a tensor in GPU memory (CUDA IPC), as torch.multiprocessing passes them."""

import common


def other(requests, answers, device):
    """Adds to the shared tensor on request."""
    tensor = requests.get()
    while (step := requests.get()) is not None:
        tensor += step
        answers.put(float(tensor.to(device).double().sum()))
    del tensor


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch.multiprocessing as processes

    run = common.Run(options)
    context = processes.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    arguments = (requests, answers, options.device)
    helper = context.Process(target=other, args=arguments, daemon=True)
    helper.start()
    tensor = torch.zeros(1 << 20, device=options.device)
    requests.put(tensor)
    for step in run.steps():
        requests.put(step)
        run.say(step, answers.get(timeout=60))
    requests.put(None)
    helper.join()
    run.end(tensor=common.torch_digest(torch, tensor))


if __name__ == "__main__":
    main()
