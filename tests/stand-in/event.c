/* Events, host functions, word writes, memsets, and the stream calls of the API. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct CUevent_st {
    int references;
    unsigned flags;
    uint64_t recorded, reached; /* generations */
    uint64_t reached_ns;
    struct dependency at; /* the place in a stream of the last record; holds a reference */
    struct capture *capture;
    pthread_cond_t cond;
};

#define ENTER()                         \
    CUresult result = require_init();   \
    if (result != CUDA_SUCCESS)         \
        return result;                  \
    pthread_mutex_lock(&sched)

#define LEAVE(value)                    \
    do {                                \
        CUresult leaving = (value);     \
        pthread_mutex_unlock(&sched);   \
        return leaving;                 \
    } while (0)

/* Both flavours of a function that ends in a stream argument. */
#define TWINS(name, parameters, ...)                                                                                   \
    EXPORT CUresult name parameters { return name##_flavour(false, __VA_ARGS__); }                                     \
    EXPORT CUresult name##_ptsz parameters { return name##_flavour(true, __VA_ARGS__); }
#define ARGS(...) __VA_ARGS__

/* Puts work into a stream, or into the graph that the stream is capturing. */
static CUresult put(bool per_thread, CUstream handle, const struct work *work)
{
    ENTER();
    CUstream stream;
    bool taken = false;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_work(stream, work, &taken);
    if (result == CUDA_SUCCESS && !taken)
        stream_submit(stream, work, NULL);
    LEAVE(result);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result == CUDA_SUCCESS && (!stream || flags > CU_STREAM_NON_BLOCKING))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        result = stream_new(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority, false, stream);
    LEAVE(result);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream handle)
{
    ENTER();
    CUstream stream;
    result = handle ? stream_resolve(handle, false, &stream) : CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS && (handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD))
        result = CUDA_ERROR_INVALID_HANDLE;
    if (result == CUDA_SUCCESS)
        stream_close(stream);
    LEAVE(result);
}

static CUresult cuStreamSynchronize_flavour(bool per_thread, CUstream handle)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_synchronous(stream);
    if (result == CUDA_SUCCESS && !stream_idle(stream)) {
        if (stream->legacy) {
            /* The legacy stream stands for all blocking ones. */
            struct ticket ticket;
            ticket_take(stream, &ticket, NULL);
            ticket_wait(&ticket);
            ticket_finish(&ticket);
        } else {
            stream_drain(stream);
        }
        result = stream->context->fault;
    }
    LEAVE(result);
}
TWINS(cuStreamSynchronize, (CUstream stream), ARGS(stream))

static CUresult cuStreamQuery_flavour(bool per_thread, CUstream handle)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = capture_synchronous(stream);
    if (result == CUDA_SUCCESS && (stream->legacy ? !stream_idle(stream) : stream->done < stream->issued))
        result = CUDA_ERROR_NOT_READY;
    LEAVE(result);
}
TWINS(cuStreamQuery, (CUstream stream), ARGS(stream))

static CUresult cuStreamGetId_flavour(bool per_thread, CUstream handle, unsigned long long *id)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        *id = stream->id;
    LEAVE(result);
}
TWINS(cuStreamGetId, (CUstream stream, unsigned long long *id), ARGS(stream, id))

static CUresult cuStreamGetFlags_flavour(bool per_thread, CUstream handle, unsigned *flags)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        *flags = stream->flags;
    LEAVE(result);
}
TWINS(cuStreamGetFlags, (CUstream stream, unsigned *flags), ARGS(stream, flags))

static CUresult cuStreamGetPriority_flavour(bool per_thread, CUstream handle, int *priority)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        *priority = stream->priority;
    LEAVE(result);
}
TWINS(cuStreamGetPriority, (CUstream stream, int *priority), ARGS(stream, priority))

static CUresult cuLaunchHostFunc_flavour(bool per_thread, CUstream stream, CUhostFn function, void *user_data)
{
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    return put(per_thread, stream, &(struct work){.kind = WORK_HOST_FUNC, .host = {function, user_data}});
}
TWINS(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *user_data), ARGS(stream, function, user_data))

