/* contract [--wait-file F] [--loop] [--only PREFIX] [--end CASE] [--ends] [--device N] [--at-length]: what a program may
 * rely on when it copies, one line a fact. --end runs one of the cases that --ends lists, and nothing else. */
#define _GNU_SOURCE
#include "contract.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

CUcontext main_context;
CUdevice main_device;
bool at_length;
static const char *current_case;
static bool wrong_bytes;
static volatile sig_atomic_t stopping;

void report(const char *variant, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%s%s%s: %s\n", current_case, *variant ? "/" : "", variant, text);
    fflush(stdout);
    wrong_bytes |= strstr(text, "bytes_ok=0") != NULL;
}

void must(CUresult result, const char *what)
{
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "contract: %s: %s returned %d\n", current_case ? current_case : "start", what, result);
        _exit(5);
    }
}

CUdeviceptr device_memory(size_t bytes)
{
    CUdeviceptr address;
    must(cuMemAlloc_v2(&address, bytes), "cuMemAlloc");
    return address;
}

void fill_pattern(unsigned char *memory, size_t bytes, unsigned seed)
{
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        memory[i] = (unsigned char)(state >> 24);
    }
}

bool is_pattern(const unsigned char *memory, size_t bytes, unsigned seed)
{
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        if (memory[i] != (unsigned char)(state >> 24))
            return false;
    }
    return true;
}

bool is_byte(const unsigned char *memory, size_t bytes, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != value)
            return false;
    return true;
}

unsigned char *host_zeros(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(memory == MAP_FAILED, "mmap");
    return memory;
}

unsigned char *host_pattern(size_t bytes, unsigned seed)
{
    unsigned char *memory = host_zeros(bytes);
    fill_pattern(memory, bytes, seed);
    return memory;
}

void host_free(void *memory, size_t bytes)
{
    munmap(memory, bytes);
}

/* Pinned memory that the checks go through, on a stream of their own. */
static unsigned char *window;
static CUstream window_stream;

static unsigned char *fetch(CUdeviceptr address, size_t bytes)
{
    must(cuMemcpyDtoHAsync_v2(window, address, bytes, window_stream), "fetching");
    must(cuStreamSynchronize(window_stream), "fetching");
    return window;
}

bool device_is_pattern(CUdeviceptr address, size_t bytes, unsigned seed)
{
    return is_pattern(fetch(address, bytes), bytes, seed);
}

bool arrived(CUdeviceptr address, size_t bytes, unsigned seed)
{
    must(cuStreamSynchronize(NULL), "cuStreamSynchronize");
    return device_is_pattern(address, bytes, seed);
}

bool device_is_byte(CUdeviceptr address, size_t bytes, unsigned char value)
{
    return is_byte(fetch(address, bytes), bytes, value);
}

void device_fill_pattern(CUdeviceptr address, size_t bytes, unsigned seed)
{
    fill_pattern(window, bytes, seed);
    must(cuMemcpyHtoDAsync_v2(address, window, bytes, window_stream), "filling");
    must(cuStreamSynchronize(window_stream), "filling");
}

void device_fill_byte(CUdeviceptr address, size_t bytes, unsigned char value)
{
    must(cuMemsetD8Async(address, value, bytes, window_stream), "filling");
    must(cuStreamSynchronize(window_stream), "filling");
}

CUstream new_stream(unsigned flags)
{
    CUstream stream;
    must(cuStreamCreate(&stream, flags), "cuStreamCreate");
    return stream;
}

CUcontext new_context(CUdevice device)
{
    CUcontext context;
    must(cuCtxCreate_v2(&context, 0, device), "cuCtxCreate");
    must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
    return context;
}

static void hold(void *argument)
{
    struct busy *busy = argument;
    struct timespec rest = {0, 300000000};
    while (nanosleep(&rest, &rest))
        ;
    busy->over = 1;
}

void make_busy(CUstream stream, struct busy *busy)
{
    busy->over = 0;
    must(cuLaunchHostFunc(stream, hold, busy), "cuLaunchHostFunc");
}

static void wait_at_gate(void *argument)
{
    struct gate *gate = argument;
    struct timespec rest = {0, 1000000};
    for (int i = 0; i < gate->patience_ms && !gate->open; i++)
        nanosleep(&rest, NULL);
    gate->late = !gate->open;
}

void close_gate(CUstream stream, struct gate *gate, int patience_ms)
{
    gate->patience_ms = patience_ms;
    gate->open = gate->late = 0;
    must(cuLaunchHostFunc(stream, wait_at_gate, gate), "cuLaunchHostFunc");
}

int open_gate(struct gate *gate)
{
    gate->open = 1;
    return gate->late;
}

