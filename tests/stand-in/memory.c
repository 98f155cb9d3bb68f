/* Device, pinned, registered and managed memory, and the table that tells them apart.
 *
 * Device memory is ordinary memory from one reserved region. Nothing about an address says what it is: only the table
 * knows, as with a real driver under unified addressing. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };

struct range {
    uintptr_t base;
    size_t bytes;
    enum kind kind;
    bool pooled;
    bool mapped; /* its pages are vmm.c's */
    int shared;  /* descriptor of the shared memory that holds it, or 0 */
    unsigned flags;
    unsigned long long id;
    CUcontext context;
};

static pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct range *ranges; /* sorted, without overlaps */
static size_t range_count, range_capacity;
static size_t pinned_bytes, device_bytes;
static unsigned long long last_id;
static uintptr_t region;

CUresult memory_init(void)
{
    void *memory = mmap(NULL, knobs.memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    /* A forked child has no device, and its parent no copy-on-write faults to pay for. */
    madvise(memory, knobs.memory_bytes, MADV_DONTFORK);
    region = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

/* Position of the first range that ends behind `address`. */
static size_t position(uintptr_t address)
{
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].base + ranges[middle].bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static struct range *find(uintptr_t address)
{
    size_t at = position(address);
    return at < range_count && ranges[at].base <= address ? &ranges[at] : NULL;
}

static bool overlaps(uintptr_t address, size_t bytes)
{
    size_t at = position(address);
    return at < range_count && ranges[at].base < address + bytes;
}

static void insert(uintptr_t base, size_t bytes, enum kind kind, bool pooled, unsigned flags, CUcontext context)
{
    if (range_count == range_capacity) {
        range_capacity = range_capacity ? 2 * range_capacity : 64;
        ranges = realloc(ranges, range_capacity * sizeof *ranges);
    }
    size_t at = position(base);
    memmove(&ranges[at + 1], &ranges[at], (range_count - at) * sizeof *ranges);
    ranges[at] = (struct range){.base = base, .bytes = bytes, .kind = kind, .pooled = pooled, .flags = flags,
                                .id = ++last_id, .context = context};
    range_count++;
}

static size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static void forget(struct range *range)
{
    switch (range->kind) {
    case KIND_DEVICE:
        if (range->mapped)
            break;
        if (range->shared) {
            mmap((void *)range->base, whole_pages(range->bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
            madvise((void *)range->base, whole_pages(range->bytes), MADV_DONTFORK);
            close(range->shared);
        }
        madvise((void *)range->base, whole_pages(range->bytes), MADV_DONTNEED);
        device_bytes -= whole_pages(range->bytes);
        break;
    case KIND_PINNED:
        munmap((void *)range->base, whole_pages(range->bytes));
        pinned_bytes -= range->bytes;
        break;
    case KIND_REGISTERED:
        pinned_bytes -= range->bytes;
        break;
    default:
        munmap((void *)range->base, whole_pages(range->bytes));
    }
    size_t at = (size_t)(range - ranges);
    memmove(range, range + 1, (range_count - at - 1) * sizeof *ranges);
    range_count--;
}

enum kind memory_kind(uintptr_t address, size_t bytes)
{
    pthread_rwlock_rdlock(&ranges_lock);
    enum kind kind = KIND_PAGEABLE;
    const struct range *range = find(address);
    /* Mappings side by side are one range. */
    while (range && range->mapped && address + bytes > range->base + range->bytes &&
           range + 1 < ranges + range_count && range[1].mapped && range[1].base == range->base + range->bytes)
        range++;
    if (range)
        kind = address + bytes <= range->base + range->bytes ? range->kind : KIND_STRADDLING;
    pthread_rwlock_unlock(&ranges_lock);
    return kind;
}

void memory_release_context(CUcontext context)
{
    pthread_rwlock_wrlock(&ranges_lock);
    for (size_t at = range_count; at-- > 0;)
        if (ranges[at].context == context)
            forget(&ranges[at]);
    pthread_rwlock_unlock(&ranges_lock);
}

/* Ends the range that starts at `address`; `unknown` is the error for memory that the driver does not know. */
static CUresult release(uintptr_t address, bool (*accepts)(enum kind), CUresult unknown)
{
    pthread_rwlock_wrlock(&ranges_lock);
    struct range *range = find(address);
    CUresult result = range ? CUDA_ERROR_INVALID_VALUE : unknown;
    if (range && range->base == address && accepts(range->kind)) {
        forget(range);
        result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

static bool on_device(enum kind kind)
{
    return kind == KIND_DEVICE || kind == KIND_MANAGED;
}

static bool pinned(enum kind kind)
{
    return kind == KIND_PINNED;
}

static bool registered(enum kind kind)
{
    return kind == KIND_REGISTERED;
}

CUresult memory_free_device(uintptr_t address)
{
    return release(address, on_device, CUDA_ERROR_INVALID_VALUE);
}

void memory_add_mapped(uintptr_t base, size_t bytes, CUcontext context)
{
    pthread_rwlock_wrlock(&ranges_lock);
    insert(base, bytes, KIND_DEVICE, false, 0, context);
    find(base)->mapped = true;
    pthread_rwlock_unlock(&ranges_lock);
}

CUresult memory_remove_mapped(uintptr_t base, size_t bytes)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&ranges_lock);
    for (struct range *range; (range = find(base)) && range->mapped && range->bytes <= bytes;) {
        base += range->bytes;
        bytes -= range->bytes;
        forget(range);
        result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

CUresult memory_share(uintptr_t address, int *fd, size_t *bytes)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&ranges_lock);
    struct range *range = find(address);
    if (range && range->kind == KIND_DEVICE && !range->mapped && !range->pooled) {
        *bytes = whole_pages(range->bytes);
        if (!range->shared) {
            range->shared = memfd_create("stand-in", MFD_CLOEXEC);
            if (ftruncate(range->shared, (off_t)*bytes) ||
                pwrite(range->shared, (void *)range->base, *bytes, 0) != (ssize_t)*bytes ||
                mmap((void *)range->base, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, range->shared, 0) ==
                    MAP_FAILED)
                abort();
        }
        *fd = range->shared;
        result = CUDA_SUCCESS;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

/* First fit in the region. */
static uintptr_t device_room(size_t bytes)
{
    uintptr_t at = region;
    for (size_t i = position(region); i < range_count && ranges[i].base < region + knobs.memory_bytes; i++) {
        if (ranges[i].base - at >= bytes)
            return at;
        at = ranges[i].base + whole_pages(ranges[i].bytes);
    }
    return region + knobs.memory_bytes - at >= bytes ? at : 0;
}

static CUresult device_alloc(CUdeviceptr *address, size_t bytes, bool pooled, CUcontext context)
{
    if (!address || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > knobs.memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&ranges_lock);
    uintptr_t base = device_room(whole_pages(bytes));
    if (base) {
        insert(base, bytes, KIND_DEVICE, pooled, 0, context);
        device_bytes += whole_pages(bytes);
        *address = base;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return base ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Calls that a global-mode capture forbids start like this. */
static CUresult enter_unsafe(CUcontext *context)
{
    CUresult result = context_current(context);
    return result == CUDA_SUCCESS ? capture_unsafe_call_unlocked() : result;
}

static void drain(CUcontext context)
{
    pthread_mutex_lock(&sched);
    context_drain(context);
    pthread_mutex_unlock(&sched);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    return result == CUDA_SUCCESS ? device_alloc(address, bytes, false, context) : result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS || !address)
        return result;
    drain(context);
    return memory_free_device(address);
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    if (bytes == 0)
        return CUDA_SUCCESS;
    pthread_rwlock_wrlock(&ranges_lock);
    void *memory = MAP_FAILED;
    if (bytes <= knobs.hostalloc_limit_bytes && pinned_bytes <= knobs.hostalloc_limit_bytes - bytes)
        memory = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE,
                      -1, 0);
    if (memory != MAP_FAILED) {
        insert((uintptr_t)memory, bytes, KIND_PINNED, false, flags | CU_MEMHOSTALLOC_DEVICEMAP, context);
        pinned_bytes += bytes;
        *address = memory;
    }
    pthread_rwlock_unlock(&ranges_lock);
    trace_call("cuMemHostAlloc %zu -> %p", bytes, memory);
    return memory == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes)
{
    return cuMemHostAlloc(address, bytes, 0);
}

EXPORT CUresult cuMemFreeHost(void *address)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS || !address)
        return result;
    drain(context);
    trace_call("cuMemFreeHost %p", address);
    return release((uintptr_t)address, pinned, CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&ranges_lock);
    if (overlaps((uintptr_t)address, bytes))
        result = ranges[position((uintptr_t)address)].kind == KIND_REGISTERED
                     ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                     : CUDA_ERROR_INVALID_VALUE;
    else if (bytes > knobs.hostalloc_limit_bytes || pinned_bytes > knobs.hostalloc_limit_bytes - bytes)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else {
        insert((uintptr_t)address, bytes, KIND_REGISTERED, false, flags, context);
        pinned_bytes += bytes;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *address)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS)
        return result;
    drain(context);
    return release((uintptr_t)address, registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_address, void *address, unsigned flags)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    enum kind kind = memory_kind((uintptr_t)address, 1);
    if (!device_address || flags || (kind != KIND_PINNED && kind != KIND_REGISTERED))
        return CUDA_ERROR_INVALID_VALUE;
    *device_address = (uintptr_t)address;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *address)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_rdlock(&ranges_lock);
    const struct range *range = find((uintptr_t)address);
    if (range && (range->kind == KIND_PINNED || range->kind == KIND_REGISTERED))
        *flags = range->flags;
    else
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags)
{
    CUcontext context;
    CUresult result = enter_unsafe(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || bytes == 0 || flags == 0)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&ranges_lock);
    insert((uintptr_t)memory, bytes, KIND_MANAGED, false, flags, context);
    pthread_rwlock_unlock(&ranges_lock);
    *address = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_rdlock(&ranges_lock);
    const struct range *range = find(address);
    if (!range)
        result = CUDA_ERROR_NOT_FOUND;
    else {
        if (base)
            *base = range->base;
        if (bytes)
            *bytes = range->bytes;
    }
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_rdlock(&ranges_lock);
    *free_bytes = knobs.memory_bytes - device_bytes;
    *total_bytes = knobs.memory_bytes;
    pthread_rwlock_unlock(&ranges_lock);
    return CUDA_SUCCESS;
}

/* Stream-ordered allocation: the memory is there at once, the free happens in stream order. */
static CUresult alloc_async(CUdeviceptr *address, size_t bytes, CUstream handle, bool per_thread)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    CUstream stream;
    pthread_mutex_lock(&sched);
    result = stream_resolve(handle, per_thread, &stream);
    pthread_mutex_unlock(&sched);
    return result == CUDA_SUCCESS ? device_alloc(address, bytes, true, context) : result;
}

