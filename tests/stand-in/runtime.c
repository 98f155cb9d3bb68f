/* The stand-in's libcudart: a thin layer that finds libcuda when it is first needed and calls its exported functions,
 * as the real one does (which function calls which: libcudart 13 on driver 580.159.04). */
#define _GNU_SOURCE
#include "cuda_stand_in.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))
enum { MAX_DEVICES = 8 };

/* name in the driver, as cuGetProcAddress takes it */
#define PLAIN_FUNCTIONS(X)                                                                                             \
    X(cuInit, cuInit) X(cuDriverGetVersion, cuDriverGetVersion) X(cuGetErrorName, cuGetErrorName)                      \
    X(cuGetErrorString, cuGetErrorString) X(cuDeviceGetCount, cuDeviceGetCount)                                        \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute) X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                \
    X(cuCtxGetCurrent, cuCtxGetCurrent) X(cuCtxSetCurrent, cuCtxSetCurrent) X(cuCtxGetDevice, cuCtxGetDevice)          \
    X(cuCtxSynchronize, cuCtxSynchronize) X(cuMemAlloc_v2, cuMemAlloc) X(cuMemFree_v2, cuMemFree)                      \
    X(cuMemAllocHost_v2, cuMemAllocHost) X(cuMemHostAlloc, cuMemHostAlloc) X(cuMemFreeHost, cuMemFreeHost)             \
    X(cuMemHostRegister_v2, cuMemHostRegister) X(cuMemHostUnregister, cuMemHostUnregister)                             \
    X(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer) X(cuMemAllocManaged, cuMemAllocManaged)                 \
    X(cuMemAllocAsync, cuMemAllocAsync) X(cuMemFreeAsync, cuMemFreeAsync) X(cuMemGetInfo_v2, cuMemGetInfo)             \
    X(cuPointerGetAttributes, cuPointerGetAttributes) X(cuStreamCreateWithPriority, cuStreamCreateWithPriority)        \
    X(cuStreamDestroy_v2, cuStreamDestroy) X(cuEventCreate, cuEventCreate) X(cuEventDestroy_v2, cuEventDestroy)        \
    X(cuEventQuery, cuEventQuery) X(cuEventSynchronize, cuEventSynchronize)                                            \
    X(cuEventElapsedTime, cuEventElapsedTime)                                                                          \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode)                                            \
    X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags) X(cuGraphDestroy, cuGraphDestroy)                      \
    X(cuGraphExecDestroy, cuGraphExecDestroy)

/* Functions with a twin for the per-thread default stream. */
#define STREAM_FUNCTIONS(X)                                                                                            \
    X(cuMemcpyHtoD_v2, cuMemcpyHtoD) X(cuMemcpyDtoH_v2, cuMemcpyDtoH) X(cuMemcpyDtoD_v2, cuMemcpyDtoD)                 \
    X(cuMemcpy, cuMemcpy) X(cuMemcpyPeer, cuMemcpyPeer) X(cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync)                     \
    X(cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync) X(cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync)                              \
    X(cuMemcpyAsync, cuMemcpyAsync) X(cuMemcpyPeerAsync, cuMemcpyPeerAsync)                                            \
    X(cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned) X(cuMemcpy2DAsync_v2, cuMemcpy2DAsync)                              \
    X(cuMemcpy3D_v2, cuMemcpy3D) X(cuMemcpy3DAsync_v2, cuMemcpy3DAsync) X(cuMemsetD8_v2, cuMemsetD8)                   \
    X(cuMemsetD8Async, cuMemsetD8Async) X(cuStreamSynchronize, cuStreamSynchronize) X(cuStreamQuery, cuStreamQuery)    \
    X(cuStreamWaitEvent, cuStreamWaitEvent) X(cuLaunchHostFunc, cuLaunchHostFunc) X(cuEventRecord, cuEventRecord)      \
    X(cuStreamBeginCapture_v2, cuStreamBeginCapture) X(cuStreamEndCapture, cuStreamEndCapture)                         \
    X(cuStreamIsCapturing, cuStreamIsCapturing) X(cuGraphLaunch, cuGraphLaunch)

static struct {
#define FIELD(name, base) __typeof__(&name) name;
    PLAIN_FUNCTIONS(FIELD)
#define FIELDS(name, base) __typeof__(&name) name[2];
    STREAM_FUNCTIONS(FIELDS)
} driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static cudaError_t driver_state;
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primary[MAX_DEVICES];
static __thread int chosen_device;
static __thread cudaError_t last_error;

