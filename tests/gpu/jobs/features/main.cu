// Features of CUDA, one at a time: whether a restore brings back each of them.
//
//   features                                   lists the features that this machine has
//   features NAME STEPS MS_PER_STEP LOGFILE    writes "STEP CHECKSUM" of each step to stdout and the log file
//
// Build: nvcc -O2 -std=c++17 -rdc=true -o features *.cu

#include "feature.h"
#include <unistd.h>

int main(int count, char** arguments)
{
    Features all;
    for (auto part : {memory_features, mapping_features, queue_features, graph_features, kernel_features, module_features})
        for (const Feature& feature : part())
            all.push_back(feature);
    if (count == 1) {
        for (const Feature& feature : all)
            if (!feature.supported || feature.supported())
                puts(feature.name);
        return 0;
    }
    if (count != 5) {
        fprintf(stderr, "usage: features [NAME STEPS MS_PER_STEP LOGFILE]\n");
        return 2;
    }
    Step use;
    for (const Feature& feature : all)
        if (!strcmp(feature.name, arguments[1]))
            use = feature.set_up();
    FILE* log = fopen(arguments[4], "a");
    if (!use || !log) {
        fprintf(stderr, "features: %s\n", use ? "failed to open the log file" : "no such feature");
        return 1;
    }
    Word steps = strtoull(arguments[2], nullptr, 10);
    useconds_t pause = useconds_t(atol(arguments[3]) * 1000);
    for (Word step = 0; step < steps; step++) {
        Word checksum = use(step);
        for (FILE* file : {stdout, log}) {
            fprintf(file, "%llu %016llx\n", step, checksum);
            fflush(file);
        }
        usleep(pause);
    }
    // Without destructors, because a feature may have threads that never end.
    CHECK(cudaDeviceSynchronize());
    fflush(stdout);
    _exit(0);
}
