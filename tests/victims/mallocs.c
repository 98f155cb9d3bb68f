/* A program without a thread that waits: all do nothing but allocate, and half of the time the allocator's lock is held.
 * A detour that begins there and allocates waits for ever. Built with OWN_ALLOCATOR: on one lock of its own, held nearly
 * always. victim-mallocs handlers: a signal's handler that sleeps interrupts them all the time. It copies nothing. Ends
 * when a thread gets no further. */
#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 2 };

static _Atomic unsigned long rounds[THREADS];
static volatile sig_atomic_t ending;

static void linger(int times)
{
    for (volatile int i = 0; i < times; i++)
        ;
}

#ifdef OWN_ALLOCATOR
/* A block is its class, then what was asked for; freed ones are kept by class: sizes rounded up to a power of two. */
enum { HEAD = 64, CLASSES = 32 };
struct block {
    size_t class;
    struct block *next;
};
static char arena[256 << 20] __attribute__((aligned(HEAD)));
static size_t used;
static struct block *kept[CLASSES];
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void take(void)
{
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
        ;
    linger(300);
}

static void give(void)
{
    atomic_flag_clear_explicit(&lock, memory_order_release);
}

/* Not seen through by the compiler, which knows what malloc's block may be used for. */
__attribute__((noinline)) void *malloc(size_t bytes)
{
    size_t class = 7;
    while (((size_t)1 << class) < bytes + HEAD)
        class++;
    take();
    struct block *block = kept[class];
    if (block) {
        kept[class] = block->next;
    } else {
        if (used + ((size_t)1 << class) > sizeof arena)
            fail(EXIT_API, "the arena is full");
        block = (struct block *)(arena + used);
        used += (size_t)1 << class;
        block->class = class;
    }
    give();
    return (char *)block + HEAD;
}

__attribute__((noinline)) void free(void *memory)
{
    if (!memory)
        return;
    struct block *block = (struct block *)((char *)memory - HEAD);
    take();
    block->next = kept[block->class];
    kept[block->class] = block;
    give();
}

void *calloc(size_t count, size_t bytes)
{
    return memset(malloc(count * bytes), 0, count * bytes);
}

void *realloc(void *memory, size_t bytes)
{
    void *other = malloc(bytes);
    if (memory) {
        struct block *block = (struct block *)((char *)memory - HEAD);
        size_t before = ((size_t)1 << block->class) - HEAD;
        memcpy(other, memory, before < bytes ? before : bytes);
        free(memory);
    }
    return other;
}

int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
    if (alignment > HEAD)
        return ENOMEM;
    *memory = malloc(bytes);
    return 0;
}

void *memalign(size_t alignment, size_t bytes)
{
    return alignment > HEAD ? NULL : malloc(bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return memalign(alignment, bytes);
}
#endif

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Each watches the other. */
static void *allocate(void *argument)
{
    size_t own = (size_t)argument, other = !own;
    unsigned long seen = 0;
    double since = now();
    /* More than the threads' caches hold, and of many sizes, so that they take the lock and look for long. */
    enum { BLOCKS = 256 };
    static void *blocks[THREADS][BLOCKS];
    unsigned random = (unsigned)own + 1;
    while (!ending) {
        void **block = &blocks[own][rand_r(&random) % BLOCKS];
        free(*block);
        *block = malloc(1100 + (size_t)rand_r(&random) % 9000);
        linger(100);
        rounds[own]++;
        if (rounds[other] != seen) {
            seen = rounds[other];
            since = now();
        } else if (now() - since > 20) {
            fail(EXIT_INTERRUPTED, "a thread is stuck after %lu rounds", seen);
        }
    }
    return argument;
}

static void doze(int signal)
{
    (void)signal;
    nanosleep(&(struct timespec){0, 2000000}, NULL);
}

static void end(int signal)
{
    (void)signal;
    ending = 1;
}

int main(int argc, char **argv)
{
    mallopt(M_ARENA_MAX, 1);
    if (cuInit(0))
        fail(EXIT_API, "starting CUDA");
    signal(SIGTERM, end);
    pthread_t thread;
    if (pthread_create(&thread, NULL, allocate, (void *)1))
        fail(EXIT_API, "cannot start a thread");
    if (argc > 1 && !strcmp(argv[1], "handlers")) {
        sigaction(SIGALRM, &(struct sigaction){.sa_handler = doze, .sa_flags = SA_RESTART}, NULL);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 3000}, {0, 3000}}, NULL);
    }
    printf("ready %d\n", getpid());
    fflush(stdout);
    allocate(NULL);
    pthread_join(thread, NULL);
    printf("{\"rounds\":%lu,\"mismatches\":0}\n", rounds[0]);
    return 0;
}
