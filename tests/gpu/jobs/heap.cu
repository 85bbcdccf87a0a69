// Host threads that call malloc and free nearly all the time, beside a thread that computes on the GPU.
//
//   heap MIB STEPS MS_PER_STEP LOGFILE
//
// With MALLOC_ARENA_MAX=1 the driver's threads allocate from the heap whose lock these threads hold: a program that
// stops them anywhere, and then waits for the driver, waits for ever. Each step changes every word of MIB mebibytes of
// GPU memory and writes "STEP CHECKSUM" to stdout and the log file.
//
// Build: nvcc -O2 -std=c++17 -o heap heap.cu

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <thread>
#include <unistd.h>

using Word = unsigned long long;

constexpr int BLOCKS = 256;
constexpr int BLOCK_THREADS = 256;
constexpr int ALLOCATORS = 3;
constexpr int PIECES = 64;
// Too large for a thread's own cache, and too small for a separate mapping.
constexpr size_t PIECE_MIN = 2 << 10;
constexpr size_t PIECE_SPREAD = 32 << 10;

static void check(cudaError_t error, const char* what)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "heap: failed to %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

__global__ void advance(Word* memory, size_t words, Word step, Word* total)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    Word part = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride) {
        memory[i] = (memory[i] ^ (memory[i] >> 29)) * 0xD1342543DE82EF95ull + (i ^ step);
        part += memory[i] * (2 * i + 1);
    }
    atomicAdd(total, part);
}

static void allocate_for_ever(unsigned seed)
{
    void* pieces[PIECES] = {};
    for (;;) {
        seed = seed * 1664525 + 1013904223;
        void*& piece = pieces[seed >> 26];
        free(piece);
        piece = malloc(PIECE_MIN + (seed >> 8) % PIECE_SPREAD);
    }
}

int main(int count, char** arguments)
{
    if (count != 5) {
        fprintf(stderr, "usage: heap MIB STEPS MS_PER_STEP LOGFILE\n");
        return 2;
    }
    size_t words = (strtoull(arguments[1], nullptr, 10) << 20) / sizeof(Word);
    Word steps = strtoull(arguments[2], nullptr, 10);
    useconds_t pause = useconds_t(atol(arguments[3]) * 1000);
    FILE* log = fopen(arguments[4], "a");
    if (!log) {
        perror("heap: failed to open the log file");
        return 1;
    }
    Word *memory, *total;
    check(cudaMalloc(&memory, words * sizeof(Word)), "allocate GPU memory");
    check(cudaMalloc(&total, sizeof(Word)), "allocate GPU memory");
    check(cudaMemset(memory, 1, words * sizeof(Word)), "fill GPU memory");
    for (int number = 0; number < ALLOCATORS; number++)
        std::thread(allocate_for_ever, number + 1).detach();
    for (Word step = 0; step < steps; step++) {
        Word checksum = 0;
        check(cudaMemset(total, 0, sizeof(Word)), "clear the checksum");
        advance<<<BLOCKS, BLOCK_THREADS>>>(memory, words, step, total);
        check(cudaGetLastError(), "start a kernel");
        check(cudaMemcpy(&checksum, total, sizeof(Word), cudaMemcpyDeviceToHost), "run a step");
        for (FILE* file : {stdout, log}) {
            fprintf(file, "%llu %016llx\n", step, checksum);
            fflush(file);
        }
        usleep(pause);
    }
    // Without destructors, because the other threads never end.
    _exit(0);
}
