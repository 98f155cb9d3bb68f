// What the driver does at edges that the copy engine relies on. Prints one line a fact; see docs/benchmarks.md.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime.h>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
__global__ void spin(long long n) {
    long long t = clock64();
    while (clock64() - t < n) {
    }
}

__global__ void fault() {
    *(volatile int *)8 = 1;
}

static CUcontext current() {
    CUcontext context = nullptr;
    cuCtxGetCurrent(&context);
    return context;
}
static CUresult context_id(CUcontext context, unsigned long long *id) {
    *id = 0;
    return cuCtxGetId(context, id);
}
static CUresult pointer_type(const void *address, unsigned *type) {
    *type = 77;
    return cuPointerGetAttribute(type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)address);
}
static CUcontext new_context() {
    CUcontext context = nullptr;
    CUdevice ordinal;
    cuDeviceGet(&ordinal, 0);
#if CUDA_VERSION >= 13000
    CUresult code = cuCtxCreate(&context, nullptr, 0, ordinal);
#else
    CUresult code = cuCtxCreate(&context, 0, ordinal);
#endif
    if (code)
        printf("cuCtxCreate: code %d\n", code);
    return context;
}

// What calls say in a context that a kernel has broken.
static void after_a_fault() {
    CUstream stream;
    CUevent event;
    char *pinned;
    cudaFree(0);
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    cudaMallocHost((void **)&pinned, 4096);
    fault<<<1, 1, 0, stream>>>();
    printf("after a fault: cuStreamSynchronize %d", cuStreamSynchronize(stream));
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    unsigned long long id;
    unsigned type;
    CUdeviceptr at;
    int code = cuStreamIsCapturing(stream, &status);
    printf(", cuStreamIsCapturing %d status %d", code, status);
    printf(", of the legacy stream %d", cuStreamIsCapturing(nullptr, &status));
    printf(", cuStreamQuery %d, of the legacy stream %d", cuStreamQuery(stream), cuStreamQuery(nullptr));
    printf(", cuCtxGetId %d, cuStreamGetId %d", context_id(current(), &id), cuStreamGetId(stream, &id));
    printf(", cuThreadExchangeStreamCaptureMode %d", cuThreadExchangeStreamCaptureMode(&mode));
    printf(", cuPointerGetAttribute of pageable memory %d", pointer_type(&mode, &type));
    printf(", of pinned memory %d", pointer_type(pinned, &type));
    printf(", cuMemHostGetDevicePointer %d", cuMemHostGetDevicePointer(&at, pinned, 0));
    printf(", cuEventQuery %d", cuEventQuery(event));
    CUcontext context = current();
    printf(", cuCtxSetCurrent %d, cuMemFreeHost %d\n", cuCtxSetCurrent(context), cuMemFreeHost(pinned));
}

// What remains of a context that is destroyed, and of what it had pinned.
static void after_a_context() {
    const size_t bytes = 1 << 20;
    unsigned long long id, later;
    unsigned type;
    cudaFree(0);
    CUcontext primary = current(), own = new_context();
    void *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int code = cuMemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    context_id(own, &id);
    int before = pointer_type(memory, &type);
    printf("portable registration: code %d, cuPointerGetAttribute %d type %u", code, before, type);
    cuCtxDestroy(own);
    cuCtxSetCurrent(primary);
    code = pointer_type(memory, &type);
    printf("; after its context was destroyed %d type %u", code, type);
    printf(", cuMemHostUnregister %d\n", cuMemHostUnregister(memory));
    code = context_id(own, &later);
    printf("cuCtxGetId of a destroyed context: code %d, id %s\n", code, later == id ? "the same" : "another");
    fflush(stdout);
    CUcontext next = new_context();
    code = context_id(next, &later);
    printf("the next context: %s, code %d, id %s\n", next == own ? "at the same address" : "elsewhere", code,
           later == id ? "the same" : "another");
    cuCtxDestroy(next);
    cuCtxSetCurrent(primary);
    code = context_id(primary, &id);
    printf("primary context: cuCtxGetId %d", code);
    code = cuDevicePrimaryCtxReset(0);
    printf(", cuDevicePrimaryCtxReset %d", code);
    fflush(stdout);
    code = context_id(primary, &later);
    printf(", then cuCtxGetId %d id %s", code, later == id ? "the same" : "another");
    int again = cudaFree(0);
    code = context_id(current(), &later);
    printf(", used again (code %d): %s, cuCtxGetId %d id %s\n", again,
           current() == primary ? "the same address" : "elsewhere", code, later == id ? "the same" : "another");
}

