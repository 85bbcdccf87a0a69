// Streams, events and what the host does beside them.

#include "feature.h"
#include <thread>
#include <unistd.h>

DRIVER(cuStreamWaitValue32);
DRIVER(cuStreamWriteValue32);

static cudaStream_t stream_of(unsigned flags, int priority = 0)
{
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithPriority(&stream, flags, priority));
    return stream;
}

/// Streams of all priorities that wait for each other's events.
static Step streams()
{
    int least, greatest;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    std::vector<cudaStream_t> streams;
    for (int number = 0; number < 16; number++)
        streams.push_back(stream_of(number % 2 ? cudaStreamNonBlocking : cudaStreamDefault, least - number % (least - greatest + 1)));
    std::vector<cudaEvent_t> events(streams.size());
    for (cudaEvent_t& event : events)
        CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    Word* memory = gpu_memory();
    return [=](Word step) {
        Word sum = 0;
        for (size_t i = 0; i < streams.size(); i++) {
            // In the first round the event was recorded in the step before, perhaps by a process that is gone.
            CHECK(cudaStreamWaitEvent(streams[i], events[(i + streams.size() - 1) % streams.size()]));
            advance_on(streams[i], memory, WORDS, step + i);
            CHECK(cudaEventRecord(events[i], streams[i]));
            int priority;
            unsigned flags;
            CHECK(cudaStreamGetPriority(streams[i], &priority));
            CHECK(cudaStreamGetFlags(streams[i], &flags));
            sum = mixed(sum, Word(priority * 64) + flags);
        }
        CHECK(cudaEventSynchronize(events.back()));
        return sum + sum_from(memory, WORDS);
    };
}

/// Times between events, one of them of long ago.
static Step event_times()
{
    cudaEvent_t start, before, now;
    for (cudaEvent_t* event : {&start, &before, &now})
        CHECK(cudaEventCreate(event));
    CHECK(cudaEventRecord(start));
    CHECK(cudaEventRecord(before));
    CHECK(cudaDeviceSynchronize());
    return [=](Word) {
        float all, last;
        CHECK(cudaEventRecord(now));
        CHECK(cudaEventSynchronize(now));
        CHECK(cudaEventElapsedTime(&all, start, now));
        CHECK(cudaEventElapsedTime(&last, before, now));
        CHECK(cudaEventRecord(before));
        CHECK(cudaEventSynchronize(before));
        // A step lasts milliseconds, and a restore seconds.
        bool right = all >= last && last >= 0 && last < 600e3f;
        if (!right)
            fprintf(stderr, "features: all %f ms, last %f ms\n", all, last);
        return Word(right);
    };
}

/// Work of many steps is always on its way.
static Step deep_queue()
{
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    Word *memory = gpu_memory(), *copies;
    CHECK(cudaMallocHost(&copies, 64 * sizeof(Word)));
    return [=](Word step) {
        Word seen = 0;
        if (step % 32 == 31) {
            CHECK(cudaStreamSynchronize(stream));
            seen = sum_of(copies, 64);
        }
        for (int part = 0; part < 64; part++) {
            advance_on(stream, memory, WORDS, step);
            CHECK(cudaMemcpyAsync(copies + part, memory + part, sizeof(Word), cudaMemcpyDeviceToHost, stream));
        }
        return seen;
    };
}

static void CUDART_CB count_in_callback(cudaStream_t, cudaError_t error, void* counter)
{
    check(error, "run the work before a callback");
    count(counter);
}

/// Host functions in the order of a stream.
static Step host_functions()
{
    cudaStream_t stream = stream_of(cudaStreamDefault);
    Word *memory = gpu_memory(), *counter;
    CHECK(cudaMallocHost(&counter, sizeof(Word)));
    *counter = 1;
    return [=](Word step) {
        for (int part = 0; part < 8; part++) {
            CHECK(cudaLaunchHostFunc(stream, count, counter));
            CHECK(cudaMemcpyAsync(memory + part, counter, sizeof(Word), cudaMemcpyHostToDevice, stream));
            advance_on(stream, memory, WORDS, step);
            CHECK(cudaStreamAddCallback(stream, count_in_callback, counter, 0));
        }
        return sum_from(memory, WORDS) + *counter;
    };
}

