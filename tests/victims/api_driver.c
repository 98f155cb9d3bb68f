/* Copies through libcuda: linked to it, or (-DLATE) as a program with a static runtime reaches it, through dlopen and
 * cuGetProcAddress. */
#define _GNU_SOURCE
#include "victim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#define COPIES(X)                                                                                                      \
    X(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 1) X(cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD", 2)                                   \
    X(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 1) X(cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH", 2)                                   \
    X(cuMemcpy, "cuMemcpy", 1) X(cuMemcpy_ptds, "cuMemcpy", 2)                                                         \
    X(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 1) X(cuMemcpyHtoDAsync_v2_ptsz, "cuMemcpyHtoDAsync", 2)               \
    X(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 1) X(cuMemcpyDtoHAsync_v2_ptsz, "cuMemcpyDtoHAsync", 2)               \
    X(cuMemcpyAsync, "cuMemcpyAsync", 1) X(cuMemcpyAsync_ptsz, "cuMemcpyAsync", 2)                                     \
    X(cuMemcpy2DUnaligned_v2, "cuMemcpy2DUnaligned", 1) X(cuMemcpy2DUnaligned_v2_ptds, "cuMemcpy2DUnaligned", 2)       \
    X(cuMemcpy2DAsync_v2, "cuMemcpy2DAsync", 1) X(cuMemcpy2DAsync_v2_ptsz, "cuMemcpy2DAsync", 2)
#define OTHERS(X)                                                                                                      \
    X(cuInit, "cuInit", 0) X(cuDeviceGet, "cuDeviceGet", 0)                                                            \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 0) X(cuCtxSetCurrent, "cuCtxSetCurrent", 0)                \
    X(cuMemAlloc_v2, "cuMemAlloc", 0) X(cuMemHostAlloc, "cuMemHostAlloc", 0) X(cuStreamCreate, "cuStreamCreate", 0)    \
    X(cuStreamSynchronize, "cuStreamSynchronize", 1) X(cuStreamSynchronize_ptsz, "cuStreamSynchronize", 2)

#define NUMBER(name, base, flags) AT_##name,
#define COUNTER(function, base, flags) {.name = #function},
enum { COPIES(NUMBER) COUNT };
struct counter api_counters[] = {COPIES(COUNTER)};
const int api_counter_count = COUNT;

#ifdef LATE
static struct {
#define FIELD(name, base, flags) __typeof__(&name) name;
    COPIES(FIELD) OTHERS(FIELD)
} late;
#define CALL(name, ...) late.name(__VA_ARGS__)

static void load(void)
{
    struct timespec wait = {(time_t)options.load_after,
                            (long)((options.load_after - (double)(time_t)options.load_after) * 1e9)};
    while (nanosleep(&wait, &wait))
        ;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        fail(EXIT_API, "dlopen: %s", dlerror());
    __typeof__(&cuGetProcAddress_v2) find = (__typeof__(find))dlsym(library, "cuGetProcAddress_v2");
#define FIND(name, base, flags)                                                                                        \
    if (find(base, (void **)&late.name, 12000, flags, NULL) != CUDA_SUCCESS || !late.name)                             \
        fail(EXIT_API, "cuGetProcAddress: no " base);
    COPIES(FIND)
    OTHERS(FIND)
}
#else
#define CALL(name, ...) name(__VA_ARGS__)

static void load(void) {}
#endif

#define COUNTED(name, bytes, ...) counted(&api_counters[AT_##name], bytes, CALL(name, __VA_ARGS__))
/* The twin for the per-thread default stream, if the options ask for it. */
#define EITHER(name, twin, bytes, ...)                                                                                 \
    (options.per_thread ? COUNTED(name##twin, bytes, __VA_ARGS__) : COUNTED(name, bytes, __VA_ARGS__))

static CUcontext context;

int api_load(void)
{
    load();
    CUdevice device;
    int result = CALL(cuInit, 0);
    if (!result)
        result = CALL(cuDeviceGet, &device, 0);
    if (!result)
        result = CALL(cuDevicePrimaryCtxRetain, &context, device);
    return result ? result : api_start_thread();
}

int api_start_thread(void)
{
    return CALL(cuCtxSetCurrent, context);
}

int api_device_alloc(CUdeviceptr *address, size_t bytes)
{
    return CALL(cuMemAlloc_v2, address, bytes);
}

int api_pinned_alloc(void **address, size_t bytes)
{
    return CALL(cuMemHostAlloc, address, bytes, 0);
}

int api_stream_create(CUstream *stream)
{
    return CALL(cuStreamCreate, stream, CU_STREAM_NON_BLOCKING);
}

int api_stream_sync(CUstream stream)
{
    return options.per_thread ? CALL(cuStreamSynchronize_ptsz, stream) : CALL(cuStreamSynchronize, stream);
}

int api_copy(enum direction direction, void *host, CUdeviceptr device, size_t bytes, CUstream stream)
{
    if (options.default_kind) {
        CUdeviceptr dst = direction == HTOD ? device : (uintptr_t)host;
        CUdeviceptr src = direction == HTOD ? (uintptr_t)host : device;
        return options.async ? EITHER(cuMemcpyAsync, _ptsz, bytes, dst, src, bytes, stream)
                             : EITHER(cuMemcpy, _ptds, bytes, dst, src, bytes);
    }
    if (direction == HTOD)
        return options.async ? EITHER(cuMemcpyHtoDAsync_v2, _ptsz, bytes, device, host, bytes, stream)
                             : EITHER(cuMemcpyHtoD_v2, _ptds, bytes, device, host, bytes);
    return options.async ? EITHER(cuMemcpyDtoHAsync_v2, _ptsz, bytes, host, device, bytes, stream)
                         : EITHER(cuMemcpyDtoH_v2, _ptds, bytes, host, device, bytes);
}

int api_copy_2d(enum direction direction, void *host, CUdeviceptr device, const struct shape *s, CUstream stream)
{
    CUDA_MEMCPY2D copy = {.WidthInBytes = s->width, .Height = s->height};
    if (direction == HTOD) {
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = host;
        copy.srcPitch = s->host_pitch;
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = device;
        copy.dstPitch = s->device_pitch;
    } else {
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = device;
        copy.srcPitch = s->device_pitch;
        copy.dstMemoryType = CU_MEMORYTYPE_HOST;
        copy.dstHost = host;
        copy.dstPitch = s->host_pitch;
    }
    size_t bytes = s->width * s->height;
    return options.async ? EITHER(cuMemcpy2DAsync_v2, _ptsz, bytes, &copy, stream)
                         : EITHER(cuMemcpy2DUnaligned_v2, _ptds, bytes, &copy);
}

int api_check_last_error(int code)
{
    (void)code;
    return 0;
}
