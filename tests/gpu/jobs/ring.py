"""Processes in a ring, one on each GPU: each reads the tensor of the one before it through CUDA IPC."""

import common


def member(number, torch_device, mine, next_inbox, requests, answers):
    """Fills its own tensor and sums up its neighbour's, on request."""
    import torch

    device = torch.device(torch_device)
    own = torch.full((1 << 20,), float(number), device=device)
    next_inbox.put(own)
    neighbour = mine.get()
    while (request := requests.get()) is not None:
        if request == "sum":
            answers.put(float(neighbour.to(device).double().sum()))
        else:
            own += request + number
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            answers.put(0.0)
    # The owner of memory must outlive its readers.
    del neighbour
    answers.put(0.0)
    requests.get()


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    import torch.multiprocessing as processes

    run = common.Run(options)
    on_gpu = options.device == "cuda"
    gpus = torch.cuda.device_count() if on_gpu else 0
    count = max(2, gpus)
    context = processes.get_context("spawn")
    inboxes, requests, answers = ([context.Queue() for _ in range(count)] for _ in range(3))
    members = []
    for number in range(count):
        device = f"cuda:{number % gpus}" if on_gpu else "cpu"
        queues = (inboxes[number], inboxes[(number + 1) % count])
        arguments = (number, device, *queues, requests[number], answers[number])
        members.append(context.Process(target=member, args=arguments, daemon=True))
        members[-1].start()

    def ask(request):
        for queue in requests:
            queue.put(request)
        return [queue.get(timeout=120) for queue in answers]

    for step in run.steps():
        ask(step)
        run.say(step, sum(total * (number + 1) for number, total in enumerate(ask("sum"))))
    ask(None)
    for queue in requests:
        queue.put(None)
    for process in members:
        process.join()
    run.end()


if __name__ == "__main__":
    main()
