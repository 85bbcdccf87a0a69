// Durations of cudaMalloc and cudaFree in microseconds.
//
//   allocate
//
// Prints lines of "HOW MIB COUNT MALLOC FREE KIND", the medians of COUNT allocations of MIB mebibytes each. HOW is
// "pairs" for those that are freed at once, and "kept" for those that are freed when the last is there. KIND is
// "covered" for memory that other processes could import, as ckpt-run's agent provides it, else "plain".

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <vector>

constexpr size_t MIB = 1ull << 20;
constexpr int WARM_UP = 10;

using Clock = std::chrono::steady_clock;
using Retain = int (*)(unsigned long long* handle, void* address);
using Release = int (*)(unsigned long long handle);

static void check(cudaError_t error, const char* what)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "allocate: failed to %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

struct Times {
    std::vector<double> malloc, free;
};

static double us_since(Clock::time_point begun)
{
    return std::chrono::duration<double, std::micro>(Clock::now() - begun).count();
}

static void* allocate(size_t mib, Times& times)
{
    void* memory = nullptr;
    Clock::time_point begun = Clock::now();
    cudaError_t error = cudaMalloc(&memory, mib * MIB);
    times.malloc.push_back(us_since(begun));
    check(error, "allocate GPU memory");
    return memory;
}

static void release(void* memory, Times& times)
{
    Clock::time_point begun = Clock::now();
    cudaError_t error = cudaFree(memory);
    times.free.push_back(us_since(begun));
    check(error, "free GPU memory");
}

static double median(std::vector<double>& times)
{
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// The driver returns a handle only for memory created by cuMemCreate.
static bool is_covered(void* memory)
{
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return false;
    auto retain = reinterpret_cast<Retain>(dlsym(driver, "cuMemRetainAllocationHandle"));
    auto release = reinterpret_cast<Release>(dlsym(driver, "cuMemRelease"));
    unsigned long long handle = 0;
    return retain && release && retain(&handle, memory) == 0 && release(handle) == 0;
}

static void say(const char* how, size_t mib, int count, Times& times, bool covered)
{
    const char* kind = covered ? "covered" : "plain";
    printf("%s %zu %d %.2f %.2f %s\n", how, mib, count, median(times.malloc), median(times.free), kind);
}

static void pairs(size_t mib, int count)
{
    Times warm_up, times;
    bool covered = false;
    for (int number = 0; number < WARM_UP; number++) {
        void* memory = allocate(mib, warm_up);
        covered = is_covered(memory);
        release(memory, warm_up);
    }
    for (int number = 0; number < count; number++)
        release(allocate(mib, times), times);
    say("pairs", mib, count, times, covered);
}

static void kept(size_t mib, int count)
{
    Times times;
    std::vector<void*> pieces;
    for (int number = 0; number < count; number++)
        pieces.push_back(allocate(mib, times));
    bool covered = is_covered(pieces.back());
    for (void* memory : pieces)
        release(memory, times);
    say("kept", mib, count, times, covered);
}

int main()
{
    check(cudaFree(nullptr), "initialize CUDA");
    pairs(2, 200);
    pairs(64, 200);
    pairs(1024, 50);
    kept(64, 128);
    return 0;
}
