/* Many processes, each of which copies twice and ends: victim-crowd COUNT. Each has a name of its own. They call the functions
 * of libevery.so, which do nothing. Says "ready PID", starts them at SIGUSR1, and ends with an account of calls and bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int to_device(const void *array, size_t offset, const void *host, size_t bytes);
typedef int to_host(void *host, const void *array, size_t offset, size_t bytes);

enum { TOGETHER = 4, BYTES = 1000 };

static void copy(int number, to_device *write, to_host *read)
{
    static char memory[2 * BYTES], array[BYTES];
    char name[16];
    snprintf(name, sizeof name, "crowd-%d", number);
    prctl(PR_SET_NAME, name);
    _exit(write(array, 0, memory, BYTES + number % 7) | read(memory, array, 0, BYTES));
}

int main(int argc, char **argv)
{
    long count = argc > 1 ? atol(argv[1]) : 1;
    void *library = dlopen("libevery.so", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    to_device *write = (to_device *)(uintptr_t)dlsym(library, "cuMemcpyHtoA_v2");
    to_host *read = (to_host *)(uintptr_t)dlsym(library, "cuMemcpyAtoH_v2");
    sigset_t go;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go, NULL);
    printf("ready %d\n", getpid());
    fflush(stdout);
    int signal, failed = 0;
    sigwait(&go, &signal);
    long bytes = 0;
    for (long started = 0, ended = 0; ended < count;) {
        if (started < count && started - ended < TOGETHER) {
            pid_t child = fork();
            if (child == 0)
                copy(started, write, read);
            failed |= child < 0;
            bytes += BYTES + started++ % 7;
        } else {
            int status;
            failed |= wait(&status) < 0 || status;
            ended++;
        }
    }
    printf("{\"functions\":{\"cuMemcpyHtoA_v2\":{\"calls\":%ld,\"errors\":0,\"bytes\":%ld},"
           "\"cuMemcpyAtoH_v2\":{\"calls\":%ld,\"errors\":0,\"bytes\":%ld}}}\n",
           count, bytes, count, count * BYTES);
    return failed;
}
