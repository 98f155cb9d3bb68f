/* Copies through libcudart. */
#include "victim.h"

#define FUNCTIONS(X)                                                                                                   \
    X(cudaMemcpy) X(cudaMemcpy_ptds) X(cudaMemcpyAsync) X(cudaMemcpyAsync_ptsz) X(cudaMemcpy2D) X(cudaMemcpy2D_ptds)   \
    X(cudaMemcpy2DAsync) X(cudaMemcpy2DAsync_ptsz)
#define NUMBER(function) AT_##function,
#define COUNTER(function) {.name = #function},
enum { FUNCTIONS(NUMBER) COUNT };
struct counter api_counters[] = {FUNCTIONS(COUNTER)};
const int api_counter_count = COUNT;

#define COUNTED(name, bytes, ...) counted(&api_counters[AT_##name], bytes, name(__VA_ARGS__))

int api_load(void)
{
    return cudaSetDevice(0);
}

int api_start_thread(void)
{
    return cudaSetDevice(0);
}

int api_device_alloc(CUdeviceptr *address, size_t bytes)
{
    return cudaMalloc((void **)address, bytes);
}

int api_pinned_alloc(void **address, size_t bytes)
{
    return cudaHostAlloc(address, bytes, 0);
}

int api_stream_create(CUstream *stream)
{
    return cudaStreamCreateWithFlags(stream, CU_STREAM_NON_BLOCKING);
}

int api_stream_sync(CUstream stream)
{
    return options.per_thread ? cudaStreamSynchronize_ptsz(stream) : cudaStreamSynchronize(stream);
}

static int kind_of(enum direction direction)
{
    return options.default_kind ? cudaMemcpyDefault : direction == HTOD ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
}

int api_copy(enum direction direction, void *host, CUdeviceptr device, size_t bytes, CUstream stream)
{
    void *on_device = (void *)(uintptr_t)device;
    void *dst = direction == HTOD ? on_device : host;
    const void *src = direction == HTOD ? host : on_device;
    int kind = kind_of(direction);
    if (options.async)
        return options.per_thread ? COUNTED(cudaMemcpyAsync_ptsz, bytes, dst, src, bytes, kind, stream)
                                  : COUNTED(cudaMemcpyAsync, bytes, dst, src, bytes, kind, stream);
    return options.per_thread ? COUNTED(cudaMemcpy_ptds, bytes, dst, src, bytes, kind)
                              : COUNTED(cudaMemcpy, bytes, dst, src, bytes, kind);
}

int api_copy_2d(enum direction direction, void *host, CUdeviceptr device, const struct shape *s, CUstream stream)
{
    void *on_device = (void *)(uintptr_t)device;
    void *dst = direction == HTOD ? on_device : host;
    const void *src = direction == HTOD ? host : on_device;
    size_t dpitch = direction == HTOD ? s->device_pitch : s->host_pitch;
    size_t spitch = direction == HTOD ? s->host_pitch : s->device_pitch;
    size_t bytes = s->width * s->height;
    int kind = kind_of(direction);
    if (options.async)
        return options.per_thread ? COUNTED(cudaMemcpy2DAsync_ptsz, bytes, dst, dpitch, src, spitch, s->width,
                                            s->height, kind, stream)
                                  : COUNTED(cudaMemcpy2DAsync, bytes, dst, dpitch, src, spitch, s->width, s->height,
                                            kind, stream);
    return options.per_thread
               ? COUNTED(cudaMemcpy2D_ptds, bytes, dst, dpitch, src, spitch, s->width, s->height, kind)
               : COUNTED(cudaMemcpy2D, bytes, dst, dpitch, src, spitch, s->width, s->height, kind);
}

int api_check_last_error(int code)
{
    int peeked = cudaPeekAtLastError();
    int last = cudaGetLastError();
    return peeked == code && last == code && cudaGetLastError() == cudaSuccess ? 0 : 1;
}
