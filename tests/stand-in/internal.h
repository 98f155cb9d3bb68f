/* What the parts of the stand-in's libcuda share.
 *
 * Locks: `sched` guards contexts, streams, events and captures; the range table in memory.c has its own lock, which is
 * taken last and never held over a wait. Bytes move with no lock held. */
#ifndef STAND_IN_INTERNAL_H
#define STAND_IN_INTERNAL_H

#include "cuda_stand_in.h"

#include <pthread.h>
#include <stdbool.h>

#define EXPORT __attribute__((visibility("default")))
#define GIB (1ull << 30)

/* Knobs, read once by cuInit from STANDIN_* (README.md lists them). */
struct knobs {
    double pinned_gbps, pageable_gbps;
    uint64_t call_ns;
    size_t hostalloc_limit_bytes, memory_bytes;
    uint64_t fail_copy_every, corrupt_every;
    int fail_copy_code, devices;
    bool no_write_value, host_page_tables, log;
};
extern struct knobs knobs;

/* device.c: returns 0, or 3 before cuInit and in a forked child. */
CUresult require_init(void);
void trace_call(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* link.c: the modelled link. */
enum lane { LANE_HTOD, LANE_DTOH, LANE_LOCAL };
struct transfer {
    char *dst;
    const char *src;
    size_t width, height, depth;
    size_t dst_pitch, src_pitch, dst_slice, src_slice;
};
uint64_t now_ns(void);
/* Moves the bytes as the DMA engine of `lane` does: at the pinned rate, one transfer after the other. */
void link_dma(enum lane lane, const struct transfer *transfer);
/* Moves the bytes as the driver does for pageable memory: through its own small buffer, on the calling thread. */
void link_pageable(enum lane lane, const struct transfer *transfer);
/* Copies the source of `transfer` into `buffer`, rows packed, as fast as the driver stages a small copy. */
void link_stage(const struct transfer *transfer, char *buffer);
void link_init(void);

/* memory.c: which memory an address belongs to. */
enum kind { KIND_PAGEABLE, KIND_PINNED, KIND_REGISTERED, KIND_MANAGED, KIND_DEVICE, KIND_STRADDLING };
CUresult memory_init(void);
/* The driver looks up the first address: what starts in ordinary memory is ordinary, wherever it ends; what starts in
 * memory that it knows must end there (driver 580.159.04). */
enum kind memory_kind(uintptr_t address, size_t bytes);
void memory_release_context(CUcontext context);
/* Ends a device or managed allocation; 1 if `address` starts none. */
CUresult memory_free_device(uintptr_t address);
/* Makes a mapping of vmm.c's known as device memory, and forgets all of those within a range; 1 if there is none. */
void memory_add_mapped(uintptr_t base, size_t bytes, CUcontext context);
CUresult memory_remove_mapped(uintptr_t base, size_t bytes);
/* Puts a device allocation into shared memory: *fd holds its bytes from now on. */
CUresult memory_share(uintptr_t address, int *fd, size_t *bytes);

/* One piece of work in a stream or a node of a graph. */
enum work_kind { WORK_NOTHING, WORK_COPY, WORK_STAGED_COPY, WORK_MEMSET, WORK_HOST_FUNC, WORK_WRITE32, WORK_WAIT32,
                 WORK_EVENT, WORK_FREE, WORK_FAULT };
struct work {
    enum work_kind kind;
    union {
        struct { enum lane lane; bool pageable; struct transfer transfer; char *staged; } copy;
        struct { char *address; int value; size_t bytes; } memset;
        struct { CUhostFn function; void *user_data; } host;
        struct { uint32_t *address; uint32_t value; } write;
        struct { CUevent event; uint64_t generation; } event;
        uintptr_t free;
        CUcontext fault;
    };
};

/* stream.c. A stream runs its work by ticket number; `done` is the last number that has run. */
struct dependency { CUstream stream; uint64_t number; };
struct ticket {
    CUstream stream;
    uint64_t number;
    struct dependency *waits;
    int wait_count;
};
struct item {
    struct ticket ticket;
    struct work work;
    struct item *next;
};
struct CUstream_st {
    CUcontext context;
    CUstream next; /* in the context */
    unsigned long long id;
    int references, priority;
    unsigned flags;
    bool legacy, alive;
    uint64_t issued, done;
    struct item *first, *last;
    pthread_cond_t work_cond, done_cond;
    struct capture *capture;
};
extern pthread_mutex_t sched;

CUresult stream_new(CUcontext context, unsigned flags, int priority, bool legacy, CUstream *stream);
void stream_close(CUstream stream);
void stream_put(CUstream stream);
CUresult stream_resolve(CUstream handle, bool per_thread, CUstream *stream);
bool stream_idle(CUstream stream);
void stream_submit(CUstream stream, const struct work *work, const struct dependency *extra);
/* The calling thread does the work itself, in the stream's order: take, wait, (work with `sched` released), finish. */
void ticket_take(CUstream stream, struct ticket *ticket, const struct dependency *extra);
void ticket_wait(struct ticket *ticket);
void ticket_finish(struct ticket *ticket);
/* Waits until everything issued so far has run. */
void stream_drain(CUstream stream);
void context_drain(CUcontext context);
void work_run(struct work *work);
void event_reached(CUevent event, uint64_t generation);
/* Whether the calling thread is in a host function, which may not call CUDA. */
bool in_host_function(void);

/* context.c */
struct CUctx_st {
    unsigned long long id;
    int device, retained;
    unsigned flags;
    bool alive, primary;
    CUresult fault; /* of a kernel: every call returns it from then on */
    CUstream legacy, streams;
    CUcontext next;
};
/* The calling thread's context; 201 without one, 800 in a host function, the context's fault if it has one. */
CUresult context_current(CUcontext *context);
/* Same, `sched` held already. */
CUresult context_current_locked(CUcontext *context);

/* capture.c; `sched` held. */
/* For work about to enter `stream`: *taken says that it became a node of a graph. */
CUresult capture_work(CUstream stream, const struct work *work, bool *taken);
/* For a synchronous copy: it meets only the captures that its own stream has to do with. */
CUresult capture_synchronous_copy(CUstream stream);
/* For a call that waits for `stream` or asks for its state: unsafe under any global capture besides. */
CUresult capture_synchronous(CUstream stream);
/* For a call that global-mode captures forbid. */
CUresult capture_unsafe_call(void);
CUresult capture_unsafe_call_unlocked(void);
/* Breaks every capture in the context, for cuCtxSynchronize. */
CUresult capture_context_synchronous(CUcontext context);
void capture_stream_gone(CUstream stream);
/* False if that capture has ended already. */
bool capture_break(struct capture *capture);
/* Makes `stream` part of a capture, as a wait for a captured event does. */
CUresult capture_join(CUstream stream, struct capture *capture);

#endif
