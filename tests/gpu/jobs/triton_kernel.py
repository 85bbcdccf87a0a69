"""A kernel of Triton; Triton wants it in a file of its own."""

import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _change(memory, count, number, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    old = tl.load(memory + places, mask=places < count)
    tl.store(memory + places, old * 31 + number + places, mask=places < count)


def change(tensor, number):
    _change[(triton.cdiv(len(tensor), BLOCK),)](tensor, len(tensor), number, BLOCK)
