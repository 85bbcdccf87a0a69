// What the parts of the program `features` share: a feature is set up once, and then used in each step.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

using Word = unsigned long long;

/// Uses the feature, and returns a checksum of what came of it.
using Step = std::function<Word(Word step)>;

struct Feature {
    const char* name;
    Step (*set_up)();
    /// False where this GPU or driver does not have it; none: it always does.
    bool (*supported)();
};

using Features = std::vector<Feature>;

Features memory_features();
Features mapping_features();
Features queue_features();
Features graph_features();
Features kernel_features();
Features module_features();

constexpr int BLOCKS = 64;
constexpr int THREADS = 256;
/// Above the size from which GPU memory stays on the GPU during a snapshot.
constexpr size_t LEN = 4 << 20;
constexpr size_t WORDS = LEN / sizeof(Word);

inline void check(int error, const char* what)
{
    if (error == 0)
        return;
    fprintf(stderr, "features: failed to %s: error %d (%s)\n", what, error, cudaGetErrorString(cudaError_t(error)));
    exit(1);
}

#define CHECK(call) check(call, #call)

/// A function of the driver.
template <typename Function>
Function driver(const char* name)
{
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &found, CUDART_VERSION, cudaEnableDefault, &result));
    check(!found, name);
    return reinterpret_cast<Function>(found);
}

#define DRIVER(name) static const auto name##_ = driver<decltype(&name)>(#name)

inline int attribute(cudaDeviceAttr which)
{
    int value = 0;
    CHECK(cudaDeviceGetAttribute(&value, which, 0));
    return value;
}

__device__ __host__ inline Word mixed(Word word, Word with)
{
    return (word ^ (word >> 29)) * 0xD1342543DE82EF95ull + with;
}

/// Changes every word.
static __global__ void advance(Word* memory, size_t words, Word step)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        memory[i] = mixed(memory[i], i ^ step);
}

inline void advance_on(cudaStream_t stream, Word* memory, size_t words, Word step)
{
    advance<<<BLOCKS, THREADS, 0, stream>>>(memory, words, step);
    CHECK(cudaGetLastError());
}

/// Returns a checksum of words in host memory.
inline Word sum_of(const Word* words, size_t count)
{
    Word sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += words[i] * (2 * i + 1);
    return sum;
}

/// Returns a checksum of words anywhere, after all work before.
inline Word sum_from(const Word* memory, size_t words)
{
    std::vector<Word> copy(words);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(copy.data(), memory, words * sizeof(Word), cudaMemcpyDefault));
    return sum_of(copy.data(), words);
}

/// Returns zeroed GPU memory.
inline Word* gpu_memory(size_t words = WORDS)
{
    Word* memory;
    CHECK(cudaMalloc(&memory, words * sizeof(Word)));
    CHECK(cudaMemset(memory, 0, words * sizeof(Word)));
    CHECK(cudaDeviceSynchronize());
    return memory;
}

/// Changes memory of WORDS words in each step.
inline Step on(Word* memory)
{
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        return sum_from(memory, WORDS);
    };
}

/// A function for the host to run in the order of a stream.
inline void CUDART_CB count(void* counter)
{
    auto* word = static_cast<Word*>(counter);
    *word = mixed(*word, 1);
}
