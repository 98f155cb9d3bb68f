/* Calls every copy function that CUDA 12 and 13 export, once a round, by the prototypes of cuda.h and cuda_runtime_api.h.
 * Built twice: with -DLIBRARY as libevery.so, whose functions do nothing, and as the program that calls them. Says "ready
 * PID", waits for SIGUSR1, and ends with an account of calls and bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t CUdeviceptr;
typedef const void *handle;

/* name, twin's suffix, bytes, prototype, arguments */
#define DRIVER(X)                                                                                                              \
    X(cuMemcpy, _ptds, 1001, (CUdeviceptr, CUdeviceptr, size_t), (device, host, 1001))                                         \
    X(cuMemcpyAsync, _ptsz, 1002, (CUdeviceptr, CUdeviceptr, size_t, handle), (device, host, 1002, 0))                         \
    X(cuMemcpyHtoD_v2, _ptds, 1003, (CUdeviceptr, const void *, size_t), (device, memory, 1003))                               \
    X(cuMemcpyDtoH_v2, _ptds, 1004, (void *, CUdeviceptr, size_t), (memory, device, 1004))                                     \
    X(cuMemcpyHtoDAsync_v2, _ptsz, 1005, (CUdeviceptr, const void *, size_t, handle), (device, memory, 1005, 0))               \
    X(cuMemcpyDtoHAsync_v2, _ptsz, 1006, (void *, CUdeviceptr, size_t, handle), (memory, device, 1006, 0))                     \
    X(cuMemcpyDtoD_v2, _ptds, 1007, (CUdeviceptr, CUdeviceptr, size_t), (device, device, 1007))                                \
    X(cuMemcpyDtoDAsync_v2, _ptsz, 1008, (CUdeviceptr, CUdeviceptr, size_t, handle), (device, device, 1008, 0))                \
    X(cuMemcpyPeer, _ptds, 1009, (CUdeviceptr, handle, CUdeviceptr, handle, size_t), (device, some, device, some, 1009))       \
    X(cuMemcpyPeerAsync, _ptsz, 1010, (CUdeviceptr, handle, CUdeviceptr, handle, size_t, handle),                              \
      (device, some, device, some, 1010, 0))                                                                                   \
    X(cuMemcpyAtoA_v2, _ptds, 1011, (handle, size_t, handle, size_t, size_t), (some, 7, some, 9, 1011))                        \
    X(cuMemcpyAtoD_v2, _ptds, 1012, (CUdeviceptr, handle, size_t, size_t), (device, some, 7, 1012))                            \
    X(cuMemcpyDtoA_v2, _ptds, 1013, (handle, size_t, CUdeviceptr, size_t), (some, 7, device, 1013))                            \
    X(cuMemcpyAtoH_v2, _ptds, 1014, (void *, handle, size_t, size_t), (memory, some, 7, 1014))                                 \
    X(cuMemcpyHtoA_v2, _ptds, 1015, (handle, size_t, const void *, size_t), (some, 7, memory, 1015))                           \
    X(cuMemcpyAtoHAsync_v2, _ptsz, 1016, (void *, handle, size_t, size_t, handle), (memory, some, 7, 1016, 0))                 \
    X(cuMemcpyHtoAAsync_v2, _ptsz, 1017, (handle, size_t, const void *, size_t, handle), (some, 7, memory, 1017, 0))           \
    X(cuMemcpy2D_v2, _ptds, 70 * 3, (const void *), (&two))                                                                    \
    X(cuMemcpy2DUnaligned_v2, _ptds, 70 * 3, (const void *), (&two))                                                           \
    X(cuMemcpy2DAsync_v2, _ptsz, 70 * 3, (const void *, handle), (&two, 0))                                                    \
    X(cuMemcpy3D_v2, _ptds, 70 * 3 * 2, (const void *), (&three))                                                              \
    X(cuMemcpy3DAsync_v2, _ptsz, 70 * 3 * 2, (const void *, handle), (&three, 0))                                              \
    X(cuMemcpy3DPeer, _ptds, 70 * 3 * 2, (const void *), (&three))                                                             \
    X(cuMemcpy3DPeerAsync, _ptsz, 70 * 3 * 2, (const void *, handle), (&three, 0))                                             \
    X(cuMemcpyBatchAsync, _ptsz, 6000, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, size_t *,    \
      handle), (dsts, srcs, sizes, 3, some, sizes, 1, sizes, 0))                                                               \
    X(cuMemcpyBatchAsync_v2, _ptsz, 6000, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, handle),  \
      (dsts, srcs, sizes, 3, some, sizes, 1, 0))                                                                               \
    X(cuMemcpy3DBatchAsync, _ptsz, 2 * 70 * 3 * 2, (size_t, void *, size_t *, unsigned long long, handle),                     \
      (2, operations, sizes, 0, 0))                                                                                            \
    X(cuMemcpy3DBatchAsync_v2, _ptsz, 2 * 70 * 3 * 2, (size_t, void *, unsigned long long, handle), (2, operations, 0, 0))     \
    X(cuMemcpyWithAttributesAsync, _ptsz, 1018, (CUdeviceptr, CUdeviceptr, size_t, void *, handle), (device, host, 1018, some, 0)) \
    X(cuMemcpy3DWithAttributesAsync, _ptsz, 70 * 3 * 2, (void *, unsigned long long, handle), (operations, 0, 0))