/// A stream that waits for a number in memory, which the host or another stream writes later.
static Step wait_for_value()
{
    cudaStream_t waiting = stream_of(cudaStreamNonBlocking), writing = stream_of(cudaStreamNonBlocking);
    Word* memory = gpu_memory();
    unsigned* numbers;
    CHECK(cudaHostAlloc(&numbers, 4096, cudaHostAllocMapped));
    memset(numbers, 0, 4096);
    // Loads the kernel, which the driver would do only when all waits are over.
    advance_on(nullptr, memory, WORDS, 0);
    return [=](Word step) {
        auto next = unsigned(step + 1);
        CHECK(cuStreamWaitValue32_(waiting, CUdeviceptr(numbers), next, CU_STREAM_WAIT_VALUE_EQ));
        CHECK(cuStreamWaitValue32_(waiting, CUdeviceptr(numbers + 1), next, CU_STREAM_WAIT_VALUE_EQ));
        advance_on(waiting, memory, WORDS, step);
        usleep(20'000);
        *static_cast<volatile unsigned*>(numbers) = next;
        CHECK(cuStreamWriteValue32_(writing, CUdeviceptr(numbers + 1), next, 0));
        CHECK(cudaStreamSynchronize(waiting));
        return sum_from(memory, WORDS);
    };
}

static Word* thread_memory(int number)
{
    static Word* all[6];
    if (!all[number])
        all[number] = gpu_memory();
    return all[number];
}

/// Threads with a default stream each, which wait by blocking.
static Step threads()
{
    return [](Word step) {
        std::vector<Word> sums(6);
        std::vector<std::thread> threads;
        for (int number = 0; number < 6; number++)
            threads.emplace_back([&, number] {
                for (Word part = 0; part < 4; part++)
                    advance_on(cudaStreamPerThread, thread_memory(number), WORDS, step * 4 + part);
                CHECK(cudaStreamSynchronize(cudaStreamPerThread));
                sums[number] = sum_from(thread_memory(number), WORDS);
            });
        for (std::thread& thread : threads)
            thread.join();
        return sum_of(sums.data(), sums.size());
    };
}

/// A thread that computes without a pause, beside the one of the steps.
static Step beside_busy(cudaStream_t stream, bool waits)
{
    Word *memory = gpu_memory(), *other = gpu_memory();
    std::thread([=] {
        for (Word round = 0;; round++) {
            advance_on(stream, other, WORDS, round);
            if (waits)
                CHECK(cudaStreamSynchronize(stream));
        }
    }).detach();
    return [=](Word step) {
        advance_on(cudaStreamPerThread, memory, WORDS, step);
        std::vector<Word> copy(WORDS);
        CHECK(cudaMemcpyAsync(copy.data(), memory, LEN, cudaMemcpyDeviceToHost, cudaStreamPerThread));
        CHECK(cudaStreamSynchronize(cudaStreamPerThread));
        return sum_of(copy.data(), WORDS);
    };
}

static Step busy_thread()
{
    return beside_busy(cudaStreamPerThread, true);
}

static Step busy_stream()
{
    return beside_busy(stream_of(cudaStreamNonBlocking), true);
}

/// Its queue is always full.
static Step busy_queue()
{
    return beside_busy(stream_of(cudaStreamNonBlocking), false);
}

/// An event that another process could wait for.
static Step event_exported()
{
    cudaEvent_t event;
    cudaIpcEventHandle_t handle;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK(cudaIpcGetEventHandle(&handle, event));
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    Word* memory = gpu_memory();
    return [=](Word step) {
        advance_on(nullptr, memory, WORDS, step);
        CHECK(cudaEventRecord(event));
        CHECK(cudaStreamWaitEvent(stream, event));
        advance_on(stream, memory, WORDS, step);
        CHECK(cudaStreamSynchronize(stream));
        return sum_from(memory, WORDS);
    };
}

/// The number by which the driver knows a stream.
static Step identities()
{
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    Word first;
    CHECK(cudaStreamGetId(stream, &first));
    return [=](Word) {
        Word now;
        CHECK(cudaStreamGetId(stream, &now));
        return Word(now == first);
    };
}

/// A stream's share of the cache.
static Step stream_attributes()
{
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    Word* memory = gpu_memory();
    CHECK(cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 4 << 20));
    cudaStreamAttrValue window = {};
    window.accessPolicyWindow = {memory, LEN, 0.5f, cudaAccessPropertyPersisting, cudaAccessPropertyStreaming};
    CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &window));
    return [=](Word step) {
        cudaStreamAttrValue found = {};
        size_t limit;
        CHECK(cudaStreamGetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &found));
        CHECK(cudaDeviceGetLimit(&limit, cudaLimitPersistingL2CacheSize));
        advance_on(stream, memory, WORDS, step);
        auto& part = found.accessPolicyWindow;
        Word same = part.base_ptr == memory && part.num_bytes == LEN && part.hitProp == cudaAccessPropertyPersisting;
        return sum_from(memory, WORDS) + same + limit;
    };
}

/// The GPU's clock goes on.
static __global__ void read_clock(Word* time)
{
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(*time));
}

static Step gpu_clock()
{
    Word *time = gpu_memory(1), *last = new Word(0);
    return [=](Word) {
        Word now;
        read_clock<<<1, 1>>>(time);
        CHECK(cudaMemcpy(&now, time, sizeof now, cudaMemcpyDeviceToHost));
        bool later = now > *last;
        *last = now;
        return Word(later);
    };
}

Features queue_features()
{
    return {
        {"streams", streams},
        {"event-times", event_times},
        {"deep-queue", deep_queue},
        {"host-functions", host_functions},
        {"wait-for-value", wait_for_value},
        {"threads", threads},
        {"busy-thread", busy_thread},
        {"busy-stream", busy_stream},
        {"busy-queue", busy_queue},
        {"event-exported", event_exported},
        {"identities", identities},
        {"stream-attributes", stream_attributes},
        {"clock", gpu_clock},
    };
}
