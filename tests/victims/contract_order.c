/* Contract: what has happened when a copy returns, and what comes before what. */
#define _GNU_SOURCE
#include "contract.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const size_t sizes[] = {4, 64 * KIB, MIB, LARGE, HUGE, 16ull * HUGE};
enum { SIZES = 4 }; /* the last two only where asked for */

static const char *variant(const char *first, size_t bytes)
{
    static char text[80];
    snprintf(text, sizeof text, "%s%s%s", first, *first ? " " : "", size_name(bytes));
    return text;
}

/* The source is the program's again when the call returns: overwritten, or unmapped. */
static void source_reusable(bool busy_stream, bool unmap)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr device = device_memory(HUGE);
    for (size_t i = 0; i <= SIZES; i++) {
        size_t bytes = i < SIZES ? sizes[i] : HUGE;
        unsigned char *source = host_pattern(bytes, 50);
        struct busy busy = {0};
        if (busy_stream)
            make_busy(stream, &busy);
        CUresult result = cuMemcpyHtoDAsync_v2(device, source, bytes, stream);
        int waited = busy.over;
        if (unmap)
            host_free(source, bytes);
        else
            memset(source, 0xff, bytes);
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        bool right = device_is_pattern(device, bytes, 50);
        if (busy_stream)
            report(variant(unmap ? "unmapped" : "overwritten", bytes), "ret=%d bytes_ok=%d waited=%d", result, right,
                   waited);
        else
            report(variant(unmap ? "unmapped" : "overwritten", bytes), "ret=%d bytes_ok=%d", result, right);
        if (!unmap)
            host_free(source, bytes);
    }
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

static void idle_source(void)
{
    source_reusable(false, false);
    source_reusable(false, true);
}

static void busy_source(void)
{
    source_reusable(true, false);
    source_reusable(true, true);
}

/* Behind a busy stream, an asynchronous DtoH returns with the bytes that the stream's earlier work left. */
static void busy_destination(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING), other = new_stream(CU_STREAM_NON_BLOCKING);
    size_t most = sizes[at_length ? SIZES + 1 : SIZES - 1];
    CUdeviceptr device = device_memory(most);
    for (size_t i = 0; i < (at_length ? SIZES + 2 : SIZES); i++) {
        unsigned char *back = host_zeros(sizes[i]);
        struct busy busy;
        struct gate elsewhere;
        device_fill_byte(device, most, 1);
        make_busy(stream, &busy); /* first: a driver may run host functions one after the other */
        close_gate(other, &elsewhere, LONG_PATIENCE_MS);
        must(cuMemsetD8Async(device, 2, sizes[i], stream), "cuMemsetD8Async");
        CUresult result = cuMemcpyDtoHAsync_v2(back, device, sizes[i], stream);
        int waited = busy.over, other_state = cuStreamQuery(other);
        open_gate(&elsewhere);
        bool right = is_byte(back, sizes[i], 2);
        report(variant("", sizes[i]), "ret=%d bytes_ok=%d waited=%d other_stream=%d", result, right, waited, other_state);
        must(cuStreamSynchronize(other), "cuStreamSynchronize");
        host_free(back, sizes[i]);
    }
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuStreamDestroy_v2(other), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

