/* Contract: every kind of memory, on either side. */
#define _GNU_SOURCE
#include "contract.h"

#include <dlfcn.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 8 * MIB };

extern char **environ;

/* Between ordinary memory and `device`, through each kind of function. */
static void through(const char *name, CUdeviceptr device, size_t bytes)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *host = host_zeros(bytes);
    for (int kind = 0; kind < 4; kind++) {
        static const char *const kinds[] = {"sync", "async", "default", "default async"};
        unsigned seed = 110 + (unsigned)kind;
        CUresult there, back;
        fill_pattern(host, bytes, seed);
        switch (kind) {
        case 0: there = cuMemcpyHtoD_v2(device, host, bytes); break;
        case 1: there = cuMemcpyHtoDAsync_v2(device, host, bytes, stream); break;
        case 2: there = cuMemcpy(device, (uintptr_t)host, bytes); break;
        default: there = cuMemcpyAsync(device, (uintptr_t)host, bytes, stream);
        }
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        memset(host, 0, bytes);
        switch (kind) {
        case 0: back = cuMemcpyDtoH_v2(host, device, bytes); break;
        case 1: back = cuMemcpyDtoHAsync_v2(host, device, bytes, stream); break;
        case 2: back = cuMemcpy((uintptr_t)host, device, bytes); break;
        default: back = cuMemcpyAsync((uintptr_t)host, device, bytes, stream);
        }
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        char variant[80];
        snprintf(variant, sizeof variant, "%s%s%s", name, *name ? " " : "", kinds[kind]);
        report(variant, "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, bytes, seed));
    }
    host_free(host, bytes);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
}

/* Stream-ordered memory: of the device's pool and of one of our own, and used in order without a wait. */
static void pool(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr device = 0;
    CUresult result = cuMemAllocAsync(&device, BYTES, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    report("cuMemAllocAsync", "ret=%d", result);
    if (result == CUDA_SUCCESS) {
        through("default", device, BYTES);
        must(cuMemFreeAsync(device, stream), "cuMemFreeAsync");
    }
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, main_device}};
    CUmemoryPool own = NULL;
    result = cuMemPoolCreate(&own, &props);
    CUresult allocated = result ? result : cuMemAllocFromPoolAsync(&device, BYTES, own, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    report("cuMemPoolCreate", "ret=%d,%d", result, allocated);
    if (allocated == CUDA_SUCCESS) {
        through("own", device, BYTES);
        must(cuMemFreeAsync(device, stream), "cuMemFreeAsync");
    }
    if (result == CUDA_SUCCESS)
        must(cuMemPoolDestroy(own), "cuMemPoolDestroy");

    unsigned char *source = host_pattern(BYTES, 120), *back = host_zeros(BYTES);
    struct busy busy;
    make_busy(stream, &busy);
    CUresult r1 = cuMemAllocAsync(&device, BYTES, stream);
    CUresult r2 = cuMemcpyHtoDAsync_v2(device, source, BYTES, stream);
    memset(source, 0, BYTES);
    CUresult r3 = cuMemcpyDtoHAsync_v2(back, device, BYTES, stream);
    CUresult r4 = cuMemFreeAsync(device, stream);
    bool right = is_pattern(back, BYTES, 120);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    report("in order", "ret=%d,%d,%d,%d bytes_ok=%d", r1, r2, r3, r4, right);
    host_free(source, BYTES);
    host_free(back, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
}

/* Reserved, created and mapped in separate calls: one mapping, and two side by side as growing allocators have them. */
static void pieces(bool leave)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, main_device}};
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, main_device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle made[2] = {0};
    CUdeviceptr base = 0;
    size_t granule = 0;
    CUresult result = cuMemGetAllocationGranularity(&granule, &prop, 0);
    report("granularity", "ret=%d bytes=%zu", result, granule);
    if (result != CUDA_SUCCESS || granule == 0)
        return;
    size_t piece = (BYTES + granule - 1) / granule * granule;
    CUresult reserved = cuMemAddressReserve(&base, 4 * piece, 0, 0, 0);
    CUresult first = cuMemCreate(&made[0], piece, &prop, 0), second = cuMemCreate(&made[1], piece, &prop, 0);
    report("made", "ret=%d,%d,%d", reserved, first, second);
    if (reserved || first || second)
        return;
    first = cuMemMap(base, piece, 0, made[0], 0);
    second = cuMemMap(base + piece, piece, 0, made[1], 0);
    report("mapped", "ret=%d,%d access=%d", first, second, cuMemSetAccess(base, 2 * piece, &access, 1));
    through("one piece", base, BYTES);
    through("inside", base + 4096 + 64, BYTES - 8192);
    through("over the seam", base + piece - 3 * MIB, BYTES);
    if (leave) {
        /* past the last mapping, where addresses are reserved and nothing is mapped; then where nothing is any more */
        unsigned char *host = host_pattern(BYTES, 5);
        CUdeviceptr late = base + 2 * piece - MIB;
        CUresult there = cuMemcpyHtoD_v2(late, host, BYTES), back = cuMemcpyDtoH_v2(host, late, BYTES);
        report("past the end", "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, BYTES, 5));
        report("past the end", "after=%d", cuCtxSynchronize());
        must(cuMemUnmap(base, piece), "cuMemUnmap");
        there = cuMemcpyHtoD_v2(base, host, BYTES), back = cuMemcpyDtoH_v2(host, base, BYTES);
        report("unmapped", "ret=%d,%d after=%d", there, back, cuCtxSynchronize());
        return;
    }
    must(cuMemUnmap(base, piece), "cuMemUnmap");
    must(cuMemUnmap(base + piece, piece), "cuMemUnmap");
    must(cuMemRelease(made[0]), "cuMemRelease");
    must(cuMemRelease(made[1]), "cuMemRelease");
    must(cuMemAddressFree(base, 4 * piece), "cuMemAddressFree");
}

