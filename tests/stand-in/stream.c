/* Streams: in order, each with a thread of its own, and the rules of the default streams.
 *
 * Every piece of work gets a ticket: the next number of its stream, and the tickets of other streams that must have run
 * before it. Queued work runs on the stream's thread; work that the driver does on the calling thread (pageable copies,
 * synchronous copies) takes a ticket as well and waits for its turn. Tickets only wait for older tickets, so no
 * two can wait for each other. */
#define _GNU_SOURCE
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

pthread_mutex_t sched = PTHREAD_MUTEX_INITIALIZER;

enum { MAX_OWN = 16 };
static __thread struct { CUcontext context; CUstream stream; } own[MAX_OWN];
static __thread bool calling_host_function;
static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

void stream_put(CUstream stream)
{
    if (--stream->references == 0) {
        pthread_cond_destroy(&stream->work_cond);
        pthread_cond_destroy(&stream->done_cond);
        free(stream);
    }
}

static bool synchronises_with_legacy(CUstream stream)
{
    return !stream->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING);
}

static bool must_wait_for(CUstream stream, CUstream other)
{
    return other != stream && other->done < other->issued &&
           ((stream->legacy && synchronises_with_legacy(other)) ||
            (other->legacy && synchronises_with_legacy(stream)));
}

bool stream_idle(CUstream stream)
{
    if (stream->done < stream->issued)
        return false;
    for (CUstream other = stream->context->streams; other; other = other->next)
        if (must_wait_for(stream, other))
            return false;
    return true;
}

void ticket_take(CUstream stream, struct ticket *ticket, const struct dependency *extra)
{
    int count = extra != NULL;
    for (CUstream other = stream->context->streams; other; other = other->next)
        count += must_wait_for(stream, other);
    *ticket = (struct ticket){.stream = stream, .number = ++stream->issued};
    stream->references++;
    if (count == 0)
        return;
    ticket->waits = malloc((size_t)count * sizeof *ticket->waits);
    if (extra)
        ticket->waits[ticket->wait_count++] = *extra;
    for (CUstream other = stream->context->streams; other; other = other->next)
        if (must_wait_for(stream, other))
            ticket->waits[ticket->wait_count++] = (struct dependency){other, other->issued};
    for (int i = 0; i < ticket->wait_count; i++)
        ticket->waits[i].stream->references++;
}

void ticket_wait(struct ticket *ticket)
{
    CUstream stream = ticket->stream;
    while (stream->done + 1 < ticket->number)
        pthread_cond_wait(&stream->done_cond, &sched);
    for (int i = 0; i < ticket->wait_count; i++) {
        struct dependency *wait = &ticket->waits[i];
        while (wait->stream->done < wait->number)
            pthread_cond_wait(&wait->stream->done_cond, &sched);
        stream_put(wait->stream);
    }
    free(ticket->waits);
}

void ticket_finish(struct ticket *ticket)
{
    ticket->stream->done = ticket->number;
    pthread_cond_broadcast(&ticket->stream->done_cond);
    stream_put(ticket->stream);
}

bool in_host_function(void)
{
    return calling_host_function;
}