static CUresult cuStreamWriteValue32_v2_flavour(bool per_thread, CUstream stream, CUdeviceptr address, uint32_t value,
                                                unsigned flags)
{
    (void)flags;
    if (require_init() == CUDA_SUCCESS) {
        if (knobs.no_write_value)
            return CUDA_ERROR_NOT_SUPPORTED;
        enum kind kind = memory_kind(address, 4);
        if (address % 4 || kind == KIND_PAGEABLE || kind == KIND_STRADDLING)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return put(per_thread, stream, &(struct work){.kind = WORK_WRITE32, .write = {(uint32_t *)address, value}});
}
TWINS(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),
      ARGS(stream, address, value, flags))

static CUresult cuStreamWaitValue32_v2_flavour(bool per_thread, CUstream stream, CUdeviceptr address, uint32_t value,
                                               unsigned flags)
{
    if (require_init() == CUDA_SUCCESS) {
        enum kind kind = memory_kind(address, 4);
        if (address % 4 || kind == KIND_PAGEABLE || kind == KIND_STRADDLING)
            return CUDA_ERROR_INVALID_VALUE;
        if (flags != CU_STREAM_WAIT_VALUE_GEQ)
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return put(per_thread, stream, &(struct work){.kind = WORK_WAIT32, .write = {(uint32_t *)address, value}});
}
TWINS(cuStreamWaitValue32_v2, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),
      ARGS(stream, address, value, flags))

struct callback { CUstream stream; CUstreamCallback function; void *user_data; };

static void run_callback(void *argument)
{
    struct callback *callback = argument;
    callback->function(callback->stream, CUDA_SUCCESS, callback->user_data);
    free(callback);
}

static CUresult cuStreamAddCallback_flavour(bool per_thread, CUstream stream, CUstreamCallback function,
                                            void *user_data, unsigned flags)
{
    if (!function || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct callback *callback = malloc(sizeof *callback);
    *callback = (struct callback){stream, function, user_data};
    CUresult result = put(per_thread, stream, &(struct work){.kind = WORK_HOST_FUNC, .host = {run_callback, callback}});
    if (result != CUDA_SUCCESS)
        free(callback);
    return result;
}
TWINS(cuStreamAddCallback, (CUstream stream, CUstreamCallback function, void *user_data, unsigned flags),
      ARGS(stream, function, user_data, flags))

/* The stand-in runs no code: the one kernel that it knows is named `fault` and breaks its context. */
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result == CUDA_SUCCESS && (!module || !image))
        result = CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *module = (CUmodule)context;
    return result;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    if (!function || !module || !name)
        return CUDA_ERROR_INVALID_VALUE;
    *function = (CUfunction)module;
    return strcmp(name, "fault") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

static CUresult cuLaunchKernel_flavour(bool per_thread, CUfunction function, CUstream stream)
{
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    return put(per_thread, stream, &(struct work){.kind = WORK_FAULT, .fault = (CUcontext)function});
}
TWINS(cuLaunchKernel,
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
       unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters, void **extra),
      ((void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z, (void)shared_bytes,
       (void)parameters, (void)extra, function), stream)

static CUresult set_bytes(bool per_thread, CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS || bytes == 0)
        return result;
    enum kind kind = memory_kind(address, bytes);
    if (kind == KIND_PAGEABLE || kind == KIND_STRADDLING)
        return CUDA_ERROR_INVALID_VALUE;
    return put(per_thread, stream,
               &(struct work){.kind = WORK_MEMSET, .memset = {(char *)address, value, bytes}});
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t bytes)
{
    return set_bytes(false, address, value, bytes, NULL);
}

EXPORT CUresult cuMemsetD8_v2_ptds(CUdeviceptr address, unsigned char value, size_t bytes)
{
    return set_bytes(true, address, value, bytes, NULL);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
    return set_bytes(false, address, value, bytes, stream);
}

