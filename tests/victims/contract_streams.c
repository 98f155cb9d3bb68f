/* Contract: streams of every flavour, who waits for whom, callbacks, and many threads at once. */
#define _GNU_SOURCE
#include "contract.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const size_t small[] = {4 * KIB, 64 * KIB, MIB};

/* One call of each that stock makes without waiting for a busy stream. `waited` must not become 1 with another copier. */
struct calls {
    CUstream stream;
    bool per_thread; /* the call is a _ptsz one */
    CUdeviceptr device, other;
    unsigned char *host, *pinned;
};

static CUresult to_device(const struct calls *c, const void *host, size_t bytes)
{
    return c->per_thread ? cuMemcpyHtoDAsync_v2_ptsz(c->device, host, bytes, c->stream)
                         : cuMemcpyHtoDAsync_v2(c->device, host, bytes, c->stream);
}

static void one_flavour(const char *name, struct calls *c, CUstream busy)
{
    struct gate gate;
    char variant[80];
    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        size_t bytes = small[i];
        fill_pattern(c->host, bytes, 190);
        close_gate(busy, &gate, PATIENCE_MS);
        CUresult result = to_device(c, c->host, bytes);
        int waited = open_gate(&gate);
        memset(c->host, 0, bytes);
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        snprintf(variant, sizeof variant, "%s %s", name, size_name(bytes));
        report(variant, "ret=%d waited=%d bytes_ok=%d", result, waited, device_is_pattern(c->device, bytes, 190));
    }
    /* many small ones, one after the other: 64 times 64 KiB, and 16 times 1 MiB */
    for (int large = 0; large < 2; large++) {
        size_t bytes = large ? MIB : 64 * KIB;
        int count = large ? 16 : 64;
        CUresult result = 0;
        fill_pattern(c->host, LARGE, 191);
        close_gate(busy, &gate, PATIENCE_MS);
        for (int i = 0; i < count; i++) {
            struct calls at = *c;
            at.device += (size_t)i * bytes;
            result |= to_device(&at, c->host + (size_t)i * bytes, bytes);
        }
        int waited = open_gate(&gate);
        memset(c->host, 0, LARGE);
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        bool right = device_is_pattern(c->device, (size_t)count * bytes, 191);
        snprintf(variant, sizeof variant, "%s %d times %s", name, count, size_name(bytes));
        report(variant, "ret=%d waited=%d bytes_ok=%d", result, waited, right);
    }
    /* what is nobody's business but the driver's */
    fill_pattern(c->pinned, LARGE, 192);
    close_gate(busy, &gate, PATIENCE_MS);
    CUresult there = to_device(c, c->pinned, LARGE);
    CUresult over = c->per_thread ? cuMemcpyDtoDAsync_v2_ptsz(c->other, c->device, LARGE, c->stream)
                                  : cuMemcpyDtoDAsync_v2(c->other, c->device, LARGE, c->stream);
    CUresult nothing = to_device(c, c->host, 0);
    CUresult back = c->per_thread ? cuMemcpyDtoHAsync_v2_ptsz(c->pinned, c->other, LARGE, c->stream)
                                  : cuMemcpyDtoHAsync_v2(c->pinned, c->other, LARGE, c->stream);
    CUresult wrong = to_device(c, NULL, LARGE);
    int waited = open_gate(&gate);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    snprintf(variant, sizeof variant, "%s pinned, device, nothing, null", name);
    report(variant, "ret=%d,%d,%d,%d,%d waited=%d bytes_ok=%d", there, over, nothing, back, wrong, waited,
           is_pattern(c->pinned, LARGE, 192));
}

