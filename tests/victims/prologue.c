/* Threads that do nothing but enter a copy function of the stand-in, which returns at once. They trap after every
 * instruction, so that at any moment some of them stand in its first ones (a processor left to itself is hardly ever
 * interrupted between two cheap ones). victim-prologue lingers: the trap's handler takes its time, so that they stand in
 * that, and will return there. */
#define _GNU_SOURCE
#include "copying.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, OFF = 999, HANDLER_US = 50 };

typedef int copy_function(CUdeviceptr, const void *, size_t);
static copy_function *copy;
static bool lingers;

/* Has the entry points of the stand-in return OFF before anything else: `cmpl $0, standin_profiler(%rip)`. */
static void switch_off(void)
{
    unsigned char *code = (unsigned char *)(intptr_t)copy;
    for (size_t at = 0; at < 32; at++)
        if (code[at] == 0x83 && code[at + 1] == 0x3d) {
            int32_t to;
            memcpy(&to, code + at + 2, sizeof to);
            *(int *)(code + at + 7 + to) = 1;
            return;
        }
    fail(EXIT_API, "the stand-in's entry points look differently");
}

static void trap_after_every_instruction(void)
{
    __asm__ volatile("pushfq\n"
                     "orl $0x100, (%%rsp)\n"
                     "popfq" ::
                         : "cc", "memory");
}

static void *enter(void *argument)
{
    trap_after_every_instruction();
    for (;;) {
        int code = copy(0, NULL, 0);
        if (code != OFF)
            fail(EXIT_MISMATCH, "a copy returned %d", code);
        copies_done++;
    }
    return argument;
}

static void on_trap(int signal)
{
    (void)signal;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while (lingers && (now.tv_sec - start.tv_sec) * 1000000 + (now.tv_nsec - start.tv_nsec) / 1000 < HANDLER_US);
}

int main(int argc, char **argv)
{
    ending_start(NULL);
    if (api_load())
        fail(EXIT_API, "starting CUDA");
    copy = (copy_function *)(intptr_t)dlsym(RTLD_DEFAULT, "cuMemcpyHtoD_v2");
    if (!copy)
        fail(EXIT_API, "no cuMemcpyHtoD_v2");
    switch_off();
    lingers = argc > 1 && !strcmp(argv[1], "lingers");
    sigaction(SIGTRAP, &(struct sigaction){.sa_handler = on_trap, .sa_flags = SA_RESTART}, NULL);
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, enter, NULL))
            fail(EXIT_API, "cannot start a thread");
    }
    say_ready();
    for (;;)
        pause();
}