EXPORT CUresult cuMemsetD8Async_ptsz(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream)
{
    return set_bytes(true, address, value, bytes, stream);
}

static void event_put(CUevent event)
{
    if (--event->references == 0) {
        if (event->at.stream)
            stream_put(event->at.stream);
        pthread_cond_destroy(&event->cond);
        free(event);
    }
}

static void mark_reached(CUevent event, uint64_t generation)
{
    if (event->reached < generation) {
        event->reached = generation;
        event->reached_ns = now_ns();
    }
    pthread_cond_broadcast(&event->cond);
}

void event_reached(CUevent event, uint64_t generation)
{
    pthread_mutex_lock(&sched);
    mark_reached(event, generation);
    event_put(event);
    pthread_mutex_unlock(&sched);
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    CUevent created = calloc(1, sizeof *created);
    created->references = 1;
    created->flags = flags;
    pthread_cond_init(&created->cond, NULL);
    *event = created;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER();
    if (!event)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    event_put(event);
    LEAVE(CUDA_SUCCESS);
}

static CUresult cuEventRecord_flavour(bool per_thread, CUevent event, CUstream handle)
{
    ENTER();
    CUstream stream;
    result = event ? stream_resolve(handle, per_thread, &stream) : CUDA_ERROR_INVALID_HANDLE;
    bool taken = false;
    if (result == CUDA_SUCCESS)
        result = capture_work(stream, &(struct work){.kind = WORK_NOTHING}, &taken);
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    event->capture = stream->capture;
    if (taken)
        LEAVE(CUDA_SUCCESS);
    if (event->at.stream)
        stream_put(event->at.stream);
    stream->references++;
    event->recorded++;
    if (stream_idle(stream)) {
        mark_reached(event, event->recorded);
    } else {
        event->references++;
        stream_submit(stream, &(struct work){.kind = WORK_EVENT, .event = {event, event->recorded}}, NULL);
    }
    event->at = (struct dependency){stream, stream->issued};
    LEAVE(CUDA_SUCCESS);
}
TWINS(cuEventRecord, (CUevent event, CUstream stream), ARGS(event, stream))

/* Asking for an event that is part of a graph breaks the capture; asking for another one is an unsafe call. */
static CUresult check_event(CUevent event)
{
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture && capture_break(event->capture))
        return CUDA_ERROR_CAPTURED_EVENT;
    return capture_unsafe_call();
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    ENTER();
    result = check_event(event);
    if (result == CUDA_SUCCESS && event->reached < event->recorded)
        result = CUDA_ERROR_NOT_READY;
    LEAVE(result);
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    ENTER();
    result = check_event(event);
    if (result == CUDA_SUCCESS) {
        uint64_t generation = event->recorded;
        event->references++;
        while (event->reached < generation)
            pthread_cond_wait(&event->cond, &sched);
        event_put(event);
    }
    LEAVE(result);
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER();
    if (!start || !end || !start->recorded || !end->recorded)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        LEAVE(CUDA_ERROR_INVALID_HANDLE);
    if (start->reached < start->recorded || end->reached < end->recorded)
        LEAVE(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((double)(int64_t)(end->reached_ns - start->reached_ns) / 1e6);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    return cuEventElapsedTime(milliseconds, start, end);
}

static CUresult cuStreamWaitEvent_flavour(bool per_thread, CUstream handle, CUevent event, unsigned flags)
{
    (void)flags;
    ENTER();
    CUstream stream;
    result = event ? stream_resolve(handle, per_thread, &stream) : CUDA_ERROR_INVALID_HANDLE;
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    if (event->capture)
        LEAVE(capture_join(stream, event->capture));
    bool taken = false;
    result = capture_work(stream, &(struct work){.kind = WORK_NOTHING}, &taken);
    if (result == CUDA_SUCCESS && !taken && event->recorded)
        stream_submit(stream, &(struct work){.kind = WORK_NOTHING}, &event->at);
    LEAVE(result);
}
TWINS(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), ARGS(stream, event, flags))