const char *size_name(size_t bytes)
{
    static __thread char names[4][32];
    static __thread int next;
    char *name = names[next++ % 4];
    if (bytes % MIB == 0 && bytes)
        snprintf(name, 32, "%zuMiB", bytes / MIB);
    else if (bytes % KIB == 0 && bytes)
        snprintf(name, 32, "%zuKiB", bytes / KIB);
    else
        snprintf(name, 32, "%zuB", bytes);
    return name;
}

struct errand { void (*function)(void *); void *argument; };

void bind_context(void)
{
    must(cuCtxSetCurrent(main_context), "cuCtxSetCurrent");
}

static void *run_errand(void *argument)
{
    struct errand *errand = argument;
    bind_context();
    errand->function(errand->argument);
    return NULL;
}

void on_other_thread(void (*function)(void *), void *argument)
{
    struct errand errand = {function, argument};
    pthread_t thread;
    must(pthread_create(&thread, NULL, run_errand, &errand), "pthread_create");
    pthread_join(thread, NULL);
}

void *runtime_library(void)
{
    void *library = dlopen("libcudart.so.13", RTLD_NOW);
    return library ? library : dlopen("libcudart.so.12", RTLD_NOW);
}

static void start_cuda(int ordinal)
{
    must(cuInit(0), "cuInit");
    must(cuDeviceGet(&main_device, ordinal), "cuDeviceGet");
    must(cuDevicePrimaryCtxRetain(&main_context, main_device), "cuDevicePrimaryCtxRetain");
    bind_context();
    must(cuMemHostAlloc((void **)&window, HUGE + MIB, 0), "cuMemHostAlloc");
    window_stream = new_stream(CU_STREAM_NON_BLOCKING);
    /* One large copy each way, as any program has made before somebody looks at it. */
    CUdeviceptr device = device_memory(HUGE);
    unsigned char *host = host_pattern(HUGE, 1);
    must(cuMemcpyHtoD_v2(device, host, HUGE), "first HtoD");
    must(cuMemcpyDtoH_v2(host, device, HUGE), "first DtoH");
    must(is_pattern(host, HUGE, 1) ? 0 : 1, "first copy");
    host_free(host, HUGE);
    must(cuMemFree_v2(device), "cuMemFree");
}

static void wait_for(const char *file)
{
    printf("ready %d\n", getpid());
    fflush(stdout);
    while (file && access(file, F_OK) != 0 && !stopping)
        usleep(10000);
}

static void on_signal(int signal)
{
    (void)signal;
    stopping = 1;
}

int main(int argc, char **argv)
{
    const char *file = NULL, *only = "", *end = NULL;
    bool loop = false;
    int device = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--wait-file") && i + 1 < argc)
            file = argv[++i];
        else if (!strcmp(argv[i], "--only") && i + 1 < argc)
            only = argv[++i];
        else if (!strcmp(argv[i], "--end") && i + 1 < argc)
            end = argv[++i];
        else if (!strcmp(argv[i], "--device") && i + 1 < argc)
            device = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--loop"))
            loop = true;
        else if (!strcmp(argv[i], "--at-length"))
            at_length = true;
        else if (!strcmp(argv[i], "--export"))
            return export_memory();
        else if (!strcmp(argv[i], "--ends")) {
            for (const struct contract_case *c = end_cases; c->name; c++)
                puts(c->name);
            return 0;
        }
        else {
            fprintf(stderr, "usage: %s [--wait-file F] [--loop] [--only PREFIX] [--end CASE] [--ends] [--device N] "
                            "[--at-length]\n", argv[0]);
            return 2;
        }
    }
    signal(SIGTERM, on_signal);
    start_cuda(device);
    wait_for(file);
    if (end) {
        for (const struct contract_case *c = end_cases; c->name; c++)
            if (!strcmp(c->name, end)) {
                signal(SIGTERM, SIG_DFL);
                current_case = c->name;
                c->run();
                return wrong_bytes ? 3 : 0;
            }
        return 2;
    }
    /* Capture comes first: there the first accelerated copy meets a capture of another thread. */
    const struct contract_case *const groups[] = {capture_cases, copy_cases,   order_cases,  misuse_cases,
                                                  context_cases, memory_cases, stream_cases, fact_cases};
    do
        for (size_t group = 0; group < sizeof groups / sizeof *groups; group++)
            for (const struct contract_case *c = groups[group]; c->name; c++)
                if (!strncmp(c->name, only, strlen(only)) && !stopping) {
                    current_case = c->name;
                    c->run();
                }
    while (loop && !stopping);
    return wrong_bytes ? 3 : 0;
}
