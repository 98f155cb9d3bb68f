/* The copy functions of libcuda.
 *
 * A copy checks its arguments, finds out which memory each side is, and then takes the driver's way: a queued DMA, a
 * slow walk through the driver's buffer on the calling thread, or a small private copy of the source that is queued. */
#include "internal.h"

#include <stdlib.h>

/* A busy stream takes an asynchronous HtoD copy up to this size without waiting (driver 580.159.04). */
enum { STAGED_AT_ONCE_BYTES = 1 << 20 };

/* What a function demands of a side: SIDE_DEVICE is memory that the driver knows. A "host" side may be device memory
 * too under unified addressing. */
enum side { SIDE_ANY, SIDE_HOST = SIDE_ANY, SIDE_DEVICE };

struct request {
    struct transfer transfer;
    enum side dst, src;
    bool synchronous, per_thread;
    CUstream stream;
};

static size_t span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    return (depth - 1) * slice + (height - 1) * pitch + width;
}

static bool allowed(enum side side, enum kind kind)
{
    return kind != KIND_STRADDLING && (side == SIDE_ANY || kind != KIND_PAGEABLE);
}

/* Fills the copy part of `work`; 1 where the driver refuses the addresses. */
static CUresult classify(const struct request *request, struct work *work)
{
    const struct transfer *t = &request->transfer;
    if (!t->dst || !t->src)
        return CUDA_ERROR_INVALID_VALUE;
    if (t->height * t->depth > 1 && (t->dst_pitch < t->width || t->src_pitch < t->width))
        return CUDA_ERROR_INVALID_VALUE;
    enum kind dst = memory_kind((uintptr_t)t->dst, span(t->width, t->height, t->depth, t->dst_pitch, t->dst_slice));
    enum kind src = memory_kind((uintptr_t)t->src, span(t->width, t->height, t->depth, t->src_pitch, t->src_slice));
    if (!allowed(request->dst, dst) || !allowed(request->src, src))
        return CUDA_ERROR_INVALID_VALUE;
    work->kind = WORK_COPY;
    work->copy.transfer = *t;
    if (dst == KIND_DEVICE)
        work->copy.lane = src == KIND_DEVICE ? LANE_LOCAL : LANE_HTOD;
    else
        work->copy.lane = src == KIND_DEVICE ? LANE_DTOH : LANE_LOCAL;
    work->copy.pageable = dst == KIND_PAGEABLE || src == KIND_PAGEABLE;
    return CUDA_SUCCESS;
}

/* Asks for every N-th copy to fail. */
static bool injected_failure(void)
{
    static _Atomic uint64_t calls;
    return knobs.fail_copy_every && ++calls % knobs.fail_copy_every == 0;
}

/* Spoils a byte of every N-th copy, so that tests can see that wrong bytes are noticed. */
static void corrupt(const struct transfer *t)
{
    static _Atomic uint64_t calls;
    if (knobs.corrupt_every && ++calls % knobs.corrupt_every == 0)
        t->dst[t->width / 2] ^= 1;
}

static bool stages_without_waiting(const struct work *work, size_t bytes)
{
    return work->copy.pageable && work->copy.lane == LANE_HTOD && bytes <= STAGED_AT_ONCE_BYTES;
}

/* Work on the calling thread, in the stream's order; `sched` is held on entry and exit. */
static CUresult run_here(CUstream stream, struct work *work)
{
    struct ticket ticket;
    ticket_take(stream, &ticket, NULL);
    ticket_wait(&ticket);
    CUresult result = stream->context->fault;
    if (result == CUDA_SUCCESS) {
        pthread_mutex_unlock(&sched);
        work_run(work);
        corrupt(&work->copy.transfer);
        pthread_mutex_lock(&sched);
    }
    ticket_finish(&ticket);
    return result;
}

