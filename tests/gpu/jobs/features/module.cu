// Code that is loaded while the program runs, and contexts that it makes itself.

#include "feature.h"
#include <string>

DRIVER(cuCtxCreate);
DRIVER(cuCtxGetId);
DRIVER(cuCtxPopCurrent);
DRIVER(cuCtxPushCurrent);
DRIVER(cuDeviceGetDevResource);
DRIVER(cuDevResourceGenerateDesc);
DRIVER(cuDevSmResourceSplitByCount);
DRIVER(cuGreenCtxCreate);
DRIVER(cuGreenCtxStreamCreate);
DRIVER(cuKernelGetFunction);
DRIVER(cuLaunchKernel);
DRIVER(cuLibraryGetGlobal);
DRIVER(cuLibraryGetKernel);
DRIVER(cuLibraryLoadData);
DRIVER(cuLinkAddData);
DRIVER(cuLinkComplete);
DRIVER(cuLinkCreate);
DRIVER(cuLinkDestroy);
DRIVER(cuMemAlloc);
DRIVER(cuMemcpyDtoH);
DRIVER(cuMemsetD8);
DRIVER(cuModuleGetFunction);
DRIVER(cuModuleGetGlobal);
DRIVER(cuModuleLoadData);
DRIVER(cuModuleUnload);

/// Adds its argument to each of 256 words, multiplies them, and does so too with a word of its own.
static std::string program(const char* factor = "6364136223846793005")
{
    return std::string(R"(.version 7.0
.target sm_70
.address_size 64
.visible .global .u64 own = 1;
.visible .entry work(.param .u64 memory, .param .u64 step) {
    .reg .b64 %a<8>;
    .reg .b32 %i;
    .reg .pred %p;
    ld.param.u64 %a1, [memory];
    ld.param.u64 %a2, [step];
    mov.u32 %i, %tid.x;
    mul.wide.u32 %a3, %i, 8;
    add.u64 %a1, %a1, %a3;
    ld.global.u64 %a4, [%a1];
    add.u64 %a4, %a4, %a2;
    mad.lo.u64 %a4, %a4, )")
        + factor + R"(, 1;
    st.global.u64 [%a1], %a4;
    setp.ne.u32 %p, %i, 0;
    @%p ret;
    mov.u64 %a5, own;
    ld.global.u64 %a6, [%a5];
    mad.lo.u64 %a6, %a6, 3, %a2;
    st.global.u64 [%a5], %a6;
    ret;
}
)";
}

static void launch(CUfunction function, Word* memory, Word step, CUstream stream = nullptr)
{
    void* parameters[] = {&memory, &step};
    CHECK(cuLaunchKernel_(function, 1, 1, 1, THREADS, 1, 1, 0, stream, parameters, nullptr));
}

static Word own_of(CUdeviceptr own)
{
    Word value;
    CHECK(cuMemcpyDtoH_(&value, own, sizeof value));
    return value;
}

/// The steps of a loaded module.
static Step use(CUmodule module)
{
    CUfunction function;
    CUdeviceptr own;
    CHECK(cuModuleGetFunction_(&function, module, "work"));
    CHECK(cuModuleGetGlobal_(&own, nullptr, module, "own"));
    Word* memory = gpu_memory(THREADS);
    return [=](Word step) {
        launch(function, memory, step);
        return sum_from(memory, THREADS) + own_of(own);
    };
}

static CUmodule loaded(const void* image)
{
    CUmodule module;
    CHECK(cuModuleLoadData_(&module, image));
    return module;
}

static Step module()
{
    CHECK(cudaFree(nullptr));
    return use(loaded(program().c_str()));
}

static Step linked()
{
    CHECK(cudaFree(nullptr));
    CUlinkState state;
    void* image;
    std::string text = program();
    CHECK(cuLinkCreate_(0, nullptr, nullptr, &state));
    CHECK(cuLinkAddData_(state, CU_JIT_INPUT_PTX, text.data(), text.size() + 1, "program", 0, nullptr, nullptr));
    CHECK(cuLinkComplete_(state, &image, nullptr));
    CUmodule module = loaded(image);
    CHECK(cuLinkDestroy_(state));
    return use(module);
}

