// Changing GPU memory: two threads free and allocate segments of mixed sizes in each step.
//
//   churn GIB STEPS MS_PER_STEP [UNTIL]
//
// Each thread holds up to half of GIB in segments between 256 bytes and an eighth of its half. In a step it
// frees some, allocates others in their place, changes every word of all of them and sums them up; the sum
// depends on the place of every word and on every step before. Prints "STEP CHECKSUM" for both threads, and
// at the end, which comes early after the step in which the file UNTIL is there, "done STEPS CHECKSUM". Two
// runs with the same GIB print the same lines, whatever addresses they are given.
//
// Build: nvcc -O2 -std=c++17 -o churn churn.cu

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <pthread.h>
#include <thread>
#include <unistd.h>

using Word = unsigned long long;

constexpr int BLOCKS = 256;
constexpr int GRID_THREADS = 256;
constexpr int WORKERS = 2;
constexpr int SEGMENTS = 32;
// Number of segments that a thread replaces in a step.
constexpr int REPLACED = 6;
constexpr size_t SIZE_MIN = 256;
// A quarter of the segments is smaller than each of these, the last one smaller than an eighth of the thread's share.
constexpr size_t SMALL = 64ull << 10;
constexpr size_t MIDDLE = 4ull << 20;
constexpr size_t LARGE = 32ull << 20;

static void check(cudaError_t error, const char* what)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "churn: failed to %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

__device__ __host__ static Word mix(Word value)
{
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    return (value ^ (value >> 27)) * 0x94D049BB133111EBull;
}

__global__ void fill(Word* memory, size_t words, Word seed)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        memory[i] = mix(i + seed);
}

// Steps do not commute, and the factors are odd: any lost step or wrong word changes the result.
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

struct Segment {
    Word* memory = nullptr;
    size_t words = 0;
};

// Both threads and the one that prints; steps begin and end together.
struct Shared {
    pthread_barrier_t barrier;
    Word step = 0;
    bool over = false;
    Word totals[WORKERS] = {};
};

class Worker {
public:
    Worker(Shared& shared, int number, size_t share)
        : shared(shared), number(number), share(share), random(mix(number + 1))
    {
    }

    void run()
    {
        check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
        check(cudaMalloc(&total, sizeof(Word)), "allocate GPU memory");
        for (int slot = 0; slot < SEGMENTS; slot++)
            allocate(slot);
        for (;;) {
            pthread_barrier_wait(&shared.barrier);
            if (shared.over)
                break;
            step();
            pthread_barrier_wait(&shared.barrier);
        }
        for (Segment& segment : segments)
            release(segment);
        check(cudaFree(total), "free GPU memory");
    }

private:
    Word draw(Word below)
    {
        random += 0x9E3779B97F4A7C15ull;
        return mix(random) % below;
    }

    size_t size(int slot)
    {
        size_t most[] = { SMALL, MIDDLE, LARGE, share / 8 };
        size_t bytes = SIZE_MIN + draw(most[slot % 4] - SIZE_MIN);
        return (bytes < share - held ? bytes : SIZE_MIN) / sizeof(Word);
    }

    void allocate(int slot)
    {
        Segment& segment = segments[slot];
        segment.words = size(slot);
        held += segment.words * sizeof(Word);
        check(cudaMalloc(&segment.memory, segment.words * sizeof(Word)), "allocate GPU memory");
        fill<<<BLOCKS, GRID_THREADS, 0, stream>>>(segment.memory, segment.words, draw(~0ull));
        check(cudaGetLastError(), "start a kernel");
    }

    void release(Segment& segment)
    {
        held -= segment.words * sizeof(Word);
        check(cudaFree(segment.memory), "free GPU memory");
        segment = {};
    }

    void step()
    {
        for (int count = 0; count < REPLACED; count++) {
            int slot = int(draw(SEGMENTS));
            release(segments[slot]);
            allocate(slot);
        }
        check(cudaMemsetAsync(total, 0, sizeof(Word), stream), "clear the checksum");
        for (Segment& segment : segments)
            advance<<<BLOCKS, GRID_THREADS, 0, stream>>>(segment.memory, segment.words, shared.step, total);
        check(cudaGetLastError(), "start a kernel");
        Word sum = 0;
        check(cudaMemcpyAsync(&sum, total, sizeof sum, cudaMemcpyDeviceToHost, stream), "read the checksum");
        check(cudaStreamSynchronize(stream), "run a step");
        shared.totals[number] = mix(shared.totals[number] + sum);
    }

    Shared& shared;
    const int number;
    const size_t share;
    size_t held = 0;
    Word random;
    Word* total = nullptr;
    cudaStream_t stream = nullptr;
    Segment segments[SEGMENTS];
};

static void say(const char* what, Word step, Word checksum)
{
    if (printf("%s%llu %016llx\n", what, step, checksum) < 0 || fflush(stdout) != 0) {
        perror("churn: failed to write a line");
        exit(1);
    }
}

int main(int count, char** arguments)
{
    double gib = count > 3 ? atof(arguments[1]) : 0;
    Word steps = count > 3 ? strtoull(arguments[2], nullptr, 10) : 0;
    long pace_ms = count > 3 ? atol(arguments[3]) : -1;
    const char* until = count == 5 ? arguments[4] : nullptr;
    size_t share = size_t(gib * double(1ull << 30)) / WORKERS;
    if (share < 8 * LARGE || steps == 0 || pace_ms < 0 || count > 5) {
        fprintf(stderr, "usage: churn GIB STEPS MS_PER_STEP [UNTIL], with at least half a GIB\n");
        return 2;
    }
    Shared shared;
    pthread_barrier_init(&shared.barrier, nullptr, WORKERS + 1);
    Worker first(shared, 0, share), second(shared, 1, share);
    std::thread threads[WORKERS] = { std::thread(&Worker::run, &first), std::thread(&Worker::run, &second) };
    Word checksum = 0;
    while (shared.step < steps && !(until && access(until, F_OK) == 0)) {
        pthread_barrier_wait(&shared.barrier);
        pthread_barrier_wait(&shared.barrier);
        checksum = shared.totals[0] ^ mix(shared.totals[1]);
        say("", shared.step++, checksum);
        usleep(useconds_t(pace_ms) * 1000);
    }
    shared.over = true;
    pthread_barrier_wait(&shared.barrier);
    for (std::thread& thread : threads)
        thread.join();
    say("done ", shared.step, checksum);
    return 0;
}
