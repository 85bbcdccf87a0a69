// GPU memory that a program creates and maps itself (cuMemCreate, cuMemMap), in all ways that programs use.
//
//   maps MIB STEPS MS_PER_STEP LOGFILE
//
// Pieces of MIB mebibytes: one with a released handle, one with two mappings, one read through a mapping without write
// access, one that is mapped during every fourth step only, and a growing range of small pieces of which one is replaced
// in each step. Each step changes every word and writes "STEP CHECKSUM" to stdout and the log file.
//
// Build: nvcc -O2 -std=c++17 -o maps maps.cu

#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>
#include <vector>

using Word = unsigned long long;
using Handle = CUmemGenericAllocationHandle;

constexpr int BLOCKS = 256;
constexpr int BLOCK_THREADS = 256;
constexpr size_t SMALL = 2 << 20;
constexpr size_t SMALL_PIECES = 64;
constexpr Word SLEEP_STEPS = 4;

static void check(int error, const char* what)
{
    if (error == 0)
        return;
    fprintf(stderr, "maps: failed to %s: error %d\n", what, error);
    exit(1);
}

/// A function of the driver.
template <typename Function>
static Function driver(const char* name)
{
    static void* library = dlopen("libcuda.so.1", RTLD_NOW);
    void* found = library ? dlsym(library, name) : nullptr;
    check(!found, name);
    return reinterpret_cast<Function>(found);
}

#define DRIVER(name) static const auto name##_ = driver<decltype(&name)>(#name)
DRIVER(cuMemAddressReserve);
DRIVER(cuMemCreate);
DRIVER(cuMemRelease);
DRIVER(cuMemMap);
DRIVER(cuMemUnmap);
DRIVER(cuMemSetAccess);
DRIVER(cuMemRetainAllocationHandle);
DRIVER(cuMemGetAllocationPropertiesFromHandle);

__global__ void advance(Word* memory, size_t words, Word step)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        memory[i] = (memory[i] ^ (memory[i] >> 29)) * 0xD1342543DE82EF95ull + (i ^ step);
}

__global__ void sum(const Word* memory, size_t words, Word* total)
{
    size_t stride = size_t(gridDim.x) * blockDim.x;
    Word part = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < words; i += stride)
        part += memory[i] * (2 * i + 1);
    atomicAdd(total, part);
}

static CUdeviceptr reserve(size_t len, CUdeviceptr wanted = 0)
{
    CUdeviceptr address = 0;
    check(cuMemAddressReserve_(&address, len, 0, wanted, 0), "reserve addresses");
    return address;
}

static Handle create(size_t len)
{
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    Handle handle = 0;
    check(cuMemCreate_(&handle, len, &properties, 0), "create memory");
    return handle;
}

static void allow(CUdeviceptr address, size_t len, CUmemAccess_flags flags)
{
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = flags;
    check(cuMemSetAccess_(address, len, &access, 1), "give access");
}