/// A library, of which a kernel is loaded when it is used first.
static Step library()
{
    CHECK(cudaFree(nullptr));
    CUlibrary library;
    CHECK(cuLibraryLoadData_(&library, program().c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    Word* memory = gpu_memory(THREADS);
    return [=](Word step) {
        if (step < 100)
            return step;
        CUkernel kernel;
        CUfunction function;
        CUdeviceptr own;
        CHECK(cuLibraryGetKernel_(&kernel, library, "work"));
        CHECK(cuKernelGetFunction_(&function, kernel));
        CHECK(cuLibraryGetGlobal_(&own, nullptr, library, "own"));
        launch(function, memory, step);
        return sum_from(memory, THREADS) + own_of(own);
    };
}

/// Another module in each step, the earlier one unloaded.
static Step module_again()
{
    CHECK(cudaFree(nullptr));
    Word* memory = gpu_memory(THREADS);
    return [=](Word step) {
        CUmodule module = loaded(program(std::to_string(2 * step + 3).c_str()).c_str());
        CUfunction function;
        CHECK(cuModuleGetFunction_(&function, module, "work"));
        launch(function, memory, step);
        Word sum = sum_from(memory, THREADS);
        CHECK(cuModuleUnload_(module));
        return sum;
    };
}

template <int NUMBER>
static __global__ void numbered(Word* memory, Word step)
{
    memory[threadIdx.x] = mixed(memory[threadIdx.x], step * NUMBER);
}

template <int... NUMBERS>
static void launch_one(Word number, Word* memory, Word step, std::integer_sequence<int, NUMBERS...>)
{
    ((number == NUMBERS ? numbered<NUMBERS><<<1, THREADS>>>(memory, step) : void()), ...);
    CHECK(cudaGetLastError());
}

/// Kernels of the program that are loaded one after the other, at their first use.
static Step lazy()
{
    Word* memory = gpu_memory(THREADS);
    return [=](Word step) {
        launch_one(step / 4 % 64, memory, step, std::make_integer_sequence<int, 64>());
        return sum_from(memory, THREADS);
    };
}

/// A second context on the same GPU, with a module and memory of its own.
static Step contexts()
{
    Word* memory = gpu_memory();
    CUcontext second;
    CUctxCreateParams parameters = {};
    CHECK(cuCtxCreate_(&second, &parameters, 0, 0));
    CUmodule module = loaded(program().c_str());
    CUfunction function;
    CUdeviceptr own, other;
    CHECK(cuModuleGetFunction_(&function, module, "work"));
    CHECK(cuModuleGetGlobal_(&own, nullptr, module, "own"));
    CHECK(cuMemAlloc_(&other, LEN));
    CHECK(cuMemsetD8_(other, 0, LEN));
    CHECK(cuCtxPopCurrent_(nullptr));
    Word first;
    CHECK(cuCtxGetId_(second, &first));
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        Word sum = sum_from(memory, WORDS), id;
        CHECK(cuCtxPushCurrent_(second));
        launch(function, reinterpret_cast<Word*>(other), step);
        CHECK(cuCtxGetId_(second, &id));
        sum += sum_from(reinterpret_cast<Word*>(other), THREADS) + own_of(own) + Word(id == first);
        CHECK(cuCtxPopCurrent_(nullptr));
        return sum;
    };
}

/// A context with a part of the GPU's multiprocessors.
static Step green_context()
{
    Word* memory = gpu_memory();
    CUdevResource all, part, rest;
    unsigned groups = 1;
    CHECK(cuDeviceGetDevResource_(0, &all, CU_DEV_RESOURCE_TYPE_SM));
    CHECK(cuDevSmResourceSplitByCount_(&part, &groups, &all, &rest, 0, 16));
    CUdevResourceDesc description;
    CHECK(cuDevResourceGenerateDesc_(&description, &part, 1));
    CUgreenCtx green;
    CHECK(cuGreenCtxCreate_(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
    CUstream stream;
    CHECK(cuGreenCtxStreamCreate_(&stream, green, CU_STREAM_NON_BLOCKING, 0));
    return [=](Word step) {
        advance_on(stream, memory, WORDS, step);
        return sum_from(memory, WORDS);
    };
}

static bool has_green_contexts()
{
    int version;
    CHECK(cudaDriverGetVersion(&version));
    return version >= 12040;
}

Features module_features()
{
    return {
        {"module", module},
        {"module-linked", linked},
        {"module-library", library},
        {"module-again", module_again},
        {"module-lazy", lazy},
        {"contexts", contexts},
        {"context-green", green_context, has_green_contexts},
    };
}
