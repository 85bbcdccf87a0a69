// Ways in which kernels are started, and what they do besides computing.

#include "feature.h"
#include <cooperative_groups.h>

namespace groups = cooperative_groups;

// Compute capability 9.0 has clusters and tensor maps; others compile kernels that are never started.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CAPABILITY_9 1
#define CLUSTER_OF_4 __cluster_dims__(4, 1, 1)
#else
#define CAPABILITY_9 0
#define CLUSTER_OF_4
#endif

DRIVER(cuTensorMapEncodeTiled);

/// Lines that a kernel prints.
static __global__ void print(Word step)
{
    printf("line %d of step %llu\n", threadIdx.x, step);
}

static Step printing()
{
    return [](Word step) {
        print<<<1, 4>>>(step);
        CHECK(cudaDeviceSynchronize());
        // Not waited for: it is printed at the next synchronization.
        print<<<1, 2>>>(step);
        return step;
    };
}

/// Limits and flags of the context.
static Step limits()
{
    CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync | cudaDeviceMapHost));
    const std::pair<cudaLimit, size_t> wanted[] = {
        {cudaLimitStackSize, 16 << 10},
        {cudaLimitPrintfFifoSize, 3 << 20},
        {cudaLimitMallocHeapSize, 24 << 20},
        {cudaLimitMaxL2FetchGranularity, 32},
    };
    for (auto [limit, value] : wanted)
        CHECK(cudaDeviceSetLimit(limit, value));
    CHECK(cudaDeviceSetCacheConfig(cudaFuncCachePreferShared));
    Word* memory = gpu_memory();
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        Word sum = sum_from(memory, WORDS);
        for (int limit = cudaLimitStackSize; limit <= cudaLimitPersistingL2CacheSize; limit++) {
            size_t value = 0;
            // Some limits are for kernels that start kernels, and not for this GPU.
            if (cudaDeviceGetLimit(&value, cudaLimit(limit)) == cudaSuccess)
                sum = mixed(sum, value);
        }
        cudaGetLastError();
        unsigned flags;
        CHECK(cudaGetDeviceFlags(&flags));
        cudaFuncCache config;
        CHECK(cudaDeviceGetCacheConfig(&config));
        return mixed(mixed(sum, flags), Word(config));
    };
}

constexpr int SHARED = 160 << 10;

static __global__ void use_shared(Word* memory, Word step)
{
    extern __shared__ Word shared[];
    for (size_t i = threadIdx.x; i < SHARED / sizeof(Word); i += blockDim.x)
        shared[i] = memory[i] + step;
    __syncthreads();
    for (size_t i = threadIdx.x; i < SHARED / sizeof(Word); i += blockDim.x)
        memory[i] = mixed(shared[SHARED / sizeof(Word) - 1 - i], i);
}

/// More shared memory than kernels have unless they are allowed to.
static Step shared_memory()
{
    CHECK(cudaFuncSetAttribute(use_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
    CHECK(cudaFuncSetAttribute(use_shared, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    Word* memory = gpu_memory();
    return [=](Word step) {
        use_shared<<<1, 512, SHARED>>>(memory, step);
        CHECK(cudaGetLastError());
        return sum_from(memory, WORDS);
    };
}

/// Blocks that wait for each other.
static __global__ void rotate(Word* memory, size_t words, Word step)
{
    groups::grid_group grid = groups::this_grid();
    for (int round = 0; round < 4; round++) {
        size_t i = grid.thread_rank(), from = (i + 12345) % words;
        Word taken = i < words ? memory[from] : 0;
        grid.sync();
        if (i < words)
            memory[i] = mixed(taken, step + i);
        grid.sync();
    }
}

static Step cooperative()
{
    auto* memory = new Word*(gpu_memory());
    return [=](Word step) {
        size_t words = BLOCKS * THREADS;
        void* parameters[] = {memory, &words, &step};
        CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(rotate), BLOCKS, THREADS, parameters));
        return sum_from(*memory, WORDS);
    };
}

/// Blocks that read each other's shared memory.
static __global__ void CLUSTER_OF_4 exchange(Word* memory, Word step)
{
#if CAPABILITY_9
    __shared__ Word own[THREADS];
    groups::cluster_group cluster = groups::this_cluster();
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    own[threadIdx.x] = memory[i];
    cluster.sync();
    Word* next = cluster.map_shared_rank(own, (cluster.block_rank() + 1) % 4);
    memory[i] = mixed(next[threadIdx.x], step + i);
    cluster.sync();
#endif
}

static Step cluster()
{
    Word* memory = gpu_memory();
    return [=](Word step) {
        exchange<<<BLOCKS, THREADS>>>(memory, step);
        CHECK(cudaGetLastError());
        return sum_from(memory, WORDS);
    };
}

constexpr int TILE = 64;
constexpr int SIDE = 1024;

/// Copies a tile by the tensor map.
static __global__ void copy_tile(const __grid_constant__ CUtensorMap map, unsigned* into)
{
#if CAPABILITY_9
    __shared__ alignas(128) unsigned tile[TILE * TILE];
    __shared__ alignas(8) Word barrier;
    auto tile_at = unsigned(__cvta_generic_to_shared(tile)), barrier_at = unsigned(__cvta_generic_to_shared(&barrier));
    int x = blockIdx.x * TILE, y = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_at));
        asm volatile("fence.proxy.async.shared::cta;");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_at), "r"(int(sizeof tile)));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"(tile_at), "l"(&map), "r"(x), "r"(y), "r"(barrier_at)
                     : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(barrier_at)
                     : "memory");
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x)
        into[(y + i / TILE) * SIDE + x + i % TILE] = tile[i];