/* Queues the copy with a private copy of its source; `sched` is not held. */
static CUresult stage_and_queue(const struct request *request, struct work *work, size_t bytes)
{
    char *staged = malloc(bytes);
    if (!staged)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct transfer *t = &work->copy.transfer;
    link_stage(t, staged);
    t->src = work->copy.staged = staged;
    t->src_pitch = t->width;
    t->src_slice = t->width * t->height;
    work->kind = WORK_STAGED_COPY;
    CUstream stream;
    pthread_mutex_lock(&sched);
    CUresult result = stream_resolve(request->stream, request->per_thread, &stream);
    if (result == CUDA_SUCCESS)
        stream_submit(stream, work, NULL);
    else
        free(staged);
    pthread_mutex_unlock(&sched);
    return result;
}

static CUresult copy(const struct request *request)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (injected_failure())
        return knobs.fail_copy_code;
    const struct transfer *t = &request->transfer;
    size_t bytes = t->width * t->height * t->depth;
    struct work work = {0};
    if (bytes && (result = classify(request, &work)) != CUDA_SUCCESS)
        return result;

    CUstream stream;
    bool taken = false, stage = false;
    pthread_mutex_lock(&sched);
    result = stream_resolve(request->stream, request->per_thread, &stream);
    if (result == CUDA_SUCCESS)
        result = request->synchronous ? capture_synchronous_copy(stream) : capture_work(stream, &work, &taken);
    if (result == CUDA_SUCCESS && !taken && bytes) {
        stage = !request->synchronous && stages_without_waiting(&work, bytes) && !stream_idle(stream);
        if (!stage && (request->synchronous || work.copy.pageable))
            result = run_here(stream, &work);
        else if (!stage)
            stream_submit(stream, &work, NULL);
    }
    pthread_mutex_unlock(&sched);
    return stage ? stage_and_queue(request, &work, bytes) : result;
}

static struct transfer linear(uintptr_t dst, uintptr_t src, size_t bytes)
{
    return (struct transfer){.dst = (char *)dst, .src = (const char *)src, .width = bytes, .height = 1, .depth = 1,
                             .dst_pitch = bytes, .src_pitch = bytes, .dst_slice = bytes, .src_slice = bytes};
}

static CUresult copy_linear(uintptr_t dst, enum side dst_side, uintptr_t src, enum side src_side, size_t bytes,
                            bool synchronous, bool per_thread, CUstream stream)
{
    return copy(&(struct request){linear(dst, src, bytes), dst_side, src_side, synchronous, per_thread, stream});
}

/* One side of a pitched copy: its first byte, or null for what the stand-in does not have (arrays). */
static CUresult place(CUmemorytype type, const void *host, CUdeviceptr device, size_t offset, char **address,
                      enum side *side)
{
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        *address = (char *)(uintptr_t)host;
        *side = SIDE_HOST;
        break;
    case CU_MEMORYTYPE_DEVICE:
        *address = (char *)(uintptr_t)device;
        *side = SIDE_DEVICE;
        break;
    case CU_MEMORYTYPE_UNIFIED:
        *address = (char *)(uintptr_t)device;
        *side = SIDE_ANY;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (*address)
        *address += offset;
    return CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *p, bool synchronous, bool per_thread, CUstream stream)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    struct request request = {.synchronous = synchronous, .per_thread = per_thread, .stream = stream};
    struct transfer *t = &request.transfer;
    *t = (struct transfer){.width = p->WidthInBytes, .height = p->Height, .depth = p->Depth,
                           .dst_pitch = p->dstPitch ? p->dstPitch : p->WidthInBytes,
                           .src_pitch = p->srcPitch ? p->srcPitch : p->WidthInBytes};
    t->dst_slice = t->dst_pitch * (p->dstHeight ? p->dstHeight : p->Height);
    t->src_slice = t->src_pitch * (p->srcHeight ? p->srcHeight : p->Height);
    char *src;
    CUresult result = place(p->dstMemoryType, p->dstHost, p->dstDevice,
                            p->dstZ * t->dst_slice + p->dstY * t->dst_pitch + p->dstXInBytes, &t->dst, &request.dst);
    if (result == CUDA_SUCCESS)
        result = place(p->srcMemoryType, p->srcHost, p->srcDevice,
                       p->srcZ * t->src_slice + p->srcY * t->src_pitch + p->srcXInBytes, &src, &request.src);
    if (result != CUDA_SUCCESS)
        return result;
    t->src = src;
    return copy(&request);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, bool synchronous, bool per_thread, CUstream stream)
{
    if (!p || (p->srcPitch && p->srcPitch < p->srcXInBytes + p->WidthInBytes) ||
        (p->dstPitch && p->dstPitch < p->dstXInBytes + p->WidthInBytes))
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D wide = {
        .srcXInBytes = p->srcXInBytes, .srcY = p->srcY, .srcMemoryType = p->srcMemoryType, .srcHost = p->srcHost,
        .srcDevice = p->srcDevice, .srcArray = p->srcArray, .srcPitch = p->srcPitch, .dstXInBytes = p->dstXInBytes,
        .dstY = p->dstY, .dstMemoryType = p->dstMemoryType, .dstHost = p->dstHost, .dstDevice = p->dstDevice,
        .dstArray = p->dstArray, .dstPitch = p->dstPitch, .WidthInBytes = p->WidthInBytes, .Height = p->Height,
        .Depth = 1};
    return copy_3d(&wide, synchronous, per_thread, stream);
}