static void load_driver(void)
{
    driver_state = cudaErrorInsufficientDriver;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return;
    __typeof__(&cuGetProcAddress_v2) find = (__typeof__(find))dlsym(library, "cuGetProcAddress_v2");
    if (!find)
        return;
    enum { VERSION = 13000 };
    bool complete = true;
#define FIND(name, base) complete &= find(#base, (void **)&driver.name, VERSION, 0, NULL) == 0 && driver.name;
    PLAIN_FUNCTIONS(FIND)
#define FIND_BOTH(name, base)                                                                                          \
    complete &= find(#base, (void **)&driver.name[0], VERSION, CU_GET_PROC_ADDRESS_LEGACY_STREAM, NULL) == 0 &&        \
                driver.name[0];                                                                                        \
    complete &= find(#base, (void **)&driver.name[1], VERSION, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM,          \
                     NULL) == 0 &&                                                                                     \
                driver.name[1];
    STREAM_FUNCTIONS(FIND_BOTH)
    if (complete)
        driver_state = driver.cuInit(0);
}

static cudaError_t keep(cudaError_t error)
{
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

/* The driver, and a context on this thread: the primary one of the chosen device if the program has set none. */
static cudaError_t enter(void)
{
    pthread_once(&once, load_driver);
    if (driver_state != cudaSuccess)
        return driver_state;
    CUcontext context = NULL;
    CUresult result = driver.cuCtxGetCurrent(&context);
    if (result != CUDA_SUCCESS || context)
        return result;
    pthread_mutex_lock(&primary_lock);
    if (!primary[chosen_device])
        result = driver.cuDevicePrimaryCtxRetain(&primary[chosen_device], chosen_device);
    context = primary[chosen_device];
    pthread_mutex_unlock(&primary_lock);
    return result == CUDA_SUCCESS ? driver.cuCtxSetCurrent(context) : result;
}

/* The body of most functions: enter, call, keep the error. */
#define CALL(expression)                     \
    do {                                     \
        cudaError_t entering = enter();      \
        if (entering == cudaSuccess)         \
            entering = (expression);         \
        return keep(entering);               \
    } while (0)

#define DEVICE(address) ((CUdeviceptr)(uintptr_t)(address))

EXPORT cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
    const char *name = NULL;
    if (enter() == cudaErrorInsufficientDriver)
        return "cudaErrorInsufficientDriver";
    driver.cuGetErrorName(error, &name);
    return name ? name : "unrecognized error code";
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
{
    const char *text = NULL;
    if (enter() == cudaErrorInsufficientDriver)
        return "CUDA driver version is insufficient for CUDA runtime version";
    driver.cuGetErrorString(error, &text);
    return text ? text : "unrecognized error code";
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 0;
    if (enter() == cudaErrorInsufficientDriver)
        return cudaSuccess;
    return keep(driver.cuDriverGetVersion(version));
}

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    pthread_once(&once, load_driver);
    return keep(driver_state != cudaSuccess ? driver_state : driver.cuDeviceGetCount(count));
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
    *device = chosen_device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device)
{
    int count = 0;
    cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess)
        return result;
    if (device < 0 || device >= count || device >= MAX_DEVICES)
        return keep(cudaErrorInvalidDevice);
    chosen_device = device;
    driver.cuCtxSetCurrent(NULL);
    return keep(enter());
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    CALL(driver.cuDeviceGetAttribute(value, attribute, device));
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    CALL(driver.cuCtxSynchronize());
}

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes)
{
    CALL(driver.cuMemAlloc_v2((CUdeviceptr *)address, bytes));
}

EXPORT cudaError_t cudaFree(void *address)
{
    CALL(driver.cuMemFree_v2(DEVICE(address)));
}

EXPORT cudaError_t cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream)
{
    CALL(driver.cuMemAllocAsync((CUdeviceptr *)address, bytes, stream));
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
    CALL(driver.cuMemFreeAsync(DEVICE(address), stream));
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t bytes)
{
    CALL(driver.cuMemAllocHost_v2(address, bytes));
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned flags)
{
    CALL(driver.cuMemHostAlloc(address, bytes, flags));
}

EXPORT cudaError_t cudaFreeHost(void *address)
{
    CALL(address ? driver.cuMemFreeHost(address) : cudaSuccess);
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    CALL(driver.cuMemHostRegister_v2(address, bytes, flags));
}

