/* A program that `cmt tune` may disturb: launched WHAT. It loads libcuda late, copies 1 MiB there and back, checks the bytes,
 * and does what WHAT says around that. Ends with 0 if all was as it is without cmt. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Every copy of BYTES is staged; one of SHORT to the device only if it comes in a row. */
enum { BYTES = 2 << 20, SHORT = 1 << 20 };

typedef int (*function)();
static function init, retain, set_current, allocate, up, down;
static unsigned long long device;
static char *there, *back;

_Noreturn static void fail(const char *what)
{
    fprintf(stderr, "launched: %s\n", what);
    _exit(1);
}

static void load(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda)
        fail(dlerror());
    init = (function)dlsym(cuda, "cuInit");
    retain = (function)dlsym(cuda, "cuDevicePrimaryCtxRetain");
    set_current = (function)dlsym(cuda, "cuCtxSetCurrent");
    allocate = (function)dlsym(cuda, "cuMemAlloc_v2");
    up = (function)dlsym(cuda, "cuMemcpyHtoD_v2");
    down = (function)dlsym(cuda, "cuMemcpyDtoH_v2");
}

static void begin(void)
{
    void *context;
    if (init(0) || retain(&context, 0) || set_current(context) || allocate(&device, (size_t)BYTES))
        fail("CUDA does not start");
    there = malloc(BYTES);
    back = malloc(BYTES);
    for (int i = 0; i < BYTES; i++)
        there[i] = (char)(i * 7 + i / 251);
}

static void copies(int count)
{
    for (int i = 0; i < count; i++) {
        memset(back, 0, BYTES);
        if (up(device, there, (size_t)SHORT) || up(device, there, (size_t)BYTES) || down(back, device, (size_t)BYTES))
            fail("a copy failed");
        if (memcmp(there, back, BYTES))
            fail("wrong bytes");
    }
}

static void *copies_of_a_thread(void *unused)
{
    void *context;
    (void)unused;
    if (retain(&context, 0) || set_current(context))
        fail("no context");
    if (up(device, there, (size_t)SHORT) || up(device, there, (size_t)BYTES) || down(back, device, (size_t)BYTES))
        fail("a copy failed");
    return NULL;
}

/* A thread whose stack is as small as they come. */
static void small_stack(void)
{
    size_t bytes = 16 << 10;
    char *stack = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_attr_t attributes;
    pthread_t thread;
    load();
    begin();
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, stack, bytes);
    if (pthread_create(&thread, &attributes, copies_of_a_thread, NULL))
        fail("no thread");
    pthread_join(thread, NULL);
    copies(10);
}

/* The only thread waits for a signal that it has blocked. */
static void signal_waits(void)
{
    sigset_t set;
    int number;
    load();
    begin();
    copies(10);
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    kill(getpid(), SIGTERM);
    usleep(100000);
    sigwait(&set, &number);
}

static bool late;

static void *cancelled(void *unused)
{
    (void)unused;
    if (!late)
        pthread_cancel(pthread_self());
    load();
    begin();
    if (late)
        pthread_cancel(pthread_self());
    up(device, there, (size_t)BYTES);
    pthread_testcancel();
    fail("not cancelled");
}

static void cancellation(bool at_first_copy)
{
    pthread_t thread;
    void *result;
    late = at_first_copy;
    pthread_create(&thread, NULL, cancelled, NULL);
    pthread_join(thread, &result);
    if (result != PTHREAD_CANCELED)
        fail("ended otherwise");
    /* What it held in libcuda, it may still hold. */
}

static void file_limit(bool from_the_start)
{
    struct rlimit none = {512, 512};
    if (from_the_start)
        setrlimit(RLIMIT_FSIZE, &none);
    load();
    begin();
    setrlimit(RLIMIT_FSIZE, &none);
    copies(10);
}

static _Atomic bool stop;
static _Atomic long written;

static void *writes(void *unused)
{
    char text[64];
    memset(text, '!', sizeof text);
    while (!stop)
        for (int fd = 1; fd <= 2; fd++)
            if (write(fd, text, sizeof text) > 0)
                written++;
    return unused;
}

/* Writes to standard output and error, which are closed: that must not end up in a file of ours. */
static void closed_descriptors(void)
{
    pthread_t thread;
    for (int fd = 0; fd <= 2; fd++)
        close(fd);
    pthread_create(&thread, NULL, writes, NULL);
    load();
    begin();
    copies(20);
    stop = true;
    pthread_join(thread, NULL);
}

/* The loader's errors and errno stay. */
static void error_numbers(void)
{
    errno = 4711;
    load();
    begin();
    errno = 4711;
    copies(1);
    if (errno != 4711)
        fail("errno changed");
    copies(9);
}

/* The environment is gone before the first copy. */
static void no_environment(void)
{
    load();
    begin();
    clearenv();
    copies(10);
}

/* Other libraries come and go while threads copy. */
static void *copies_for_ever(void *unused)
{
    void *context;
    char *own = malloc(BYTES);
    (void)unused;
    if (retain(&context, 0) || set_current(context))
        fail("no context");
    while (!stop)
        if (up(device, there, (size_t)BYTES) || down(own, device, (size_t)BYTES) || memcmp(there, own, BYTES))
            fail("wrong bytes");
    return NULL;
}

static void loader_at_work(void)
{
    pthread_t threads[4];
    load();
    begin();
    copies(10);
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, copies_for_ever, NULL);
    for (int i = 0; i < 200; i++) {
        void *library = dlopen("libm.so.6", RTLD_NOW), *other = dlopen("libresolv.so.2", RTLD_NOW);
        if (library)
            dlclose(library);
        if (other)
            dlclose(other);
    }
    stop = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

/* Forked while others copy; the child's CUDA does not work, with or without us. */
static void forks(void)
{
    pthread_t threads[2];
    load();
    begin();
    copies(10);
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, copies_for_ever, NULL);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            up(device, there, (size_t)BYTES);
            _exit(0);
        }
        int status;
        while (waitpid(child, &status, 0) < 0)
            ;
        if (status)
            fail("a child ended otherwise");
    }
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}

/* The first copies are made by a thread that a library's constructor starts and waits for: the loader's lock is held. */
static void constructor(void)
{
    if (!dlopen("libconstructs.so", RTLD_NOW))
        fail(dlerror());
}

void launched_copies(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, copies_of_a_thread, NULL);
    pthread_join(thread, NULL);
}

/* Confines itself before its first copy: whatever opens files or starts threads from then on is killed. */
static void confined(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    load();
    begin();
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        fail("no filter");
    if (up(device, there, (size_t)BYTES) || down(back, device, (size_t)BYTES) || memcmp(there, back, BYTES))
        fail("a copy failed");
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "small-stack"))
        small_stack();
    else if (!strcmp(what, "signal-waits"))
        signal_waits();
    else if (!strcmp(what, "cancel-load"))
        cancellation(false);
    else if (!strcmp(what, "cancel-copy"))
        cancellation(true);
    else if (!strcmp(what, "file-limit"))
        file_limit(true);
    else if (!strcmp(what, "file-limit-late"))
        file_limit(false);
    else if (!strcmp(what, "closed"))
        closed_descriptors();
    else if (!strcmp(what, "errno"))
        error_numbers();
    else if (!strcmp(what, "no-environment"))
        no_environment();
    else if (!strcmp(what, "loader"))
        loader_at_work();
    else if (!strcmp(what, "forks"))
        forks();
    else if (!strcmp(what, "constructor"))
        load(), begin(), constructor();
    else if (!strcmp(what, "seccomp"))
        confined();
    else
        fail("launched WHAT");
    return 0;
}
