/* Contract: the bytes arrive, through every function, for every kind of memory. */
#define _GNU_SOURCE
#include "contract.h"

#include <string.h>
#include <stdio.h>
#include <sys/mman.h>

static const size_t sizes[] = {4, 4 * KIB, 64 * KIB, MIB, 4 * MIB + 13, LARGE};
enum { SIZES = sizeof sizes / sizeof *sizes };

typedef CUresult (*both_ways)(bool to_device, void *host, CUdeviceptr device, size_t bytes, CUstream stream);

/* There and back through one pair of functions, for each size. */
static void there_and_back(const char *name, both_ways copy, CUstream stream)
{
    for (size_t i = 0; i < SIZES; i++) {
        size_t bytes = sizes[i];
        CUdeviceptr device = device_memory(bytes + 64);
        unsigned char *source = host_pattern(bytes + 64, 10 + (unsigned)i), *back = host_zeros(bytes + 64);
        device_fill_pattern(device, bytes + 64, 99);
        CUresult there = copy(true, source, device, bytes, stream);
        memset(source, 0, bytes);
        CUresult away = copy(false, back, device, bytes, stream);
        bool right = is_pattern(back, bytes, 10 + (unsigned)i);
        must(cuStreamSynchronize(stream), "cuStreamSynchronize");
        right = right && is_byte(back + bytes, 64, 0) && device_is_pattern(device, bytes, 10 + (unsigned)i);
        char variant[64];
        snprintf(variant, sizeof variant, "%s %s", name, size_name(bytes));
        report(variant, "ret=%d,%d bytes_ok=%d", there, away, right);
        host_free(source, bytes + 64);
        host_free(back, bytes + 64);
        must(cuMemFree_v2(device), "cuMemFree");
    }
}

#define PAIR(name, there, back)                                                                                        \
    static CUresult name(bool to_device, void *host, CUdeviceptr device, size_t bytes, CUstream stream)                \
    {                                                                                                                  \
        (void)stream;                                                                                                  \
        return to_device ? there : back;                                                                               \
    }
PAIR(legacy, cuMemcpyHtoD_v2(device, host, bytes), cuMemcpyDtoH_v2(host, device, bytes))
PAIR(ptds, cuMemcpyHtoD_v2_ptds(device, host, bytes), cuMemcpyDtoH_v2_ptds(host, device, bytes))
PAIR(async, cuMemcpyHtoDAsync_v2(device, host, bytes, stream), cuMemcpyDtoHAsync_v2(host, device, bytes, stream))
PAIR(ptsz, cuMemcpyHtoDAsync_v2_ptsz(device, host, bytes, stream),
     cuMemcpyDtoHAsync_v2_ptsz(host, device, bytes, stream))
PAIR(any, cuMemcpy(device, (uintptr_t)host, bytes), cuMemcpy((uintptr_t)host, device, bytes))
PAIR(any_ptds, cuMemcpy_ptds(device, (uintptr_t)host, bytes), cuMemcpy_ptds((uintptr_t)host, device, bytes))
PAIR(any_async, cuMemcpyAsync(device, (uintptr_t)host, bytes, stream),
     cuMemcpyAsync((uintptr_t)host, device, bytes, stream))
PAIR(any_ptsz, cuMemcpyAsync_ptsz(device, (uintptr_t)host, bytes, stream),
     cuMemcpyAsync_ptsz((uintptr_t)host, device, bytes, stream))

static void functions(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING), blocking = new_stream(0);
    there_and_back("cuMemcpyHtoD", legacy, NULL);
    there_and_back("cuMemcpyHtoD_ptds", ptds, CU_STREAM_PER_THREAD);
    there_and_back("cuMemcpyHtoDAsync", async, stream);
    there_and_back("cuMemcpyHtoDAsync blocking", async, blocking);
    there_and_back("cuMemcpyHtoDAsync legacy", async, NULL);
    there_and_back("cuMemcpyHtoDAsync LEGACY", async, CU_STREAM_LEGACY);
    there_and_back("cuMemcpyHtoDAsync PER_THREAD", async, CU_STREAM_PER_THREAD);
    there_and_back("cuMemcpyHtoDAsync_ptsz", ptsz, NULL);
    there_and_back("cuMemcpyHtoDAsync_ptsz own", ptsz, stream);
    there_and_back("cuMemcpy", any, NULL);
    there_and_back("cuMemcpy_ptds", any_ptds, CU_STREAM_PER_THREAD);
    there_and_back("cuMemcpyAsync", any_async, stream);
    there_and_back("cuMemcpyAsync_ptsz", any_ptsz, NULL);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuStreamDestroy_v2(blocking), "cuStreamDestroy");
}

