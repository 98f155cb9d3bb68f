/* Preloaded (libconfine.so): takes rights away from the process before its main(), as $CONFINE says. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

#define WORD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define FAIL(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))
#define FORBID(call, error) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), FAIL(error)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define X86_64_ONLY                                                                                                    \
    WORD(arch), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0), FAIL(EPERM), WORD(nr)
/* The rest only if `call` has one of `bits` in the low half of argument `index`. */
#define FORBID_BITS(call, index, bits)                                                                                 \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 4), WORD(args[index]),                                          \
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1), FAIL(EPERM), ALLOW

#define NAMESPACES                                                                                                     \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

static struct sock_filter no_memfd[] = {X86_64_ONLY, FORBID(memfd_create, EPERM), ALLOW};
/* systemd's MemoryDenyWriteExecute= before the kernel knew PR_SET_MDWE. */
static struct sock_filter no_exec_gain[] = {X86_64_ONLY, FORBID_BITS(mprotect, 2, 4), ALLOW};
/* What containers forbid by default: namespaces, mounts, the kernel itself; clone3 "does not exist". */
static struct sock_filter container[] = {
    X86_64_ONLY,
    FORBID(clone3, ENOSYS),
    FORBID(mount, EPERM),
    FORBID(umount2, EPERM),
    FORBID(pivot_root, EPERM),
    FORBID(setns, EPERM),
    FORBID(unshare, EPERM),
    FORBID(bpf, EPERM),
    FORBID(perf_event_open, EPERM),
    FORBID(userfaultfd, EPERM),
    FORBID(keyctl, EPERM),
    FORBID(add_key, EPERM),
    FORBID(init_module, EPERM),
    FORBID(kexec_load, EPERM),
    FORBID(reboot, EPERM),
    FORBID(open_by_handle_at, EPERM),
    FORBID(process_vm_writev, EPERM),
    FORBID(move_pages, EPERM),
    FORBID(get_mempolicy, EPERM),
    FORBID(set_mempolicy, EPERM),
    FORBID(mbind, EPERM),
    FORBID_BITS(clone, 0, NAMESPACES),
    ALLOW,
};

static void must(int result, const char *what)
{
    if (result) {
        perror(what);
        _exit(6);
    }
}

static void filter(struct sock_filter *instructions, size_t bytes)
{
    struct sock_fprog program = {(unsigned short)(bytes / sizeof *instructions), instructions};
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges");
    must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), "seccomp");
}

__attribute__((constructor)) static void confine(void)
{
    const char *how = getenv("CONFINE");
    if (!how)
        return;
    if (!strcmp(how, "no-memfd"))
        filter(no_memfd, sizeof no_memfd);
    else if (!strcmp(how, "no-exec-gain"))
        filter(no_exec_gain, sizeof no_exec_gain);
    else if (!strcmp(how, "container"))
        filter(container, sizeof container);
    else if (!strcmp(how, "mdwe"))
        must(prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0), "PR_SET_MDWE");
    else if (!strcmp(how, "undumpable"))
        must(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE");
    else
        must(-1, how);
}
