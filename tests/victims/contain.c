/* Runs a program as a container does: victim-contain WHAT[,WHAT...] ROOT PROGRAM [ARGUMENTS].
 *
 * user, net, uts, ipc, cgroup, pid: namespaces of its own, besides that of mounts. proc: /proc is mounted. ro: the root is
 * read-only. The root is pivoted to and the old one taken away. With pid the program is a child, process 1. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(int result, const char *what)
{
    if (result < 0) {
        perror(what);
        exit(6);
    }
}

static void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    must(fd, path);
    must((int)write(fd, text, strlen(text)), path);
    close(fd);
}

static int wanted(const char *list, const char *one)
{
    size_t length = strlen(one);
    for (const char *at = list; (at = strstr(at, one)); at += length)
        if ((at == list || at[-1] == ',') && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    const char *what = argv[1], *root = argv[2];
    int user = wanted(what, "user"), pid = wanted(what, "pid");
    must(unshare(CLONE_NEWNS | (user ? CLONE_NEWUSER : 0) | (pid ? CLONE_NEWPID : 0) |
                 (wanted(what, "net") ? CLONE_NEWNET : 0) | (wanted(what, "uts") ? CLONE_NEWUTS : 0) |
                 (wanted(what, "ipc") ? CLONE_NEWIPC : 0) | (wanted(what, "cgroup") ? CLONE_NEWCGROUP : 0)),
         "unshare");
    if (user) { /* root inside is somebody else outside */
        put("/proc/self/setgroups", "deny");
        put("/proc/self/uid_map", "0 0 1");
        put("/proc/self/gid_map", "0 0 1");
    }
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
    must(mount(root, root, NULL, MS_BIND | MS_REC, NULL), "bind the root");
    if (pid) {
        pid_t child = fork();
        must(child, "fork");
        if (child > 0) {
            int status;
            must(waitpid(child, &status, 0), "wait");
            if (WIFSIGNALED(status))
                fprintf(stderr, "process 1 was ended by signal %d\n", WTERMSIG(status));
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
        }
        must(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "die with the parent");
    }
    must(chdir(root), root);
    if (wanted(what, "proc"))
        must(mount("proc", "proc", "proc", 0, NULL), "mount /proc");
    if (wanted(what, "ro"))
        must(mount(NULL, root, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), "read-only root");
    must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
    must(umount2(".", MNT_DETACH), "take the old root away");
    must(chdir("/"), "/");
    execv(argv[3], argv + 3);
    perror(argv[3]);
    return 6;
}