// A copy from memory that is not there: an error, or a signal?
static void unmapped(size_t bytes) {
    void *device;
    cudaMalloc(&device, bytes);
    void *gone = mmap(0, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(gone, bytes);
    printf("HtoD of %zu MiB from unmapped memory: ", bytes >> 20);
    fflush(stdout);
    printf("code %d", cuMemcpyHtoD((CUdeviceptr)device, gone, bytes));
    printf(", then cuCtxSynchronize %d\n", cuCtxSynchronize());
}

// Ids of the per-thread default streams of two threads that live, and of one that lives after them.
static void per_thread_ids() {
    unsigned long long ids[3] = {};
    int codes[3] = {}, other = -1;
    CUcontext context = current();
    auto ask = [&](int which) {
        cuCtxSetCurrent(context);
        codes[which] = cuStreamGetId(CU_STREAM_PER_THREAD, &ids[which]);
    };
    std::thread first([&] {
        ask(0);
        std::thread second([&] { ask(1); });
        second.join();
    });
    first.join();
    std::thread third([&] { ask(2); });
    third.join();
    unsigned long long legacy = 0;
    other = cuStreamGetId(CU_STREAM_LEGACY, &legacy);
    printf("cuStreamGetId per thread: codes %d %d %d, ids %llu, %llu, successor %llu; legacy: code %d id %llu\n",
           codes[0], codes[1], codes[2], ids[0], ids[1], ids[2], other, legacy);
}

// Whether a call on another thread breaks a capture in global mode.
static void during_a_capture(const char *name, std::function<int()> call) {
    CUstream stream;
    CUgraph graph = nullptr;
    CUcontext context = current();
    int code = -1;
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    int begin = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    std::thread other([&] {
        cuCtxSetCurrent(context);
        code = call();
    });
    other.join();
    int end = cuStreamEndCapture(stream, &graph);
    printf("during a global capture, %s: code %d, begin %d end %d\n", name, code, begin, end);
    if (graph)
        cuGraphDestroy(graph);
    cuStreamDestroy(stream);
}

// Runs this program again with an argument: what happens there must not reach the other facts.
static void in_a_child(const char *what) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        execl("/proc/self/exe", "facts", what, (char *)nullptr);
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status))
        printf("(signal %d in \"%s\")\n", WTERMSIG(status), what);
}

