/* A program without CUDA: dynamic (victim-nocuda) or, linked with -static, one that nothing can be loaded into
 * (victim-static). */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    printf("ready %d\n", getpid());
    fflush(stdout);
    for (;;)
        pause();
}