static void wait_for_word(const uint32_t *word, uint32_t value)
{
    struct timespec rest = {0, 50000};
    while ((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
        nanosleep(&rest, NULL);
}

void work_run(struct work *work)
{
    switch (work->kind) {
    case WORK_NOTHING:
        break;
    case WORK_COPY:
        (work->copy.pageable ? link_pageable : link_dma)(work->copy.lane, &work->copy.transfer);
        break;
    case WORK_STAGED_COPY:
        link_dma(work->copy.lane, &work->copy.transfer);
        free(work->copy.staged);
        break;
    case WORK_MEMSET:
        memset(work->memset.address, work->memset.value, work->memset.bytes);
        break;
    case WORK_HOST_FUNC:
        calling_host_function = true;
        work->host.function(work->host.user_data);
        calling_host_function = false;
        break;
    case WORK_WRITE32:
        __atomic_store_n(work->write.address, work->write.value, __ATOMIC_RELEASE);
        break;
    case WORK_WAIT32:
        wait_for_word(work->write.address, work->write.value);
        break;
    case WORK_EVENT:
        event_reached(work->event.event, work->event.generation);
        break;
    case WORK_FREE:
        memory_free_device(work->free);
        break;
    case WORK_FAULT:
        pthread_mutex_lock(&sched);
        work->fault->fault = CUDA_ERROR_ILLEGAL_ADDRESS;
        pthread_mutex_unlock(&sched);
        break;
    }
}

static void *stream_thread(void *argument)
{
    CUstream stream = argument;
    prctl(PR_SET_TIMERSLACK, 1000ul);
    pthread_mutex_lock(&sched);
    for (;;) {
        while (!stream->first && stream->alive)
            pthread_cond_wait(&stream->work_cond, &sched);
        struct item *item = stream->first;
        if (!item)
            break;
        stream->first = item->next;
        if (!stream->first)
            stream->last = NULL;
        ticket_wait(&item->ticket);
        /* Behind a fault nothing happens any more, but those who wait are told. */
        if (!stream->context->fault || item->work.kind == WORK_EVENT) {
            pthread_mutex_unlock(&sched);
            work_run(&item->work);
            pthread_mutex_lock(&sched);
        }
        ticket_finish(&item->ticket);
        free(item);
    }
    stream_put(stream);
    pthread_mutex_unlock(&sched);
    return NULL;
}

/* Small work that a stream with nothing ahead of it may as well do at once. */
static bool instant(enum work_kind kind)
{
    return kind == WORK_NOTHING || kind == WORK_WRITE32;
}

void stream_submit(CUstream stream, const struct work *work, const struct dependency *extra)
{
    if (!extra && instant(work->kind) && stream_idle(stream)) {
        struct work now = *work;
        work_run(&now);
        return;
    }
    struct item *item = calloc(1, sizeof *item);
    item->work = *work;
    ticket_take(stream, &item->ticket, extra);
    if (stream->last)
        stream->last->next = item;
    else
        stream->first = item;
    stream->last = item;
    pthread_cond_signal(&stream->work_cond);
}

void stream_drain(CUstream stream)
{
    uint64_t number = stream->issued;
    stream->references++;
    while (stream->done < number)
        pthread_cond_wait(&stream->done_cond, &sched);
    stream_put(stream);
}

void context_drain(CUcontext context)
{
    /* The list may change while we wait; what is added later need not be waited for, and a closed stream has left it. */
    int count = 0, capacity = 0;
    for (CUstream s = context->streams; s; s = s->next)
        capacity++;
    struct dependency *all = malloc((size_t)(capacity + 1) * sizeof *all);
    for (CUstream s = context->streams; s; s = s->next) {
        s->references++;
        all[count++] = (struct dependency){s, s->issued};
    }
    for (int i = 0; i < count; i++) {
        while (all[i].stream->done < all[i].number)
            pthread_cond_wait(&all[i].stream->done_cond, &sched);
        stream_put(all[i].stream);
    }
    free(all);
}

CUresult stream_new(CUcontext context, unsigned flags, int priority, bool legacy, CUstream *result)
{
    CUstream stream = calloc(1, sizeof *stream);
    static unsigned long long last_id;
    stream->id = ++last_id;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->legacy = legacy;
    stream->alive = true;
    stream->references = 2; /* the context's list and the thread */
    pthread_cond_init(&stream->work_cond, NULL);
    pthread_cond_init(&stream->done_cond, NULL);
    /* The thread takes no signal of the program's. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, stream_thread, stream);
    if (!failed)
        pthread_setname_np(thread, "standin-stream");
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(stream);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stream->next = context->streams;
    context->streams = stream;
    *result = stream;
    return CUDA_SUCCESS;
}

/* Work that is queued still runs; the thread ends after it. */
void stream_close(CUstream stream)
{
    for (CUstream *link = &stream->context->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    capture_stream_gone(stream);
    stream->alive = false;
    pthread_cond_signal(&stream->work_cond);
    stream_put(stream);
}

static bool is_open(CUstream stream, CUcontext context)
{
    for (CUstream s = context->streams; s; s = s->next)
        if (s == stream)
            return true;
    return false;
}

static void close_own_streams(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&sched);
    for (int i = 0; i < MAX_OWN; i++)
        if (own[i].context && own[i].context->alive && is_open(own[i].stream, own[i].context))
            stream_close(own[i].stream);
    pthread_mutex_unlock(&sched);
}

static void make_own_key(void)
{
    pthread_key_create(&own_key, close_own_streams);
}

static CUresult own_stream(CUcontext context, CUstream *stream)
{
    for (int i = 0; i < MAX_OWN; i++) {
        if (own[i].context == context) {
            *stream = own[i].stream;
            return CUDA_SUCCESS;
        }
        if (own[i].context && own[i].context->alive)
            continue;
        CUresult result = stream_new(context, 0, 0, false, stream);
        if (result == CUDA_SUCCESS) {
            own[i].context = context;
            own[i].stream = *stream;
            pthread_once(&own_once, make_own_key);
            pthread_setspecific(own_key, own);
        }
        return result;
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult stream_resolve(CUstream handle, bool per_thread, CUstream *stream)
{
    CUcontext context;
    CUresult result = context_current_locked(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread))
        return own_stream(context, stream);
    if (handle == CU_STREAM_LEGACY || !handle) {
        *stream = context->legacy;
        return CUDA_SUCCESS;
    }
    if (!is_open(handle, context))
        return CUDA_ERROR_INVALID_HANDLE;
    *stream = handle;
    return CUDA_SUCCESS;
}
