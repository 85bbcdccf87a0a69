/* Opens random files of a list, reads 4 KiB of each and closes it, for some seconds; prints how many a second.
 * usage: open_files SECONDS THREADS <LIST; for benches/files_cost.py */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PATHS_MAX 1000000

static char *paths[PATHS_MAX];
static size_t count;
static double seconds;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void *load(void *seed) {
    unsigned state = (unsigned)(size_t)seed;
    char buffer[4096];
    size_t opened = 0;
    for (double end = now() + seconds; now() < end; opened++) {
        int file = open(paths[(size_t)rand_r(&state) % count], O_RDONLY);
        if (file < 0 || read(file, buffer, sizeof buffer) < 0) {
            perror("open_files");
            exit(1);
        }
        close(file);
    }
    return (void *)opened;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    seconds = atof(argv[1]);
    int threads = atoi(argv[2]);
    char line[4096];
    while (count < PATHS_MAX && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        paths[count++] = strdup(line);
    }
    pthread_t workers[256];
    size_t total = 0;
    for (int i = 0; i < threads; i++) pthread_create(&workers[i], NULL, load, (void *)(size_t)(i + 1));
    for (int i = 0; i < threads; i++) {
        void *opened;
        pthread_join(workers[i], &opened);
        total += (size_t)opened;
    }
    printf("%.0f\n", (double)total / seconds);
    return 0;
}
