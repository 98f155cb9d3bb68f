/* Programs that mean harm to whoever attaches to them or traces them: victim-hostile WHAT [FILE]. They copy in the
 * background, so that they look worth it. */
#define _GNU_SOURCE
#include "copying.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The beginning of a control block, by cmt-common/src/control.rs, and what a block is called. */
struct block {
    _Atomic unsigned state, payload_fd, control_fd;
};
enum { BLOCK_BYTES = 32 << 10, READY = 1 };
#define BLOCK_NAME "cmt-control"

static int file;

static void must(int done, const char *what)
{
    if (!done)
        fail(EXIT_API, "%s", what);
}

/* A file that root may write and this program may not. */
static void open_to_read(const char *path)
{
    must((file = open(path, O_RDONLY)) >= 0, path);
}

/* Calls `act` with each control block as soon as it is there, again and again. */
static void for_each_block(void (*act)(struct block *block, int fd))
{
    for (;;) {
        FILE *maps = fopen("/proc/self/maps", "r");
        char line[512];
        while (maps && fgets(line, sizeof line, maps)) {
            unsigned long start;
            if (strstr(line, BLOCK_NAME) && sscanf(line, "%lx", &start) == 1)
                for (int fd = 3; fd < 64; fd++) {
                    char path[64], name[256] = "";
                    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
                    if (readlink(path, name, sizeof name - 1) > 0 && strstr(name, BLOCK_NAME))
                        act((struct block *)start, fd);
                }
        }
        if (maps)
            fclose(maps);
    }
}

/* Whoever reads a mapping behind the end of its file dies of it. */
static void truncate_block(struct block *block, int fd)
{
    (void)block;
    if (ftruncate(fd, 0)) {
        /* sealed */
    }
}

static void *truncating(void *argument)
{
    for_each_block(truncate_block);
    return argument;
}

/* "Write the payload to this descriptor": to what will be the block's, from before it is made until it is gone. */
static void *naming(void *argument)
{
    int next = dup(0);
    close(next);
    for (;;) {
        ssize_t written = pwrite(next, &file, sizeof file, offsetof(struct block, payload_fd));
        (void)written;
    }
    return argument;
}

/* Stands in for pthread_create: makes a block of its own that is ready to be filled, and no thread. */
static int make_own_block(void)
{
    int fd = memfd_create(BLOCK_NAME, MFD_ALLOW_SEALING);
    must(fd >= 0 && !ftruncate(fd, BLOCK_BYTES), "a block");
    struct block *block = mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(block != MAP_FAILED, "a mapped block");
    block->payload_fd = (unsigned)file;
    block->control_fd = (unsigned)fd;
    block->state = READY;
    return 11; /* EAGAIN */
}

static void replace_pthread_create(void)
{
    unsigned char *code = dlsym(RTLD_DEFAULT, "pthread_create");
    void *page = (void *)((unsigned long)code & ~4095ul), *to = (void *)make_own_block;
    must(!mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC), "mprotect");
    memcpy(code, "\x48\xb8", 2); /* mov rax, to; jmp rax */
    memcpy(code + 2, &to, 8);
    memcpy(code + 10, "\xff\xe0", 2);
    must(!mprotect(page, 8192, PROT_READ | PROT_EXEC), "mprotect");
}

/* Names: of the process, of a memfd, and of a file at the root, that of a chroot, where all of them are one's own. */
static void take_odd_names(const char *root)
{
    int fd = memfd_create("\xff\xfe\n\x1b[31m", 0);
    must(!ftruncate(fd, 4096) && mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0) != MAP_FAILED, "a memfd");
    must(!chdir(root) && (fd = open("SYSV1", O_RDWR | O_CREAT, 0600)) >= 0, "a file");
    must(!ftruncate(fd, 4096) && mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED, "a mapped file");
    must(!chroot("."), "chroot");
    prctl(PR_SET_NAME, "a) Z \x1b[31m\x07\xff");
}

/* More control blocks than there is time to look at, none of them filled. */
static void map_many_blocks(void)
{
    int fd = memfd_create(BLOCK_NAME, MFD_ALLOW_SEALING);
    must(!ftruncate(fd, BLOCK_BYTES), "a block");
    for (int i = 0; i < 30000; i++)
        mmap(NULL, BLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

/* A library whose table of symbols has 3 GiB, none of which takes room in its file. */
static void map_huge_library(void)
{
    static const Elf64_Ehdr header = {
        .e_ident = {0x7f, 'E', 'L', 'F', ELFCLASS64, ELFDATA2LSB, EV_CURRENT}, .e_type = ET_DYN, .e_machine = EM_X86_64,
        .e_version = EV_CURRENT, .e_ehsize = sizeof header, .e_shoff = sizeof header, .e_shentsize = sizeof(Elf64_Shdr),
        .e_shnum = 2, .e_shstrndx = 1};
    static const Elf64_Shdr sections[2] = {
        {.sh_type = SHT_DYNSYM, .sh_link = 1, .sh_offset = 4096, .sh_size = 3l << 30, .sh_entsize = sizeof(Elf64_Sym)},
        {.sh_type = SHT_STRTAB, .sh_offset = 4096, .sh_size = 3l << 30}};
    int fd = memfd_create("libcuda.so.9", 0);
    must(!ftruncate(fd, 4l << 30) && pwrite(fd, &header, sizeof header, 0) == sizeof header &&
             pwrite(fd, sections, sizeof sections, sizeof header) == sizeof sections,
         "a library");
    must(mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) != MAP_FAILED, "a mapped library");
}

/* Threads that each start the next and end: some have not been stopped whenever one looks. */
static void *relay(void *argument)
{
    pthread_attr_t detached;
    pthread_t next;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (pthread_create(&next, &detached, relay, argument))
        ;
    return NULL;
}

/* A handler, 2000 times a second, with a large frame on a stack of its own. */
static void on_alarm(int signal)
{
    volatile char frame[64 << 10];
    struct timespec from, now;
    (void)signal;
    frame[0] = frame[sizeof frame - 1] = 1;
    clock_gettime(CLOCK_MONOTONIC, &from);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - from.tv_sec) * 1000000 + (now.tv_nsec - from.tv_nsec) / 1000 < 200);
}

static void handle_on_own_stack(void)
{
    stack_t stack = {.ss_sp = malloc(1 << 20), .ss_size = 1 << 20};
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_ONSTACK | SA_RESTART};
    struct itimerval every = {{0, 500}, {0, 500}};
    must(!sigaltstack(&stack, NULL) && !sigaction(SIGALRM, &action, NULL), "a handler");
    setitimer(ITIMER_REAL, &every, NULL);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "", *path = argc > 2 ? argv[2] : "/";
    pthread_t thread;
    ending_start(NULL);
    copying_start(2);
    if (!strcmp(what, "truncates"))
        pthread_create(&thread, NULL, truncating, NULL);
    if (!strcmp(what, "names-a-file")) {
        open_to_read(path);
        pthread_create(&thread, NULL, naming, NULL);
    }
    if (!strcmp(what, "own-block")) {
        open_to_read(path);
        replace_pthread_create();
    }
    if (!strcmp(what, "odd-names"))
        take_odd_names(path);
    if (!strcmp(what, "many-blocks"))
        map_many_blocks();
    if (!strcmp(what, "huge-library"))
        map_huge_library();
    if (!strcmp(what, "relay"))
        relay(NULL);
    if (!strcmp(what, "own-stack"))
        handle_on_own_stack();
    say_ready();
    for (;;)
        pause();
}