/* Odd sizes at odd addresses; the bytes around the copied ones stay. */
static void unaligned(void)
{
    enum { MOST = 5 * MIB };
    CUdeviceptr device = device_memory(MOST);
    unsigned char *source = host_zeros(MOST), *back = host_zeros(MOST);
    static const size_t odd[] = {1, 63, 4097, 65537, 262143, MIB + 1, 2 * MIB - 1, 4 * MIB + 4095};
    bool right = true;
    CUresult result = 0;
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (size_t shift = 1; shift < 64; shift += 31) {
            fill_pattern(source + shift, odd[i], (unsigned)(i + shift));
            memset(back, 0xa5, shift + odd[i] + 64);
            result |= cuMemcpyHtoD_v2(device + 64 - shift, source + shift, odd[i]);
            result |= cuMemcpyDtoH_v2(back + shift, device + 64 - shift, odd[i]);
            right = right && is_byte(back, shift, 0xa5) && is_pattern(back + shift, odd[i], (unsigned)(i + shift)) &&
                    is_byte(back + shift + odd[i], 64, 0xa5);
        }
    report("", "ret=%d bytes_ok=%d", result, right);
    host_free(source, MOST);
    host_free(back, MOST);
    must(cuMemFree_v2(device), "cuMemFree");
}