EXPORT cudaError_t cudaHostUnregister(void *address)
{
    CALL(driver.cuMemHostUnregister(address));
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags)
{
    CALL(driver.cuMemHostGetDevicePointer_v2((CUdeviceptr *)device_address, address, flags));
}

EXPORT cudaError_t cudaMallocManaged(void **address, size_t bytes, unsigned flags)
{
    CALL(driver.cuMemAllocManaged((CUdeviceptr *)address, bytes, flags));
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    CALL(driver.cuMemGetInfo_v2(free_bytes, total_bytes));
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address)
{
    unsigned type = 0, managed = 0;
    int ordinal = 0;
    CUdeviceptr device = 0, host = 0;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                    CU_POINTER_ATTRIBUTE_HOST_POINTER};
    void *values[] = {&type, &managed, &ordinal, &device, &host};
    cudaError_t result = enter();
    if (result == cudaSuccess)
        result = driver.cuPointerGetAttributes(5, wanted, values, DEVICE(address));
    if (result == cudaSuccess)
        *attributes = (struct cudaPointerAttributes){.type = managed ? 3 : (int)type,
                                                     .device = ordinal,
                                                     .devicePointer = (void *)(uintptr_t)device,
                                                     .hostPointer = (void *)(uintptr_t)host};
    return keep(result);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    CALL(driver.cuStreamCreateWithPriority(stream, flags, priority));
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    CALL(driver.cuStreamCreateWithPriority(stream, flags, 0));
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    CALL(driver.cuStreamCreateWithPriority(stream, 0, 0));
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    CALL(driver.cuStreamDestroy_v2(stream));
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    CALL(driver.cuEventCreate(event, flags));
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    CALL(driver.cuEventCreate(event, 0));
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    CALL(driver.cuEventDestroy_v2(event));
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event)
{
    CALL(driver.cuEventQuery(event));
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    CALL(driver.cuEventSynchronize(event));
}

EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    CALL(driver.cuEventElapsedTime(milliseconds, start, end));
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CALL(driver.cuThreadExchangeStreamCaptureMode(mode));
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    CALL(driver.cuGraphInstantiateWithFlags(executable, graph, flags));
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    CALL(driver.cuGraphDestroy(graph));
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    CALL(driver.cuGraphExecDestroy(executable));
}

/* Both flavours of a function that ends in a stream argument; `twin` picks the driver's twin. */
#define TWINS(name, parameters, expression)                                                                            \
    EXPORT cudaError_t name parameters                                                                                 \
    {                                                                                                                  \
        enum { twin = 0 };                                                                                             \
        CALL(expression);                                                                                              \
    }                                                                                                                  \
    EXPORT cudaError_t name##_ptsz parameters                                                                          \
    {                                                                                                                  \
        enum { twin = 1 };                                                                                             \
        CALL(expression);                                                                                              \
    }

TWINS(cudaStreamSynchronize, (cudaStream_t stream), driver.cuStreamSynchronize[twin](stream))
TWINS(cudaStreamQuery, (cudaStream_t stream), driver.cuStreamQuery[twin](stream))
TWINS(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned flags),
      driver.cuStreamWaitEvent[twin](stream, event, flags))
TWINS(cudaLaunchHostFunc, (cudaStream_t stream, CUhostFn function, void *user_data),
      driver.cuLaunchHostFunc[twin](stream, function, user_data))
TWINS(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), driver.cuEventRecord[twin](event, stream))
TWINS(cudaStreamBeginCapture, (cudaStream_t stream, CUstreamCaptureMode mode),
      driver.cuStreamBeginCapture_v2[twin](stream, mode))
TWINS(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t *graph), driver.cuStreamEndCapture[twin](stream, graph))
TWINS(cudaStreamIsCapturing, (cudaStream_t stream, CUstreamCaptureStatus *status),
      driver.cuStreamIsCapturing[twin](stream, status))
TWINS(cudaGraphLaunch, (cudaGraphExec_t executable, cudaStream_t stream), driver.cuGraphLaunch[twin](executable, stream))
TWINS(cudaMemsetAsync, (void *address, int value, size_t bytes, cudaStream_t stream),
      driver.cuMemsetD8Async[twin](DEVICE(address), (unsigned char)value, bytes, stream))

EXPORT cudaError_t cudaMemset(void *address, int value, size_t bytes)
{
    CALL(driver.cuMemsetD8_v2[0](DEVICE(address), (unsigned char)value, bytes));
}

