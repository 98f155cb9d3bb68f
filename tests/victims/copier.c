/* A program that copies all the time, checks every byte and counts its own calls.
 *
 * Each thread sends a stretch of a random pattern to the device and reads it back, another stretch each round, so that
 * a copy that did not happen, or came late, shows as wrong bytes. Bytes beyond the copied ones must stay. */
#define _GNU_SOURCE
#include "victim.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    WINDOW = 1 << 20,       /* how far a stretch may start into the pattern */
    EXTRA = 256,            /* bytes that a buffer has more than the largest size */
    GUARD = 64,             /* bytes checked behind a destination */
    OVERWRITE_UP_TO = 256 << 10,
    ROW = 4000, HOST_PITCH = 4096, DEVICE_PITCH = 4352,
};

static unsigned char *pattern;
static size_t largest, buffer_bytes;
static _Atomic bool stopping;
static _Atomic int running;
static _Atomic uint64_t moved[2], busy_ns[2], copies, verified_bytes, mismatches;

_Noreturn void fail(int exit_code, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "victim: %s\n", text);
    _exit(exit_code);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void must(int code, const char *what)
{
    if (code)
        fail(EXIT_API, "%s returned %d", what, code);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void *host_memory(size_t bytes)
{
    void *memory = NULL;
    if (options.pinned) {
        must(api_pinned_alloc(&memory, bytes), "allocating pinned memory");
        return memory;
    }
    memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail(EXIT_API, "out of memory");
    return memory;
}

static void make_pattern(void)
{
    size_t words = (buffer_bytes + WINDOW) / 8 + 1;
    uint64_t *memory = host_memory(words * 8), state = 88172645463325252u;
    for (size_t i = 0; i < words; i++)
        memory[i] = next_random(&state);
    pattern = (unsigned char *)memory;
}

struct worker {
    int number;
    uint64_t random;
    CUstream stream;
    CUdeviceptr device;
    unsigned char *destination, *scratch;
};

/* One copy with its time; false if it failed and errors are allowed. */
static bool copy(struct worker *w, enum direction direction, void *host, CUdeviceptr device, size_t bytes,
                 const struct shape *shape)
{
    double start = now();
    int code = shape ? api_copy_2d(direction, host, device, shape, w->stream)
                     : api_copy(direction, host, device, bytes, w->stream);
    busy_ns[direction] += (uint64_t)((now() - start) * 1e9);
    if (code) {
        if (!options.allow_errors)
            fail(EXIT_API, "thread %d: %s of %zu bytes returned %d", w->number,
                 direction == HTOD ? "HtoD" : "DtoH", bytes, code);
        api_check_last_error(code);
        return false;
    }
    moved[direction] += bytes;
    copies++;
    return true;
}

static void check(const struct worker *w, const unsigned char *got, const unsigned char *expected, size_t bytes)
{
    if (memcmp(got, expected, bytes) == 0) {
        verified_bytes += bytes;
        return;
    }
    size_t at = 0;
    while (got[at] == expected[at])
        at++;
    mismatches++;
    fail(EXIT_MISMATCH, "thread %d: mismatch at byte %zu of %zu: %02x instead of %02x", w->number, at, bytes, got[at],
         expected[at]);
}

static void check_untouched(const struct worker *w, const unsigned char *at, size_t bytes, const char *where)
{
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != 0xa5)
            fail(EXIT_MISMATCH, "thread %d: byte %zu %s was written", w->number, i, where);
}

/* A destination of `bytes` and a guard behind; `fresh` ones have never been touched and have no guard. */
static unsigned char *destination(struct worker *w, size_t bytes, size_t offset)
{
    if (options.fresh)
        return (unsigned char *)host_memory(bytes + offset) + offset;
    memset(w->destination + offset + bytes, 0xa5, GUARD);
    return w->destination + offset;
}