static CUresult free_async(CUdeviceptr address, CUstream handle, bool per_thread)
{
    CUresult result = require_init();
    if (result != CUDA_SUCCESS)
        return result;
    if (memory_kind(address, 1) != KIND_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream;
    pthread_mutex_lock(&sched);
    result = stream_resolve(handle, per_thread, &stream);
    if (result == CUDA_SUCCESS)
        stream_submit(stream, &(struct work){.kind = WORK_FREE, .free = address}, NULL);
    pthread_mutex_unlock(&sched);
    return result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return alloc_async(address, bytes, stream, false);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream)
{
    return alloc_async(address, bytes, stream, true);
}

/* All pools are one. */
EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    CUresult result = require_init();
    if (result != CUDA_SUCCESS)
        return result;
    if (!pool || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = (CUmemoryPool)&device_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    return pool ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return pool ? alloc_async(address, bytes, stream, false) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return pool ? alloc_async(address, bytes, stream, true) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    return free_async(address, stream, false);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    return free_async(address, stream, true);
}

/* What the driver says about memory that it does not know: no context, no type, the address itself as host pointer, no
 * device (-2); range and flags are left as the caller had them. */
static CUresult attribute_of_unknown(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUdeviceptr *)value = 0;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = address;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)value = 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = -2;
        break;
    }
    return CUDA_SUCCESS;
}

static CUresult attribute_of(const struct range *range, void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    if (!range)
        return attribute_of_unknown(value, attribute, address);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = range->pooled ? NULL : range->context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = on_device(range->kind) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = range->kind == KIND_DEVICE ? 0 : address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)value = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)value = range->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)value = range->kind == KIND_MANAGED;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = range->context->device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = range->base;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = range->bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned char *)value = 1;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)value = range->pooled ? (CUmemoryPool)&device_bytes : NULL;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_rwlock_rdlock(&ranges_lock);
    const struct range *range = find(address);
    result = value && range ? attribute_of(range, value, attribute, address) : CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}

EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values,
                                       CUdeviceptr address)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (count == 0 || !attributes || !values)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&ranges_lock);
    const struct range *range = find(address);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = attribute_of(range, values[i], attributes[i], address);
    pthread_rwlock_unlock(&ranges_lock);
    return result;
}