#define RUNTIME(X)                                                                                                             \
    X(cudaMemcpy, _ptds, 2001, (void *, const void *, size_t, int), (at_device, memory, 2001, 1))                              \
    X(cudaMemcpyAsync, _ptsz, 2002, (void *, const void *, size_t, int, handle), (memory, at_device, 2002, 2, 0))              \
    X(cudaMemcpy2D, _ptds, 70 * 3, (void *, size_t, const void *, size_t, size_t, size_t, int),                                \
      (at_device, 512, memory, 128, 70, 3, 1))                                                                                 \
    X(cudaMemcpy2DAsync, _ptsz, 70 * 3, (void *, size_t, const void *, size_t, size_t, size_t, int, handle),                   \
      (memory, 128, at_device, 512, 70, 3, 2, 0))                                                                              \
    X(cudaMemcpy3D, _ptds, 70 * 3 * 2, (const void *), (&parameters))                                                          \
    X(cudaMemcpy3DAsync, _ptsz, 70 * 3 * 2, (const void *, handle), (&parameters, 0))                                          \
    X(cudaMemcpy3DPeer, _ptds, 70 * 3 * 2, (const void *), (&peer))                                                            \
    X(cudaMemcpy3DPeerAsync, _ptsz, 70 * 3 * 2, (const void *, handle), (&peer, 0))                                            \
    X(cudaMemcpyToSymbol, _ptds, 2003, (const void *, const void *, size_t, size_t, int), (some, memory, 2003, 7, 1))          \
    X(cudaMemcpyToSymbolAsync, _ptsz, 2004, (const void *, const void *, size_t, size_t, int, handle),                         \
      (some, memory, 2004, 7, 4, 0))                                                                                           \
    X(cudaMemcpyFromSymbol, _ptds, 2005, (void *, const void *, size_t, size_t, int), (memory, some, 2005, 7, 2))              \
    X(cudaMemcpyFromSymbolAsync, _ptsz, 2006, (void *, const void *, size_t, size_t, int, handle),                             \
      (memory, some, 2006, 7, 2, 0))                                                                                           \
    X(cudaMemcpyToArray, _ptds, 2007, (handle, size_t, size_t, const void *, size_t, int), (some, 1, 2, memory, 2007, 1))      \
    X(cudaMemcpyToArrayAsync, _ptsz, 2008, (handle, size_t, size_t, const void *, size_t, int, handle),                        \
      (some, 1, 2, memory, 2008, 1, 0))                                                                                        \
    X(cudaMemcpyFromArray, _ptds, 2009, (void *, const void *, size_t, size_t, size_t, int), (memory, some, 1, 2, 2009, 2))    \
    X(cudaMemcpyFromArrayAsync, _ptsz, 2010, (void *, const void *, size_t, size_t, size_t, int, handle),                      \
      (memory, some, 1, 2, 2010, 2, 0))                                                                                        \
    X(cudaMemcpyArrayToArray, _ptds, 2011, (handle, size_t, size_t, const void *, size_t, size_t, size_t, int),                \
      (some, 1, 2, some, 3, 4, 2011, 3))                                                                                       \
    X(cudaMemcpy2DToArray, _ptds, 70 * 3, (handle, size_t, size_t, const void *, size_t, size_t, size_t, int),                 \
      (some, 1, 2, memory, 128, 70, 3, 1))                                                                                     \
    X(cudaMemcpy2DToArrayAsync, _ptsz, 70 * 3, (handle, size_t, size_t, const void *, size_t, size_t, size_t, int, handle),    \
      (some, 1, 2, memory, 128, 70, 3, 1, 0))                                                                                  \
    X(cudaMemcpy2DFromArray, _ptds, 70 * 3, (void *, size_t, const void *, size_t, size_t, size_t, size_t, int),               \
      (memory, 128, some, 1, 2, 70, 3, 2))                                                                                     \
    X(cudaMemcpy2DFromArrayAsync, _ptsz, 70 * 3, (void *, size_t, const void *, size_t, size_t, size_t, size_t, int, handle),  \
      (memory, 128, some, 1, 2, 70, 3, 2, 0))                                                                                  \
    X(cudaMemcpy2DArrayToArray, _ptds, 70 * 3, (handle, size_t, size_t, const void *, size_t, size_t, size_t, size_t, int),    \
      (some, 1, 2, some, 3, 4, 70, 3, 3))                                                                                      \
    X(cudaMemcpyBatchAsync, _ptsz, 6000, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, void *, size_t *, size_t, handle),   \
      (dsts, srcs, sizes, 3, some, sizes, 1, 0))                                                                               \
    X(cudaMemcpy3DBatchAsync, _ptsz, 2 * 70 * 3 * 2, (size_t, void *, unsigned long long, handle), (2, operations, 0, 0))      \
    X(cudaMemcpyWithAttributesAsync, _ptsz, 2012, (void *, const void *, size_t, void *, handle),                              \
      (at_device, memory, 2012, some, 0))                                                                                      \
    X(cudaMemcpy3DWithAttributesAsync, _ptsz, 70 * 3 * 2, (void *, unsigned long long, handle), (operations, 0, 0))