static void does_not_wait(void)
{
    struct calls c = {.device = device_memory(LARGE), .other = device_memory(LARGE), .host = host_zeros(LARGE)};
    must(cuMemHostAlloc((void **)&c.pinned, LARGE, 0), "cuMemHostAlloc");
    CUstream blocking = new_stream(0), free_stream = new_stream(CU_STREAM_NON_BLOCKING), urgent;
    int least, greatest;
    must(cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
    must(cuStreamCreateWithPriority(&urgent, CU_STREAM_NON_BLOCKING, greatest), "cuStreamCreateWithPriority");
    c.stream = free_stream, one_flavour("non-blocking", &c, free_stream);
    c.stream = blocking, one_flavour("blocking", &c, blocking);
    c.stream = urgent, one_flavour("urgent", &c, urgent);
    c.stream = NULL, one_flavour("legacy", &c, NULL);
    one_flavour("legacy behind a blocking one", &c, blocking);
    c.stream = blocking, one_flavour("blocking behind legacy", &c, NULL);
    c.stream = CU_STREAM_PER_THREAD, one_flavour("PER_THREAD", &c, CU_STREAM_PER_THREAD);
    c.stream = NULL, c.per_thread = true, one_flavour("ptsz", &c, CU_STREAM_PER_THREAD);
    c.stream = free_stream, one_flavour("ptsz own", &c, free_stream);
    must(cuStreamDestroy_v2(blocking), "cuStreamDestroy");
    must(cuStreamDestroy_v2(free_stream), "cuStreamDestroy");
    must(cuStreamDestroy_v2(urgent), "cuStreamDestroy");
    must(cuMemFreeHost(c.pinned), "cuMemFreeHost");
    must(cuMemFree_v2(c.device), "cuMemFree");
    must(cuMemFree_v2(c.other), "cuMemFree");
    host_free(c.host, LARGE);
}

struct word { volatile uint32_t *at; _Atomic int late, done; };

/* Lets a stream go that waits for a word: when told to, or after a second. */
static void *write_word(void *argument)
{
    struct word *word = argument;
    for (int i = 0; i < 1000 && !word->done; i++)
        usleep(1000);
    word->late = !word->done;
    *word->at = 1;
    return NULL;
}

/* A stream that waits for a word in memory, as streams of other devices' partners do: no host function is involved. */
static void waits_for_word(void)
{
    CUdeviceptr device = device_memory(LARGE);
    unsigned char *host = host_zeros(LARGE);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    struct word word = {0};
    must(cuMemHostAlloc((void **)&word.at, 4096, CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
    for (size_t i = 0; i < 5; i++) {
        size_t bytes = i < 3 ? small[i] : i == 3 ? LARGE : MIB;
        bool back = i == 4;
        pthread_t thread;
        CUresult result;
        *word.at = 0, word.late = word.done = 0;
        fill_pattern(host, bytes, 200);
        device_fill_pattern(device, bytes, 201);
        CUresult wait = cuStreamWaitValue32_v2(stream, (uintptr_t)word.at, 1, CU_STREAM_WAIT_VALUE_GEQ);
        must(pthread_create(&thread, NULL, write_word, &word), "pthread_create");
        result = back ? cuMemcpyDtoHAsync_v2(host, device, bytes, stream)
                      : cuMemcpyHtoDAsync_v2(device, host, bytes, stream);
        word.done = 1;
        pthread_join(thread, NULL);
        bool right = !back || is_pattern(host, bytes, 201);
        if (!back)
            memset(host, 0, bytes);
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        right = right && device_is_pattern(device, bytes, back ? 201 : 200);
        char variant[64];
        snprintf(variant, sizeof variant, "%s %s", back ? "DtoH" : "HtoD", size_name(bytes));
        report(variant, "ret=%d,%d waited=%d bytes_ok=%d", wait, result, word.late, right);
    }
    must(cuMemFreeHost((void *)word.at), "cuMemFreeHost");
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
    host_free(host, LARGE);
}

/* Streams of every priority that there is: their copies, and that they stay what they are. */
static void priorities(void)
{
    int least = 0, greatest = 0;
    CUresult range = cuCtxGetStreamPriorityRange(&least, &greatest);
    report("range", "ret=%d least=%d greatest=%d", range, least, greatest);
    CUdeviceptr device = device_memory(LARGE);
    unsigned char *source = host_pattern(LARGE, 210), *back = host_zeros(LARGE);
    for (int priority = least; priority >= greatest; priority--) {
        CUstream stream;
        int now = 77;
        unsigned flags = 77;
        CUresult created = cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority);
        must(created, "cuStreamCreateWithPriority");
        device_fill_byte(device, LARGE, 0);
        memset(back, 0, LARGE);
        CUresult there = cuMemcpyHtoDAsync_v2(device, source, LARGE, stream);
        CUresult away = cuMemcpyDtoHAsync_v2(back, device, LARGE, stream);
        bool right = is_pattern(back, LARGE, 210);
        must(cuStreamGetPriority(stream, &now), "cuStreamGetPriority");
        must(cuStreamGetFlags(stream, &flags), "cuStreamGetFlags");
        char variant[32];
        snprintf(variant, sizeof variant, "%d", priority);
        report(variant, "ret=%d,%d bytes_ok=%d same=%d flags=%u", there, away, right, now == priority, flags);
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    }
    must(cuMemFree_v2(device), "cuMemFree");
    host_free(source, LARGE);
    host_free(back, LARGE);
}

/* What callbacks saw, in their order. */
struct seen {
    char text[16];
    _Atomic int length;
    const unsigned char *pinned;
    size_t bytes;
    unsigned seed;
};

static void note(struct seen *seen, char what)
{
    seen->text[seen->length++] = what;
}

static void look(void *argument)
{
    struct seen *seen = argument;
    note(seen, is_pattern(seen->pinned, seen->bytes, seen->seed) ? 'y' : 'n');
}

static void called_back(CUstream stream, CUresult status, void *argument)
{
    (void)stream;
    note(argument, status == CUDA_SUCCESS ? 'c' : 'e');
}

/* Host functions between copies: each runs after what stands before it and before what stands behind it. */
static void callbacks(void)
{
    static const size_t sizes[] = {4 * KIB, MIB, LARGE};
    for (unsigned flags = 0; flags <= CU_STREAM_NON_BLOCKING; flags++)
        for (size_t i = 0; i < 3; i++) {
            size_t bytes = sizes[i];
            CUdeviceptr device = device_memory(bytes);
            CUstream stream = new_stream(flags);
            unsigned char *source = host_pattern(bytes, 220), *back = host_zeros(bytes);
            struct seen seen = {.bytes = bytes, .seed = 220};
            must(cuMemHostAlloc((void **)&seen.pinned, bytes, 0), "cuMemHostAlloc");
            memset((void *)seen.pinned, 0, bytes);
            must(cuStreamAddCallback(stream, called_back, &seen, 0), "cuStreamAddCallback");
            must(cuLaunchHostFunc(stream, look, &seen), "cuLaunchHostFunc");
            CUresult r1 = cuMemcpyHtoDAsync_v2(device, source, bytes, stream);
            memset(source, 0, bytes);
            CUresult r2 = cuMemcpyDtoHAsync_v2((void *)seen.pinned, device, bytes, stream);
            must(cuLaunchHostFunc(stream, look, &seen), "cuLaunchHostFunc");
            CUresult r3 = cuMemcpyDtoHAsync_v2(back, device, bytes, stream);
            int before = seen.length;
            must(cuStreamAddCallback(stream, called_back, &seen, 0), "cuStreamAddCallback");
            must(cuStreamSynchronize(stream), "cuStreamSynchronize");
            char variant[64];
            snprintf(variant, sizeof variant, "%s %s", flags ? "non-blocking" : "blocking", size_name(bytes));
            report(variant, "ret=%d,%d,%d before=%d saw=%s bytes_ok=%d", r1, r2, r3, before, seen.text,
                   is_pattern(back, bytes, 220));
            must(cuMemFreeHost((void *)seen.pinned), "cuMemFreeHost");
            must(cuMemFree_v2(device), "cuMemFree");
            must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
            host_free(source, bytes);
            host_free(back, bytes);
        }
}

enum { THREADS = 12, ROUNDS = 8 };

struct worker {
    unsigned number;
    int errors, wrong;
};

/* Each thread's own stream of a flavour of its own, odd sizes, odd addresses. */
static void *work(void *argument)
{
    struct worker *w = argument;
    bind_context();
    bool per_thread = w->number % 3 == 2;
    CUstream stream = per_thread ? CU_STREAM_PER_THREAD : new_stream(w->number % 3 ? CU_STREAM_NON_BLOCKING : 0);
    CUdeviceptr device = device_memory(LARGE);
    unsigned char *source = host_zeros(LARGE), *back = host_zeros(LARGE);
    for (unsigned round = 0; round < ROUNDS; round++) {
        size_t bytes = (size_t[]){70001, MIB + 3, 3 * MIB - 1, 9 * MIB + 77}[(round + w->number) % 4];
        unsigned seed = 1000 * w->number + round, shift = (w->number + 7 * round) % 61;
        fill_pattern(source + shift, bytes, seed);
        CUresult there = cuMemcpyHtoDAsync_v2(device + shift, source + shift, bytes, stream);
        memset(source + shift, 0xee, bytes);
        CUresult away = cuMemcpyDtoHAsync_v2(back + 2 * shift, device + shift, bytes, stream);
        w->errors += there != 0 || away != 0;
        w->wrong += !is_pattern(back + 2 * shift, bytes, seed);
    }
    if (!per_thread)
        must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
    host_free(source, LARGE);
    host_free(back, LARGE);
    return NULL;
}

static void many_threads(void)
{
    pthread_t threads[THREADS];
    struct worker workers[THREADS];
    int errors = 0, wrong = 0;
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i] = (struct worker){.number = i};
        must(pthread_create(&threads[i], NULL, work, &workers[i]), "pthread_create");
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        errors += workers[i].errors;
        wrong += workers[i].wrong;
    }
    report("", "errors=%d bytes_ok=%d", errors, wrong == 0);
}

