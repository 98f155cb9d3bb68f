// A plain CUDA program that copies pageable memory both ways and checks every byte. nvcc links the static runtime into
// it, so the only copy functions that can be seen or swapped are those of libcuda.
//
//     nvcc -O2 -o copies examples/copies.cu && ./copies [MiB] [seconds]
//
// Prints `ready PID`, then one JSON line a second with the rates of the copies themselves (1e9 bytes a second; the checks
// are not timed). Ends on SIGTERM or after `seconds` with a JSON summary; exit code 3 if a byte was wrong.
#include <csignal>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include <cuda_runtime.h>

static volatile sig_atomic_t running = 1;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static void check(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

int main(int argc, char **argv) {
    size_t bytes = (argc > 1 ? strtoull(argv[1], nullptr, 10) : 1024) << 20;
    double seconds = argc > 2 ? atof(argv[2]) : 60;
    signal(SIGTERM, [](int) { running = 0; });
    signal(SIGINT, [](int) { running = 0; });

    auto *source = static_cast<uint64_t *>(malloc(bytes));
    auto *back = static_cast<uint64_t *>(malloc(bytes));
    uint64_t word = 0x9E3779B97F4A7C15ull;
    for (size_t i = 0; i < bytes / 8; i++) {
        word ^= word << 13, word ^= word >> 7, word ^= word << 17;
        source[i] = word;
    }
    memset(back, 0, bytes);
    void *device;
    check(cudaMalloc(&device, bytes), "cudaMalloc");
    printf("ready %d\n", getpid());
    fflush(stdout);

    double start = now(), second = start, up_s = 0, down_s = 0;
    unsigned long loops = 0, window = 0, mismatches = 0;
    while (running && now() - start < seconds) {
        source[loops % (bytes / 8)] += loops + 1;  // So that a copy that was left out is seen.
        double a = now();
        check(cudaMemcpy(device, source, bytes, cudaMemcpyHostToDevice), "HtoD");
        double b = now();
        check(cudaMemcpy(back, device, bytes, cudaMemcpyDeviceToHost), "DtoH");
        down_s += now() - b;
        up_s += b - a;
        loops++, window++;
        if (memcmp(source, back, bytes) != 0) {
            mismatches++;
            fprintf(stderr, "a copy came back changed\n");
        }
        if (now() - second >= 1) {
            second = now();
            printf("{\"t\": %.1f, \"htod_gbps\": %.2f, \"dtoh_gbps\": %.2f}\n", second - start,
                   window * bytes / up_s / 1e9, window * bytes / down_s / 1e9);
            fflush(stdout);
            up_s = down_s = 0, window = 0;
        }
    }
    printf("{\"pid\": %d, \"loops\": %lu, \"bytes\": %zu, \"mismatches\": %lu}\n", getpid(), loops, 2 * loops * bytes,
           mismatches);
    return mismatches ? 3 : 0;
}
