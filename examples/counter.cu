// GPU job for tests of ckpt-run: counts in GPU memory, and detects damage.
//
//   counter GIB STEPS [MS_PER_STEP] [LOGFILE]
//
// Each step changes every word of GIB gibibytes of GPU memory and prints one
// line, "STEP CHECKSUM", to stdout and to the log file, if one is given. The last
// line is "done STEPS CHECKSUM". The checksum depends on the position of every
// word, and each step on the step before: a wrong or stale byte, or a lost or
// repeated step, changes every line after it. Two runs with the same GIB and STEPS
// print the same. The job keeps no checkpoints and has no code for ckpt-run.
//
// Build: nvcc -O2 -o counter counter.cu
// With -DCOUNTER_BITS=16 only 16 bits of each word are used, so that images are smaller than the memory.

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <unistd.h>

using Word = unsigned long long;

#ifndef COUNTER_BITS
#define COUNTER_BITS 64
#endif
constexpr int UNUSED_BITS = 64 - COUNTER_BITS;
constexpr Word USED = ~0ull >> UNUSED_BITS;

constexpr int BLOCKS = 1024;
constexpr int THREADS = 256;

static void fail(const char* what, const char* why)
{
    fprintf(stderr, "counter: failed to %s: %s\n", what, why);
    exit(1);
}

static void check(cudaError_t error, const char* what)
{
    if (error != cudaSuccess)
        fail(what, cudaGetErrorString(error));
}

__global__ void fill(Word* memory, size_t words)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        memory[i] = (i ^ (i >> 31)) * 0x9E3779B97F4A7C15ull >> UNUSED_BITS;
}

// Steps do not commute, so that a lost, repeated or swapped one is detected.
__global__ void advance(Word* memory, size_t words, Word step)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        memory[i] = ((memory[i] ^ (memory[i] >> 29)) * 0xD1342543DE82EF95ull + (i ^ step ^ (step << 40))) & USED;
}

// The factors are odd: no change of a single word cancels. The order of the
// additions does not matter, so that the sum is the same in every run.
__global__ void sum(const Word* memory, size_t words, Word* total)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    Word part = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        part += memory[i] * (2 * i + 1);
    atomicAdd(total, part);
}

static void say(FILE* log, const char* format, ...)
{
    for (FILE* file : {stdout, log}) {
        if (!file)
            continue;
        va_list arguments;
        va_start(arguments, format);
        if (vfprintf(file, format, arguments) < 0 || fflush(file) != 0)
            fail("write a line", strerror(errno));
        va_end(arguments);
    }
}

int main(int count, char** arguments)
{
    double gib = count > 2 ? atof(arguments[1]) : 0;
    Word steps = count > 2 ? strtoull(arguments[2], nullptr, 10) : 0;
    long pace_ms = count > 3 ? atol(arguments[3]) : 100;
    if (gib <= 0 || steps == 0 || pace_ms < 0 || count > 5) {
        fprintf(stderr, "usage: counter GIB STEPS [MS_PER_STEP] [LOGFILE]\n");
        return 2;
    }
    FILE* log = nullptr;
    if (count > 4 && !(log = fopen(arguments[4], "a")))
        fail("open the log file", strerror(errno));

    size_t words = size_t(gib * double(1ull << 30)) / sizeof(Word);
    Word *memory, *total;
    check(cudaMalloc(&memory, words * sizeof(Word)), "allocate GPU memory");
    check(cudaMalloc(&total, sizeof(Word)), "allocate GPU memory");
    fill<<<BLOCKS, THREADS>>>(memory, words);
    check(cudaGetLastError(), "start a kernel");

    Word checksum = 0;
    for (Word step = 0; step < steps; step++) {
        advance<<<BLOCKS, THREADS>>>(memory, words, step);
        check(cudaMemset(total, 0, sizeof(Word)), "clear the checksum");
        sum<<<BLOCKS, THREADS>>>(memory, words, total);
        check(cudaGetLastError(), "start a kernel");
        check(cudaMemcpy(&checksum, total, sizeof(Word), cudaMemcpyDeviceToHost), "run a step");
        say(log, "%llu %016llx\n", step, checksum);
        usleep(useconds_t(pace_ms) * 1000);
    }
    say(log, "done %llu %016llx\n", steps, checksum);
    return 0;
}