static void mapped_pieces(void)
{
    pieces(false);
}

/* Copies that leave the mappings. What a driver makes of them may break the context, so this is a case of its own. */
void outside_the_pieces(void)
{
    pieces(true);
}

/* What the exporting process says, and what it answers at the end. */
struct exported { CUresult result; CUipcMemHandle handle; };
struct answer { CUresult result; int right; };

/* The other process: exports memory with a pattern, and looks for another one in it once it hears from us. */
int export_memory(void)
{
    struct exported exported = {0};
    struct answer answer = {0};
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory = 0;
    unsigned char *pinned = NULL;
    char go;
    CUresult result = cuInit(0);
    if (!result)
        result = cuDeviceGet(&device, 0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&context, device);
    if (!result)
        result = cuCtxSetCurrent(context);
    if (!result)
        result = cuMemAlloc_v2(&memory, BYTES);
    if (!result)
        result = cuMemHostAlloc((void **)&pinned, BYTES, 0);
    if (!result) {
        fill_pattern(pinned, BYTES, 130);
        result = cuMemcpyHtoD_v2(memory, pinned, BYTES);
    }
    exported.result = result ? result : cuIpcGetMemHandle(&exported.handle, memory);
    if (write(1, &exported, sizeof exported) != sizeof exported || read(0, &go, 1) != 1)
        return 1;
    answer.result = cuMemcpyDtoH_v2(pinned, memory, BYTES);
    answer.right = is_pattern(pinned, BYTES, 131);
    return write(1, &answer, sizeof answer) == sizeof answer ? 0 : 1;
}