#endif
}

static Step tensor_map()
{
    Word *from = gpu_memory(), *into = gpu_memory();
    CUtensorMap map;
    cuuint64_t sizes[] = {SIDE, SIDE}, strides[] = {SIDE * sizeof(unsigned)};
    cuuint32_t box[] = {TILE, TILE}, steps[] = {1, 1};
    CHECK(cuTensorMapEncodeTiled_(&map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, from, sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return [=](Word step) {
        advance_on(nullptr, from, WORDS, step);
        copy_tile<<<dim3(SIDE / TILE, SIDE / TILE), 128>>>(map, reinterpret_cast<unsigned*>(into));
        CHECK(cudaGetLastError());
        return sum_from(into, WORDS);
    };
}

static __global__ void parent(Word* memory, Word step)
{
    if (threadIdx.x == 0)
        advance<<<8, THREADS, 0, cudaStreamTailLaunch>>>(memory, WORDS, step);
}

/// Kernels that start kernels.
static Step dynamic()
{
    Word* memory = gpu_memory();
    return [=](Word step) {
        parent<<<1, 32>>>(memory, step);
        CHECK(cudaGetLastError());
        return sum_from(memory, WORDS);
    };
}

static __device__ Word deep(Word value, int depth)
{
    volatile Word kept[32];
    for (int i = 0; i < 32; i++)
        kept[i] = value + i;
    return depth ? mixed(deep(kept[depth % 32], depth - 1), kept[31]) : value;
}

static __global__ void recurse(Word* memory, Word step)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    memory[i] = deep(memory[i] + step, 40);
}

/// Kernels with a stack.
static Step stack()
{
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 32 << 10));
    Word* memory = gpu_memory();
    return [=](Word step) {
        recurse<<<BLOCKS, THREADS>>>(memory, step);
        CHECK(cudaGetLastError());
        return sum_from(memory, WORDS);
    };
}

/// A kernel that runs until the host has answered.
static __global__ void ask(volatile Word* letters, Word step)
{
    letters[0] = step;
    __threadfence_system();
    while (letters[1] != step)
        ;
    letters[2] = mixed(letters[2], letters[3]);
}

static Step conversation()
{
    Word* letters;
    CHECK(cudaHostAlloc(&letters, 4096, cudaHostAllocMapped));
    memset(letters, 0xff, 4096);
    return [=](Word step) {
        auto* seen = static_cast<volatile Word*>(letters);
        ask<<<1, 1>>>(letters, step);
        CHECK(cudaGetLastError());
        while (seen[0] != step)
            ;
        seen[3] = step * 3;
        __sync_synchronize();
        seen[1] = step;
        CHECK(cudaDeviceSynchronize());
        return Word(seen[2]);
    };
}

static bool has_clusters()
{
    return attribute(cudaDevAttrClusterLaunch);
}

Features kernel_features()
{
    return {
        {"printing", printing},
        {"limits", limits},
        {"shared-memory", shared_memory},
        {"cooperative", cooperative},
        {"cluster", cluster, has_clusters},
        {"tensor-map", tensor_map, has_clusters},
        {"dynamic", dynamic},
        {"stack", stack},
        {"conversation", conversation},
    };
}
