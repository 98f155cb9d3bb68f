/* Programs with odd threads or mappings: victim-odd WHAT. They copy in the background and check that nothing of theirs
 * was touched. */
#define _GNU_SOURCE
#include "copying.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

/* A fibre on 3 KiB of stack in the middle of other data; the thread that runs it does nothing else. */
enum { BELOW = 32 << 10, STACK = 3 << 10, CANARY = 0x5a };
static unsigned char pool[64 << 10] __attribute__((aligned(4096)));

static void check_pool(void)
{
    for (size_t i = 0; i < sizeof pool; i++)
        if (pool[i] != CANARY && (i < BELOW || i >= BELOW + STACK))
            fail(EXIT_MISMATCH, "byte %zu around the fibre's stack is %02x", i, pool[i]);
}

static void fibre(void)
{
    for (;;)
        pause();
}

static void run_fibre(void)
{
    static ucontext_t here, there;
    getcontext(&there);
    there.uc_stack.ss_sp = pool + BELOW;
    there.uc_stack.ss_size = STACK;
    makecontext(&there, fibre, 0);
    swapcontext(&here, &there);
}

/* A parent that waits for its vfork child stops for nobody. */
static void vforks(long child_us)
{
    for (;;) {
        pid_t child = vfork();
        if (child == 0) {
            nanosleep(&(struct timespec){child_us / 1000000, child_us % 1000000 * 1000}, NULL);
            _exit(0);
        }
        if (child < 0 || waitpid(child, NULL, 0) != child)
            fail(EXIT_API, "vfork");
    }
}

/* Changes of the user id go to all threads by a signal that glibc keeps for itself. */
static _Atomic unsigned long changes;

static void *idle(void *argument)
{
    for (;;)
        pause();
    return argument;
}

static void change_user(void)
{
    pthread_t thread;
    for (int i = 0; i < 12; i++)
        pthread_create(&thread, NULL, idle, NULL);
    for (;; changes++)
        if (setresuid(0, 0, 0))
            fail(EXIT_API, "setresuid");
}

static void *watch_changes(void *argument)
{
    for (unsigned long last = 0;; last = changes) {
        struct timespec left = {15, 0};
        while (nanosleep(&left, &left)) /* each change interrupts it */
            ;
        if (changes == last)
            fail(EXIT_INTERRUPTED, "setresuid hangs after %lu", last);
    }
    return argument;
}

static void print_changes(void)
{
    printf("\"changes\":%lu,", changes);
}

/* As symbolizers do. */
static void map_libc_as_data(void)
{
    struct link_map *libc = NULL;
    dlinfo(dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD), RTLD_DI_LINKMAP, &libc);
    int fd = open(libc->l_name, O_RDONLY);
    struct stat stat;
    /* Below and above the real one. */
    if (fd < 0 || fstat(fd, &stat) ||
        mmap((void *)0x10000000, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, fd, 0) == MAP_FAILED ||
        mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED)
        fail(EXIT_API, "cannot map libc");
}

static sigset_t go;

/* At SIGUSR1 forks a child that copies nothing and ends with it. */
static void fork_a_child(void)
{
    int signal;
    sigwait(&go, &signal);
    if (fork() == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
}

/* At SIGUSR1 becomes another program, or ends. */
static void leave(bool by_exec)
{
    int signal;
    sigwait(&go, &signal);
    if (by_exec)
        execl("/proc/self/exe", "victim-odd", "nothing", NULL);
    exit(43);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "nothing"))
        return 42;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go, NULL);
    bool changing = !strcmp(what, "setresuid");
    ending_start(changing ? print_changes : NULL);
    bool fibres = !strcmp(what, "fibre");
    if (fibres) {
        memset(pool, CANARY, sizeof pool);
        copying_check = check_pool;
    }
    copying_start(2);
    pthread_t thread;
    if (changing)
        pthread_create(&thread, NULL, watch_changes, NULL);
    if (!strcmp(what, "libc-as-data"))
        map_libc_as_data();
    say_ready();
    if (fibres)
        run_fibre();
    if (changing)
        change_user();
    if (!strcmp(what, "vfork"))
        vforks(argc > 2 ? atol(argv[2]) : 1000);
    if (!strcmp(what, "main-exits"))
        pthread_exit(NULL);
    if (!strcmp(what, "exec") || !strcmp(what, "exit"))
        leave(!strcmp(what, "exec"));
    if (!strcmp(what, "fork"))
        fork_a_child();
    for (;;)
        pause();
}
