// Memory that is seen in other ways than by its address: textures, surfaces, and mappings that a program makes itself.

#include "feature.h"
#include <unistd.h>

DRIVER(cuMemAddressReserve);
DRIVER(cuMemCreate);
DRIVER(cuMemGetAllocationGranularity);
DRIVER(cuMemMap);
DRIVER(cuMemMapArrayAsync);
DRIVER(cuMemSetAccess);
DRIVER(cuMemUnmap);
DRIVER(cuMemExportToShareableHandle);
DRIVER(cuMemImportFromShareableHandle);
DRIVER(cuMemRelease);
DRIVER(cuDeviceGetAttribute);

constexpr int SIDE = 1024;
constexpr size_t CELLS = size_t(SIDE) * SIDE;

static bool driver_has(CUdevice_attribute which)
{
    int value = 0;
    CHECK(cudaFree(nullptr));
    CHECK(cuDeviceGetAttribute_(&value, which, 0));
    return value;
}

static __global__ void write_surface(cudaSurfaceObject_t surface, unsigned step)
{
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    unsigned old;
    surf2Dread(&old, surface, x * sizeof(unsigned), y);
    surf2Dwrite(old * 1664525 + step + x * y, surface, x * sizeof(unsigned), y);
}

static __global__ void read_texture(cudaTextureObject_t texture, Word* into)
{
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    into[y * SIDE + x] = tex2D<unsigned>(texture, x + 0.5f, y + 0.5f);
}

static __global__ void read_filtered(cudaTextureObject_t texture, Word* into, float level)
{
    unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    into[y * SIDE + x] = Word(tex2DLod<float>(texture, x / 700.0f, y / 900.0f, level) * 1e9f);
}

static __global__ void read_linear(cudaTextureObject_t texture, Word* into)
{
    size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    uint2 found = tex1Dfetch<uint2>(texture, int(i));
    into[i] = Word(found.y) << 32 | found.x;
}

static const dim3 GRID(SIDE / THREADS, SIDE);

static cudaResourceDesc resource_of(cudaArray_t array)
{
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    return resource;
}

static cudaTextureDesc plain_reading()
{
    cudaTextureDesc reading = {};
    reading.readMode = cudaReadModeElementType;
    return reading;
}

