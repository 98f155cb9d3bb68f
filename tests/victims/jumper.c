/* Leaves copies by longjmp, from shallow and deep frames, between copies that return: a program that exports its own
 * cuMemcpyHtoD_v2. Says "ready PID", waits for SIGUSR1, and ends with an account of the copies that returned. */
#define _GNU_SOURCE
#include <alloca.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS = 50 };

static jmp_buf out;
static volatile int jump;

__attribute__((noinline, visibility("default"))) int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t bytes)
{
    volatile uint64_t sink = dst + (uintptr_t)src + bytes;
    (void)sink;
    if (jump)
        longjmp(out, 1);
    return 0;
}

/* Copies from a frame that is `depth` bytes further down. */
static __attribute__((noinline)) void copy(size_t depth)
{
    volatile char *frame = alloca(depth + 16);
    frame[0] = 1;
    cuMemcpyHtoD_v2(4096, (void *)frame, 1000);
    frame[1] = 1;
}

static __attribute__((noinline)) void leave(size_t depth)
{
    jump = 1;
    if (!setjmp(out))
        copy(depth);
    jump = 0;
}

int main(void)
{
    sigset_t go;
    int signal;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &go, NULL);
    printf("ready %d\n", getpid());
    fflush(stdout);
    sigwait(&go, &signal);
    static const size_t depths[][2] = {{64, 64}, {64, 8192}, {8192, 64}};
    int copies = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < 3; i++) {
            leave(depths[i][0]);
            copy(depths[i][1]);
            copy(depths[i][1]);
            copies += 2;
        }
    printf("{\"pid\":%d,\"functions\":{\"cuMemcpyHtoD_v2\":{\"calls\":%d,\"errors\":0,\"bytes\":%d}},\"jumped\":%d}\n", getpid(),
           copies, copies * 1000, ROUNDS * 3);
    fflush(stdout);
    _exit(0);
}
