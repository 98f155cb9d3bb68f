/* A program linked to libcuda and to libearly.so that loads other libraries while threads are in libcuda's code. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

void early_join(void);
int cuInit(unsigned);

int main(void)
{
    cuInit(0);
    for (int i = 0; i < 20; i++) {
        void *library = dlopen("libresolv.so.2", RTLD_NOW);
        if (library)
            dlclose(library);
        usleep(500);
    }
    early_join();
    return 0;
}
