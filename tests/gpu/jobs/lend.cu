// Two processes with one piece of GPU memory (CUDA IPC): the first reads the second's counts there.
//
//   lend KIB STEPS MS_PER_STEP RESULT TIMES
//
// Prints a line a step, and writes all to RESULT; milliseconds of each step go to TIMES. Below 2 MiB the memory is the
// driver's own, not the agent's.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char* what)
{
    perror(what);
    exit(1);
}

static void check(cudaError_t error, const char* what)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "lend: failed to %s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

__global__ void count(unsigned* memory, size_t words, unsigned step)
{
    for (size_t i = threadIdx.x; i < words; i += blockDim.x)
        memory[i] = memory[i] * 1664525u + unsigned(i) + step;
}

static void hear(int from, void* bytes, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t part = read(from, static_cast<char*>(bytes) + done, len - done);
        if (part <= 0)
            exit(part == 0 ? 0 : 1);
        done += part;
    }
}

static void tell(int to, const void* bytes, size_t len)
{
    if (write(to, bytes, len) != ssize_t(len))
        fail("write");
}

// The second process: reads the length, a handle and steps from its standard input; replies after each step.
static int borrow()
{
    size_t words;
    cudaIpcMemHandle_t handle;
    unsigned step, *memory;
    hear(0, &words, sizeof words);
    hear(0, &handle, sizeof handle);
    check(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&memory), handle, cudaIpcMemLazyEnablePeerAccess), "open");
    for (;;) {
        hear(0, &step, sizeof step);
        count<<<1, 256>>>(memory, words, step);
        check(cudaDeviceSynchronize(), "count");
        tell(1, &step, sizeof step);
    }
}

static double milliseconds()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

int main(int number, char** arguments)
{
    if (number == 1)
        return borrow();
    if (number != 6) {
        fprintf(stderr, "usage: lend KIB STEPS MS_PER_STEP RESULT TIMES\n");
        return 2;
    }
    size_t words = strtoull(arguments[1], nullptr, 10) * 1024 / sizeof(unsigned);
    unsigned steps = strtoul(arguments[2], nullptr, 10), pace = strtoul(arguments[3], nullptr, 10), *memory;
    int requests[2], answers[2];
    if (pipe(requests) || pipe(answers))
        fail("pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(requests[0], 0);
        dup2(answers[1], 1);
        for (int end : {requests[0], requests[1], answers[0], answers[1]})
            close(end);
        execl("/proc/self/exe", arguments[0], nullptr);
        fail("exec");
    }
    close(requests[0]);
    close(answers[1]);
    cudaIpcMemHandle_t handle;
    check(cudaMalloc(&memory, words * sizeof *memory), "allocate");
    check(cudaMemset(memory, 1, words * sizeof *memory), "fill");
    check(cudaDeviceSynchronize(), "fill");
    check(cudaIpcGetMemHandle(&handle, memory), "export");
    tell(requests[1], &words, sizeof words);
    tell(requests[1], &handle, sizeof handle);
    FILE *result = fopen(arguments[4], "w"), *times = fopen(arguments[5], "w");
    if (!result || !times)
        fail("open");
    for (unsigned step = 0; step < steps; step++) {
        double begun = milliseconds();
        unsigned done, last;
        tell(requests[1], &step, sizeof step);
        hear(answers[0], &done, sizeof done);
        check(cudaMemcpy(&last, memory + words - 1, sizeof last, cudaMemcpyDeviceToHost), "read");
        for (FILE* file : {stdout, result}) {
            fprintf(file, "%u %u\n", step, last);
            fflush(file);
        }
        usleep(pace * 1000);
        fprintf(times, "%.1f\n", milliseconds() - begun);
    }
    fclose(times);
    close(requests[1]);
    int status;
    waitpid(child, &status, 0);
    return status != 0;
}
