// CUDA graphs: captured, built, changed, with memory of their own, with conditions, and started by kernels.

#include "feature.h"

static cudaStream_t new_stream()
{
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static cudaGraphExec_t instantiate(cudaGraph_t graph, unsigned long long flags = 0)
{
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, flags));
    return exec;
}

/// Kernels, copies, fills and host functions, in two streams, captured once.
static Step captured()
{
    cudaStream_t stream = new_stream(), other = new_stream();
    Word *memory = gpu_memory(), *second = gpu_memory(), *host;
    CHECK(cudaMallocHost(&host, LEN));
    memset(host, 1, LEN);
    cudaEvent_t fork, join;
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cudaMemcpyAsync(second, host, LEN, cudaMemcpyHostToDevice, stream));
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(other, fork));
    advance_on(other, second, WORDS / 2, 5);
    advance_on(stream, memory, WORDS, 6);
    CHECK(cudaMemsetAsync(second + WORDS / 2, 3, LEN / 4, stream));
    CHECK(cudaLaunchHostFunc(other, count, host));
    CHECK(cudaEventRecord(join, other));
    CHECK(cudaStreamWaitEvent(stream, join));
    CHECK(cudaMemcpyAsync(host + WORDS / 2, memory, LEN / 2, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = instantiate(graph);
    return [=](Word) {
        CHECK(cudaGraphLaunch(exec, stream));
        return sum_from(second, WORDS) + sum_of(host, WORDS);
    };
}

/// A capture that is open for ten steps at a time.
static Step capture_open()
{
    cudaStream_t stream = new_stream();
    Word* memory = gpu_memory();
    return [=](Word step) {
        if (step % 10 == 0)
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        advance_on(stream, memory, WORDS, step);
        if (step % 10 < 9)
            return step;
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(stream, &graph));
        cudaGraphExec_t exec = instantiate(graph);
        CHECK(cudaGraphLaunch(exec, stream));
        Word sum = sum_from(memory, WORDS);
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        return sum;
    };
}

/// A kernel's node, whose parameters each step changes, within a child.
static Step updated()
{
    cudaStream_t stream = new_stream();
    auto* memory = new Word*(gpu_memory());
    auto* words = new size_t(WORDS);
    auto* number = new Word(0);
    auto* parameters = new void*[3] { memory, words, number };
    cudaKernelNodeParams kernel = {};
    kernel.func = reinterpret_cast<void*>(advance);
    kernel.gridDim = dim3(BLOCKS);
    kernel.blockDim = dim3(THREADS);
    kernel.kernelParams = parameters;
    cudaGraph_t graph, child;
    cudaGraphNode_t node, nested;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphCreate(&child, 0));
    CHECK(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &kernel));
    *number = 77;
    CHECK(cudaGraphAddKernelNode(&nested, child, nullptr, 0, &kernel));
    CHECK(cudaGraphAddChildGraphNode(&nested, graph, &node, 1, child));
    cudaGraphExec_t exec = instantiate(graph);
    return [=](Word step) {
        *number = step;
        CHECK(cudaGraphExecKernelNodeSetParams(exec, node, &kernel));
        CHECK(cudaGraphLaunch(exec, stream));
        return sum_from(*memory, WORDS);
    };
}

/// Memory that a graph allocates and frees itself.
static Step with_memory()
{
    cudaStream_t stream = new_stream();
    Word* memory = gpu_memory();
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    Word* own;
    CHECK(cudaMallocAsync(&own, LEN, stream));
    CHECK(cudaMemcpyAsync(own, memory, LEN, cudaMemcpyDeviceToDevice, stream));
    advance_on(stream, own, WORDS, 9);
    CHECK(cudaMemcpyAsync(memory, own, LEN, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaFreeAsync(own, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec = instantiate(graph);
    return [=](Word) {
        CHECK(cudaGraphLaunch(exec, stream));
        return sum_from(memory, WORDS);
    };
}

static __global__ void count_down(Word* left, cudaGraphConditionalHandle condition)
{
    cudaGraphSetConditional(condition, --*left > 0);
}

/// A loop within the graph.
static Step conditional()
{
    cudaStream_t stream = new_stream();
    Word *memory = gpu_memory(), *left = gpu_memory(1);
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaGraphConditionalHandle condition;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphConditionalHandleCreate(&condition, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNodeParams loop = {};
    loop.type = cudaGraphNodeTypeConditional;
    loop.conditional.handle = condition;
    loop.conditional.type = cudaGraphCondTypeWhile;
    loop.conditional.size = 1;
    CHECK(cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &loop));
    cudaGraph_t body = loop.conditional.phGraph_out[0];
    CHECK(cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    advance_on(stream, memory, WORDS, 4);
    count_down<<<1, 1, 0, stream>>>(left, condition);
    CHECK(cudaStreamEndCapture(stream, nullptr));
    cudaGraphExec_t exec = instantiate(graph);
    return [=](Word step) {
        Word rounds = step % 7 + 1;
        CHECK(cudaMemcpyAsync(left, &rounds, sizeof rounds, cudaMemcpyHostToDevice, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        return sum_from(memory, WORDS);
    };
}

static __global__ void start(cudaGraphExec_t exec, Word* started)
{
    ++*started;
    cudaGraphLaunch(exec, cudaStreamGraphFireAndForget);
}

/// A graph that a kernel of another graph starts.
static Step from_kernel()
{
    cudaStream_t stream = new_stream();
    Word *memory = gpu_memory(), *started = gpu_memory(1);
    cudaGraph_t inner, outer;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    advance_on(stream, memory, WORDS, 8);
    CHECK(cudaStreamEndCapture(stream, &inner));
    cudaGraphExec_t inside = instantiate(inner, cudaGraphInstantiateFlagDeviceLaunch);
    CHECK(cudaGraphUpload(inside, stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    start<<<1, 1, 0, stream>>>(inside, started);
    CHECK(cudaStreamEndCapture(stream, &outer));
    cudaGraphExec_t exec = instantiate(outer);
    return [=](Word) {
        CHECK(cudaGraphLaunch(exec, stream));
        return sum_from(memory, WORDS) + sum_from(started, 1);
    };
}

static bool has_conditions()
{
    int version;
    CHECK(cudaDriverGetVersion(&version));
    return version >= 12040;
}

Features graph_features()
{
    return {
        {"graph-captured", captured},
        {"graph-capture-open", capture_open},
        {"graph-updated", updated},
        {"graph-memory", with_memory},
        {"graph-conditional", conditional, has_conditions},
        {"graph-from-kernel", from_kernel},
    };
}
