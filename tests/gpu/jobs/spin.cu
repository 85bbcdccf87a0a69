// Idle kernels of this many seconds on the whole GPU, one after the other; prints a line for each, until one fails.
//
//   spin SECONDS

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

constexpr int THREADS = 256;

__device__ unsigned long long now()
{
    unsigned long long time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

__global__ void spin(unsigned long long nanoseconds)
{
    for (auto begun = now(); now() - begun < nanoseconds;) { }
}

int main(int count, char** arguments)
{
    double seconds = count == 2 ? atof(arguments[1]) : 0;
    if (seconds <= 0) {
        fprintf(stderr, "usage: spin SECONDS\n");
        return 2;
    }
    int blocks = 0;
    cudaError_t error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
    while (error == cudaSuccess) {
        spin<<<blocks, THREADS>>>((unsigned long long)(seconds * 1e9));
        error = cudaDeviceSynchronize();
        printf("%s\n", cudaGetErrorString(error));
        fflush(stdout);
    }
    return 1;
}