static void round_linear(struct worker *w, long number, size_t bytes)
{
    bool odd = !options.exact && number % 4 == 3;
    size_t offset = odd ? next_random(&w->random) % GUARD : 0;
    if (odd)
        bytes += next_random(&w->random) % (EXTRA - 2 * GUARD);
    size_t phase = next_random(&w->random) % WINDOW;
    if (!odd)
        phase &= ~(size_t)63;
    unsigned char *source = pattern + phase;
    bool overwrite = bytes <= OVERWRITE_UP_TO && !options.pinned;
    if (overwrite) {
        source = w->scratch + offset;
        memcpy(source, pattern + phase, bytes);
    }
    bool right = copy(w, HTOD, source, w->device + offset, bytes, NULL);
    if (overwrite) /* the source belongs to the program again */
        memset(source, 0x5a, bytes);
    if (options.async && number % 2 == 0)
        must(api_stream_sync(w->stream), "stream synchronise");
    unsigned char *got = destination(w, bytes, offset);
    right &= copy(w, DTOH, got, w->device + offset, bytes, NULL);
    if (options.async && options.pinned)
        must(api_stream_sync(w->stream), "stream synchronise");
    if (right)
        check(w, got, pattern + phase, bytes);
    if (!options.fresh)
        check_untouched(w, got + bytes, GUARD, "behind the destination");
    if (options.async && !options.pinned)
        must(api_stream_sync(w->stream), "stream synchronise");
    if (options.fresh && !options.pinned)
        munmap(got - offset, bytes + offset);
}

static void round_two_d(struct worker *w, size_t bytes)
{
    size_t height = bytes / ROW ? bytes / ROW : 1;
    struct shape shape = {bytes < ROW ? bytes : ROW, height, HOST_PITCH, DEVICE_PITCH};
    size_t phase = next_random(&w->random) % WINDOW;
    memset(w->destination, 0xa5, height * HOST_PITCH);
    bool right = copy(w, HTOD, pattern + phase, w->device, shape.width * height, &shape);
    right &= copy(w, DTOH, w->destination, w->device, shape.width * height, &shape);
    if (options.async)
        must(api_stream_sync(w->stream), "stream synchronise");
    for (size_t row = 0; right && row < height; row++) {
        check(w, w->destination + row * HOST_PITCH, pattern + phase + row * HOST_PITCH, shape.width);
        check_untouched(w, w->destination + row * HOST_PITCH + shape.width, HOST_PITCH - shape.width, "between rows");
    }
}

/* A copy that leaves the device buffer: it must fail, write nothing, and leave the usual trace. */
static void round_wrong(struct worker *w)
{
    memset(w->destination, 0xa5, GUARD);
    enum direction direction = next_random(&w->random) % 2 ? HTOD : DTOH;
    void *host = direction == HTOD ? pattern : w->destination;
    int code = api_copy(direction, host, w->device + buffer_bytes / 2, buffer_bytes, w->stream);
    if (!code)
        fail(EXIT_MISMATCH, "thread %d: a copy past the end succeeded", w->number);
    if (api_check_last_error(code))
        fail(EXIT_MISMATCH, "thread %d: the last error is not %d", w->number, code);
    check_untouched(w, w->destination, GUARD, "of a failed copy's destination");
}

static void *work(void *argument)
{
    struct worker *w = argument;
    must(api_start_thread(), "starting a thread");
    if (!options.per_thread)
        must(api_stream_create(&w->stream), "creating a stream");
    must(api_device_alloc(&w->device, buffer_bytes), "allocating device memory");
    w->destination = host_memory(buffer_bytes);
    memset(w->destination, 0, buffer_bytes);
    w->scratch = malloc(OVERWRITE_UP_TO + EXTRA);
    w->random = 0x9e3779b97f4a7c15u * (uint64_t)(w->number + 1);
    struct timespec pause = {options.pause_ms / 1000, options.pause_ms % 1000 * 1000000};
    for (long round = 0; !stopping && (!options.calls || 2 * round < options.calls); round++) {
        size_t bytes = options.sizes[round % options.size_count];
        if (options.two_d)
            round_two_d(w, bytes);
        else
            round_linear(w, round, bytes);
        if (options.fail_every && round % options.fail_every == options.fail_every - 1)
            round_wrong(w);
        if (options.pause_ms)
            nanosleep(&pause, NULL);
    }
    running--;
    return NULL;
}

/* A forked child copies once, as programs with worker processes do by mistake, and ends. */
static pid_t fork_child(struct worker *w)
{
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        signal(SIGALRM, SIG_DFL);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        int code = api_copy(HTOD, pattern, w->device, options.sizes[0], w->stream);
        _exit(code & 127);
    }
    return child;
}

