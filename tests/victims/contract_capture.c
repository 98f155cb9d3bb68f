/* Contract: copies while a stream captures. */
#define _GNU_SOURCE
#include "contract.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *const modes[] = {"global", "thread-local", "relaxed"};

struct other {
    CUdeviceptr device;
    unsigned char *host;
    size_t bytes;
    CUresult there, away;
    bool right;
};

static void copy_on_own_stream(void *argument)
{
    struct other *o = argument;
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    fill_pattern(o->host, o->bytes, 5);
    o->there = cuMemcpyHtoDAsync_v2(o->device, o->host, o->bytes, stream);
    memset(o->host, 0, o->bytes);
    o->away = cuMemcpyDtoHAsync_v2(o->host, o->device, o->bytes, stream);
    o->right = is_pattern(o->host, o->bytes, 5);
}

/* Another thread copies in its own stream, for the first time perhaps, while this one captures: the capture lives. */
static void other_thread(void)
{
    struct other o = {device_memory(LARGE), host_zeros(LARGE), LARGE, 0, 0, false};
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    for (int mode = 0; mode < 3; mode++) {
        CUgraph graph = NULL;
        must(cuStreamBeginCapture_v2(stream, mode), "cuStreamBeginCapture");
        on_other_thread(copy_on_own_stream, &o);
        CUresult end = cuStreamEndCapture(stream, &graph);
        report(modes[mode], "ret=%d,%d bytes_ok=%d end=%d", o.there, o.away, o.right, end);
        if (graph)
            must(cuGraphDestroy(graph), "cuGraphDestroy");
    }
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    host_free(o.host, o.bytes);
    must(cuMemFree_v2(o.device), "cuMemFree");
}

struct first {
    CUcontext context;
    CUstream stream;
    struct other copy;
    CUstreamCaptureMode mode; /* of the copying thread, before and after */
};

static void copy_first(void *argument)
{
    struct first *f = argument;
    must(cuCtxSetCurrent(f->context), "cuCtxSetCurrent");
    must(cuThreadExchangeStreamCaptureMode(&f->mode), "cuThreadExchangeStreamCaptureMode");
    f->copy.there = cuMemcpyHtoDAsync_v2(f->copy.device, f->copy.host, f->copy.bytes, f->stream);
    f->copy.away = cuMemcpyDtoHAsync_v2(f->copy.host, f->copy.device, f->copy.bytes, f->stream);
    f->copy.right = is_pattern(f->copy.host, f->copy.bytes, 12);
    f->mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    must(cuThreadExchangeStreamCaptureMode(&f->mode), "cuThreadExchangeStreamCaptureMode");
}

/* A context in which nobody has copied: a copier prepares for it what it needs, pinned memory perhaps, while this thread
 * captures in each mode and the copying thread is in each mode. The capture lives, and the copying thread stays in its
 * mode. */
static void first_copy(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    for (int mode = 0; mode < 3; mode++)
        for (int own = 0; own < 3; own++) {
            struct first f = {.mode = own};
            CUgraph graph = NULL;
            f.context = new_context(main_device);
            must(cuCtxPushCurrent_v2(f.context), "cuCtxPushCurrent");
            f.stream = new_stream(CU_STREAM_NON_BLOCKING);
            f.copy = (struct other){device_memory(LARGE), host_pattern(LARGE, 12), LARGE, -1, -1, false};
            must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
            must(cuStreamBeginCapture_v2(stream, mode), "cuStreamBeginCapture");
            on_other_thread(copy_first, &f);
            CUresult end = cuStreamEndCapture(stream, &graph);
            char variant[64];
            snprintf(variant, sizeof variant, "%s beside %s", modes[own], modes[mode]);
            report(variant, "ret=%d,%d bytes_ok=%d mode=%d end=%d", f.copy.there, f.copy.away, f.copy.right, f.mode, end);
            if (graph)
                must(cuGraphDestroy(graph), "cuGraphDestroy");
            must(cuCtxDestroy_v2(f.context), "cuCtxDestroy");
            host_free(f.copy.host, LARGE);
        }
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
}

struct beside {
    CUresult begin, end;
};

