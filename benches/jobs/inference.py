#!/usr/bin/env python3
"""A server between requests: weights that never change, a Python heap that always does.

    inference.py HEARTBEAT [--mib N] [--bf16] [--seed N]

Each request sends one vector through one layer, then does the usual work of a server: strings, a
limited cache of answers, a growing log, short-lived buffers of varying size.
--bf16 keeps the weights as the upper halves of float32 (uint16), as accelerators want them.
"""

import argparse
import collections
import json
import random

import numpy
from heartbeat import Heart

WIDTH = 1024
LAYER_BYTES = WIDTH * WIDTH * 4
SCALE = 0.02  # of weights, as in trained networks
REQUEST_SECONDS = 0.05
CACHED_ANSWERS = 2000
BUFFER_BYTES_MAX = 1 << 18


def load(mib, bf16, numbers):
    """Returns layers as float32, or twice as many as bfloat16 bits."""
    layers = []
    for _ in range((mib << 20) // LAYER_BYTES * (2 if bf16 else 1)):
        layer = numbers.standard_normal((WIDTH, WIDTH), dtype=numpy.float32)
        layer *= SCALE
        layers.append((layer.view(numpy.uint32) >> 16).astype(numpy.uint16) if bf16 else layer)
    return layers


def as_float(layer):
    if layer.dtype == numpy.float32:
        return layer
    return (layer.astype(numpy.uint32) << 16).view(numpy.float32)


class Server:
    def __init__(self, layers, seed):
        self.layers = layers
        self.numbers = numpy.random.default_rng(seed)
        self.random = random.Random(seed)
        self.answers = collections.OrderedDict()
        self.log = []
        self.buffers = []

    def request(self, number):
        question = self.numbers.standard_normal(WIDTH, dtype=numpy.float32)
        layer = as_float(self.layers[self.random.randrange(len(self.layers))])
        scores = numpy.maximum(question @ layer, 0)
        best = numpy.argsort(scores)[-16:]
        answer = {"request": number, "best": best.tolist(), "scores": scores[best].tolist()}
        text = json.dumps(answer)
        self.answers[hash(text)] = text
        if len(self.answers) > CACHED_ANSWERS:
            self.answers.popitem(last=False)
        self.log.append((number, f"request {number} answered with {len(text)} bytes"))
        self.buffers.append(bytearray(self.random.randrange(BUFFER_BYTES_MAX)))
        if len(self.buffers) > 16:
            self.buffers.pop(self.random.randrange(len(self.buffers)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heartbeat")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    layers = load(arguments.mib, arguments.bf16, numpy.random.default_rng(arguments.seed))
    server = Server(layers, arguments.seed)
    heart = Heart(arguments.heartbeat)
    while True:
        server.request(heart.steps)
        heart.step(REQUEST_SECONDS)


if __name__ == "__main__":
    main()
