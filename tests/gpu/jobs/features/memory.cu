// Kinds of memory that the runtime allocates or registers.

#include "feature.h"
#include <sys/mman.h>

__device__ Word variable[1024];
__constant__ Word constant[1024];

static Step pinned()
{
    Word* memory;
    CHECK(cudaMallocHost(&memory, LEN));
    memset(memory, 1, LEN);
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        CHECK(cudaDeviceSynchronize());
        memory[step % WORDS] += step;
        return sum_of(memory, WORDS);
    };
}

static Step write_combined()
{
    Word *memory, *seen;
    CHECK(cudaHostAlloc(&memory, LEN, cudaHostAllocMapped | cudaHostAllocPortable | cudaHostAllocWriteCombined));
    memset(memory, 1, LEN);
    CHECK(cudaHostGetDevicePointer(&seen, memory, 0));
    Word* copy = gpu_memory();
    return [=](Word step) {
        memory[step % WORDS] = step;
        CHECK(cudaMemcpy(copy, seen, LEN, cudaMemcpyDefault));
        return sum_from(copy, WORDS);
    };
}

/// Host memory of the program, which the GPU is then told about.
static Step register_host(void* memory)
{
    check(memory == MAP_FAILED || !memory, "get memory");
    memset(memory, 1, LEN);
    CHECK(cudaHostRegister(memory, LEN, cudaHostRegisterMapped));
    Word *words = static_cast<Word*>(memory), *seen;
    CHECK(cudaHostGetDevicePointer(&seen, memory, 0));
    return [=](Word step) {
        advance_on(nullptr, seen, WORDS, step);
        CHECK(cudaDeviceSynchronize());
        return sum_of(words, WORDS);
    };
}

static Step registered()
{
    return register_host(aligned_alloc(4096, LEN));
}

static Step registered_shared()
{
    return register_host(mmap(nullptr, LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
}

/// Registered and unregistered in turns, at the same address.
static Step registered_again()
{
    auto* memory = static_cast<Word*>(aligned_alloc(4096, LEN));
    memset(memory, 1, LEN);
    return [=](Word step) {
        CHECK(step % 8 ? 0 : int(cudaHostRegister(memory, LEN, cudaHostRegisterDefault)));
        if (step % 8 < 6)
            advance_on(nullptr, memory, WORDS, step);
        CHECK(cudaDeviceSynchronize());
        CHECK(step % 8 == 5 ? int(cudaHostUnregister(memory)) : 0);
        return sum_of(memory, WORDS);
    };
}

/// Memory of malloc, which GPUs with heterogeneous memory management read and write where it is.
static Step pageable()
{
    auto* memory = static_cast<Word*>(malloc(LEN));
    memset(memory, 1, LEN);
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        CHECK(cudaDeviceSynchronize());
        return sum_of(memory, WORDS);
    };
}

static __global__ void use_variables(Word step)
{
    variable[threadIdx.x] = mixed(variable[threadIdx.x] + constant[threadIdx.x], step);
}

static Step variables()
{
    return [](Word step) {
        Word copy[1024];
        CHECK(cudaMemcpyToSymbol(constant, &step, sizeof step, (step % 1024) * sizeof(Word)));
        use_variables<<<1, 1024>>>(step);
        CHECK(cudaMemcpyFromSymbol(copy, variable, sizeof copy));
        return sum_of(copy, 1024);
    };
}

static Step pitched()
{
    cudaPitchedPtr memory;
    cudaExtent extent = make_cudaExtent(1000, 100, 50);
    CHECK(cudaMalloc3D(&memory, extent));
    CHECK(cudaMemset3D(memory, 7, extent));
    size_t words = memory.pitch / sizeof(Word) * 100 * 50;
    auto* all = static_cast<Word*>(memory.ptr);
    CHECK(cudaMemset(all, 3, words * sizeof(Word)));
    return [=](Word step) {
        advance_on(nullptr, all, words, step);
        std::vector<char> packed(1000 * 100 * 50);
        cudaMemcpy3DParms copy = {};
        copy.srcPtr = memory;
        copy.dstPtr = make_cudaPitchedPtr(packed.data(), 1000, 1000, 100);
        copy.extent = extent;
        copy.kind = cudaMemcpyDeviceToHost;
        CHECK(cudaMemcpy3D(&copy));
        return sum_of(reinterpret_cast<Word*>(packed.data()), packed.size() / sizeof(Word));
    };
}

static Step pool()
{
    cudaMemPool_t pool;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, 0};
    CHECK(cudaMemPoolCreate(&pool, &properties));
    Word threshold = 64 << 20;
    CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    Word* kept;
    CHECK(cudaMallocFromPoolAsync(&kept, LEN, pool, nullptr));
    CHECK(cudaMemsetAsync(kept, 1, LEN, nullptr));
    return [=](Word step) {
        Word *other, set = 0, used = 0;
        CHECK(cudaMallocFromPoolAsync(&other, LEN << step % 3, pool, nullptr));
        advance_on(nullptr, kept, WORDS, step);
        CHECK(cudaMemcpyAsync(other, kept, LEN, cudaMemcpyDeviceToDevice, nullptr));
        Word sum = sum_from(other, WORDS);
        CHECK(cudaFreeAsync(other, nullptr));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &set));
        CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
        return sum + set + used;
    };
}