static void read_only_source(void)
{
    CUdeviceptr device = device_memory(4 * MIB);
    unsigned char *source = host_pattern(4 * MIB, 3);
    must(mprotect(source, 4 * MIB, PROT_READ), "mprotect");
    CUresult result = cuMemcpyHtoD_v2(device, source, 4 * MIB);
    report("cuMemcpyHtoD", "ret=%d bytes_ok=%d", result, arrived(device, 4 * MIB, 3));
    result = cuMemcpy(device, (uintptr_t)source, 4 * MIB);
    report("cuMemcpy", "ret=%d bytes_ok=%d", result, arrived(device, 4 * MIB, 3));
    host_free(source, 4 * MIB);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* Memory that the driver knows, both ways, in the given host memory. */
static void known_memory(const char *name, unsigned char *host, size_t bytes)
{
    CUdeviceptr device = device_memory(bytes);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    char variant[64];
    fill_pattern(host, bytes, 21);
    CUresult there = cuMemcpyHtoD_v2(device, host, bytes);
    memset(host, 0, bytes);
    CUresult back = cuMemcpyDtoH_v2(host, device, bytes);
    snprintf(variant, sizeof variant, "%s sync", name);
    report(variant, "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, bytes, 21));

    fill_pattern(host, bytes, 22);
    there = cuMemcpyHtoDAsync_v2(device, host, bytes, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    memset(host, 0, bytes);
    back = cuMemcpyDtoHAsync_v2(host, device, bytes, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    snprintf(variant, sizeof variant, "%s async", name);
    report(variant, "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, bytes, 22));

    fill_pattern(host, bytes, 23);
    there = cuMemcpy(device, (uintptr_t)host, bytes);
    memset(host, 0, bytes);
    back = cuMemcpy((uintptr_t)host, device, bytes);
    snprintf(variant, sizeof variant, "%s default", name);
    report(variant, "ret=%d,%d bytes_ok=%d", there, back, is_pattern(host, bytes, 23));
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

static void driver_memory(void)
{
    enum { BYTES = 8 * MIB };
    void *pinned;
    must(cuMemHostAlloc(&pinned, BYTES, 0), "cuMemHostAlloc");
    known_memory("pinned", pinned, BYTES);
    must(cuMemFreeHost(pinned), "cuMemFreeHost");
    unsigned char *registered = host_zeros(BYTES);
    must(cuMemHostRegister_v2(registered, BYTES, 0), "cuMemHostRegister");
    known_memory("registered", registered, BYTES);
    must(cuMemHostUnregister(registered), "cuMemHostUnregister");
    known_memory("unregistered", registered, BYTES);
    host_free(registered, BYTES);
    CUdeviceptr managed;
    must(cuMemAllocManaged(&managed, BYTES, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
    known_memory("managed", (unsigned char *)(uintptr_t)managed, BYTES);
    must(cuMemFree_v2(managed), "cuMemFree");
}

/* Copies with no host side, and with no device side. */
static void one_sided(void)
{
    enum { BYTES = 8 * MIB };
    CUdeviceptr a = device_memory(BYTES), b = device_memory(BYTES);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    device_fill_pattern(a, BYTES, 31);
    CUresult result = cuMemcpyDtoD_v2(b, a, BYTES);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    report("cuMemcpyDtoD", "ret=%d bytes_ok=%d", result, device_is_pattern(b, BYTES, 31));
    device_fill_pattern(a, BYTES, 32);
    result = cuMemcpyDtoDAsync_v2(b, a, BYTES, stream);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    report("cuMemcpyDtoDAsync", "ret=%d bytes_ok=%d", result, device_is_pattern(b, BYTES, 32));
    device_fill_pattern(a, BYTES, 33);
    result = cuMemcpy(b, a, BYTES);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    report("cuMemcpy", "ret=%d bytes_ok=%d", result, device_is_pattern(b, BYTES, 33));
    unsigned char *from = host_pattern(BYTES, 34), *to = host_zeros(BYTES);
    result = cuMemcpy((uintptr_t)to, (uintptr_t)from, BYTES);
    report("host to host", "ret=%d bytes_ok=%d", result, is_pattern(to, BYTES, 34));
    host_free(from, BYTES);
    host_free(to, BYTES);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(a), "cuMemFree");
    must(cuMemFree_v2(b), "cuMemFree");
}

/* One way to ask for a rectangle. */
static CUresult of_rows(int way, const CUDA_MEMCPY2D *copy, CUstream stream)
{
    switch (way) {
    case 0: return cuMemcpy2D_v2(copy);
    case 1: return cuMemcpy2D_v2_ptds(copy);
    case 2: return cuMemcpy2DUnaligned_v2(copy);
    case 3: return cuMemcpy2DUnaligned_v2_ptds(copy);
    case 4: return cuMemcpy2DAsync_v2(copy, stream);
    default: return cuMemcpy2DAsync_v2_ptsz(copy, stream);
    }
}

/* Rows of a rectangle that begins some bytes and a row behind its memory, there and back. What lies between the rows stays,
 * on both sides; rows are copied whole. */
static void rectangle(const char *name, size_t width, size_t height, size_t gap, size_t aside)
{
    static const char *const ways[] = {"sync", "sync ptds", "unaligned", "unaligned ptds", "async", "async ptsz"};
    size_t host_pitch = aside + width + gap, pitch = aside + width + 2 * gap, rows = height + 1;
    CUdeviceptr device = device_memory(pitch * rows);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *source = host_zeros(host_pitch * rows), *back = host_zeros(host_pitch * rows);
    unsigned char *whole = host_zeros(pitch * rows);
    for (int way = 0; way < 6; way++) {
        bool unified = way == 3 || way == 4;
        fill_pattern(source, host_pitch * rows, 41 + (unsigned)way);
        memset(back, 0xa5, host_pitch * rows);
        device_fill_byte(device, pitch * rows, 0x5a);
        CUDA_MEMCPY2D there = {.srcXInBytes = aside, .srcY = 1, .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = source,
                               .srcPitch = host_pitch, .dstXInBytes = aside, .dstY = 1,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = device, .dstPitch = pitch,
                               .WidthInBytes = width, .Height = height};
        CUDA_MEMCPY2D away = {.dstXInBytes = aside, .dstY = 1, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back,
                              .dstPitch = host_pitch, .srcXInBytes = aside, .srcY = 1,
                              .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = device, .srcPitch = pitch,
                              .WidthInBytes = width, .Height = height};
        if (unified) {
            there.srcMemoryType = there.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
            there.srcHost = NULL, there.srcDevice = (uintptr_t)source;
            away.srcMemoryType = away.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
            away.dstHost = NULL, away.dstDevice = (uintptr_t)back;
        }
        CUresult first = of_rows(way, &there, stream);
        /* The source is the program's again. */
        unsigned char *kept = host_zeros(host_pitch * rows);
        memcpy(kept, source, host_pitch * rows);
        memset(source, 0, host_pitch * rows);
        CUresult second = of_rows(way, &away, stream);
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        must(cuMemcpyDtoH_v2(whole, device, pitch * rows), "cuMemcpyDtoH");
        bool right = is_byte(whole, pitch + aside, 0x5a) && is_byte(back, host_pitch + aside, 0xa5);
        for (size_t row = 1; row < rows; row++) {
            unsigned char *line = back + row * host_pitch, *there_line = whole + row * pitch;
            unsigned char *wanted = kept + row * host_pitch + aside;
            right = right && !memcmp(line + aside, wanted, width) && !memcmp(there_line + aside, wanted, width) &&
                    is_byte(line, aside, 0xa5) && is_byte(line + aside + width, gap, 0xa5) &&
                    is_byte(there_line, aside, 0x5a) && is_byte(there_line + aside + width, 2 * gap, 0x5a);
        }
        char variant[80];
        snprintf(variant, sizeof variant, "%s %s%s", name, ways[way], unified ? " unified" : "");
        report(variant, "ret=%d,%d bytes_ok=%d", first, second, right);
        host_free(kept, host_pitch * rows);
    }
    host_free(source, host_pitch * rows);
    host_free(back, host_pitch * rows);
    host_free(whole, pitch * rows);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

static void two_d(void)
{
    rectangle("of pixels", 100, 30000, 28, 12);
    rectangle("of lines", 3000, 1500, 584, 0);
    rectangle("of powers of two", 4096, 1024, 4096, 0);
    rectangle("without gaps", 4096, 1024, 0, 0);
    rectangle("of long rows", MIB, 4, 4096, 512);
    rectangle("of rows that are too long", 2 * MIB, 3, 64, 0);
    rectangle("of one row", 3 * MIB / 4, 1, 64, 64);
    rectangle("of a byte", 1, 50000, 1, 0);
}

/* Rectangles that are odd: memory types that contradict the addresses, a last row that ends with its allocation or behind it,
 * pitches of a single row. */
static void two_d_odd(void)
{
    enum { WIDTH = 4096, HEIGHT = 1024, PITCH = WIDTH + 512, BYTES_2D = WIDTH * HEIGHT };
    static const struct { const char *name; CUmemorytype from, to; bool up; } kinds[] = {
        {"device to unified, from the host", CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED, true},
        {"unified to host, to the device", CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_HOST, true},
        {"unified to device, to the host", CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_DEVICE, false},
        {"host to unified", CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_UNIFIED, true},
        {"unified to device", CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_DEVICE, true},
        {"device to unified", CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_UNIFIED, false},
        {"unified to host", CU_MEMORYTYPE_UNIFIED, CU_MEMORYTYPE_HOST, false},
        {"device to device, from the host", CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_DEVICE, true}};
    CUdeviceptr device = device_memory(BYTES_2D);
    unsigned char *host = host_pattern(2 * BYTES_2D, 61);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        uintptr_t from = kinds[i].up ? (uintptr_t)host : device, to = kinds[i].up ? device : (uintptr_t)host;
        CUDA_MEMCPY2D copy = {.srcMemoryType = kinds[i].from, .srcHost = (void *)from, .srcDevice = from,
                              .srcPitch = WIDTH, .dstMemoryType = kinds[i].to, .dstHost = (void *)to, .dstDevice = to,
                              .dstPitch = WIDTH, .WidthInBytes = WIDTH, .Height = HEIGHT};
        CUresult sync = cuMemcpy2D_v2(&copy), unaligned = cuMemcpy2DUnaligned_v2(&copy);
        CUresult async = cuMemcpy2DAsync_v2(&copy, NULL);
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        report(kinds[i].name, "ret=%d,%d,%d", sync, unaligned, async);
    }
    size_t rows = (BYTES_2D - WIDTH) / PITCH + 1, behind = BYTES_2D - ((rows - 1) * PITCH + WIDTH);
    for (size_t past = 0; past < 2; past++) {
        CUDA_MEMCPY2D there = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = WIDTH,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = device + behind + past,
                               .dstPitch = PITCH, .WidthInBytes = WIDTH, .Height = rows};
        CUDA_MEMCPY2D away = {.dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = host, .dstPitch = WIDTH,
                              .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = device + behind + past,
                              .srcPitch = PITCH, .WidthInBytes = WIDTH, .Height = rows};
        CUresult first = cuMemcpy2DUnaligned_v2(&there), second = cuMemcpy2DUnaligned_v2(&away);
        report(past ? "ends behind its allocation" : "ends with its allocation", "ret=%d,%d", first, second);
    }
    static const size_t pitches[] = {0, 3 * MIB - 1, 3 * MIB, (1u << 31) - 1, 1u << 31};
    for (size_t i = 0; i < sizeof pitches / sizeof *pitches; i++) {
        CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = host, .srcPitch = pitches[i],
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = device, .dstPitch = 3 * MIB,
                              .WidthInBytes = 3 * MIB, .Height = 1};
        CUresult of_host = cuMemcpy2D_v2(&copy);
        copy.srcPitch = 3 * MIB, copy.dstPitch = pitches[i];
        CUresult of_device = cuMemcpy2D_v2(&copy);
        char variant[64];
        snprintf(variant, sizeof variant, "one row, pitch %zu", pitches[i]);
        report(variant, "ret=%d,%d", of_host, of_device);
    }
    report("nowhere", "ret=%d", cuMemcpy2D_v2(NULL));
    host_free(host, 2 * BYTES_2D);
    must(cuMemFree_v2(device), "cuMemFree");
}

/* A rectangle on a busy stream: what waits, and that the source may be changed at once. */
static void two_d_busy(void)
{
    enum { WIDTH = 3000, PITCH = 3584, HEIGHT = 600 };
    CUdeviceptr device = device_memory(PITCH * HEIGHT);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    unsigned char *source = host_pattern(PITCH * HEIGHT, 51), *back = host_zeros(PITCH * HEIGHT);
    unsigned char *kept = host_pattern(PITCH * HEIGHT, 51);
    CUDA_MEMCPY2D there = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = source, .srcPitch = PITCH,
                           .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = device, .dstPitch = PITCH,
                           .WidthInBytes = WIDTH, .Height = HEIGHT};
    CUDA_MEMCPY2D away = {.dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = PITCH,
                          .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = device, .srcPitch = PITCH,
                          .WidthInBytes = WIDTH, .Height = HEIGHT};
    struct busy busy;
    make_busy(stream, &busy);
    CUresult result = cuMemcpy2DAsync_v2(&there, stream);
    report("HtoD", "ret=%d waited=%d", result, busy.over);
    memset(source, 0, PITCH * HEIGHT);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    make_busy(stream, &busy);
    result = cuMemcpy2DAsync_v2(&away, stream);
    bool right = true;
    for (size_t row = 0; row < HEIGHT; row++)
        right = right && !memcmp(back + row * PITCH, kept + row * PITCH, WIDTH);
    report("DtoH", "ret=%d bytes_ok=%d waited=%d", result, right, busy.over);
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    make_busy(NULL, &busy);
    result = cuMemcpy2D_v2(&there);
    report("HtoD sync", "ret=%d waited=%d", result, busy.over);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    host_free(source, PITCH * HEIGHT);
    host_free(back, PITCH * HEIGHT);
    host_free(kept, PITCH * HEIGHT);
    must(cuStreamDestroy_v2(stream), "cuStreamDestroy");
    must(cuMemFree_v2(device), "cuMemFree");
}

const struct contract_case copy_cases[] = {
    {"copy", functions}, {"unaligned", unaligned}, {"read_only_source", read_only_source},
    {"driver_memory", driver_memory}, {"one_sided", one_sided}, {"two_d", two_d}, {"two_d_odd", two_d_odd}, {"two_d_busy", two_d_busy}, {0}};