static void *capture_for_a_while(void *argument)
{
    struct beside *b = argument;
    CUgraph graph = NULL;
    bind_context();
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    usleep(50000);
    b->begin = cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    usleep(150000);
    b->end = cuStreamEndCapture(stream, &graph);
    if (graph)
        must(cuGraphDestroy(graph), "cuGraphDestroy");
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    return NULL;
}

/* A copy waits for a busy stream while another thread captures: whatever a copier asks meanwhile, the capture lives. */
static void waiting_copy(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr device = device_memory(MIB);
    unsigned char *back = host_zeros(MIB);
    for (int async = 0; async < 2; async++) {
        struct beside beside = {-1, -1};
        struct busy busy;
        pthread_t thread;
        device_fill_pattern(device, MIB, 9 + async);
        must(pthread_create(&thread, NULL, capture_for_a_while, &beside), "pthread_create");
        make_busy(async ? stream : NULL, &busy);
        CUresult copy = async ? cuMemcpyDtoHAsync_v2(back, device, MIB, stream) : cuMemcpyDtoH_v2(back, device, MIB);
        bool right = is_pattern(back, MIB, 9 + async);
        pthread_join(thread, NULL);
        report(async ? "async" : "sync", "copy=%d bytes_ok=%d begin=%d end=%d", copy, right, beside.begin, beside.end);
    }
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    host_free(back, MIB);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* A captured copy is part of the graph: nothing moves before the launch, and each launch moves the bytes of then. */
static void captured_copy(void)
{
    static const size_t sizes[] = {4 * KIB, MIB, LARGE};
    for (size_t i = 0; i < 3; i++) {
        size_t bytes = sizes[i];
        CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
        CUdeviceptr device = device_memory(bytes);
        unsigned char *source = host_pattern(bytes, 6), *back = host_zeros(bytes);
        device_fill_byte(device, bytes, 1);
        must(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
        CUresult there = cuMemcpyHtoDAsync_v2(device, source, bytes, stream);
        CUresult away = cuMemcpyDtoHAsync_v2(back, device, bytes, stream);
        CUgraph graph = NULL;
        CUresult end = cuStreamEndCapture(stream, &graph);
        bool untouched = device_is_byte(device, bytes, 1) && is_byte(back, bytes, 0);
        CUresult launch = -1;
        bool right = false;
        if (graph) {
            CUgraphExec executable;
            must(cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiate");
            right = untouched;
            for (unsigned seed = 7; seed < 9; seed++) {
                fill_pattern(source, bytes, seed);
                launch = cuGraphLaunch(executable, stream);
                must(cuStreamSynchronize(stream), "cuStreamSynchronize");
                right = right && is_pattern(back, bytes, seed) && device_is_pattern(device, bytes, seed);
            }
            must(cuGraphExecDestroy(executable), "cuGraphExecDestroy");
            must(cuGraphDestroy(graph), "cuGraphDestroy");
        }
        report(size_name(bytes), "ret=%d,%d end=%d launch=%d bytes_ok=%d", there, away, end, launch, right);
        host_free(source, bytes);
        host_free(back, bytes);
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
        must(cuMemFree_v2(device), "cuMemFree");
    }
}

/* A synchronous copy while a stream captures: an error, and the capture is broken or not, as stock does it. */
static void synchronous_copy(void)
{
    CUdeviceptr device = device_memory(4 * MIB);
    unsigned char *host = host_pattern(4 * MIB, 8);
    for (unsigned flags = 0; flags <= CU_STREAM_NON_BLOCKING; flags++)
        for (int mode = 0; mode < 3; mode++) {
            CUstream stream = new_stream(flags);
            device_fill_byte(device, 4 * MIB, 1);
            must(cuStreamBeginCapture_v2(stream, mode), "cuStreamBeginCapture");
            CUresult there = cuMemcpyHtoD_v2(device, host, 4 * MIB);
            CUgraph graph = NULL;
            CUresult end = cuStreamEndCapture(stream, &graph);
            bool there_now = arrived(device, 4 * MIB, 8);
            if (graph)
                must(cuGraphDestroy(graph), "cuGraphDestroy");
            char variant[64];
            snprintf(variant, sizeof variant, "%s %s", flags ? "non-blocking" : "blocking", modes[mode]);
            report(variant, "ret=%d end=%d arrived=%d", there, end, there_now);
            must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
        }
    host_free(host, 4 * MIB);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* An asynchronous copy into the legacy stream while another stream captures. */
static void legacy_copy(void)
{
    CUdeviceptr device = device_memory(4 * MIB);
    unsigned char *host = host_pattern(4 * MIB, 8);
    for (unsigned flags = 0; flags <= CU_STREAM_NON_BLOCKING; flags++) {
        CUstream stream = new_stream(flags);
        CUstreamCaptureStatus status = -1;
        CUgraph graph = NULL;
        must(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
        CUresult asked = cuStreamIsCapturing(NULL, &status);
        CUresult there = cuMemcpyHtoDAsync_v2(device, host, 4 * MIB, NULL);
        CUresult end = cuStreamEndCapture(stream, &graph);
        report(flags ? "non-blocking" : "blocking", "is_capturing=%d ret=%d end=%d", asked, there, end);
        if (graph)
            must(cuGraphDestroy(graph), "cuGraphDestroy");
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    }
    host_free(host, 4 * MIB);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Calls that a copier might make on its way, while another thread captures in global mode. */
static const char *const calls[] = {"cuStreamQuery", "cuStreamSynchronize", "cuEventQuery", "cuEventSynchronize",
                                    "cuEventRecord", "cuMemHostAlloc", "cuStreamWriteValue32", "cuPointerGetAttributes"};
enum { CALLS = sizeof calls / sizeof *calls };

struct call {
    int which;
    bool relaxed;
    CUstream stream;
    CUevent event;
    CUdeviceptr device;
    CUresult result;
};

static void make_call(void *argument)
{
    struct call *c = argument;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    void *pinned = NULL;
    unsigned type;
    CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    void *value = &type;
    if (c->relaxed)
        must(cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
    switch (c->which) {
    case 0: c->result = cuStreamQuery(c->stream); break;
    case 1: c->result = cuStreamSynchronize(c->stream); break;
    case 2: c->result = cuEventQuery(c->event); break;
    case 3: c->result = cuEventSynchronize(c->event); break;
    case 4: c->result = cuEventRecord(c->event, c->stream); break;
    case 5: c->result = cuMemHostAlloc(&pinned, MIB, 0); break;
    case 6: c->result = cuStreamWriteValue32_v2(c->stream, c->device, 1, 0); break;
    case 7: c->result = cuPointerGetAttributes(1, &attribute, &value, c->device); break;
    }
    if (pinned && c->relaxed) /* the mode is one of those under which this does no harm */
        must(cuMemFreeHost(pinned), "cuMemFreeHost");
    if (c->relaxed)
        must(cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
}

static void unsafe_calls(void)
{
    struct call c = {.stream = new_stream(CU_STREAM_NON_BLOCKING), .device = device_memory(4)};
    CUstream capturing = new_stream(CU_STREAM_NON_BLOCKING);
    must(cuEventCreate(&c.event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    must(cuEventRecord(c.event, c.stream), "cuEventRecord");
    for (c.which = 0; c.which < CALLS; c.which++)
        for (int relaxed = 0; relaxed < 2; relaxed++) {
            CUgraph graph = NULL;
            c.relaxed = relaxed;
            must(cuStreamBeginCapture_v2(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
            on_other_thread(make_call, &c);
            CUresult end = cuStreamEndCapture(capturing, &graph);
            char variant[64];
            snprintf(variant, sizeof variant, "%s%s", calls[c.which], relaxed ? " relaxed" : "");
            report(variant, "ret=%d end=%d", c.result, end);
            if (graph)
                must(cuGraphDestroy(graph), "cuGraphDestroy");
        }
    must(cuEventDestroy_v2(c.event), "cuEventDestroy");
    must(cuStreamDestroy_v2(c.stream), "cuStreamDestroy");
    must(cuStreamDestroy_v2(capturing), "cuStreamDestroy");
    must(cuMemFree_v2(c.device), "cuMemFree");
}

const struct contract_case capture_cases[] = {
    {"capture_other_thread", other_thread}, {"capture_first_copy", first_copy}, {"capture_waiting_copy", waiting_copy},
    {"capture_async_copy", captured_copy}, {"capture_sync_copy", synchronous_copy},
    {"capture_legacy_copy", legacy_copy}, {"capture_unsafe_calls", unsafe_calls}, {0}};
