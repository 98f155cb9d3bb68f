/* Contexts: primary and created ones, and each thread's stack of current contexts. */
#include "internal.h"

#include <stdlib.h>

enum { MAX_DEPTH = 32, MAX_DEVICES = 8 };

static CUcontext contexts;
static CUcontext primary[MAX_DEVICES];
static unsigned long long last_id;
static __thread CUcontext stack[MAX_DEPTH];
static __thread int depth;

static bool known(CUcontext context)
{
    for (CUcontext c = contexts; c; c = c->next)
        if (c == context)
            return true;
    return false;
}

CUresult context_current_locked(CUcontext *context)
{
    if (in_host_function())
        return CUDA_ERROR_NOT_PERMITTED;
    if (depth == 0 || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!stack[depth - 1]->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *context = stack[depth - 1];
    return (*context)->fault;
}

CUresult context_current(CUcontext *context)
{
    CUresult result = require_init();
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&sched);
    result = context_current_locked(context);
    pthread_mutex_unlock(&sched);
    return result;
}

static CUresult open_context(CUcontext context, int device, unsigned flags)
{
    context->device = device;
    context->flags = flags;
    context->id = ++last_id;
    context->alive = true;
    CUresult result = stream_new(context, 0, 0, true, &context->legacy);
    if (result != CUDA_SUCCESS)
        context->alive = false;
    return result;
}

/* The structure stays, so that a handle kept by the program can be recognised as dead. */
static void close_context(CUcontext context)
{
    context_drain(context);
    while (context->streams)
        stream_close(context->streams);
    context->legacy = NULL;
    context->alive = false;
    pthread_mutex_unlock(&sched);
    memory_release_context(context);
    pthread_mutex_lock(&sched);
}

static CUcontext new_context(void)
{
    CUcontext context = calloc(1, sizeof *context);
    context->next = contexts;
    contexts = context;
    return context;
}

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

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    ENTER();
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (device < 0 || device >= knobs.devices)
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (depth == MAX_DEPTH)
        LEAVE(CUDA_ERROR_OUT_OF_MEMORY);
    CUcontext created = new_context();
    result = open_context(created, device, flags);
    if (result == CUDA_SUCCESS)
        *context = stack[depth++] = created;
    LEAVE(result);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned flags, CUdevice device)
{
    (void)params;
    return cuCtxCreate_v2(context, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER();
    if (!known(context))
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!context->alive)
        LEAVE(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (context->primary)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    close_context(context);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER();
    if (device < 0 || device >= knobs.devices)
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    if (!primary[device]) {
        primary[device] = new_context();
        primary[device]->primary = true;
    }
    if (!primary[device]->alive)
        result = open_context(primary[device], device, 0);
    if (result == CUDA_SUCCESS) {
        primary[device]->retained++;
        *context = primary[device];
    }
    LEAVE(result);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER();
    if (device < 0 || device >= knobs.devices)
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    CUcontext context = primary[device];
    if (!context || context->retained == 0)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (--context->retained == 0)
        close_context(context);
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER();
    if (device < 0 || device >= knobs.devices)
        LEAVE(CUDA_ERROR_INVALID_DEVICE);
    *flags = 0;
    *active = primary[device] && primary[device]->alive;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER();
    if (!known(context) || depth == MAX_DEPTH)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER();
    if (depth == 0 || !stack[depth - 1])
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context)
        *context = stack[depth];
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER();
    if (context && !known(context))
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (context && !context->alive)
        LEAVE(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (!context) {
        if (depth > 0)
            depth--;
    } else {
        if (depth == 0)
            depth = 1;
        stack[depth - 1] = context;
    }
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER();
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    *context = depth > 0 ? stack[depth - 1] : NULL;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result == CUDA_SUCCESS)
        *device = context->device;
    LEAVE(result);
}

EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    ENTER();
    if (!context && (result = context_current_locked(&context)) != CUDA_SUCCESS)
        LEAVE(result);
    if (!known(context))
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!context->alive)
        LEAVE(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    *id = context->id;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result == CUDA_SUCCESS)
        *flags = context->flags;
    LEAVE(result);
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    ENTER();
    if (context && !known(context))
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    *version = 3020;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result == CUDA_SUCCESS) {
        *least = 0;
        *greatest = -5;
    }
    LEAVE(result);
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER();
    CUcontext context;
    result = context_current_locked(&context);
    if (result == CUDA_SUCCESS)
        result = capture_context_synchronous(context);
    if (result == CUDA_SUCCESS) {
        context_drain(context);
        result = context->fault;
    }
    LEAVE(result);
}
