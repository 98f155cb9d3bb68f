/* What the cases of `contract` share. A case prints lines through `report`; nothing in them depends on time or
 * addresses, so that the outputs of two runs, untouched and patched, can be compared as text. */
#ifndef CONTRACT_H
#define CONTRACT_H

#include "../stand-in/cuda_stand_in.h"

#include <stdbool.h>

enum { KIB = 1 << 10, MIB = 1 << 20, LARGE = 16 * MIB, HUGE = 64 * MIB };

/* Prints "CASE/VARIANT: …". A line with bytes_ok=0 makes the program exit 3. */
void report(const char *variant, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Ends the program: the preparation of a case failed. */
void must(CUresult result, const char *what);

CUdeviceptr device_memory(size_t bytes);
/* Ordinary memory with a pattern that depends on `seed`. Freed by host_free. */
unsigned char *host_pattern(size_t bytes, unsigned seed);
unsigned char *host_zeros(size_t bytes);
void host_free(void *memory, size_t bytes);
void fill_pattern(unsigned char *memory, size_t bytes, unsigned seed);
bool is_pattern(const unsigned char *memory, size_t bytes, unsigned seed);
bool is_byte(const unsigned char *memory, size_t bytes, unsigned char value);
/* The same question about device memory, through pinned memory, so that no copy under test is involved. */
bool device_is_pattern(CUdeviceptr address, size_t bytes, unsigned seed);
/* The same after a synchronous HtoD copy on the legacy stream: it may return with its last bytes on their way, stock's too
 * (driver 580), and the stream that this looks with does not wait for them. */
bool arrived(CUdeviceptr address, size_t bytes, unsigned seed);
bool device_is_byte(CUdeviceptr address, size_t bytes, unsigned char value);
/* Fills device memory without a copy from pageable memory. */
void device_fill_pattern(CUdeviceptr address, size_t bytes, unsigned seed);
void device_fill_byte(CUdeviceptr address, size_t bytes, unsigned char value);

CUstream new_stream(unsigned flags);
/* A context that is not current. */
CUcontext new_context(CUdevice device);
/* Keeps a stream busy for 0.3 s, in place of a kernel. `was_over` says whether it had ended at this moment. */
struct busy { _Atomic int over; };
void make_busy(CUstream stream, struct busy *busy);
/* Keeps a stream busy until `open_gate`, or for so long: then a call that was made meanwhile has waited for it. */
struct gate { _Atomic int open, late; int patience_ms; };
enum { PATIENCE_MS = 1000, LONG_PATIENCE_MS = 20000 };
void close_gate(CUstream stream, struct gate *gate, int patience_ms);
/* Says whether it came too late. The stream goes on. */
int open_gate(struct gate *gate);
const char *size_name(size_t bytes);
/* Runs `function` on another thread, which has the primary context, and waits for it. */
void on_other_thread(void (*function)(void *), void *argument);
void bind_context(void);
extern CUcontext main_context;
extern CUdevice main_device;

/* Also runs what takes long or much memory. */
extern bool at_length;
/* The libcudart that is installed; null without one. */
void *runtime_library(void);
/* In contract_memory.c: what a process does that exports memory to this one, and cases for end_cases. */
int export_memory(void);
void outside_the_pieces(void), of_kinds_that_do_not_fit(void);

struct contract_case { const char *name; void (*run)(void); };
extern const struct contract_case copy_cases[], order_cases[], capture_cases[], misuse_cases[], context_cases[],
    memory_cases[], stream_cases[], fact_cases[];
/* Cases after which the process has ended, or its context is of no use: each is run alone. */
extern const struct contract_case end_cases[];

#endif