/* These have no twin. */
#define ALONE(X)                                                                                                               \
    X(cudaMemcpyPeer, , 2013, (void *, int, const void *, int, size_t), (at_device, 0, at_device, 1, 2013))                    \
    X(cudaMemcpyPeerAsync, , 2014, (void *, int, const void *, int, size_t, handle), (at_device, 0, at_device, 1, 2014, 0))

#ifdef LIBRARY

#define ONE(name) __attribute__((visibility("default"))) int name(void) { return 0; }
#define BOTH(name, twin, bytes, prototype, arguments) ONE(name) ONE(name##twin)
#define SINGLE(name, twin, bytes, prototype, arguments) ONE(name)
DRIVER(BOTH)
RUNTIME(BOTH)
ALONE(SINGLE)

#else

enum { ROUNDS = 3 };

/* CUDA_MEMCPY3D and CUDA_MEMCPY3D_PEER: context is reserved in the first. */
struct copy_3d {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    unsigned srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    handle srcArray, srcContext;
    size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    unsigned dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    handle dstArray, dstContext;
    size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
};

struct copy_2d {
    size_t srcXInBytes, srcY;
    unsigned srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    handle srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    unsigned dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    handle dstArray;
    size_t dstPitch, WidthInBytes, Height;
};

struct pitched { void *ptr; size_t pitch, xsize, ysize; };
struct extent { size_t width, height, depth; };

/* cudaMemcpy3DParms */
struct parameters {
    handle srcArray;
    struct extent srcPos;
    struct pitched srcPtr;
    handle dstArray;
    struct extent dstPos;
    struct pitched dstPtr;
    struct extent extent;
    int kind;
};

