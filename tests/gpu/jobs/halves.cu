// The counter of examples/counter.cu with its memory in two halves, on two GPUs or of two kinds.
//
//   halves gpus|pool|pitched GIB STEPS [MS_PER_STEP] [LOGFILE]
//
// gpus: a half on each of the first two GPUs, which never touch each other's memory; the sums of both meet on the
// host. pool and pitched: both halves on the first GPU, one from cudaMalloc, the other from cudaMallocAsync or
// cudaMallocPitch. Prints the lines that the counter prints with the same GIB and STEPS.

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <unistd.h>

using Word = unsigned long long;

constexpr int BLOCKS = 1024;
constexpr int THREADS = 256;
// Length of a row of pitched memory, which no GPU makes longer.
constexpr size_t ROW_BYTES = 1 << 20;

enum class Kind { plain, pool, pitched };

static void fail(const char* what, const char* why)
{
    fprintf(stderr, "halves: failed to %s: %s\n", what, why);
    exit(1);
}

static void check(cudaError_t error, const char* what)
{
    if (error != cudaSuccess)
        fail(what, cudaGetErrorString(error));
}

// Words from `first` of all words; `total` receives the sum of these.
struct Half {
    int gpu;
    size_t first, words;
    Word *memory, *total;
};

__global__ void fill(Half half)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x; at < half.words; at += stride) {
        size_t i = half.first + at;
        half.memory[at] = (i ^ (i >> 31)) * 0x9E3779B97F4A7C15ull;
    }
}

__global__ void advance(Half half, Word step)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x; at < half.words; at += stride) {
        size_t i = half.first + at;
        Word word = half.memory[at];
        half.memory[at] = (word ^ (word >> 29)) * 0xD1342543DE82EF95ull + (i ^ step ^ (step << 40));
    }
}

__global__ void sum(Half half)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    Word part = 0;
    for (size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x; at < half.words; at += stride)
        part += half.memory[at] * (2 * (half.first + at) + 1);
    atomicAdd(half.total, part);
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

static void allocate(Half& half, Kind kind)
{
    size_t bytes = half.words * sizeof(Word);
    check(cudaSetDevice(half.gpu), "choose a GPU");
    check(cudaMalloc(&half.total, sizeof(Word)), "allocate GPU memory");
    size_t pitch = ROW_BYTES;
    switch (kind) {
    case Kind::plain:
        check(cudaMalloc(&half.memory, bytes), "allocate GPU memory");
        break;
    case Kind::pool:
        check(cudaMallocAsync(&half.memory, bytes, cudaStream_t(0)), "allocate GPU memory from the pool");
        check(cudaStreamSynchronize(cudaStream_t(0)), "allocate GPU memory from the pool");
        break;
    case Kind::pitched:
        size_t rows = (bytes + ROW_BYTES - 1) / ROW_BYTES;
        check(cudaMallocPitch(&half.memory, &pitch, ROW_BYTES, rows), "allocate pitched GPU memory");
        break;
    }
    if (pitch != ROW_BYTES)
        fail("allocate pitched GPU memory", "its rows are padded");
    fill<<<BLOCKS, THREADS>>>(half);
    check(cudaGetLastError(), "start a kernel");
}

static void begin(const Half& half, Word step)
{
    check(cudaSetDevice(half.gpu), "choose a GPU");
    advance<<<BLOCKS, THREADS>>>(half, step);
    check(cudaMemset(half.total, 0, sizeof(Word)), "clear the checksum");
    sum<<<BLOCKS, THREADS>>>(half);
    check(cudaGetLastError(), "start a kernel");
}

static Word end(const Half& half)
{
    Word total = 0;
    check(cudaSetDevice(half.gpu), "choose a GPU");
    check(cudaMemcpy(&total, half.total, sizeof total, cudaMemcpyDeviceToHost), "run a step");
    return total;
}

int main(int count, char** arguments)
{
    const char* way = count > 3 ? arguments[1] : "";
    bool on_two = strcmp(way, "gpus") == 0;
    Kind kind = strcmp(way, "pool") == 0 ? Kind::pool : strcmp(way, "pitched") == 0 ? Kind::pitched : Kind::plain;
    double gib = count > 3 ? atof(arguments[2]) : 0;
    Word steps = count > 3 ? strtoull(arguments[3], nullptr, 10) : 0;
    long pace_ms = count > 4 ? atol(arguments[4]) : 100;
    if (on_two == (kind != Kind::plain) || gib <= 0 || steps == 0 || pace_ms < 0 || count > 6) {
        fprintf(stderr, "usage: halves gpus|pool|pitched GIB STEPS [MS_PER_STEP] [LOGFILE]\n");
        return 2;
    }
    FILE* log = nullptr;
    if (count > 5 && !(log = fopen(arguments[5], "a")))
        fail("open the log file", strerror(errno));

    size_t words = size_t(gib * double(1ull << 30)) / sizeof(Word);
    Half halves[] = {
        { 0, 0, words / 2, nullptr, nullptr },
        { on_two ? 1 : 0, words / 2, words - words / 2, nullptr, nullptr },
    };
    allocate(halves[0], Kind::plain);
    allocate(halves[1], kind);

    Word checksum = 0;
    for (Word step = 0; step < steps; step++) {
        for (const Half& half : halves)
            begin(half, step);
        checksum = 0;
        for (const Half& half : halves)
            checksum += end(half);
        say(log, "%llu %016llx\n", step, checksum);
        usleep(useconds_t(pace_ms) * 1000);
    }
    say(log, "done %llu %016llx\n", steps, checksum);
    return 0;
}
