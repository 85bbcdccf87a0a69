// Takes GPU memory until only this much is free, prints "full", and keeps it until it is killed.
//
//   hog GIB_FREE

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <unistd.h>

// Size taken at a time; halved for the last pieces.
constexpr size_t PIECE = 1ull << 30;
constexpr size_t PIECE_MIN = 1ull << 24;

int main(int count, char** arguments)
{
    size_t left = count == 2 ? size_t(atof(arguments[1]) * double(1ull << 30)) : 0;
    if (left == 0) {
        fprintf(stderr, "usage: hog GIB_FREE\n");
        return 2;
    }
    size_t available, total;
    for (size_t piece = PIECE; piece >= PIECE_MIN; piece /= 2) {
        void* memory;
        while (cudaMemGetInfo(&available, &total) == cudaSuccess && available >= left + piece
            && cudaMalloc(&memory, piece) == cudaSuccess) { }
    }
    cudaError_t error = cudaMemGetInfo(&available, &total);
    if (error != cudaSuccess) {
        fprintf(stderr, "hog: failed to ask for free memory: %s\n", cudaGetErrorString(error));
        return 1;
    }
    printf("full %zu MiB free\n", available >> 20);
    fflush(stdout);
    for (;;)
        pause();
}