int main(int words, char **arguments) {
    if (words > 1) {
        const char *what = arguments[1];
        if (!strcmp(what, "fault"))
            after_a_fault();
        else if (!strcmp(what, "context"))
            after_a_context();
        else
            unmapped((size_t)atoi(what) << 20);
        return 0;
    }
    cudaFree(0);
    const size_t most = 64 << 20;
    char *device;
    cudaMalloc((void **)&device, most);
    char *host = (char *)mmap(0, most, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(host, 1, most);
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    // How large an asynchronous HtoD from pageable memory may be to return before a busy stream is idle.
    for (size_t bytes = 64 << 10; bytes <= most; bytes *= 2) {
        spin<<<1, 1, 0, stream>>>(400000000LL);
        double start = now();
        cudaError_t code = cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream);
        double call = now() - start;
        cudaStreamSynchronize(stream);
        printf("busy stream, async HtoD %6zu KiB: call %8.3f ms of %8.3f ms, code %d\n", bytes >> 10, call * 1e3,
               (now() - start) * 1e3, code);
    }
    // Several small ones in a row: when does stock run out of staging?
    spin<<<1, 1, 0, stream>>>(800000000LL);
    double start = now();
    int count = 0;
    for (; count < 256 && now() - start < 0.2; count++)
        cudaMemcpyAsync(device, host, 1 << 20, cudaMemcpyHostToDevice, stream);
    printf("busy stream, async HtoD of 1 MiB in a row: %d calls in %.1f ms\n", count, (now() - start) * 1e3);
    cudaStreamSynchronize(stream);
    // A registered page in the middle of a pageable range.
    cudaHostRegister(host + (1 << 20), 4096, 0);
    cudaError_t inner = cudaMemcpy(device, host, 4 << 20, cudaMemcpyHostToDevice);
    cudaGetLastError();
    cudaError_t tail = cudaMemcpy(device, host, (1 << 20) + 2048, cudaMemcpyHostToDevice);
    cudaGetLastError();
    printf("registered page inside the range: code %d; at its end: code %d\n", inner, tail);
    cudaHostUnregister(host + (1 << 20));
    // Attributes of kinds of memory.
    CUdeviceptr pool;
    cudaMallocAsync((void **)&pool, 1 << 20, stream);
    cudaStreamSynchronize(stream);
    void *managed;
    cudaMallocManaged(&managed, 1 << 20);
    CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                   CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT};
    struct {
        const char *name;
        CUdeviceptr at;
    } kinds[] = {{"device", (CUdeviceptr)device + 4096}, {"pool", pool}, {"managed", (CUdeviceptr)managed},
                 {"pageable", (CUdeviceptr)host}};
    for (auto &kind : kinds) {
        unsigned type = 77, is_managed = 77;
        CUdeviceptr base = 0;
        size_t size = 0;
        int ordinal = -7;
        CUcontext context = nullptr;
        void *values[] = {&type, &is_managed, &base, &size, &ordinal, &context};
        CUresult code = cuPointerGetAttributes(6, names, values, kind.at);
        printf("attributes of %-8s: code %d type %u managed %u offset %lld size %zu ordinal %d context %d\n", kind.name,
               code, type, is_managed, base ? (long long)(kind.at - base) : -1, size, ordinal, context != nullptr);
    }
    double t = now();
    for (int i = 0; i < 100000; i++) {
        unsigned type, is_managed;
        CUdeviceptr base;
        size_t size;
        int ordinal;
        CUcontext context;
        void *values[] = {&type, &is_managed, &base, &size, &ordinal, &context};
        cuPointerGetAttributes(6, names, values, (CUdeviceptr)host);
    }
    printf("cuPointerGetAttributes of six on a pageable address: %.0f ns\n", (now() - t) * 1e4);
    t = now();
    unsigned long long id;
    CUcontext context;
    for (int i = 0; i < 100000; i++) {
        cuCtxGetCurrent(&context);
        cuCtxGetId(context, &id);
    }
    printf("cuCtxGetCurrent and cuCtxGetId: %.0f ns\n", (now() - t) * 1e4);
    t = now();
    void *own = mmap(0, 32 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    cudaError_t code = cudaHostRegister(own, 32 << 20, cudaHostRegisterPortable | cudaHostRegisterMapped);
    printf("mmap and register 32 MiB: %.1f ms, code %d\n", (now() - t) * 1e3, code);
    t = now();
    cudaHostUnregister(own);
    printf("unregister: %.1f ms\n", (now() - t) * 1e3);
    per_thread_ids();
    char *pinned;
    cudaMallocHost((void **)&pinned, 4096);
    CUevent events[2];
    for (CUevent &event : events)
        cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    cuEventRecord(events[1], nullptr);
    during_a_capture("cuMemHostGetDevicePointer", [&] {
        CUdeviceptr at;
        return cuMemHostGetDevicePointer(&at, pinned, 0);
    });
    during_a_capture("cuEventDestroy of a new event", [&] { return cuEventDestroy(events[0]); });
    during_a_capture("cuEventDestroy of a recorded event", [&] { return cuEventDestroy(events[1]); });
    // Is a stream idle as soon as a synchronous copy has returned? A staged one must not look busy where stock is idle.
    for (size_t bytes : {(size_t)64 << 10, (size_t)1 << 20, (size_t)16 << 20}) {
        int busy[2] = {};
        for (int i = 0; i < 200; i++) {
            cuMemcpyHtoD((CUdeviceptr)device, host, bytes);
            busy[0] += cuStreamQuery(nullptr) != CUDA_SUCCESS;
            cuMemcpyDtoH(host, (CUdeviceptr)device, bytes);
            busy[1] += cuStreamQuery(nullptr) != CUDA_SUCCESS;
        }
        printf("stream busy right after a synchronous copy of %zu KiB: HtoD %d, DtoH %d of 200\n", bytes >> 10, busy[0],
               busy[1]);
    }
    for (const char *what : {"fault", "context", "1", "16"})
        in_a_child(what);
    return 0;
}