/* Memory of another process: read what it wrote, and write what it reads. */
static void of_another_process(void)
{
    int to[2], from[2];
    pid_t child;
    posix_spawn_file_actions_t files;
    char *const arguments[] = {"contract", "--export", NULL};
    must(pipe(to) || pipe(from), "pipe");
    must(posix_spawn_file_actions_init(&files), "posix_spawn");
    posix_spawn_file_actions_adddup2(&files, to[0], 0);
    posix_spawn_file_actions_adddup2(&files, from[1], 1);
    posix_spawn_file_actions_addclose(&files, to[1]);
    posix_spawn_file_actions_addclose(&files, from[0]);
    must(posix_spawn(&child, "/proc/self/exe", &files, NULL, arguments, environ), "posix_spawn");
    posix_spawn_file_actions_destroy(&files);
    close(to[0]);
    close(from[1]);
    struct exported exported = {.result = -1};
    struct answer answer = {-1, -1};
    CUdeviceptr memory = 0;
    if (read(from[0], &exported, sizeof exported) != sizeof exported)
        exported.result = -1;
    CUresult opened = exported.result
                          ? -1
                          : cuIpcOpenMemHandle_v2(&memory, exported.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    report("opened", "export=%d ret=%d", exported.result, opened);
    if (opened == CUDA_SUCCESS) {
        unsigned char *host = host_zeros(BYTES);
        CUresult back = cuMemcpyDtoH_v2(host, memory, BYTES);
        report("read", "ret=%d bytes_ok=%d", back, is_pattern(host, BYTES, 130));
        through("", memory, BYTES);
        fill_pattern(host, BYTES, 131);
        CUresult there = cuMemcpyHtoD_v2(memory, host, BYTES);
        CUresult past = cuMemcpyHtoD_v2(memory + 4096, host, BYTES);
        report("written", "ret=%d past the end=%d", there, past);
        /* The other process does not wait for its last bytes. */
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        must(write(to[1], "g", 1) == 1 ? 0 : 1, "write");
        if (read(from[0], &answer, sizeof answer) != sizeof answer)
            answer.result = -1;
        report("read there", "ret=%d bytes_ok=%d", answer.result, answer.right);
        report("closed", "ret=%d", cuIpcCloseMemHandle(memory));
        report("after it", "ret=%d", cuMemcpyHtoD_v2(memory, host, BYTES));
        host_free(host, BYTES);
    }
    close(to[1]);
    close(from[0]);
    int status = 0;
    waitpid(child, &status, 0);
    report("other process", "exit=%d", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

/* Host memory that the device can read: as host side, and its device address as device side. */
static void of_the_host(void)
{
    static const struct { const char *name; unsigned flags; } ways[] = {
        {"portable", CU_MEMHOSTALLOC_PORTABLE},
        {"mapped", CU_MEMHOSTALLOC_DEVICEMAP},
        {"write-combined", CU_MEMHOSTALLOC_WRITECOMBINED | CU_MEMHOSTALLOC_DEVICEMAP}};
    static const struct { const char *name; unsigned flags; } registrations[] = {
        {"registered mapped", CU_MEMHOSTREGISTER_DEVICEMAP},
        {"registered portable", CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP},
        {"registered read-only", CU_MEMHOSTREGISTER_READ_ONLY}};
    enum { SOME = MIB }; /* reading write-combined memory is slow */
    CUdeviceptr device = device_memory(SOME);
    for (size_t i = 0; i < 6; i++) {
        const char *name = i < 3 ? ways[i].name : registrations[i - 3].name;
        void *host = NULL;
        CUdeviceptr mapped = 0;
        CUresult result;
        if (i < 3) {
            result = cuMemHostAlloc(&host, SOME, ways[i].flags);
        } else {
            host = host_zeros(SOME);
            result = cuMemHostRegister_v2(host, SOME, registrations[i - 3].flags);
        }
        CUresult pointer = result ? -1 : cuMemHostGetDevicePointer_v2(&mapped, host, 0);
        report(name, "ret=%d,%d", result, pointer);
        if (result == CUDA_SUCCESS) {
            fill_pattern(host, SOME, 140);
            CUresult there = cuMemcpyHtoD_v2(device, host, SOME);
            report(name, "from it: ret=%d bytes_ok=%d", there, arrived(device, SOME, 140));
            if (i != 5) {
                device_fill_pattern(device, SOME, 141);
                CUresult back = cuMemcpyDtoH_v2(host, device, SOME);
                report(name, "into it: ret=%d bytes_ok=%d", back, is_pattern(host, SOME, 141));
                if (pointer == CUDA_SUCCESS)
                    through(name, mapped, SOME);
            }
            must(i < 3 ? cuMemFreeHost(host) : cuMemHostUnregister(host), "giving host memory back");
        }
        if (i >= 3)
            host_free(host, SOME);
    }
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Through the runtime with each kind: with `fitting` only where the kind is right, for one that is wrong may break the
 * context. Kind 0 is for memory that the CPU can reach. */
static void of_each_kind(const char *name, CUdeviceptr memory, bool fitting, bool reachable)
{
    void *library = runtime_library();
    if (!library) {
        report(name, "no libcudart");
        return;
    }
    __typeof__(&cudaMemcpy) copy = (__typeof__(copy))dlsym(library, "cudaMemcpy");
    __typeof__(&cudaMemcpyAsync) copy_async = (__typeof__(copy_async))dlsym(library, "cudaMemcpyAsync");
    __typeof__(&cudaGetLastError) last = (__typeof__(last))dlsym(library, "cudaGetLastError");
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_zeros(BYTES);
    void *known = (void *)(uintptr_t)memory, *on_device = (void *)(uintptr_t)device;
    for (int async = 0; async < 2; async++)
        for (int kind = reachable ? cudaMemcpyHostToHost : cudaMemcpyHostToDevice; kind <= cudaMemcpyDefault; kind++) {
            bool across = fitting && kind == cudaMemcpyDeviceToDevice;
            void *other = across ? on_device : host;
            int there = 0, back = 0;
            bool moved = true, moved_back = true;
            if (!fitting || kind != cudaMemcpyDeviceToHost) {
                if (across)
                    device_fill_pattern(device, BYTES, 150 + (unsigned)kind);
                else
                    fill_pattern(host, BYTES, 150 + (unsigned)kind);
                there = async ? copy_async(known, other, BYTES, kind, stream) : copy(known, other, BYTES, kind);
                must(cuCtxSynchronize(), "cuCtxSynchronize");
                moved = device_is_pattern(memory, BYTES, 150 + (unsigned)kind);
            }
            if (!fitting || kind != cudaMemcpyHostToDevice) {
                device_fill_pattern(memory, BYTES, 160 + (unsigned)kind);
                back = async ? copy_async(other, known, BYTES, kind, stream) : copy(other, known, BYTES, kind);
                must(cuCtxSynchronize(), "cuCtxSynchronize");
                moved_back = across ? device_is_pattern(device, BYTES, 160 + (unsigned)kind)
                                    : is_pattern(host, BYTES, 160 + (unsigned)kind);
            }
            char variant[80];
            snprintf(variant, sizeof variant, "%s%s kind %d", name, async ? " async" : "", kind);
            report(variant, "ret=%d,%d moved=%d,%d last=%d", there, back, moved, moved_back, last());
        }
    host_free(host, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

void of_kinds_that_do_not_fit(void)
{
    CUdeviceptr device = device_memory(BYTES), managed;
    must(cuMemAllocManaged(&managed, BYTES, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
    of_each_kind("managed", managed, false, true);
    of_each_kind("device memory", device, false, false);
}

static void managed(void)
{
    static const struct { const char *name; unsigned flags; } ways[] = {{"global", CU_MEM_ATTACH_GLOBAL},
                                                                       {"host", CU_MEM_ATTACH_HOST}};
    CUdeviceptr device = device_memory(BYTES);
    for (int i = 0; i < 2; i++) {
        CUdeviceptr memory;
        CUresult result = cuMemAllocManaged(&memory, BYTES, ways[i].flags);
        report(ways[i].name, "ret=%d", result);
        if (result != CUDA_SUCCESS)
            continue;
        through(ways[i].name, memory, BYTES);
        of_each_kind(ways[i].name, memory, true, true);
        device_fill_pattern(device, BYTES, 170);
        result = cuMemcpyDtoD_v2(memory, device, BYTES);
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        bool right = is_pattern((unsigned char *)(uintptr_t)memory, BYTES, 170);
        report(ways[i].name, "from device memory: ret=%d bytes_ok=%d", result, right);
        must(cuMemFree_v2(memory), "cuMemFree");
    }
    of_each_kind("device memory", device, true, false);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Between two contexts a copy returns before it is done (driver 580), in whichever of them. */
static void both_synchronised(CUcontext other)
{
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    must(cuCtxPushCurrent_v2(other), "cuCtxPushCurrent");
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
}

/* From one context's memory to another's, and between ordinary memory and memory of a context that is not current. */
static void peers(const char *name, CUcontext other)
{
    CUdeviceptr here = device_memory(BYTES), there;
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    must(cuCtxPushCurrent_v2(other), "cuCtxPushCurrent");
    there = device_memory(BYTES);
    must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
    char variant[80];
    device_fill_pattern(here, BYTES, 180);
    CUresult out = cuMemcpyPeer(there, other, here, main_context, BYTES);
    both_synchronised(other);
    device_fill_byte(here, BYTES, 0);
    CUresult back = cuMemcpyPeer(here, main_context, there, other, BYTES);
    both_synchronised(other);
    snprintf(variant, sizeof variant, "%s cuMemcpyPeer", name);
    report(variant, "ret=%d,%d bytes_ok=%d", out, back, device_is_pattern(here, BYTES, 180));
    device_fill_pattern(here, BYTES, 181);
    out = cuMemcpyPeerAsync(there, other, here, main_context, BYTES, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    device_fill_byte(here, BYTES, 0);
    back = cuMemcpyPeerAsync(here, main_context, there, other, BYTES, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    snprintf(variant, sizeof variant, "%s cuMemcpyPeerAsync", name);
    report(variant, "ret=%d,%d bytes_ok=%d", out, back, device_is_pattern(here, BYTES, 181));
    device_fill_pattern(here, BYTES, 182);
    out = cuMemcpy(there, here, BYTES);
    both_synchronised(other);
    device_fill_byte(here, BYTES, 0);
    back = cuMemcpyAsync(here, there, BYTES, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    snprintf(variant, sizeof variant, "%s cuMemcpy", name);
    report(variant, "ret=%d,%d bytes_ok=%d", out, back, device_is_pattern(here, BYTES, 182));
    snprintf(variant, sizeof variant, "%s ordinary memory", name);
    through(variant, there, BYTES);
    CUcontext current = NULL;
    must(cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    report(name, "current=%s", current == main_context ? "same" : "other");
    must(cuCtxPushCurrent_v2(other), "cuCtxPushCurrent");
    must(cuMemFree_v2(there), "cuMemFree");
    must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(here), "cuMemFree");
}

static void peer(void)
{
    CUcontext other;
    int count = 0;
    peers("same context", main_context);
    other = new_context(main_device);
    peers("same device", other);
    must(cuCtxDestroy_v2(other), "cuCtxDestroy");
    must(cuDeviceGetCount(&count), "cuDeviceGetCount");
    if (count < 2) {
        report("other device", "not here: 1 device");
        return;
    }
    other = new_context(main_device ? 0 : 1);
    peers("other device", other);
    must(cuCtxDestroy_v2(other), "cuCtxDestroy");
}

const struct contract_case memory_cases[] = {
    {"memory_pool", pool}, {"memory_pieces", mapped_pieces}, {"memory_ipc", of_another_process},
    {"memory_host", of_the_host}, {"memory_managed", managed}, {"memory_peer", peer}, {0}};
