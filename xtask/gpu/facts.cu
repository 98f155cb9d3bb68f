// What the driver does at edges that the copy engine relies on. Prints one line a fact; see EVIDENCE in docs/.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

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

int main() {
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
    return 0;
}
