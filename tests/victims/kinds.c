/* Copies from and to one buffer of each kind of host memory, all of them made before "ready PID"; each kind has a size of
 * its own, so that a report's size classes tell them apart. Waits for SIGUSR1, copies ROUNDS times, prints an account.
 * --pin: what is registered is pinned in the kernel, too, as NVIDIA's driver does; here by io_uring. */
#define _GNU_SOURCE
#include "victim.h"

#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROUNDS = 20, LARGEST = 16 << 20 };

_Noreturn void fail(int exit_code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    _exit(exit_code);
}

static void must(int code, const char *what)
{
    if (code)
        fail(EXIT_API, "%s returned %d", what, code);
}

static void *map(size_t bytes, int flags, int fd)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (at == MAP_FAILED)
        fail(EXIT_API, "mmap of %zu bytes failed", bytes);
    return at;
}

static void *anonymous(size_t bytes)
{
    return map(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

static void *touched(void *at, size_t bytes)
{
    memset(at, 1, bytes);
    return at;
}

/* Starts at a multiple of 2 MiB, so that a huge page fits. */
static void *huge(size_t bytes)
{
    char *at = anonymous(bytes + (2 << 20));
    at += -(uintptr_t)at & ((2 << 20) - 1);
    madvise(at, bytes, MADV_HUGEPAGE);
    return touched(at, bytes);
}

static void *file(size_t bytes, int flags)
{
    char path[] = "./victim-kinds-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0 || unlink(path) || ftruncate(fd, (off_t)bytes))
        fail(EXIT_API, "no file in the current folder");
    void *at = map(bytes, flags, fd);
    volatile char sum = 0;
    if (flags & MAP_SHARED)
        memset(at, 1, bytes);
    else
        for (size_t i = 0; i < bytes; i += 4096)
            sum += ((volatile char *)at)[i];
    return at;
}

static void *memory_file(size_t bytes)
{
    int fd = memfd_create("victim-kinds", 0);
    if (fd < 0 || ftruncate(fd, (off_t)bytes))
        fail(EXIT_API, "no memory file");
    return touched(map(bytes, MAP_SHARED, fd), bytes);
}

/* Holds pages as pin_user_pages does, for as long as the process lives. */
static void pin(void *at, size_t bytes)
{
    struct io_uring_params parameters = {0};
    long ring = syscall(SYS_io_uring_setup, 1, &parameters);
    struct iovec buffer = {at, bytes};
    if (ring < 0 || syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1))
        fail(EXIT_API, "io_uring cannot pin memory here");
}

static struct counter htod = {.name = "cuMemcpyHtoD_v2"}, dtoh = {.name = "cuMemcpyDtoH_v2"};
static CUdeviceptr device;

static void copy(void *host, size_t bytes)
{
    must(counted(&htod, bytes, cuMemcpyHtoD_v2(device, host, bytes)), "cuMemcpyHtoD");
    must(counted(&dtoh, bytes, cuMemcpyDtoH_v2(host, device, bytes)), "cuMemcpyDtoH");
}

int main(int argc, char **argv)
{
    CUdevice number;
    CUcontext context;
    must(cuInit(0), "cuInit");
    must(cuDeviceGet(&number, 0), "cuDeviceGet");
    must(cuDevicePrimaryCtxRetain(&context, number), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    must(cuMemAlloc_v2(&device, LARGEST), "cuMemAlloc");

    struct { void *at; size_t bytes; } kinds[7];
    int count = 0;
#define KIND(memory, size) (kinds[count].at = (memory), kinds[count].bytes = (size), count++)
    KIND(touched(anonymous(64 << 10), 64 << 10), 64 << 10);
    KIND(touched(anonymous(128 << 10), 128 << 10), 128 << 10);
    KIND(file(256 << 10, MAP_SHARED), 256 << 10);
    KIND(memory_file(512 << 10), 512 << 10);
    KIND(huge(4 << 20), 4 << 20);
    CUdeviceptr managed;
    must(cuMemHostAlloc(&kinds[count].at, 1 << 20, 0), "cuMemHostAlloc");
    kinds[count++].bytes = 1 << 20;
    must(cuMemAllocManaged(&managed, 2 << 20, 1), "cuMemAllocManaged");
    kinds[count].at = (void *)(uintptr_t)managed;
    kinds[count++].bytes = 2 << 20;
    must(cuMemHostRegister_v2(kinds[1].at, kinds[1].bytes, 0), "cuMemHostRegister");
    if (argc > 1 && !strcmp(argv[1], "--pin"))
        pin(kinds[1].at, kinds[1].bytes);

    sigset_t go;
    int signal;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &go, NULL);
    printf("ready %d\n", getpid());
    fflush(stdout);
    sigwait(&go, &signal);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < count; i++)
            copy(kinds[i].at, kinds[i].bytes);
        /* What nobody has touched: a source that reads as zeros, and a destination. */
        size_t bytes = 8 << 20;
        void *fresh = anonymous(bytes);
        copy(fresh, bytes);
        munmap(fresh, bytes);
        fresh = anonymous(LARGEST);
        must(counted(&dtoh, LARGEST, cuMemcpyDtoH_v2(fresh, device, LARGEST)), "cuMemcpyDtoH");
        munmap(fresh, LARGEST);
    }
    printf("{\"pid\":%d,\"rounds\":%d,\"functions\":{", getpid(), ROUNDS);
    for (int i = 0; i < 2; i++) {
        struct counter *c = i ? &dtoh : &htod;
        printf("%s\"%s\":{\"calls\":%llu,\"errors\":%llu,\"bytes\":%llu}", i ? "," : "", c->name, (unsigned long long)c->calls,
               (unsigned long long)c->errors, (unsigned long long)c->bytes);
    }
    printf("}}\n");
    fflush(stdout);
    _exit(0);
}
