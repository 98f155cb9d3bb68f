/* Contract: how a process ends in the midst of its copies, and what it is told when its context is broken. Each case has
 * a process of its own; whoever runs it compares its output and how it ended. */
#define _GNU_SOURCE
#include "contract.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 4 * MIB };

static _Atomic int copies;

static _Noreturn void copy_for_ever(bool to_device)
{
    bind_context();
    CUdeviceptr device = device_memory(HUGE);
    unsigned char *host = host_zeros(HUGE);
    for (;;) {
        CUresult result = to_device ? cuMemcpyHtoD_v2(device, host, HUGE) : cuMemcpyDtoH_v2(host, device, HUGE);
        if (result != CUDA_SUCCESS)
            pause(); /* the driver is being taken down */
        copies++;
    }
}

static void *to_device_for_ever(void *argument)
{
    (void)argument;
    copy_for_ever(true);
}

static void *to_host_for_ever(void *argument)
{
    (void)argument;
    copy_for_ever(false);
}

/* Two threads in large copies, a few of which are over. */
static void copy_in_background(void)
{
    pthread_t thread;
    must(pthread_create(&thread, NULL, to_device_for_ever, NULL), "pthread_create");
    must(pthread_create(&thread, NULL, to_host_for_ever, NULL), "pthread_create");
    while (copies < 6)
        usleep(1000);
    report("", "copying");
}

static void by_exit(void)
{
    copy_in_background();
    exit(7);
}

static void by_underscore_exit(void)
{
    copy_in_background();
    _exit(8);
}

static void by_signal(void)
{
    copy_in_background();
    raise(SIGTERM);
}

static void by_exec(void)
{
    copy_in_background();
    execl("/bin/sh", "sh", "-c", "echo another program; exit 9", NULL);
}

static void by_return(void)
{
    copy_in_background();
}

/* A child of an attached process copies, is told that it cannot, and ends as any program does. */
static void child_exits(void)
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_pattern(BYTES, 240);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        CUresult there = cuMemcpyHtoD_v2(device, host, BYTES), back = cuMemcpyDtoH_v2(host, device, BYTES);
        exit(there == back ? there & 127 : 126);
    }
    int status = 0;
    CUresult parent = cuMemcpyHtoD_v2(device, host, BYTES);
    waitpid(child, &status, 0);
    report("", "child=%d signal=%d parent=%d bytes_ok=%d", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
           WIFSIGNALED(status) ? WTERMSIG(status) : 0, parent, arrived(device, BYTES, 240));
}

struct inside { CUdeviceptr device; unsigned char *host; CUstream stream; CUresult there, away; };

static void copy_inside(void *argument)
{
    struct inside *inside = argument;
    inside->there = cuMemcpyHtoDAsync_v2(inside->device, inside->host, BYTES, inside->stream);
    inside->away = cuMemcpyDtoH_v2(inside->host, inside->device, BYTES);
}

/* A host function that copies, which it may not. */
static void in_host_function(void)
{
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
    struct inside inside = {device_memory(BYTES), host_zeros(BYTES), new_stream(CU_STREAM_NON_BLOCKING), -1, -1};
    must(cuLaunchHostFunc(stream, copy_inside, &inside), "cuLaunchHostFunc");
    CUresult after = cuStreamSynchronize(stream);
    report("", "ret=%d,%d after=%d", inside.there, inside.away, after);
    CUresult good = cuMemcpyHtoD_v2(inside.device, inside.host, BYTES);
    report("then a good one", "ret=%d", good);
}

/* Memory that the program itself could not read. */
static void unreadable_source(void)
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_zeros(BYTES);
    must(mprotect(host + MIB, MIB, PROT_NONE), "mprotect");
    report("", "copying");
    report("", "ret=%d", cuMemcpyHtoD_v2(device, host, BYTES));
}

static void unwritable_destination(void)
{
    CUdeviceptr device = device_memory(BYTES);
    unsigned char *host = host_zeros(BYTES);
    must(mprotect(host + MIB, MIB, PROT_READ), "mprotect");
    report("", "copying");
    report("", "ret=%d", cuMemcpyDtoH_v2(host, device, BYTES));
}

/* A kernel that writes where nothing is. */
static const char fault[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                            ".visible .entry fault()\n{\n"
                            ".reg .b32 %r<2>;\n.reg .b64 %rd<2>;\n"
                            "mov.u32 %r1, 1;\nmov.u64 %rd1, 64;\nst.global.u32 [%rd1], %r1;\nret;\n}\n";

/* Copies behind a kernel that faults, and everything after: the error that the context keeps. */
static void broken_context(void)
{
    CUmodule module;
    CUfunction function;
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING), other = new_stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr device = device_memory(LARGE);
    unsigned char *host = host_zeros(LARGE);
    struct gate gate;
    CUresult loaded = cuModuleLoadData(&module, fault);
    CUresult found = loaded ? -1 : cuModuleGetFunction(&function, module, "fault");
    report("kernel", "ret=%d,%d", loaded, found);
    if (found != CUDA_SUCCESS)
        return;
    close_gate(stream, &gate, PATIENCE_MS);
    CUresult launched = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    CUresult there = cuMemcpyHtoDAsync_v2(device, host, MIB, stream);
    open_gate(&gate);
    CUresult away = cuMemcpyDtoHAsync_v2(host, device, MIB, stream);
    report("behind it", "ret=%d,%d,%d", launched, there, away);
    report("afterwards", "ret=%d,%d,%d,%d,%d,%d", cuMemcpyHtoD_v2(device, host, LARGE),
           cuMemcpyDtoH_v2(host, device, LARGE), cuMemcpyHtoDAsync_v2(device, host, LARGE, other),
           cuMemcpyDtoHAsync_v2(host, device, LARGE, other), cuMemcpy(device, (uintptr_t)host, LARGE),
           cuMemcpyAsync((uintptr_t)host, device, LARGE, other));
    report("synchronise", "ret=%d", cuCtxSynchronize());
}

/* The kernel faults while large copies are on their way in another thread: they end with the same code. */
static void broken_meanwhile(void)
{
    CUmodule module;
    CUfunction function;
    must(cuModuleLoadData(&module, fault), "cuModuleLoadData");
    must(cuModuleGetFunction(&function, module, "fault"), "cuModuleGetFunction");
    CUdeviceptr device = device_memory(HUGE);
    unsigned char *host = host_zeros(HUGE);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING), other = new_stream(CU_STREAM_NON_BLOCKING);
    struct busy busy;
    make_busy(other, &busy);
    must(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, other, NULL, NULL), "cuLaunchKernel");
    CUresult result;
    int turn = 0;
    do {
        turn = !turn;
        result = turn ? cuMemcpyHtoDAsync_v2(device, host, HUGE, stream) : cuMemcpyDtoHAsync_v2(host, device, HUGE, stream);
    } while (result == CUDA_SUCCESS);
    report("", "ret=%d synchronise=%d", result, cuStreamSynchronize(stream));
}

const struct contract_case end_cases[] = {
    {"end_exit", by_exit},
    {"end_underscore_exit", by_underscore_exit},
    {"end_return", by_return},
    {"end_signal", by_signal},
    {"end_exec", by_exec},
    {"end_child_exits", child_exits},
    {"end_in_host_function", in_host_function},
    {"end_unreadable_source", unreadable_source},
    {"end_unwritable_destination", unwritable_destination},
    {"end_outside_the_pieces", outside_the_pieces},
    {"end_kinds", of_kinds_that_do_not_fit},
    {"end_broken_context", broken_context},
    {"end_broken_meanwhile", broken_meanwhile},
    {0}};
