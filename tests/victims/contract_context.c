/* Contract: contexts. A copy happens in the calling thread's context and leaves the stack of contexts alone. */
#define _GNU_SOURCE
#include "contract.h"

#include <stdio.h>
#include <unistd.h>

enum { BYTES = 8 * MIB };

static CUcontext current(void)
{
    CUcontext context = NULL;
    must(cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    return context;
}

static bool both_ways(unsigned seed, CUresult results[2])
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *source = host_pattern(BYTES, seed), *back = host_zeros(BYTES);
    results[0] = cuMemcpyHtoD_v2(device, source, BYTES);
    results[1] = cuMemcpyDtoH_v2(back, device, BYTES);
    bool right = is_pattern(back, BYTES, seed);
    host_free(source, BYTES);
    host_free(back, BYTES);
    must(cuMemFree_v2(device), "cuMemFree");
    return right;
}

static void stack_unchanged(void)
{
    CUresult results[2];
    CUcontext created, popped;
    must(cuCtxCreate_v2(&created, 0, main_device), "cuCtxCreate");
    bool right = both_ways(1, results), same = current() == created;
    report("created", "ret=%d,%d bytes_ok=%d same=%d", results[0], results[1], right, same);
    must(cuCtxPushCurrent_v2(main_context), "cuCtxPushCurrent");
    right = both_ways(2, results);
    same = current() == main_context;
    must(cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");
    same = same && popped == main_context && current() == created;
    report("pushed", "ret=%d,%d bytes_ok=%d same=%d", results[0], results[1], right, same);
    must(cuCtxPopCurrent_v2(&popped), "cuCtxPopCurrent");
    report("popped", "same=%d", popped == created && current() == main_context);
    must(cuCtxDestroy_v2(created), "cuCtxDestroy");
}

/* Contexts come and go, each with a copy; the primary one goes on. */
static void created_and_destroyed(void)
{
    CUresult results[2];
    bool right = true;
    for (unsigned i = 0; i < 5; i++) {
        CUcontext created;
        must(cuCtxCreate_v2(&created, 0, main_device), "cuCtxCreate");
        right = right && both_ways(10 + i, results) && !results[0] && !results[1];
        must(cuCtxDestroy_v2(created), "cuCtxDestroy");
        bind_context();
        right = right && both_ways(20 + i, results) && !results[0] && !results[1];
    }
    report("", "ret=%d,%d bytes_ok=%d same=%d", results[0], results[1], right, current() == main_context);
}

/* More contexts at once than a copier may have room for; it takes from one what another needs, and is not seen. */
static void many(void)
{
    enum { MANY = 12 };
    CUcontext contexts[MANY];
    CUresult results[2];
    bool right = true, same = true;
    for (int i = 0; i < MANY; i++)
        contexts[i] = new_context(main_device);
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < MANY; i++) {
            must(cuCtxPushCurrent_v2(contexts[i]), "cuCtxPushCurrent");
            right = right && both_ways(40 + (unsigned)i, results) && !results[0] && !results[1];
            same = same && current() == contexts[i];
            must(cuCtxPopCurrent_v2(NULL), "cuCtxPopCurrent");
            same = same && current() == main_context;
            usleep(round * 20000); /* a copier may take its time to take something away */
        }
    for (int i = 0; i < MANY; i++)
        must(cuCtxDestroy_v2(contexts[i]), "cuCtxDestroy");
    report("", "bytes_ok=%d same=%d after=%d", right, same, current() == main_context);
}

static void per_thread(void *argument)
{
    CUresult *results = argument;
    results[2] = both_ways(30, results);
}

static void other_thread(void)
{
    CUresult results[3] = {0};
    on_other_thread(per_thread, results);
    report("", "ret=%d,%d bytes_ok=%d", results[0], results[1], results[2]);
}

/* Nothing of ours on a device that the program does not use. */
static void other_device(void)
{
    int count = 0, active = 0;
    unsigned flags;
    must(cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (int device = 0; device < count; device++) {
        int one = 0;
        if (device != main_device)
            must(cuDevicePrimaryCtxGetState(device, &flags, &one), "cuDevicePrimaryCtxGetState");
        active += one;
    }
    report("", "active=%d", active);
}

const struct contract_case context_cases[] = {
    {"context_stack", stack_unchanged}, {"context_destroyed", created_and_destroyed}, {"context_many", many},
    {"context_other_thread", other_thread}, {"context_other_device", other_device}, {0}};