/// A pool whose memory can be given to other processes.
static cudaMemPool_t exportable_pool()
{
    cudaMemPool_t pool;
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    properties.location = {cudaMemLocationTypeDevice, 0};
    CHECK(cudaMemPoolCreate(&pool, &properties));
    return pool;
}

static Step use_pool(cudaMemPool_t pool)
{
    Word* memory;
    CHECK(cudaMallocFromPoolAsync(&memory, LEN, pool, nullptr));
    CHECK(cudaMemsetAsync(memory, 1, LEN, nullptr));
    return on(memory);
}

static Step pool_exportable()
{
    return use_pool(exportable_pool());
}

static Step pool_exported()
{
    cudaMemPool_t pool = exportable_pool();
    int handle = -1;
    CHECK(cudaMemPoolExportToShareableHandle(&handle, pool, cudaMemHandleTypePosixFileDescriptor, 0));
    return use_pool(pool);
}

struct Node {
    Node* next;
    Word value;
};

__device__ Node* list;

static __global__ void prepend(Word step)
{
    auto* node = static_cast<Node*>(malloc(sizeof(Node)));
    *node = {list, step};
    list = node;
}

static __global__ void walk(Word* sum)
{
    *sum = 0;
    for (Node* node = list; node; node = node->next)
        *sum = mixed(*sum, node->value);
}

/// Memory that kernels allocate themselves.
static Step device_heap()
{
    CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 32 << 20));
    Word* sum = gpu_memory(1);
    return [=](Word step) {
        prepend<<<1, 1>>>(step);
        walk<<<1, 1>>>(sum);
        return sum_from(sum, 1);
    };
}

/// What the driver says of a pointer; addresses differ between runs of the program.
static std::vector<Word> asked(const Word* pointer)
{
    cudaPointerAttributes found;
    CHECK(cudaPointerGetAttributes(&found, pointer));
    return {Word(found.type), Word(found.device), Word(found.devicePointer), Word(found.hostPointer)};
}

static Step pointers()
{
    Word *gpu = gpu_memory(), *host;
    CHECK(cudaMallocHost(&host, LEN));
    auto* registered = static_cast<Word*>(aligned_alloc(4096, LEN));
    CHECK(cudaHostRegister(registered, LEN, cudaHostRegisterMapped));
    auto* plain = static_cast<Word*>(malloc(LEN));
    std::vector<Word*> all = {gpu, gpu + WORDS - 1, host, registered, plain};
    std::vector<std::vector<Word>> first;
    for (Word* pointer : all)
        first.push_back(asked(pointer));
    return [=](Word) {
        Word changed = 0;
        for (size_t i = 0; i < all.size(); i++)
            changed |= Word(asked(all[i]) != first[i]) << i;
        return changed;
    };
}

/// A program that gives the GPU back altogether, and begins again.
static Step reset()
{
    auto* memory = new Word*(gpu_memory());
    return [=](Word step) {
        if (step % 30 == 29) {
            CHECK(cudaDeviceReset());
            *memory = gpu_memory();
        }
        advance_on(nullptr, *memory, WORDS, step);
        return sum_from(*memory, WORDS);
    };
}

static bool has_pools()
{
    return attribute(cudaDevAttrMemoryPoolsSupported);
}

static bool has_pageable()
{
    return attribute(cudaDevAttrPageableMemoryAccess);
}

Features memory_features()
{
    return {
        {"pinned", pinned},
        {"write-combined", write_combined},
        {"registered", registered},
        {"registered-shared", registered_shared},
        {"registered-again", registered_again},
        {"pageable", pageable, has_pageable},
        {"variables", variables},
        {"pitched", pitched},
        {"pool", pool, has_pools},
        {"pool-exportable", pool_exportable, has_pools},
        {"pool-exported", pool_exported, has_pools},
        {"device-heap", device_heap},
        {"pointers", pointers},
        {"reset", reset},
    };
}
