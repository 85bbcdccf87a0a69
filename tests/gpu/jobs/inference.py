"""A model that answers requests, one a line from stdin, until there are no more."""

import sys
import zlib

import common


def main():
    options = common.parse(__doc__)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device).eval()
    with torch.inference_mode():
        for number, request in enumerate(sys.stdin):
            points, _ = common.batch(torch, zlib.crc32(request.encode()), size=1)
            answer = network(points.to(options.device))[0, 0].item()
            run.line(f"{number} {request.strip()} {answer.hex()}")
            run.pause()
    run.end(weights=common.torch_digest(torch, network.state_dict()))


if __name__ == "__main__":
    main()
