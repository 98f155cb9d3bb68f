/* Stream capture and graphs. A graph here is a list of work in order: enough to replay what one stream captured. */
#include "internal.h"

#include <stdlib.h>

struct nodes {
    struct work *work;
    size_t count, capacity;
};

struct capture {
    CUstreamCaptureMode mode;
    pthread_t owner;
    bool active, broken;
    CUstream origin;
    struct nodes nodes;
    struct capture *next; /* of all that ever were: events may point to ended ones */
};
struct CUgraph_st { struct nodes nodes; };
struct CUgraphExec_st { struct nodes nodes; };

static struct capture *captures;
static int active_count;
static __thread CUstreamCaptureMode thread_mode;

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

static void append(struct nodes *nodes, const struct work *work)
{
    if (work->kind == WORK_NOTHING)
        return;
    if (nodes->count == nodes->capacity) {
        nodes->capacity = nodes->capacity ? 2 * nodes->capacity : 16;
        nodes->work = realloc(nodes->work, nodes->capacity * sizeof *nodes->work);
    }
    nodes->work[nodes->count++] = *work;
}

static struct nodes copy_nodes(const struct nodes *nodes)
{
    struct nodes copy = {0};
    for (size_t i = 0; i < nodes->count; i++)
        append(&copy, &nodes->work[i]);
    return copy;
}

bool capture_break(struct capture *capture)
{
    capture->broken = true;
    return capture->active;
}

/* Breaks the captures of the blocking streams that the legacy stream would have to wait for. */
static bool break_blocking(CUcontext context)
{
    bool any = false;
    for (CUstream s = context->streams; s; s = s->next)
        if (s->capture && !(s->flags & CU_STREAM_NON_BLOCKING))
            any |= capture_break(s->capture);
    return any;
}

CUresult capture_unsafe_call(void)
{
    if (active_count == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    bool forbidden = false;
    for (struct capture *c = captures; c; c = c->next) {
        if (!c->active || c->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
            continue;
        bool mine = pthread_equal(c->owner, pthread_self());
        if (mine || (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL))
            forbidden |= capture_break(c);
    }
    return forbidden ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_unsafe_call_unlocked(void)
{
    pthread_mutex_lock(&sched);
    CUresult result = capture_unsafe_call();
    pthread_mutex_unlock(&sched);
    return result;
}

CUresult capture_synchronous_copy(CUstream stream)
{
    if (active_count == 0)
        return CUDA_SUCCESS;
    if (stream->capture) {
        capture_break(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->legacy && break_blocking(stream->context))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return CUDA_SUCCESS;
}

CUresult capture_synchronous(CUstream stream)
{
    CUresult result = capture_synchronous_copy(stream);
    return result == CUDA_SUCCESS ? capture_unsafe_call() : result;
}

CUresult capture_context_synchronous(CUcontext context)
{
    bool any = false;
    for (CUstream s = context->streams; s; s = s->next)
        if (s->capture)
            any |= capture_break(s->capture);
    return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult capture_work(CUstream stream, const struct work *work, bool *taken)
{
    if (active_count == 0)
        return CUDA_SUCCESS;
    if (stream->capture) {
        if (stream->capture->broken)
            return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        append(&stream->capture->nodes, work);
        *taken = true;
        return CUDA_SUCCESS;
    }
    if (stream->legacy && break_blocking(stream->context))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return CUDA_SUCCESS;
}

CUresult capture_join(CUstream stream, struct capture *capture)
{
    if (!capture->active || stream->legacy || (stream->capture && stream->capture != capture))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

static void end(struct capture *capture, CUcontext context)
{
    capture->active = false;
    active_count--;
    for (CUstream s = context->streams; s; s = s->next)
        if (s->capture == capture)
            s->capture = NULL;
}

void capture_stream_gone(CUstream stream)
{
    struct capture *capture = stream->capture;
    if (capture && capture->origin == stream) {
        stream->capture = NULL;
        end(capture, stream->context);
        free(capture->nodes.work);
        capture->nodes = (struct nodes){0};
    }
}

static CUresult begin(bool per_thread, CUstream handle, CUstreamCaptureMode mode)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (stream->legacy)
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->capture)
        LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    struct capture *capture = calloc(1, sizeof *capture);
    capture->mode = mode;
    capture->owner = pthread_self();
    capture->active = true;
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    active_count++;
    stream->capture = capture;
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    return begin(false, stream, mode);
}

EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
    return begin(true, stream, mode);
}

static CUresult finish(bool per_thread, CUstream handle, CUgraph *graph)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    *graph = NULL;
    struct capture *capture = stream->capture;
    if (!capture || capture->origin != stream)
        LEAVE(CUDA_ERROR_ILLEGAL_STATE);
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(capture->owner, pthread_self()))
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    end(capture, stream->context);
    if (capture->broken) {
        free(capture->nodes.work);
        capture->nodes = (struct nodes){0};
        LEAVE(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    *graph = calloc(1, sizeof **graph);
    (*graph)->nodes = capture->nodes;
    capture->nodes = (struct nodes){0};
    LEAVE(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return finish(false, stream, graph);
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return finish(true, stream, graph);
}

static CUresult is_capturing(bool per_thread, CUstream handle, CUstreamCaptureStatus *status)
{
    ENTER();
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    if (result != CUDA_SUCCESS)
        LEAVE(result);
    *status = !stream->capture          ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                        : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (stream->legacy && active_count)
        for (CUstream s = stream->context->streams; s; s = s->next)
            if (s->capture && !(s->flags & CU_STREAM_NON_BLOCKING))
                result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    LEAVE(result);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    return is_capturing(false, stream, status);
}

EXPORT CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status)
{
    return is_capturing(true, stream, status);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    if (!mode || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    if (!graph || !executable)
        return CUDA_ERROR_INVALID_VALUE;
    *executable = calloc(1, sizeof **executable);
    (*executable)->nodes = copy_nodes(&graph->nodes);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    free(graph->nodes.work);
    free(graph);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable)
{
    if (!executable)
        return CUDA_ERROR_INVALID_VALUE;
    free(executable->nodes.work);
    free(executable);
    return CUDA_SUCCESS;
}

static CUresult launch(bool per_thread, CUgraphExec executable, CUstream handle)
{
    ENTER();
    if (!executable)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    CUstream stream;
    result = stream_resolve(handle, per_thread, &stream);
    for (size_t i = 0; result == CUDA_SUCCESS && i < executable->nodes.count; i++) {
        bool taken = false;
        result = capture_work(stream, &executable->nodes.work[i], &taken);
        if (result == CUDA_SUCCESS && !taken)
            stream_submit(stream, &executable->nodes.work[i], NULL);
    }
    LEAVE(result);
}

EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream)
{
    return launch(false, executable, stream);
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec executable, CUstream stream)
{
    return launch(true, executable, stream);
}