/* An exported copy function starts as the real driver's do (580.159.04): four whole instructions, and a compare
 * relative to rip at byte 11. It hands its arguments on to body_NAME untouched. */
/* What may stand before the first push: drivers up to 535 look at a flag there. */
#ifdef STANDIN_COMPARES
#define STANDIN_FIRST "cmpl $0, standin_profiler(%rip)\n"
#else
#define STANDIN_FIRST
#endif
__attribute__((visibility("hidden"), used)) int standin_profiler;

#ifdef __CET__
#define LANDING "endbr64\n"
#else
#define LANDING ""
#endif

#define ENTRY(name)                                                                                                    \
    __asm__(".pushsection .text\n.p2align 4\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"               \
            ".cfi_startproc\n" LANDING                                                                                 \
            STANDIN_FIRST                                                                                              \
            "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset %rbp, -16\n"                                               \
            "mov %rsp, %rbp\n.cfi_def_cfa_register %rbp\n"                                                             \
            "push %r12\n.cfi_offset %r12, -24\n"                                                                       \
            "push %rbx\n.cfi_offset %rbx, -32\n"                                                                       \
            "sub $8, %rsp\n"                                                                                           \
            "cmpl $0, standin_profiler(%rip)\n"                                                                        \
            "jne 1f\n"                                                                                                 \
            "push $0\n"                                                                                                \
            "call body_" #name "\n"                                                                                    \
            "add $16, %rsp\n"                                                                                          \
            "pop %rbx\npop %r12\npop %rbp\n.cfi_remember_state\n.cfi_def_cfa %rsp, 8\nret\n"                           \
            "1: .cfi_restore_state\nmov $999, %eax\nadd $8, %rsp\n"                                                    \
            "pop %rbx\npop %r12\npop %rbp\n.cfi_def_cfa %rsp, 8\nret\n"                                                \
            ".cfi_endproc\n.size " #name ", . - " #name "\n.popsection\n")

#define BODY(name, ...) __attribute__((visibility("hidden"), used)) CUresult body_##name(__VA_ARGS__)

#define COPY_BYTES(name, dst_type, dst_side, src_type, src_side)                                                       \
    BODY(name, dst_type dst, src_type src, size_t bytes)                                                               \
    {                                                                                                                  \
        return copy_linear((uintptr_t)dst, dst_side, (uintptr_t)src, src_side, bytes, true, false, NULL);              \
    }                                                                                                                  \
    BODY(name##_ptds, dst_type dst, src_type src, size_t bytes)                                                        \
    {                                                                                                                  \
        return copy_linear((uintptr_t)dst, dst_side, (uintptr_t)src, src_side, bytes, true, true, NULL);               \
    }                                                                                                                  \
    ENTRY(name);                                                                                                       \
    ENTRY(name##_ptds);

#define COPY_BYTES_ASYNC(name, dst_type, dst_side, src_type, src_side)                                                 \
    BODY(name, dst_type dst, src_type src, size_t bytes, CUstream stream)                                              \
    {                                                                                                                  \
        return copy_linear((uintptr_t)dst, dst_side, (uintptr_t)src, src_side, bytes, false, false, stream);           \
    }                                                                                                                  \
    BODY(name##_ptsz, dst_type dst, src_type src, size_t bytes, CUstream stream)                                       \
    {                                                                                                                  \
        return copy_linear((uintptr_t)dst, dst_side, (uintptr_t)src, src_side, bytes, false, true, stream);            \
    }                                                                                                                  \
    ENTRY(name);                                                                                                       \
    ENTRY(name##_ptsz);

#define COPY_STRUCT(name, type, function)                                                                              \
    BODY(name, const type *copy) { return function(copy, true, false, NULL); }                                         \
    BODY(name##_ptds, const type *copy) { return function(copy, true, true, NULL); }                                   \
    ENTRY(name);                                                                                                       \
    ENTRY(name##_ptds);

#define COPY_STRUCT_ASYNC(name, type, function)                                                                        \
    BODY(name, const type *copy, CUstream stream) { return function(copy, false, false, stream); }                     \
    BODY(name##_ptsz, const type *copy, CUstream stream) { return function(copy, false, true, stream); }               \
    ENTRY(name);                                                                                                       \
    ENTRY(name##_ptsz);

COPY_BYTES(cuMemcpyHtoD_v2, CUdeviceptr, SIDE_DEVICE, const void *, SIDE_HOST)
COPY_BYTES(cuMemcpyDtoH_v2, void *, SIDE_HOST, CUdeviceptr, SIDE_DEVICE)
COPY_BYTES(cuMemcpyDtoD_v2, CUdeviceptr, SIDE_DEVICE, CUdeviceptr, SIDE_DEVICE)
COPY_BYTES(cuMemcpy, CUdeviceptr, SIDE_ANY, CUdeviceptr, SIDE_ANY)
COPY_BYTES_ASYNC(cuMemcpyHtoDAsync_v2, CUdeviceptr, SIDE_DEVICE, const void *, SIDE_HOST)
COPY_BYTES_ASYNC(cuMemcpyDtoHAsync_v2, void *, SIDE_HOST, CUdeviceptr, SIDE_DEVICE)
COPY_BYTES_ASYNC(cuMemcpyDtoDAsync_v2, CUdeviceptr, SIDE_DEVICE, CUdeviceptr, SIDE_DEVICE)
COPY_BYTES_ASYNC(cuMemcpyAsync, CUdeviceptr, SIDE_ANY, CUdeviceptr, SIDE_ANY)
COPY_STRUCT(cuMemcpy2D_v2, CUDA_MEMCPY2D, copy_2d)
COPY_STRUCT(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, copy_2d)
COPY_STRUCT(cuMemcpy3D_v2, CUDA_MEMCPY3D, copy_3d)
COPY_STRUCT_ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, copy_2d)
COPY_STRUCT_ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, copy_3d)

#define COPY_PEER(name, synchronous, per_thread, stream, ...)                                                          \
    BODY(name, CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, __VA_ARGS__)            \
    {                                                                                                                  \
        if (!dst_context || !src_context)                                                                              \
            return CUDA_ERROR_INVALID_VALUE;                                                                           \
        return copy_linear(dst, SIDE_DEVICE, src, SIDE_DEVICE, bytes, synchronous, per_thread, stream);                \
    }                                                                                                                  \
    ENTRY(name);
COPY_PEER(cuMemcpyPeer, true, false, NULL, size_t bytes)
COPY_PEER(cuMemcpyPeer_ptds, true, true, NULL, size_t bytes)
COPY_PEER(cuMemcpyPeerAsync, false, false, stream, size_t bytes, CUstream stream)
COPY_PEER(cuMemcpyPeerAsync_ptsz, false, true, stream, size_t bytes, CUstream stream)
