/* Contract: calls that fail, and what they leave behind. */
#define _GNU_SOURCE
#include "contract.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 4 * MIB };

/* Ranges that leave their allocation: refused, and not a byte moves. */
static void out_of_range(void)
{
    static const struct { const char *name; size_t start, bytes; } ranges[] = {
        {"one byte past the end", 0, BYTES + 1},
        {"far past the end", MIB, BYTES},
        {"small", BYTES - 16, 32},
    };
    CUdeviceptr whole = device_memory(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *host = host_pattern(2 * BYTES, 1);
    device_fill_byte(whole, BYTES, 3);
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        CUdeviceptr at = whole + ranges[i].start;
        size_t bytes = ranges[i].bytes;
        CUresult a = cuMemcpyHtoD_v2(at, host, bytes), b = cuMemcpyHtoDAsync_v2(at, host, bytes, stream);
        CUresult c = cuMemcpyDtoH_v2(host, at, bytes), d = cuMemcpyDtoHAsync_v2(host, at, bytes, stream);
        CUresult e = cuMemcpy(at, (uintptr_t)host, bytes);
        CUresult after = cuStreamSynchronize(stream);
        bool right = device_is_byte(whole, BYTES, 3) && is_pattern(host, 2 * BYTES, 1);
        report(ranges[i].name, "ret=%d,%d,%d,%d,%d after=%d bytes_ok=%d", a, b, c, d, e, after, right);
    }
    CUresult good = cuMemcpyHtoD_v2(whole, host, BYTES);
    report("then a good one", "ret=%d bytes_ok=%d", good, arrived(whole, BYTES, 1));
    host_free(host, 2 * BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(whole), "cuMemFree");
}

