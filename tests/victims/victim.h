/* What the copying victims share: options, counters, and the API that a victim copies through. */
#ifndef VICTIM_H
#define VICTIM_H

#include "../stand-in/cuda_stand_in.h"

#include <stdbool.h>

enum direction { HTOD, DTOH };

struct options {
    int threads, idle_threads, malloc_storm;
    size_t sizes[16];
    int size_count;
    double seconds, fork_at, load_after;
    long calls, fail_every, pause_ms;
    bool async, fresh, default_kind, pinned, per_thread, two_d, exact, allow_errors, hold, count_interrupted;
};
extern struct options options;

/* One exported function: the victim's own outermost calls to it. Bytes are those of successful calls. */
struct counter {
    const char *name;
    _Atomic uint64_t calls, errors, bytes;
};

/* Counts a call that returned `code`. */
static inline int counted(struct counter *counter, size_t bytes, int code)
{
    counter->calls++;
    if (code)
        counter->errors++;
    else
        counter->bytes += bytes;
    return code;
}

/* Rows of a two-dimensional copy. */
struct shape {
    size_t width, height, host_pitch, device_pitch;
};

/* api_runtime.c or api_driver.c. Every function returns the API's code. */
extern struct counter api_counters[];
extern const int api_counter_count;
int api_load(void);
int api_start_thread(void);
int api_device_alloc(CUdeviceptr *address, size_t bytes);
int api_pinned_alloc(void **address, size_t bytes);
int api_stream_create(CUstream *stream);
int api_stream_sync(CUstream stream);
int api_copy(enum direction direction, void *host, CUdeviceptr device, size_t bytes, CUstream stream);
int api_copy_2d(enum direction direction, void *host, CUdeviceptr device, const struct shape *shape, CUstream stream);
/* After a call that failed with `code`: 0 if the API's last error says the same (where it has one), and clears it. */
int api_check_last_error(int code);

/* parked.c: threads that wait in system calls, or keep malloc busy. */
void parked_start(int count);
/* How often epoll_wait and recv with a timeout returned EINTR, where that does not end the victim. */
extern _Atomic uint64_t interrupted_calls;
void malloc_storm_start(int count);

/* options.c */
void options_parse(int argc, char **argv);

/* Says what went wrong and ends the process with `exit_code`. */
_Noreturn void fail(int exit_code, const char *format, ...) __attribute__((format(printf, 2, 3)));
enum { EXIT_USAGE = 2, EXIT_MISMATCH = 3, EXIT_INTERRUPTED = 4, EXIT_API = 5 };

#endif
