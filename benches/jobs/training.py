#!/usr/bin/env python3
"""A training: float32 weights, gradients and both of Adam's moments, all changed by each step.

    training.py HEARTBEAT [--layers N] [--data-mib N] [--bf16] [--seed N]

A residual network of square layers learns to repeat a smaller one's answers, from data that stay in
memory. --bf16 keeps a bfloat16 copy of the weights for the computation beside the float32 weights.
"""

import argparse

import numpy
from heartbeat import Heart

WIDTH = 1024
BATCH = 32
# 34 layers: 4 arrays of 4 MiB each are 544 MiB.
LAYERS = 34
DATA_MIB = 48
RATE, DECAY, BETA1, BETA2, EPSILON = 1e-4, 0.01, 0.9, 0.999, 1e-8
# Adam processes its arrays in pieces that fit the processor's cache.
PIECE = 1 << 15
STEP_SECONDS = 0.01


class Layer:
    def __init__(self, numbers, bf16):
        self.weights = numbers.standard_normal((WIDTH, WIDTH), dtype=numpy.float32)
        self.weights *= numpy.float32(0.5 / WIDTH**0.5)
        self.gradients = numpy.zeros_like(self.weights)
        self.first = numpy.zeros_like(self.weights)
        self.second = numpy.zeros_like(self.weights)
        self.bits = numpy.empty(self.weights.shape, numpy.uint16) if bf16 else None
        self.quantize()

    def quantize(self):
        if self.bits is not None:
            numpy.right_shift(self.weights.view(numpy.uint32), 16, out=self.bits, casting="unsafe")

    def computed_with(self):
        if self.bits is None:
            return self.weights
        return (self.bits.astype(numpy.uint32) << 16).view(numpy.float32)

    def update(self, step, scratch):
        rate = numpy.float32(RATE * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step))
        flat = [a.reshape(-1) for a in (self.weights, self.gradients, self.first, self.second)]
        for begin in range(0, flat[0].size, PIECE):
            weights, gradients, first, second = (a[begin : begin + PIECE] for a in flat)
            first *= numpy.float32(BETA1)
            numpy.multiply(gradients, numpy.float32(1 - BETA1), out=scratch)
            first += scratch
            second *= numpy.float32(BETA2)
            numpy.multiply(gradients, gradients, out=scratch)
            scratch *= numpy.float32(1 - BETA2)
            second += scratch
            numpy.sqrt(second, out=scratch)
            scratch += numpy.float32(EPSILON)
            numpy.divide(first, scratch, out=scratch)
            scratch *= rate
            weights *= numpy.float32(1 - RATE * DECAY)
            weights -= scratch
        self.quantize()


class Training:
    def __init__(self, layers, data_mib, bf16, seed):
        self.numbers = numpy.random.default_rng(seed)
        self.layers = [Layer(self.numbers, bf16) for _ in range(layers)]
        rows = (data_mib << 20) // (2 * WIDTH * 4)
        self.inputs = self.numbers.standard_normal((rows, WIDTH), dtype=numpy.float32)
        teacher = self.numbers.standard_normal((WIDTH, WIDTH), dtype=numpy.float32)
        self.targets = numpy.tanh(self.inputs @ teacher / numpy.float32(WIDTH**0.5))
        self.scratch = numpy.empty(PIECE, numpy.float32)
        self.losses = []

    def step(self):
        rows = self.numbers.integers(len(self.inputs), size=BATCH)
        values, kept = self.inputs[rows], []
        for layer in self.layers:
            inner = numpy.maximum(values @ layer.computed_with(), 0)
            kept.append((values, inner))
            values = values + inner
        error = values - self.targets[rows]
        self.losses.append(float(numpy.mean(error * error)))
        error *= numpy.float32(2 / BATCH)
        for layer, (values, inner) in zip(reversed(self.layers), reversed(kept)):
            masked = error * (inner > 0)
            numpy.matmul(values.T, masked, out=layer.gradients)
            error = error + masked @ layer.computed_with().T
            layer.update(len(self.losses), self.scratch)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("heartbeat")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--data-mib", type=int, default=DATA_MIB)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    training = Training(arguments.layers, arguments.data_mib, arguments.bf16, arguments.seed)
    heart = Heart(arguments.heartbeat)
    while True:
        training.step()
        heart.step(STEP_SECONDS)


if __name__ == "__main__":
    main()
