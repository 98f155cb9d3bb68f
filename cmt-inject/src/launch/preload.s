/* What `cmt tune` has the loader preload: it loads the payload where that can live, and is nothing to any other program.
 *
 * It needs no library and knows each function by a weak reference, so that musl's loader can load it, too, and finds nothing
 * to do. Built by cmt-agent's build script: cc -shared -nostdlib. */
    .intel_syntax noprefix
    .weak gnu_get_libc_version
    .weak getenv
    .weak dlopen
    /* Where glibc is older than 2.34, dlopen is in a library of its own. */
    .weak __libc_dlopen_mode

    .text
    .type load, @function
load:
    sub rsp, 8
    cmp qword ptr [rip + gnu_get_libc_version@GOTPCREL], 0
    je 2f
    mov rax, [rip + getenv@GOTPCREL]
    test rax, rax
    je 2f
    lea rdi, variable[rip]
    call rax
    test rax, rax
    je 2f
    mov rdi, rax
    mov esi, 2                  /* RTLD_NOW, and local */
    mov rax, [rip + dlopen@GOTPCREL]
    test rax, rax
    jne 1f
    mov rax, [rip + __libc_dlopen_mode@GOTPCREL]
    test rax, rax
    je 2f
1:  call rax
2:  add rsp, 8
    ret
    .size load, . - load

    .section .rodata
variable:
    .asciz "CMT_TUNE_PAYLOAD"

    .section .init_array, "aw"
    .balign 8
    .quad load

    .section .note.GNU-stack, "", @progbits
