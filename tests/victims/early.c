/* A library whose constructor starts threads that copy, for programs that are linked to libcuda: they are in libcuda's code
 * before anything that was preloaded is told of libraries. early_join() ends them. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

int cuMemcpyHtoD_v2(unsigned long long, const void *, size_t);

static pthread_t threads[4];
static _Atomic bool stop;

static void *calls(void *unused)
{
    char byte = 0;
    while (!stop)
        cuMemcpyHtoD_v2(0, &byte, 0);
    return unused;
}

__attribute__((constructor)) static void start(void)
{
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, calls, NULL);
}

void early_join(void)
{
    stop = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}