static void map(CUdeviceptr address, size_t len, Handle handle)
{
    check(cuMemMap_(address, len, 0, handle, 0), "map memory");
    allow(address, len, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

static void unmap(CUdeviceptr address, size_t len)
{
    check(cudaDeviceSynchronize(), "wait");
    check(cuMemUnmap_(address, len), "unmap memory");
}

static Word* words_at(CUdeviceptr address)
{
    return reinterpret_cast<Word*>(address);
}

static void fill(CUdeviceptr address, size_t len, int byte)
{
    check(cudaMemset(words_at(address), byte, len), "fill memory");
}

static void step_on(CUdeviceptr address, size_t len, Word step)
{
    advance<<<BLOCKS, BLOCK_THREADS>>>(words_at(address), len / sizeof(Word), step);
    check(cudaGetLastError(), "start a kernel");
}

static void add(CUdeviceptr address, size_t len, Word* total)
{
    sum<<<BLOCKS, BLOCK_THREADS>>>(words_at(address), len / sizeof(Word), total);
    check(cudaGetLastError(), "start a kernel");
}

int main(int count, char** arguments)
{
    if (count != 5) {
        fprintf(stderr, "usage: maps MIB STEPS MS_PER_STEP LOGFILE\n");
        return 2;
    }
    size_t len = strtoull(arguments[1], nullptr, 10) << 20;
    Word steps = strtoull(arguments[2], nullptr, 10);
    useconds_t pause = useconds_t(atol(arguments[3]) * 1000);
    FILE* log = fopen(arguments[4], "a");
    if (!log) {
        perror("maps: failed to open the log file");
        return 1;
    }
    Word* total;
    check(cudaMalloc(&total, sizeof(Word)), "allocate GPU memory");

    CUdeviceptr kept = reserve(len), released = reserve(len), first = reserve(len), second = reserve(len);
    CUdeviceptr constant = reserve(len), sleeper = reserve(len), again = reserve(len);
    CUdeviceptr range = reserve(SMALL * SMALL_PIECES, CUdeviceptr(0x500000000000));
    Handle kept_handle = create(len), two = create(len), sleeping = create(len);
    map(kept, len, kept_handle);
    fill(kept, len, 1);
    check(cuMemMap_(constant, len, 0, kept_handle, 0), "map memory");
    allow(constant, len, CU_MEM_ACCESS_FLAGS_PROT_READ);
    Handle short_lived = create(len);
    map(released, len, short_lived);
    check(cuMemRelease_(short_lived), "release memory");
    fill(released, len, 2);
    map(first, len, two);
    map(second, len, two);
    fill(second, len, 3);
    map(sleeper, len, sleeping);
    fill(sleeper, len, 4);
    unmap(sleeper, len);
    std::vector<Handle> pieces(SMALL_PIECES);
    for (size_t place = 0; place < SMALL_PIECES; place++) {
        pieces[place] = create(SMALL);
        check(cuMemMap_(range + place * SMALL, SMALL, 0, pieces[place], 0), "map memory");
    }
    allow(range, SMALL * SMALL_PIECES, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    fill(range, SMALL * SMALL_PIECES, 5);

    for (Word step = 0; step < steps; step++) {
        Word checksum = 0;
        check(cudaMemset(total, 0, sizeof(Word)), "clear the checksum");
        step_on(kept, len, step);
        add(constant, len, total);
        step_on(released, len, step);
        step_on(step % 2 ? first : second, len, step);
        add(step % 2 ? second : first, len, total);
        step_on(range, SMALL * SMALL_PIECES, step);
        add(range, SMALL * SMALL_PIECES, total);
        if (step % SLEEP_STEPS == 0) {
            map(sleeper, len, sleeping);
            step_on(sleeper, len, step);
            add(sleeper, len, total);
            unmap(sleeper, len);
            // The memory of a released handle, found by its address.
            Handle found = 0;
            check(cuMemRetainAllocationHandle_(&found, words_at(released)), "find a handle");
            CUmemAllocationProp properties = {};
            check(cuMemGetAllocationPropertiesFromHandle_(&properties, found), "ask for properties");
            check(properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE, "see the requested type");
            map(again, len, found);
            check(cuMemRelease_(found), "release memory");
            add(again, len, total);
            unmap(again, len);
        }
        size_t place = step % SMALL_PIECES;
        unmap(range + place * SMALL, SMALL);
        check(cuMemRelease_(pieces[place]), "release memory");
        pieces[place] = create(SMALL);
        map(range + place * SMALL, SMALL, pieces[place]);
        fill(range + place * SMALL, SMALL, int(step));
        check(cudaMemcpy(&checksum, total, sizeof(Word), cudaMemcpyDeviceToHost), "run a step");
        for (FILE* file : {stdout, log}) {
            fprintf(file, "%llu %016llx\n", step, checksum);
            fflush(file);
        }
        usleep(pause);
    }
    fclose(log);
    return 0;
}