EXPORT cudaError_t cudaMemset_ptds(void *address, int value, size_t bytes)
{
    CALL(driver.cuMemsetD8_v2[1](DEVICE(address), (unsigned char)value, bytes));
}

/* An exported copy function starts like libcudart's: push rbp; mov rbp, rsp; push r15; … and goes on in body_NAME with
 * its arguments (on the stack too) untouched. */
#define ENTRY(name)                                                                                                    \
    __asm__(".pushsection .text\n.p2align 4\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"               \
            ".cfi_startproc\n"                                                                                         \
            "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset %rbp, -16\n"                                               \
            "mov %rsp, %rbp\n.cfi_def_cfa_register %rbp\n"                                                             \
            "push %r15\npush %r14\npush %rbx\n"                                                                        \
            "sub $40, %rsp\n"                                                                                          \
            "lea -24(%rbp), %rsp\n"                                                                                    \
            "pop %rbx\npop %r14\npop %r15\npop %rbp\n.cfi_def_cfa %rsp, 8\n"                                           \
            "jmp body_" #name "\n"                                                                                     \
            ".cfi_endproc\n.size " #name ", . - " #name "\n.popsection\n")

#define COPY(name, twin_suffix, parameters, function, arguments)                                                       \
    __attribute__((visibility("hidden"), used)) cudaError_t body_##name parameters                                     \
    {                                                                                                                  \
        CALL(function(0, arguments));                                                                                  \
    }                                                                                                                  \
    __attribute__((visibility("hidden"), used)) cudaError_t body_##name##twin_suffix parameters                        \
    {                                                                                                                  \
        CALL(function(1, arguments));                                                                                  \
    }                                                                                                                  \
    ENTRY(name);                                                                                                       \
    ENTRY(name##twin_suffix);
#define ARGS(...) __VA_ARGS__

static cudaError_t copy(int twin, void *dst, const void *src, size_t bytes, int kind)
{
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return driver.cuMemcpyHtoD_v2[twin](DEVICE(dst), src, bytes);
    case cudaMemcpyDeviceToHost:
        return driver.cuMemcpyDtoH_v2[twin](dst, DEVICE(src), bytes);
    case cudaMemcpyDeviceToDevice:
        return driver.cuMemcpyDtoD_v2[twin](DEVICE(dst), DEVICE(src), bytes);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return driver.cuMemcpy[twin](DEVICE(dst), DEVICE(src), bytes);
    default:
        return cudaErrorInvalidMemcpyDirection;
    }
}

static cudaError_t copy_async(int twin, void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream)
{
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return driver.cuMemcpyHtoDAsync_v2[twin](DEVICE(dst), src, bytes, stream);
    case cudaMemcpyDeviceToHost:
        return driver.cuMemcpyDtoHAsync_v2[twin](dst, DEVICE(src), bytes, stream);
    case cudaMemcpyDeviceToDevice:
        return driver.cuMemcpyDtoDAsync_v2[twin](DEVICE(dst), DEVICE(src), bytes, stream);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return driver.cuMemcpyAsync[twin](DEVICE(dst), DEVICE(src), bytes, stream);
    default:
        return cudaErrorInvalidMemcpyDirection;
    }
}

/* The driver's names for the two sides of a cudaMemcpyKind. */
static bool sides(int kind, CUmemorytype *dst, CUmemorytype *src)
{
    static const CUmemorytype by_kind[5][2] = {
        {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_HOST},     {CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST},
        {CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE},   {CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE},
        {CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_UNIFIED}};
    if (kind < 0 || kind > 4)
        return false;
    *dst = by_kind[kind][0];
    *src = by_kind[kind][1];
    return true;
}

static bool describe_2d(CUDA_MEMCPY2D *copy, void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                        size_t height, int kind)
{
    *copy = (CUDA_MEMCPY2D){.dstHost = dst, .dstDevice = DEVICE(dst), .dstPitch = dpitch, .srcHost = src,
                            .srcDevice = DEVICE(src), .srcPitch = spitch, .WidthInBytes = width, .Height = height};
    return sides(kind, &copy->dstMemoryType, &copy->srcMemoryType);
}

static cudaError_t copy_2d(int twin, void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                           size_t height, int kind)
{
    CUDA_MEMCPY2D copy;
    return describe_2d(&copy, dst, dpitch, src, spitch, width, height, kind)
               ? driver.cuMemcpy2DUnaligned_v2[twin](&copy)
               : cudaErrorInvalidMemcpyDirection;
}

