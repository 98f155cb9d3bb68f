/* Threads that copy in the background of a victim whose main subject is another. */
#ifndef COPYING_H
#define COPYING_H

#include "victim.h"

#include <stdatomic.h>

extern _Atomic unsigned long copies_done;
/* A look at the victim's own invariants, by a copying thread after each copy. */
extern void (*copying_check)(void);

/* Starts CUDA and `count` threads that copy 1 MiB there and back, check every byte and never stop. */
void copying_start(int count);
/* Starts a thread that waits for SIGTERM, prints an account that opens with `extra()` and ends the process. SIGTERM is
 * blocked in the calling thread and in those it starts later. */
void ending_start(void (*extra)(void));
/* Prints "ready PID". */
void say_ready(void);

#endif