/// An array that kernels write as a surface and read as a texture.
static Step use_array(cudaArray_t array)
{
    std::vector<unsigned> zeros(CELLS);
    CHECK(cudaMemcpy2DToArray(array, 0, 0, zeros.data(), SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = resource_of(array);
    cudaTextureDesc reading = plain_reading();
    cudaSurfaceObject_t surface;
    cudaTextureObject_t texture;
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    CHECK(cudaCreateTextureObject(&texture, &resource, &reading, nullptr));
    Word* into = gpu_memory(CELLS);
    return [=](Word step) {
        write_surface<<<GRID, THREADS>>>(surface, unsigned(step));
        read_texture<<<GRID, THREADS>>>(texture, into);
        return sum_from(into, CELLS);
    };
}

static Step array()
{
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    CHECK(cudaMallocArray(&array, &format, SIDE, SIDE, cudaArraySurfaceLoadStore));
    return use_array(array);
}

/// An array whose memory the program creates and maps itself.
static Step array_mapped()
{
    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned>();
    CHECK(cudaMallocArray(&array, &format, SIDE, SIDE, cudaArraySurfaceLoadStore | cudaArrayDeferredMapping));
    cudaArrayMemoryRequirements needs;
    CHECK(cudaArrayGetMemoryRequirements(&needs, array, 0));
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    properties.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL;
    size_t unit;
    CHECK(cuMemGetAllocationGranularity_(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemGenericAllocationHandle memory;
    CHECK(cuMemCreate_(&memory, (needs.size + unit - 1) / unit * unit, &properties, 0));
    CUarrayMapInfo map = {};
    map.resourceType = CU_RESOURCE_TYPE_ARRAY;
    map.resource.array = reinterpret_cast<CUarray>(array);
    map.subresourceType = CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL;
    map.subresource.miptail.size = needs.size;
    map.memOperationType = CU_MEM_OPERATION_TYPE_MAP;
    map.memHandleType = CU_MEM_HANDLE_TYPE_GENERIC;
    map.memHandle.memHandle = memory;
    map.deviceBitMask = 1;
    CHECK(cuMemMapArrayAsync_(&map, 1, nullptr));
    return use_array(array);
}

/// A texture with levels, read between its cells and beyond its edges.
static Step mipmap()
{
    cudaMipmappedArray_t levels;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocMipmappedArray(&levels, &format, make_cudaExtent(SIDE, SIDE, 0), 2));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = levels;
    cudaTextureDesc reading = {};
    reading.addressMode[0] = cudaAddressModeWrap;
    reading.addressMode[1] = cudaAddressModeMirror;
    reading.filterMode = reading.mipmapFilterMode = cudaFilterModeLinear;
    reading.normalizedCoords = 1;
    reading.maxMipmapLevelClamp = 1;
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &reading, nullptr));
    Word* into = gpu_memory(CELLS);
    for (unsigned level = 0; level < 2; level++) {
        cudaArray_t part;
        CHECK(cudaGetMipmappedArrayLevel(&part, levels, level));
        size_t side = SIDE >> level;
        std::vector<float> values(side * side);
        for (size_t i = 0; i < values.size(); i++)
            values[i] = float(mixed(i, level) >> 40) / (1 << 24);
        CHECK(cudaMemcpy2DToArray(part, 0, 0, values.data(), side * 4, side * 4, side, cudaMemcpyHostToDevice));
    }
    return [=](Word step) {
        read_filtered<<<GRID, THREADS>>>(texture, into, (step % 16) / 16.0f);
        return sum_from(into, CELLS);
    };
}

/// A texture over memory of cudaMalloc.
static Step texture()
{
    Word *memory = gpu_memory(), *into = gpu_memory();
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = memory;
    resource.res.linear.desc = cudaCreateChannelDesc<uint2>();
    resource.res.linear.sizeInBytes = LEN;
    cudaTextureDesc reading = plain_reading();
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &reading, nullptr));
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        read_linear<<<WORDS / THREADS, THREADS>>>(texture, into);
        return sum_from(into, WORDS);
    };
}

static Step texture_pitched()
{
    unsigned* memory;
    size_t pitch;
    CHECK(cudaMallocPitch(&memory, &pitch, SIDE * sizeof(unsigned), SIDE));
    CHECK(cudaMemset(memory, 1, pitch * SIDE));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = memory;
    resource.res.pitch2D.desc = cudaCreateChannelDesc<unsigned>();
    resource.res.pitch2D.width = resource.res.pitch2D.height = SIDE;
    resource.res.pitch2D.pitchInBytes = pitch;
    cudaTextureDesc reading = plain_reading();
    cudaTextureObject_t texture;
    CHECK(cudaCreateTextureObject(&texture, &resource, &reading, nullptr));
    Word* into = gpu_memory(CELLS);
    return [=](Word step) {
        advance_on(nullptr, reinterpret_cast<Word*>(memory), pitch * SIDE / sizeof(Word), step);
        read_texture<<<GRID, THREADS>>>(texture, into);
        return sum_from(into, CELLS);
    };
}

/// Returns created memory.
static CUmemGenericAllocationHandle create(CUmemAllocationProp properties)
{
    CUmemGenericAllocationHandle handle;
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    check(cuMemCreate_(&handle, LEN, &properties, 0), "create memory");
    return handle;
}

static CUmemLocation on_gpu()
{
    return {CU_MEM_LOCATION_TYPE_DEVICE, 0};
}

