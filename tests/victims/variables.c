/* Preloaded (libvariables.so): 200 KiB of thread-local variables, which libc takes out of every thread's stack. */
__attribute__((visibility("default"))) __thread char cmt_victim_variables[200 << 10];

__attribute__((constructor)) static void use(void)
{
    cmt_victim_variables[0] = 1;
}