struct meanwhile { CUdeviceptr device; unsigned char *host; CUresult there, away; bool right; };

static void copy_on_per_thread(void *argument)
{
    struct meanwhile *m = argument;
    fill_pattern(m->host, LARGE, 230);
    m->there = cuMemcpyHtoDAsync_v2_ptsz(m->device, m->host, LARGE, NULL);
    memset(m->host, 0, LARGE);
    m->away = cuMemcpyDtoH_v2_ptds(m->host, m->device, LARGE);
    m->right = is_pattern(m->host, LARGE, 230);
}

/* One thread's default stream is busy; the other's goes on, unless it is the legacy one, which waits for all of them. */
static void per_thread_overlap(void)
{
    struct meanwhile m = {device_memory(LARGE), host_zeros(LARGE), -1, -1, false};
    struct gate gate;
    close_gate(CU_STREAM_PER_THREAD, &gate, PATIENCE_MS);
    on_other_thread(copy_on_per_thread, &m);
    int waited = open_gate(&gate);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    report("another thread's", "ret=%d,%d waited=%d bytes_ok=%d", m.there, m.away, waited, m.right);
    CUstream stream = new_stream(0);
    close_gate(stream, &gate, PATIENCE_MS);
    copy_on_per_thread(&m);
    waited = open_gate(&gate);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    report("beside a blocking stream", "ret=%d,%d waited=%d bytes_ok=%d", m.there, m.away, waited, m.right);
    close_gate(CU_STREAM_PER_THREAD, &gate, PATIENCE_MS);
    CUresult result = cuMemcpyDtoH_v2(m.host, m.device, LARGE);
    waited = open_gate(&gate);
    report("legacy behind it", "ret=%d waited=%d bytes_ok=%d", result, waited, is_pattern(m.host, LARGE, 230));
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(m.device), "cuMemFree");
    host_free(m.host, LARGE);
}

const struct contract_case stream_cases[] = {
    {"does_not_wait", does_not_wait}, {"waits_for_word", waits_for_word}, {"priorities", priorities},
    {"callbacks", callbacks}, {"many_threads", many_threads}, {"per_thread_overlap", per_thread_overlap}, {0}};
