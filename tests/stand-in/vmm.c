/* Memory that is reserved, created and mapped in separate calls, and memory of other processes. Both are files in memory:
 * a handle is a descriptor, and another process is asked for its descriptor by number. */
#define _GNU_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULE = 2 << 20 };

/* What is in a CUipcMemHandle. */
struct shared {
    int pid, fd, device;
    size_t bytes;
};
_Static_assert(sizeof(struct shared) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
    (void)option;
    if (!bytes || !prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = GRANULE;
    return require_init();
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags)
{
    CUresult result = require_init();
    if (result != CUDA_SUCCESS)
        return result;
    if (!address || bytes == 0 || bytes % GRANULE || alignment % GRANULE || flags)
        return CUDA_ERROR_INVALID_VALUE;
    void *memory = mmap((void *)(uintptr_t)wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    return munmap((void *)(uintptr_t)address, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                            unsigned long long flags)
{
    CUresult result = require_init();
    if (result != CUDA_SUCCESS)
        return result;
    if (!handle || !prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || bytes == 0 || bytes % GRANULE || flags)
        return CUDA_ERROR_INVALID_VALUE;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    return close((int)handle) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static void *map(uintptr_t address, size_t bytes, int fd, size_t offset, int protection)
{
    int fixed = address ? MAP_FIXED : 0;
    void *memory = mmap((void *)address, bytes, protection, MAP_SHARED | fixed, fd, (off_t)offset);
    if (memory != MAP_FAILED)
        madvise(memory, bytes, MADV_DONTFORK);
    return memory;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address % 4096 || bytes % GRANULE || flags ||
        map(address, bytes, (int)handle, offset, PROT_NONE) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    memory_add_mapped(address, bytes, context);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    CUresult result = memory_remove_mapped(address, bytes);
    if (result == CUDA_SUCCESS)
        mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    if (!access || count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct shared shared = {.pid = getpid(), .device = context->device};
    result = memory_share(address, &shared.fd, &shared.bytes);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &shared, sizeof shared);
    return result;
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    CUcontext context;
    CUresult result = context_current(&context);
    if (result != CUDA_SUCCESS)
        return result;
    struct shared shared;
    memcpy(&shared, &handle, sizeof shared);
    if (shared.pid == getpid() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return shared.pid == getpid() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *memory = fd < 0 ? MAP_FAILED : map(0, shared.bytes, fd, 0, PROT_READ | PROT_WRITE);
    if (fd >= 0)
        close(fd);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_INVALID_HANDLE;
    memory_add_mapped((uintptr_t)memory, shared.bytes, context);
    *address = (uintptr_t)memory;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    size_t bytes;
    CUdeviceptr base;
    CUresult result = cuMemGetAddressRange_v2(&base, &bytes, address);
    if (result == CUDA_SUCCESS)
        result = base == address ? memory_remove_mapped(address, bytes) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        munmap((void *)(uintptr_t)address, bytes);
    return result;
}
