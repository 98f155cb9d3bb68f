#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 1 << 20 };

_Atomic unsigned long copies_done;
void (*copying_check)(void);

_Noreturn void fail(int exit_code, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "victim: %s\n", text);
    _exit(exit_code);
}

static void must(int code, const char *what)
{
    if (code)
        fail(EXIT_API, "%s returned %d", what, code);
}

static void *copying(void *argument)
{
    CUdeviceptr device;
    unsigned char *source = malloc(BYTES), *got = calloc(1, BYTES);
    must(api_start_thread(), "starting a thread");
    must(api_device_alloc(&device, BYTES), "allocating device memory");
    memset(source, (int)(size_t)argument + 1, BYTES);
    for (unsigned round = 0;; round++) {
        memcpy(source + round * 64 % BYTES, &round, sizeof round);
        must(api_copy(HTOD, source, device, BYTES, NULL), "HtoD");
        must(api_copy(DTOH, got, device, BYTES, NULL), "DtoH");
        if (memcmp(source, got, BYTES))
            fail(EXIT_MISMATCH, "mismatch in round %u", round);
        copies_done += 2;
        if (copying_check)
            copying_check();
    }
    return NULL;
}

static void start(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, argument))
        fail(EXIT_API, "cannot start a thread");
    pthread_detach(thread);
}

void copying_start(int count)
{
    must(api_load(), "starting CUDA");
    for (int i = 0; i < count; i++)
        start(copying, (void *)(size_t)i);
}

static void *ending(void *extra)
{
    sigset_t term;
    int signal;
    sigfillset(&term);
    pthread_sigmask(SIG_BLOCK, &term, NULL);
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigwait(&term, &signal);
    printf("{");
    if (extra)
        ((void (*)(void))(intptr_t)extra)();
    printf("\"copies\":%lu,\"mismatches\":0}\n", copies_done);
    fflush(stdout);
    _exit(0);
}

void ending_start(void (*extra)(void))
{
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &term, NULL);
    start(ending, (void *)(intptr_t)extra);
}

void say_ready(void)
{
    while (copies_done < 2)
        usleep(1000);
    printf("ready %d\n", getpid());
    fflush(stdout);
}