/* A synchronous copy waits for blocking streams, and for no others. */
static void synchronous_waits(void)
{
    static const struct { const char *name; unsigned flags; } streams[] = {{"blocking", 0},
                                                                          {"non-blocking", CU_STREAM_NON_BLOCKING}};
    CUdeviceptr device = device_memory(4 * MIB);
    unsigned char *host = host_pattern(4 * MIB, 60);
    for (int i = 0; i < 2; i++) {
        CUstream stream = new_stream(streams[i].flags);
        struct busy busy;
        char name[64];
        make_busy(stream, &busy);
        CUresult result = cuMemcpyHtoD_v2(device, host, 4 * MIB);
        snprintf(name, sizeof name, "HtoD %s", streams[i].name);
        report(name, "ret=%d waited=%d", result, busy.over);
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        make_busy(stream, &busy);
        result = cuMemcpyDtoH_v2(host, device, 4 * MIB);
        snprintf(name, sizeof name, "DtoH %s", streams[i].name);
        report(name, "ret=%d bytes_ok=%d waited=%d", result, is_pattern(host, 4 * MIB, 60), busy.over);
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    }
    host_free(host, 4 * MIB);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Write on the device, DtoH, HtoD, read on the device: all in one stream, without waiting in between. */
static void one_stream(void)
{
    for (unsigned flags = 0; flags <= CU_STREAM_NON_BLOCKING; flags++)
        for (size_t i = 0; i < SIZES; i++) {
            size_t bytes = sizes[i];
            CUstream stream = new_stream(flags);
            CUdeviceptr device = device_memory(bytes), copy = device_memory(bytes);
            unsigned char *back = host_zeros(bytes), *source = host_pattern(bytes, 70);
            struct busy busy;
            make_busy(stream, &busy);
            CUresult r1 = cuMemsetD8Async(device, 7, bytes, stream);
            CUresult r2 = cuMemcpyDtoHAsync_v2(back, device, bytes, stream);
            CUresult r3 = cuMemcpyHtoDAsync_v2(device, source, bytes, stream);
            memset(source, 0, bytes);
            CUresult r4 = cuMemcpyDtoDAsync_v2(copy, device, bytes, stream);
            CUresult r5 = cuMemsetD8Async(device, 9, bytes, stream);
            must(cuStreamSynchronize(stream), "cuStreamSynchronize");
            bool right = is_byte(back, bytes, 7) && device_is_pattern(copy, bytes, 70) && device_is_byte(device, bytes, 9);
            report(variant(flags ? "non-blocking" : "blocking", bytes), "ret=%d,%d,%d,%d,%d bytes_ok=%d", r1, r2, r3, r4,
                   r5, right);
            host_free(back, bytes);
            host_free(source, bytes);
            must(cuMemFree_v2(device), "cuMemFree");
            must(cuMemFree_v2(copy), "cuMemFree");
            must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
        }
}

struct two_threads {
    CUdeviceptr device;
    size_t bytes;
    unsigned char *host;
    CUresult result;
    bool right;
};

static void read_by_legacy_stream(void *argument)
{
    struct two_threads *t = argument;
    t->result = cuMemcpyDtoHAsync_v2(t->host, t->device, t->bytes, NULL);
    t->right = is_pattern(t->host, t->bytes, 81);
}

/* One thread writes in a blocking stream; another reads through the legacy stream, which comes after it. */
static void two_threads(void)
{
    for (size_t i = 0; i < SIZES; i++) {
        struct two_threads t = {device_memory(sizes[i]), sizes[i], host_zeros(sizes[i]), 0, false};
        unsigned char *source = host_pattern(sizes[i], 81);
        CUstream stream = new_stream(0);
        struct busy busy;
        make_busy(stream, &busy);
        CUresult result = cuMemcpyHtoDAsync_v2(t.device, source, sizes[i], stream);
        on_other_thread(read_by_legacy_stream, &t);
        report(variant("", sizes[i]), "ret=%d,%d bytes_ok=%d", result, t.result, t.right);
        host_free(source, sizes[i]);
        host_free(t.host, sizes[i]);
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
        must(cuMemFree_v2(t.device), "cuMemFree");
    }
}

/* An event behind a copy comes after it, for another stream too. */
static void events(void)
{
    for (size_t i = 0; i < SIZES; i++) {
        size_t bytes = sizes[i];
        CUstream a = new_stream(CU_STREAM_NON_BLOCKING), b = new_stream(CU_STREAM_NON_BLOCKING);
        CUevent event;
        must(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
        CUdeviceptr device = device_memory(bytes);
        unsigned char *source = host_pattern(bytes, 90), *back = host_zeros(bytes);
        struct busy busy;
        make_busy(a, &busy);
        CUresult there = cuMemcpyHtoDAsync_v2(device, source, bytes, a);
        must(cuEventRecord(event, a), "cuEventRecord");
        must(cuStreamWaitEvent(b, event, 0), "cuStreamWaitEvent");
        CUresult away = cuMemcpyDtoHAsync_v2(back, device, bytes, b);
        report(variant("", bytes), "ret=%d,%d bytes_ok=%d event=%d", there, away, is_pattern(back, bytes, 90),
               cuEventQuery(event));
        must(cuEventDestroy_v2(event), "cuEventDestroy");
        must(cuStreamDestroy_v2(a), "cuStreamDestroy");
        must(cuStreamDestroy_v2(b), "cuStreamDestroy");
        host_free(source, bytes);
        host_free(back, bytes);
        must(cuMemFree_v2(device), "cuMemFree");
    }
}

const struct contract_case order_cases[] = {
    {"source_after_htod", idle_source}, {"source_after_htod_busy", busy_source},
    {"destination_after_dtoh_busy", busy_destination}, {"synchronous_waits", synchronous_waits},
    {"one_stream_order", one_stream}, {"two_threads_legacy", two_threads}, {"event_order", events}, {0}};