static Word* map(CUmemGenericAllocationHandle handle, CUmemLocation also)
{
    CUdeviceptr address;
    CHECK(cuMemAddressReserve_(&address, LEN, 0, 0, 0));
    CHECK(cuMemMap_(address, LEN, 0, handle, 0));
    CUmemAccessDesc access[2] = {{on_gpu(), CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {also, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    CHECK(cuMemSetAccess_(address, LEN, access, also.type == CU_MEM_LOCATION_TYPE_DEVICE ? 1 : 2));
    auto* memory = reinterpret_cast<Word*>(address);
    CHECK(cudaMemset(memory, 1, LEN));
    return memory;
}

static Step mapped_compressed()
{
    CUmemAllocationProp properties = {};
    properties.location = on_gpu();
    properties.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_GENERIC;
    return on(map(create(properties), on_gpu()));
}

static bool has_compression()
{
    return driver_has(CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED);
}

/// Host memory that is created and mapped as GPU memory is.
static Step mapped_host()
{
    CUmemAllocationProp properties = {};
    properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0};
    Word* memory = map(create(properties), properties.location);
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        CHECK(cudaDeviceSynchronize());
        return sum_of(memory, WORDS);
    };
}

static bool has_host_mappings()
{
    return driver_has(CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
}

static CUmemGenericAllocationHandle exportable()
{
    CUmemAllocationProp properties = {};
    properties.location = on_gpu();
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return create(properties);
}

static int exported(CUmemGenericAllocationHandle handle)
{
    int file = -1;
    CHECK(cuMemExportToShareableHandle_(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return file;
}

/// Exported, and imported again by the same process.
static Step mapped_imported()
{
    auto handle = exportable();
    Word* memory = map(handle, on_gpu());
    int file = exported(handle);
    CUmemGenericAllocationHandle imported;
    CHECK(cuMemImportFromShareableHandle_(
        &imported, reinterpret_cast<void*>(size_t(file)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(file);
    Word* seen = map(imported, on_gpu());
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        return sum_from(seen, WORDS);
    };
}

/// Exported, and imported as memory of another API.
static Step mapped_external()
{
    auto handle = exportable();
    Word* memory = map(handle, on_gpu());
    cudaExternalMemoryHandleDesc from = {};
    from.type = cudaExternalMemoryHandleTypeOpaqueFd;
    from.handle.fd = exported(handle);
    from.size = LEN;
    cudaExternalMemory_t external;
    CHECK(cudaImportExternalMemory(&external, &from));
    cudaExternalMemoryBufferDesc part = {};
    part.size = LEN;
    void* seen;
    CHECK(cudaExternalMemoryGetMappedBuffer(&seen, external, &part));
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        return sum_from(static_cast<Word*>(seen), WORDS);
    };
}

/// Mapped and unmapped in turns.
static Step mapped_again()
{
    CUmemAllocationProp properties = {};
    properties.location = on_gpu();
    auto handle = create(properties);
    auto* memory = new Word*(map(handle, on_gpu()));
    return [=](Word step) {
        advance_on(nullptr, *memory, WORDS, step);
        Word sum = sum_from(*memory, WORDS);
        CHECK(cuMemUnmap_(CUdeviceptr(*memory), LEN));
        CUmemAccessDesc access = {on_gpu(), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CHECK(cuMemMap_(CUdeviceptr(*memory), LEN, 0, handle, 0));
        CHECK(cuMemSetAccess_(CUdeviceptr(*memory), LEN, &access, 1));
        return sum;
    };
}

Features mapping_features()
{
    return {
        {"array", array},
        {"array-mapped", array_mapped, [] { return driver_has(CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED); }},
        {"mipmap", mipmap},
        {"texture", texture},
        {"texture-pitched", texture_pitched},
        {"mapped-compressed", mapped_compressed, has_compression},
        {"mapped-host", mapped_host, has_host_mappings},
        {"mapped-imported", mapped_imported},
        {"mapped-external", mapped_external},
        {"mapped-again", mapped_again},
    };
}