/* A host range that is registered in part only: refused where it starts in the registered part. */
static void straddling(void)
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_pattern(BYTES, 2);
    device_fill_byte(device, BYTES, 3);
    must(cuMemHostRegister_v2(host + MIB, MIB, 0), "cuMemHostRegister");
    static const struct { const char *name; size_t start, bytes; } ranges[] = {
        {"into", 0, 2 * MIB}, {"out of", MIB + MIB / 2, MIB}, {"over", 0, 4 * MIB}, {"by a page", MIB - 4096, 8192}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        CUresult there = cuMemcpyHtoD_v2(device, host + ranges[i].start, ranges[i].bytes);
        CUresult back = cuMemcpyDtoH_v2(host + ranges[i].start, device, ranges[i].bytes);
        bool moved = !device_is_byte(device, BYTES, 3) || !is_pattern(host, BYTES, 2);
        report(ranges[i].name, "ret=%d,%d moved=%d", there, back, moved);
        /* the following lines start from the same bytes */
        device_fill_byte(device, BYTES, 3);
        fill_pattern(host, BYTES, 2);
    }
    CUresult inside = cuMemcpyHtoD_v2(device, host + MIB, MIB);
    report("inside", "ret=%d", inside);
    must(cuMemHostUnregister(host + MIB), "cuMemHostUnregister");
    CUresult there = cuMemcpyHtoD_v2(device, host, BYTES);
    report("unregistered", "ret=%d bytes_ok=%d", there, arrived(device, BYTES, 2));
    host_free(host, BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* The same for the functions that take addresses of any kind, and for those with a stream. */
static void straddling_async(void)
{
    CUdeviceptr device = device_memory(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *host = host_pattern(BYTES, 2);
    device_fill_byte(device, BYTES, 3);
    must(cuMemHostRegister_v2(host + MIB, MIB, 0), "cuMemHostRegister");
    static const struct { const char *name; size_t start, bytes; } ranges[] = {
        {"into", 0, 2 * MIB}, {"out of", MIB + MIB / 2, MIB}, {"over", 0, 4 * MIB}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        unsigned char *at = host + ranges[i].start;
        CUresult there = cuMemcpyHtoDAsync_v2(device, at, ranges[i].bytes, stream);
        CUresult back = cuMemcpyDtoHAsync_v2(at, device, ranges[i].bytes, stream);
        CUresult any = cuMemcpy(device, (uintptr_t)at, ranges[i].bytes);
        CUresult any_back = cuMemcpyAsync((uintptr_t)at, device, ranges[i].bytes, stream);
        CUresult after = cuStreamSynchronize(stream);
        bool moved = !device_is_byte(device, BYTES, 3) || !is_pattern(host, BYTES, 2);
        report(ranges[i].name, "ret=%d,%d,%d,%d after=%d moved=%d", there, back, any, any_back, after, moved);
        device_fill_byte(device, BYTES, 3);
        fill_pattern(host, BYTES, 2);
    }
    must(cuMemHostUnregister(host + MIB), "cuMemHostUnregister");
    host_free(host, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Device memory that was given back, and a stream of another context: refused. */
static void stale(void)
{
    CUdeviceptr device = device_memory(HUGE), other_device;
    unsigned char *host = host_zeros(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUcontext other;
    must(cuMemFree_v2(device), "cuMemFree");
    report("freed memory", "ret=%d,%d,%d", cuMemcpyHtoD_v2(device, host, BYTES), cuMemcpyDtoH_v2(host, device, BYTES),
           cuMemcpyHtoDAsync_v2(device, host, BYTES, stream));
    other = new_context(main_device);
    must(cuCtxPushCurrent_v2(other), "cuCtxPushCurrent");
    other_device = device_memory(BYTES);
    report("stream of another context", "ret=%d,%d", cuMemcpyHtoDAsync_v2(other_device, host, BYTES, stream),
           cuMemcpyDtoHAsync_v2(host, other_device, BYTES, stream));
    must(cuMemFree_v2(other_device), "cuMemFree");
    must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
    must(cuCtxDestroy_v2(other), "cuCtxDestroy");
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    host_free(host, BYTES);
}

static void zero_bytes(void)
{
    CUdeviceptr device = device_memory(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *host = host_zeros(BYTES);
    report("HtoD", "ret=%d,%d", cuMemcpyHtoD_v2(device, host, 0), cuMemcpyHtoDAsync_v2(device, host, 0, stream));
    report("DtoH", "ret=%d,%d", cuMemcpyDtoH_v2(host, device, 0), cuMemcpyDtoHAsync_v2(host, device, 0, stream));
    report("default", "ret=%d,%d", cuMemcpy(device, (uintptr_t)host, 0),
           cuMemcpyAsync(device, (uintptr_t)host, 0, stream));
    report("nowhere", "ret=%d,%d", cuMemcpyHtoD_v2(0, NULL, 0), cuMemcpyDtoHAsync_v2(NULL, 0, 0, stream));
    host_free(host, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

static void null_pointers(void)
{
    CUdeviceptr device = device_memory(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *host = host_zeros(BYTES);
    report("HtoD to null", "ret=%d,%d", cuMemcpyHtoD_v2(0, host, BYTES), cuMemcpyHtoDAsync_v2(0, host, BYTES, stream));
    report("HtoD from null", "ret=%d,%d", cuMemcpyHtoD_v2(device, NULL, BYTES),
           cuMemcpyHtoDAsync_v2(device, NULL, BYTES, stream));
    report("DtoH to null", "ret=%d,%d", cuMemcpyDtoH_v2(NULL, device, BYTES),
           cuMemcpyDtoHAsync_v2(NULL, device, BYTES, stream));
    report("DtoH from null", "ret=%d,%d", cuMemcpyDtoH_v2(host, 0, BYTES), cuMemcpyDtoHAsync_v2(host, 0, BYTES, stream));
    host_free(host, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

/* A device address where a host one belongs, and the other way round. */
static void wrong_sides(void)
{
    CUdeviceptr device = device_memory(2 * BYTES);
    unsigned char *host = host_zeros(2 * BYTES);
    report("HtoD to host memory", "ret=%d", cuMemcpyHtoD_v2((uintptr_t)host, host + BYTES, BYTES));
    report("DtoH from host memory", "ret=%d", cuMemcpyDtoH_v2(host, (uintptr_t)host + BYTES, BYTES));
    report("HtoD from device memory", "ret=%d", cuMemcpyHtoD_v2(device, (void *)(uintptr_t)(device + BYTES), BYTES));
    report("DtoH to device memory", "ret=%d", cuMemcpyDtoH_v2((void *)(uintptr_t)device, device + BYTES, BYTES));
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    host_free(host, 2 * BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

struct bare { CUdeviceptr device; unsigned char *host; };

static void *without_context(void *argument)
{
    struct bare *bare = argument;
    CUcontext current = (CUcontext)1;
    CUresult there = cuMemcpyHtoD_v2(bare->device, bare->host, BYTES);
    CUresult away = cuMemcpyDtoHAsync_v2(bare->host, bare->device, BYTES, NULL);
    cuCtxGetCurrent(&current);
    report("", "ret=%d,%d context_after=%d", there, away, current != NULL);
    return NULL;
}

static void no_context(void)
{
    struct bare bare = {device_memory(BYTES), host_zeros(BYTES)};
    pthread_t thread;
    must(pthread_create(&thread, NULL, without_context, &bare), "pthread_create");
    pthread_join(thread, NULL);
    host_free(bare.host, BYTES);
    must(cuMemFree_v2(bare.device), "cuMemFree");
}

static void forked_child(void)
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_zeros(BYTES);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        _exit(cuMemcpyHtoD_v2(device, host, BYTES) & 127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CUresult parent = cuMemcpyHtoD_v2(device, host, BYTES);
    report("", "child=%d signal=%d parent=%d", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
           WIFSIGNALED(status) ? WTERMSIG(status) : 0, parent);
    host_free(host, BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* The runtime's last error after good and bad copies. */
static void last_error(void)
{
    void *library = runtime_library();
    if (!library) {
        report("", "no libcudart");
        return;
    }
    __typeof__(&cudaMemcpy) copy = (__typeof__(copy))dlsym(library, "cudaMemcpy");
    __typeof__(&cudaMemcpyAsync) copy_async = (__typeof__(copy_async))dlsym(library, "cudaMemcpyAsync");
    __typeof__(&cudaPeekAtLastError) peek = (__typeof__(peek))dlsym(library, "cudaPeekAtLastError");
    __typeof__(&cudaGetLastError) get = (__typeof__(get))dlsym(library, "cudaGetLastError");
    CUdeviceptr device = device_memory(BYTES);
    void *on_device = (void *)(uintptr_t)device;
    unsigned char *host = host_pattern(2 * BYTES, 9);
    int result = copy(on_device, host, BYTES, cudaMemcpyHostToDevice);
    report("good", "ret=%d peek=%d get=%d bytes_ok=%d", result, peek(), get(), arrived(device, BYTES, 9));
    result = copy(on_device, host, 2 * BYTES, cudaMemcpyHostToDevice);
    int peeked = peek(), first = get(), second = get();
    report("out of range", "ret=%d peek=%d get=%d then=%d", result, peeked, first, second);
    result = copy(host, on_device, BYTES, 17);
    peeked = peek(), first = get(), second = get();
    report("bad kind", "ret=%d peek=%d get=%d then=%d", result, peeked, first, second);
    result = copy_async(on_device, host, 2 * BYTES, cudaMemcpyHostToDevice, NULL);
    int good = copy(on_device, host, BYTES, cudaMemcpyHostToDevice);
    first = get();
    report("kept over a good one", "ret=%d,%d get=%d", result, good, first);
    host_free(host, 2 * BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* A second libcudart, from a file of its own, as wheels bring them; null where there is none at all. */
static void *another_runtime(void *first)
{
    Dl_info info;
    char path[] = "/tmp/contract-runtime-XXXXXX";
    void *known = first ? dlsym(first, "cudaMemcpy") : NULL;
    if (!known || !dladdr(known, &info))
        return NULL;
    int from = open(info.dli_fname, O_RDONLY), into = mkstemp(path);
    struct stat file;
    must(from < 0 || into < 0 || fstat(from, &file), "opening libcudart");
    must(sendfile(into, from, NULL, (size_t)file.st_size) != file.st_size, "copying libcudart");
    close(from);
    close(into);
    void *second = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    return second;
}

/* Two runtimes in one process: each copies, and keeps its own errors. */
static void two_runtimes(void)
{
    void *libraries[2] = {runtime_library(), NULL};
    libraries[1] = another_runtime(libraries[0]);
    if (!libraries[1]) {
        report("", "no libcudart");
        return;
    }
    CUdeviceptr device = device_memory(BYTES);
    void *on_device = (void *)(uintptr_t)device;
    unsigned char *host = host_pattern(2 * BYTES, 9);
    __typeof__(&cudaGetLastError) get[2];
    for (unsigned i = 0; i < 2; i++) {
        __typeof__(&cudaMemcpy) copy = (__typeof__(copy))dlsym(libraries[i], "cudaMemcpy");
        get[i] = (__typeof__(get[i]))dlsym(libraries[i], "cudaGetLastError");
        fill_pattern(host, BYTES, 250 + i);
        int there = copy(on_device, host, BYTES, cudaMemcpyHostToDevice);
        memset(host, 0, BYTES);
        int back = copy(host, on_device, BYTES, cudaMemcpyDeviceToHost);
        report(i ? "second" : "first", "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, BYTES, 250 + i));
        if (i)
            report("error of the second", "ret=%d", copy(on_device, host, 2 * BYTES, cudaMemcpyHostToDevice));
    }
    report("last errors", "first=%d second=%d differ=%d", get[0](), get[1](), get[0] != get[1]);
    host_free(host, 2 * BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

const struct contract_case misuse_cases[] = {
    {"out_of_range", out_of_range}, {"straddling", straddling}, {"straddling_async", straddling_async},
    {"stale", stale}, {"zero_bytes", zero_bytes},
    {"null_pointers", null_pointers}, {"wrong_sides", wrong_sides}, {"no_context", no_context},
    {"forked_child", forked_child}, {"last_error", last_error}, {"two_runtimes", two_runtimes}, {0}};