/* cudaMemcpy3DPeerParms */
struct peer {
    handle srcArray;
    struct extent srcPos;
    struct pitched srcPtr;
    int srcDevice;
    handle dstArray;
    struct extent dstPos;
    struct pitched dstPtr;
    int dstDevice;
    struct extent extent;
};

/* CUDA_MEMCPY3D_BATCH_OP, with operands that are pointers */
struct operand { unsigned type; CUdeviceptr ptr; size_t rowLength, layerHeight; int location[2]; };
struct operation { struct operand src, dst; struct extent extent; unsigned srcAccessOrder, flags; };

static int failures;

static void *find(void *library, const char *name)
{
    void *at = dlsym(library, name);
    if (!at) {
        fprintf(stderr, "victim-every: no %s\n", name);
        exit(1);
    }
    return at;
}

int main(void)
{
    void *library = dlopen("libevery.so", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "victim-every: %s\n", dlerror());
        return 1;
    }
    char *memory = malloc(1 << 16), *some = malloc(64);
    memset(memory, 1, 1 << 16);
    /* Device memory is where the processor cannot reach. */
    void *at_device = mmap(NULL, 64 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CUdeviceptr host = (uintptr_t)memory, device = (uintptr_t)at_device;
    CUdeviceptr dsts[] = {device, device, device}, srcs[] = {host, host, host};
    size_t sizes[] = {1000, 2000, 3000};
    struct copy_2d two = {.srcMemoryType = 1, .srcHost = memory, .dstMemoryType = 2, .dstDevice = device, .WidthInBytes = 70,
                          .Height = 3};
    struct copy_3d three = {.srcMemoryType = 2, .srcDevice = device, .dstMemoryType = 1, .dstHost = memory, .WidthInBytes = 70,
                            .Height = 3, .Depth = 2};
    struct parameters parameters = {.srcPtr = {memory, 128, 70, 3}, .dstPtr = {at_device, 128, 70, 3}, .extent = {70, 3, 2},
                                    .kind = 1};
    struct peer peer = {.srcPtr = {at_device, 128, 70, 3}, .dstPtr = {at_device, 128, 70, 3}, .dstDevice = 1,
                        .extent = {70, 3, 2}};
    struct operation operations[2] = {{.src = {.type = 1, .ptr = host}, .dst = {.type = 1, .ptr = device}, .extent = {70, 3, 2}},
                                      {.src = {.type = 1, .ptr = host}, .dst = {.type = 1, .ptr = device}, .extent = {70, 3, 2}}};
    sigset_t go;
    int signal;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go, NULL);
    printf("ready %d\n", getpid());
    fflush(stdout);
    sigwait(&go, &signal);
    for (int round = 0; round < ROUNDS; round++) {
#define CALL(name, prototype, arguments) failures += ((int (*) prototype)find(library, name)) arguments;
#define BOTH(name, twin, bytes, prototype, arguments) CALL(#name, prototype, arguments) CALL(#name #twin, prototype, arguments)
#define SINGLE(name, twin, bytes, prototype, arguments) CALL(#name, prototype, arguments)
        DRIVER(BOTH)
        RUNTIME(BOTH)
        ALONE(SINGLE)
    }
    printf("{\"pid\":%d,\"failures\":%d,\"functions\":{", getpid(), failures);
    const char *comma = "";
#define ROW(name, moved)                                                                                                       \
    printf("%s\"%s\":{\"calls\":%d,\"errors\":0,\"bytes\":%d}", comma, name, ROUNDS, ROUNDS * (moved));                        \
    comma = ",";
#undef BOTH
#undef SINGLE
#define BOTH(name, twin, bytes, prototype, arguments) ROW(#name, bytes) ROW(#name #twin, bytes)
#define SINGLE(name, twin, bytes, prototype, arguments) ROW(#name, bytes)
    DRIVER(BOTH)
    RUNTIME(BOTH)
    ALONE(SINGLE)
    printf("}}\n");
    fflush(stdout);
    _exit(0);
}

#endif