static void print_final(int child_status)
{
    printf("{\"pid\":%d,\"functions\":{", getpid());
    const char *comma = "";
    for (int i = 0; i < api_counter_count; i++) {
        struct counter *c = &api_counters[i];
        if (!c->calls)
            continue;
        printf("%s\"%s\":{\"calls\":%llu,\"errors\":%llu,\"bytes\":%llu}", comma, c->name, (unsigned long long)c->calls,
               (unsigned long long)c->errors, (unsigned long long)c->bytes);
        comma = ",";
    }
    printf("},\"verified_bytes\":%llu,\"mismatches\":%llu", (unsigned long long)verified_bytes,
           (unsigned long long)mismatches);
    if (options.count_interrupted)
        printf(",\"interrupted\":%llu", (unsigned long long)interrupted_calls);
    if (options.fork_at != 0)
        printf(",\"child_exit\":%d,\"child_signal\":%d", WIFEXITED(child_status) ? WEXITSTATUS(child_status) : -1,
               WIFSIGNALED(child_status) ? WTERMSIG(child_status) : 0);
    printf("}\n");
    fflush(stdout);
}

static double rate(uint64_t bytes, double seconds)
{
    return seconds > 0 ? (double)bytes / seconds / 1e9 : 0;
}

struct reading { uint64_t bytes[2], busy_ns[2], copies; double at; };

static void print_progress(double start, struct reading *last)
{
    struct reading r = {{moved[0], moved[1]}, {busy_ns[0], busy_ns[1]}, copies, now()};
    double wall = r.at - last->at;
    printf("{\"t\":%.2f,\"htod_gbps\":%.3f,\"dtoh_gbps\":%.3f,\"htod_bytes\":%llu,\"dtoh_bytes\":%llu,"
           "\"htod_call_gbps\":%.3f,\"dtoh_call_gbps\":%.3f,\"copies\":%llu}\n",
           r.at - start, rate(r.bytes[0] - last->bytes[0], wall), rate(r.bytes[1] - last->bytes[1], wall),
           (unsigned long long)(r.bytes[0] - last->bytes[0]), (unsigned long long)(r.bytes[1] - last->bytes[1]),
           rate(r.bytes[0] - last->bytes[0], (double)(r.busy_ns[0] - last->busy_ns[0]) / 1e9),
           rate(r.bytes[1] - last->bytes[1], (double)(r.busy_ns[1] - last->busy_ns[1]) / 1e9),
           (unsigned long long)(r.copies - last->copies));
    fflush(stdout);
    *last = r;
}

/* Waits for SIGUSR1, so that a tracer sees all allocations and copies. */
static void hold(void)
{
    sigset_t go;
    int signal;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &go, NULL);
    printf("ready %d\n", getpid());
    fflush(stdout);
    sigwait(&go, &signal);
}

int main(int argc, char **argv)
{
    options_parse(argc, argv);
    /* Signals are for the main thread, which waits for them; the others never see one. */
    sigset_t wanted;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGINT);
    if (options.fork_at < 0)
        sigaddset(&wanted, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &wanted, NULL);

    for (int i = 0; i < options.size_count; i++)
        largest = options.sizes[i] > largest ? options.sizes[i] : largest;
    buffer_bytes = options.two_d ? (largest / ROW + 1) * DEVICE_PITCH : largest + EXTRA;
    if (options.load_after > 0)
        printf("ready %d\n", getpid());
    fflush(stdout);
    must(api_load(), "starting CUDA");
    if (options.hold)
        hold();
    make_pattern();
    struct worker *workers = calloc((size_t)options.threads, sizeof *workers);
    running = options.threads;
    for (int i = 0; i < options.threads; i++) {
        pthread_t thread;
        workers[i].number = i;
        if (pthread_create(&thread, NULL, work, &workers[i]))
            fail(EXIT_API, "cannot start a thread");
        pthread_detach(thread);
    }
    parked_start(options.idle_threads);
    malloc_storm_start(options.malloc_storm);
    if (options.load_after <= 0 && !options.hold)
        printf("ready %d\n", getpid());
    fflush(stdout);

    double start = now(), tick = start + 1;
    struct reading last = {.at = start};
    pid_t child = 0;
    int child_status = 0;
    while (running > 0) {
        int signal = sigtimedwait(&wanted, NULL, &(struct timespec){0, stopping ? 1000000 : 20000000});
        bool fork_now = signal == SIGUSR1 || (options.fork_at > 0 && now() - start >= options.fork_at);
        if (signal == SIGTERM || signal == SIGINT || (options.seconds > 0 && now() - start >= options.seconds))
            stopping = true;
        if (fork_now && !child)
            child = fork_child(&workers[0]);
        if (now() >= tick && !stopping) {
            print_progress(start, &last);
            tick += 1;
        }
    }
    if (child > 0)
        while (waitpid(child, &child_status, 0) < 0 && errno == EINTR)
            ;
    print_final(child_status);
    /* Streams and parked threads end with the process. */
    _exit(0);
}
