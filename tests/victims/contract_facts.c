/* Facts about the driver that a copier leans on. Here the stand-in is held to the real driver. */
#define _GNU_SOURCE
#include "contract.h"

#include <stdio.h>
#include <string.h>

enum { BYTES = 3 * MIB + 100 };

/* All attributes of an address in one line; contexts and addresses as comparisons with what they should be. */
static void attributes_of(const char *name, CUdeviceptr address, CUdeviceptr base)
{
    CUcontext context = (CUcontext)1;
    unsigned type = 77, managed = 77;
    int ordinal = 77;
    CUdeviceptr device = 77, host = 77, start = 77;
    size_t size = 77;
    CUmemoryPool pool = (CUmemoryPool)1;
    CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_CONTEXT,        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
                                    CU_POINTER_ATTRIBUTE_IS_MANAGED,     CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                    CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
    void *values[] = {&context, &type, &device, &host, &managed, &ordinal, &start, &size, &pool};
    CUresult all = cuPointerGetAttributes(9, wanted, values, address);
    unsigned single = 77;
    CUresult one = cuPointerGetAttribute(&single, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    char bytes[32] = "unwritten";
    if (size != 77)
        snprintf(bytes, sizeof bytes, "%zu", size);
    report(name,
           "ret=%d type=%u context=%s device=%s host=%s managed=%u ordinal=%d start=%s size=%s pool=%d; one: ret=%d type=%u",
           all, type, !context ? "null" : context == main_context ? "own" : "other",
           !device ? "null" : device == address ? "same" : "other",
           !host ? "null" : host == address ? "same" : "other", managed, ordinal,
           start == 77 ? "unwritten" : start == base ? "base" : "other", bytes, pool != NULL, one, one ? 0 : single);
}

static void pointer_attributes(void)
{
    CUdeviceptr device = device_memory(BYTES), managed, pooled;
    unsigned char *host = host_zeros(BYTES + MIB);
    void *pinned;
    attributes_of("null", 0, 0);
    attributes_of("unknown", (uintptr_t)host, (uintptr_t)host);
    attributes_of("device", device + 4096, device);
    must(cuMemHostAlloc(&pinned, BYTES, 0), "cuMemHostAlloc");
    attributes_of("pinned", (uintptr_t)pinned + 4096, (uintptr_t)pinned);
    must(cuMemFreeHost(pinned), "cuMemFreeHost");
    attributes_of("pinned, freed", (uintptr_t)pinned + 4096, (uintptr_t)pinned);
    must(cuMemHostRegister_v2(host + 4096 + 16, BYTES, 0), "cuMemHostRegister");
    attributes_of("registered", (uintptr_t)host + 8192, (uintptr_t)host + 4096 + 16);
    attributes_of("same page before", (uintptr_t)host + 4096, (uintptr_t)host + 4096 + 16);
    attributes_of("same page behind", (uintptr_t)host + 4096 + 16 + BYTES, (uintptr_t)host + 4096 + 16);
    must(cuMemHostUnregister(host + 4096 + 16), "cuMemHostUnregister");
    attributes_of("unregistered", (uintptr_t)host + 8192, (uintptr_t)host);
    must(cuMemAllocManaged(&managed, BYTES, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
    attributes_of("managed", managed + 4096, managed);
    must(cuMemFree_v2(managed), "cuMemFree");
    must(cuMemAllocAsync(&pooled, BYTES, NULL), "cuMemAllocAsync");
    attributes_of("pool", pooled + 4096, pooled);
    must(cuMemFreeAsync(pooled, NULL), "cuMemFreeAsync");
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    must(cuMemFree_v2(device), "cuMemFree");
    attributes_of("device, freed", device, device);
    host_free(host, BYTES + MIB);
}

static void memory_calls(void)
{
    CUdeviceptr device = device_memory(BYTES), base = 0, mapped;
    unsigned char *host = host_zeros(BYTES);
    void *pinned;
    size_t size = 0;
    must(cuMemHostAlloc(&pinned, BYTES, 0), "cuMemHostAlloc");
    CUresult result = cuMemGetAddressRange_v2(&base, &size, device + 100);
    report("range of device memory", "ret=%d base=%d size=%zu", result, base == device, size);
    result = cuMemGetAddressRange_v2(&base, &size, (uintptr_t)pinned + 100);
    report("range of pinned memory", "ret=%d", result);
    report("range of ordinary memory", "ret=%d", cuMemGetAddressRange_v2(&base, &size, (uintptr_t)host));
    result = cuMemHostGetDevicePointer_v2(&mapped, (char *)pinned + 64, 0);
    report("device pointer of pinned memory", "ret=%d same=%d", result, mapped == (uintptr_t)pinned + 64);
    report("device pointer of ordinary memory", "ret=%d", cuMemHostGetDevicePointer_v2(&mapped, host, 0));
    report("free inside", "ret=%d", cuMemFree_v2(device + 4096));
    report("free null", "ret=%d", cuMemFree_v2(0));
    report("free ordinary memory", "ret=%d", cuMemFree_v2((uintptr_t)host));
    report("free host null", "ret=%d", cuMemFreeHost(NULL));
    report("free host inside", "ret=%d", cuMemFreeHost((char *)pinned + 4096));
    report("register", "ret=%d", cuMemHostRegister_v2(host, MIB, 0));
    report("register again", "ret=%d", cuMemHostRegister_v2(host, MIB, 0));
    report("register over", "ret=%d", cuMemHostRegister_v2(host + MIB / 2, MIB, 0));
    report("register nothing", "ret=%d", cuMemHostRegister_v2(host + 2 * MIB, 0, 0));
    report("register pinned", "ret=%d", cuMemHostRegister_v2(pinned, MIB, 0));
    report("unregister inside", "ret=%d", cuMemHostUnregister(host + 4096));
    report("unregister", "ret=%d", cuMemHostUnregister(host));
    report("unregister again", "ret=%d", cuMemHostUnregister(host));
    must(cuMemFreeHost(pinned), "cuMemFreeHost");
    report("allocate nothing", "ret=%d,%d", cuMemAlloc_v2(&base, 0), cuMemHostAlloc(&pinned, 0, 0));
    host_free(host, BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
}

static void word_writes(void)
{
    volatile uint32_t *word;
    uint32_t ordinary = 0;
    CUdeviceptr device = device_memory(4096);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    must(cuMemHostAlloc((void **)&word, 4096, 0), "cuMemHostAlloc");
    *word = 0;
    static const struct { const char *name; CUstream stream; } streams[] = {
        {"legacy", CU_STREAM_LEGACY}, {"per thread", CU_STREAM_PER_THREAD}, {"null", NULL}};
    for (uint32_t i = 0; i < 3; i++) {
        CUresult result = cuStreamWriteValue32_v2(streams[i].stream, (uintptr_t)word, i + 1, 0);
        must(cuStreamSynchronize(streams[i].stream), "cuStreamSynchronize");
        report(streams[i].name, "ret=%d value=%u", result, *word);
    }
    CUresult result = cuStreamWriteValue32_v2_ptsz(NULL, (uintptr_t)word, 9, 0);
    must(cuStreamSynchronize_ptsz(NULL), "cuStreamSynchronize");
    report("ptsz", "ret=%d value=%u", result, *word);
    report("unaligned", "ret=%d", cuStreamWriteValue32_v2(stream, (uintptr_t)word + 2, 1, 0));
    report("ordinary memory", "ret=%d", cuStreamWriteValue32_v2(stream, (uintptr_t)&ordinary, 1, 0));
    report("device memory", "ret=%d", cuStreamWriteValue32_v2(stream, device, 1, 0));
    struct busy busy;
    *word = 0;
    make_busy(stream, &busy);
    result = cuStreamWriteValue32_v2(stream, (uintptr_t)word, 5, 0);
    uint32_t early = *word;
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    report("in stream order", "ret=%d before=%u after=%u", result, early, *word);
    must(cuMemFreeHost((void *)word), "cuMemFreeHost");
    must(cuMemFree_v2(device), "cuMemFree");
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
}

static void streams(void)
{
    CUstream a = new_stream(0), b = new_stream(CU_STREAM_NON_BLOCKING);
    CUgraph graph = NULL;
    unsigned long long ids[5] = {0};
    CUresult r0 = cuStreamGetId(a, &ids[0]), r1 = cuStreamGetId(b, &ids[1]), r2 = cuStreamGetId(NULL, &ids[2]);
    CUresult r3 = cuStreamGetId(CU_STREAM_LEGACY, &ids[3]), r4 = cuStreamGetId_ptsz(NULL, &ids[4]);
    report("ids", "ret=%d,%d,%d,%d,%d differ=%d null_is_legacy=%d", r0, r1, r2, r3, r4,
           ids[0] != ids[1] && ids[1] != ids[2] && ids[2] != ids[4] && ids[0] != ids[2], ids[2] == ids[3]);
    struct busy busy;
    make_busy(a, &busy);
    report("queries", "busy=%d idle=%d legacy=%d", cuStreamQuery(a), cuStreamQuery(b), cuStreamQuery(NULL));
    must(cuStreamSynchronize(NULL), "cuStreamSynchronize");
    report("legacy synchronise", "waited=%d", busy.over);
    make_busy(b, &busy);
    must(cuStreamSynchronize(NULL), "cuStreamSynchronize");
    report("legacy synchronise, non-blocking", "waited=%d", busy.over);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    report("context synchronise", "waited=%d", busy.over);
    report("capture of legacy", "ret=%d", cuStreamBeginCapture_v2(NULL, 0));
    report("end without begin", "ret=%d", cuStreamEndCapture(a, &graph));
    must(cuStreamDestroy_v2(a), "cuStreamDestroy");
    must(cuStreamDestroy_v2(b), "cuStreamDestroy");
}

static void contexts(void)
{
    CUcontext created, current = NULL;
    unsigned long long first = 0, second = 0;
    must(cuCtxGetId(NULL, &first), "cuCtxGetId");
    must(cuCtxCreate_v2(&created, 0, main_device), "cuCtxCreate");
    must(cuCtxGetId(created, &second), "cuCtxGetId");
    report("ids", "differ=%d", first != second);
    must(cuCtxDestroy_v2(created), "cuCtxDestroy");
    CUresult result = cuCtxGetCurrent(&current);
    report("current after destroy", "ret=%d current=%s", result,
           !current ? "null" : current == main_context ? "main" : current == created ? "destroyed" : "other");
    bind_context();
    void *pinned, *function = NULL;
    must(cuMemHostAlloc(&pinned, MIB, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
    must(cuMemFreeHost(pinned), "cuMemFreeHost");
    static const char *const names[] = {"cuMemcpyHtoDAsync", "cuMemcpyDtoH", "cuMemcpy", "cuStreamIsCapturing"};
    void *const same[] = {(void *)cuMemcpyHtoDAsync_v2, (void *)cuMemcpyDtoH_v2, (void *)cuMemcpy,
                          (void *)cuStreamIsCapturing};
    for (int i = 0; i < 4; i++) {
        int status = -1;
        result = cuGetProcAddress_v2(names[i], &function, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
        report(names[i], "ret=%d status=%d same=%d", result, status, function == same[i]);
    }
    result = cuGetProcAddress_v2("cuNoSuchFunction", &function, 12000, 0, NULL);
    report("unknown function", "ret=%d null=%d", result, function == NULL);
}

const struct contract_case fact_cases[] = {
    {"fact_attributes", pointer_attributes}, {"fact_memory", memory_calls}, {"fact_writes", word_writes},
    {"fact_streams", streams}, {"fact_contexts", contexts}, {0}};