static cudaError_t copy_2d_async(int twin, void *dst, size_t dpitch, const void *src, size_t spitch, size_t width,
                                 size_t height, int kind, cudaStream_t stream)
{
    CUDA_MEMCPY2D copy;
    return describe_2d(&copy, dst, dpitch, src, spitch, width, height, kind)
               ? driver.cuMemcpy2DAsync_v2[twin](&copy, stream)
               : cudaErrorInvalidMemcpyDirection;
}

static bool describe_3d(CUDA_MEMCPY3D *copy, const struct cudaMemcpy3DParms *p)
{
    *copy = (CUDA_MEMCPY3D){
        .srcXInBytes = p->srcPos.x, .srcY = p->srcPos.y, .srcZ = p->srcPos.z, .srcHost = p->srcPtr.ptr,
        .srcDevice = DEVICE(p->srcPtr.ptr), .srcPitch = p->srcPtr.pitch, .srcHeight = p->srcPtr.ysize,
        .dstXInBytes = p->dstPos.x, .dstY = p->dstPos.y, .dstZ = p->dstPos.z, .dstHost = p->dstPtr.ptr,
        .dstDevice = DEVICE(p->dstPtr.ptr), .dstPitch = p->dstPtr.pitch, .dstHeight = p->dstPtr.ysize,
        .WidthInBytes = p->extent.width, .Height = p->extent.height, .Depth = p->extent.depth};
    return !p->srcArray && !p->dstArray && sides(p->kind, &copy->dstMemoryType, &copy->srcMemoryType);
}

static cudaError_t copy_3d(int twin, const struct cudaMemcpy3DParms *parameters)
{
    CUDA_MEMCPY3D copy;
    return describe_3d(&copy, parameters) ? driver.cuMemcpy3D_v2[twin](&copy) : cudaErrorInvalidValue;
}

static cudaError_t copy_3d_async(int twin, const struct cudaMemcpy3DParms *parameters, cudaStream_t stream)
{
    CUDA_MEMCPY3D copy;
    return describe_3d(&copy, parameters) ? driver.cuMemcpy3DAsync_v2[twin](&copy, stream) : cudaErrorInvalidValue;
}

COPY(cudaMemcpy, _ptds, (void *dst, const void *src, size_t bytes, int kind), copy, ARGS(dst, src, bytes, kind))
COPY(cudaMemcpyAsync, _ptsz, (void *dst, const void *src, size_t bytes, int kind, cudaStream_t stream), copy_async,
     ARGS(dst, src, bytes, kind, stream))
COPY(cudaMemcpy2D, _ptds,
     (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind), copy_2d,
     ARGS(dst, dpitch, src, spitch, width, height, kind))
COPY(cudaMemcpy2DAsync, _ptsz,
     (void *dst, size_t dpitch, const void *src, size_t spitch, size_t width, size_t height, int kind,
      cudaStream_t stream),
     copy_2d_async, ARGS(dst, dpitch, src, spitch, width, height, kind, stream))
COPY(cudaMemcpy3D, _ptds, (const struct cudaMemcpy3DParms *parameters), copy_3d, parameters)
COPY(cudaMemcpy3DAsync, _ptsz, (const struct cudaMemcpy3DParms *parameters, cudaStream_t stream), copy_3d_async,
     ARGS(parameters, stream))

/* The primary context of a device, for the functions that name devices. */
static CUcontext context_of(int device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    pthread_mutex_lock(&primary_lock);
    if (!primary[device])
        driver.cuDevicePrimaryCtxRetain(&primary[device], device);
    CUcontext context = primary[device];
    pthread_mutex_unlock(&primary_lock);
    return context;
}

__attribute__((visibility("hidden"), used)) cudaError_t body_cudaMemcpyPeer(void *dst, int dst_device, const void *src,
                                                                            int src_device, size_t bytes)
{
    CALL(driver.cuMemcpyPeer[0](DEVICE(dst), context_of(dst_device), DEVICE(src), context_of(src_device), bytes));
}
ENTRY(cudaMemcpyPeer);

__attribute__((visibility("hidden"), used)) cudaError_t body_cudaMemcpyPeerAsync(void *dst, int dst_device,
                                                                                 const void *src, int src_device,
                                                                                 size_t bytes, cudaStream_t stream)
{
    CALL(driver.cuMemcpyPeerAsync[0](DEVICE(dst), context_of(dst_device), DEVICE(src), context_of(src_device), bytes,
                                     stream));
}
ENTRY(cudaMemcpyPeerAsync);
