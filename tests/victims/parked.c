/* Threads that only wait: a system call that nothing wakes must not return. And threads that keep malloc's locks busy. */
#define _GNU_SOURCE
#include "victim.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *const waits[] = {"epoll_wait", "futex", "read", "nanosleep", "poll", "recv with a timeout"};
enum { WAITS = sizeof waits / sizeof *waits };
static const struct timespec hours = {36000, 0};

_Atomic uint64_t interrupted_calls;

/* A call that the kernel never restarts by itself was interrupted, and that is only to be counted. */
static bool is_tolerated(long result)
{
    bool tolerated = options.count_interrupted && result == -1 && errno == EINTR;
    interrupted_calls += tolerated;
    return tolerated;
}

static long wait_forever(size_t which)
{
    int pipe_ends[2], pair[2];
    if (pipe(pipe_ends) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        fail(EXIT_API, "parked thread: %s", strerror(errno));
    char byte;
    switch (which) {
    case 0: {
        struct epoll_event event = {.events = EPOLLIN};
        int epoll = epoll_create1(0);
        epoll_ctl(epoll, EPOLL_CTL_ADD, pipe_ends[0], &event);
        int ready;
        do
            ready = epoll_wait(epoll, &event, 1, 36000 * 1000);
        while (is_tolerated(ready));
        return ready;
    }
    case 1: {
        static int word;
        return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &hours, NULL, 0);
    }
    case 2:
        return read(pipe_ends[0], &byte, 1);
    case 3:
        return nanosleep(&hours, NULL);
    case 4: {
        struct pollfd fd = {.fd = pipe_ends[0], .events = POLLIN};
        return poll(&fd, 1, -1);
    }
    default: {
        struct timeval timeout = {36000, 0};
        setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
        ssize_t got;
        do
            got = recv(pair[0], &byte, 1, 0);
        while (is_tolerated(got));
        return got;
    }
    }
}

static void *parked(void *argument)
{
    size_t which = (size_t)argument % WAITS;
    long result = wait_forever(which);
    int error = errno;
    fail(EXIT_INTERRUPTED, "%s returned %ld: %s", waits[which], result, strerror(error));
}

static void *storm(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument;
    void *blocks[64] = {0};
    for (;;) {
        unsigned at = (unsigned)rand_r(&seed) % 64;
        free(blocks[at]);
        size_t bytes = (size_t)rand_r(&seed) % (at == 0 ? 1 << 18 : 4096) + 1;
        blocks[at] = malloc(bytes);
        if (blocks[at])
            memset(blocks[at], (int)at, bytes < 64 ? bytes : 64);
    }
    return NULL;
}

static void start(void *(*run)(void *), int count)
{
    for (size_t i = 0; i < (size_t)count; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run, (void *)i))
            fail(EXIT_API, "cannot start a thread");
        pthread_detach(thread);
    }
}

void parked_start(int count)
{
    start(parked, count);
}

void malloc_storm_start(int count)
{
    start(storm, count);
}
