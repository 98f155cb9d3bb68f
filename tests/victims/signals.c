/* A program that lives on signals: queued real-time ones, and SIGALRM at 1 kHz, all handled and counted.
 *
 * Threads wait in system calls meanwhile. A call that signal(7) restarts (the handlers have SA_RESTART) never fails. One
 * that it does not restart fails with EINTR only if a handler ran on its thread. That thread gets signals of its own
 * only: those for the whole process may wake it and then be taken by another thread, with or without us. */
#define _GNU_SOURCE
#include "copying.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static _Atomic unsigned long queued, handled, queued_sum, handled_sum, alarms, interrupted;
static _Thread_local volatile unsigned long handled_here;

enum { READ, RECV, RESTARTED, EPOLL = RESTARTED, POLL, SLEEP, TIMED_RECV, WAITS };
static const char *const names[] = {"read", "recv", "epoll_wait", "poll", "nanosleep", "recv with a timeout"};
static pthread_t waiters[WAITS], queuing;
static _Atomic bool ending;
/* The signal that threads get for themselves. */
#define OWN (SIGRTMIN + 4)

static void on_queued(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    handled_sum += (unsigned long)info->si_value.sival_int;
    handled++;
    handled_here++;
}

static void on_alarm(int signal)
{
    (void)signal;
    alarms++;
    handled_here++;
}

/* One at a time, so that each is missed at once. */
static void *queue_signals(void *argument)
{
    (void)argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (int number = 1; !ending; number++) {
        union sigval value = {.sival_int = number};
        int signal = SIGRTMIN + 1 + number % 3;
        queued++;
        queued_sum += (unsigned long)number;
        size_t to = RESTARTED + (size_t)number / 2 % (WAITS - RESTARTED);
        if (number % 2)
            signal = OWN;
        if (number % 2 ? pthread_sigqueue(waiters[to], signal, value) : sigqueue(getpid(), signal, value))
            fail(EXIT_API, "cannot queue a signal");
        for (int waited_ms = 0; handled < queued; waited_ms++) {
            if (waited_ms == 20000)
                fail(EXIT_INTERRUPTED, "signal %d is lost: %lu queued, %lu handled", signal, queued, handled);
            usleep(waited_ms ? 1000 : 50);
        }
    }
    return NULL;
}

static void *waiting(void *argument)
{
    size_t which = (size_t)argument;
    sigset_t others;
    sigfillset(&others);
    sigdelset(&others, OWN);
    if (which >= RESTARTED)
        pthread_sigmask(SIG_BLOCK, &others, NULL);
    int pipe_ends[2], pair[2];
    if (pipe(pipe_ends) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        fail(EXIT_API, "no pipe");
    struct epoll_event event = {.events = EPOLLIN};
    int epoll = epoll_create1(0);
    epoll_ctl(epoll, EPOLL_CTL_ADD, pipe_ends[0], &event);
    struct timeval hours = {36000, 0};
    if (which == TIMED_RECV)
        setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &hours, sizeof hours);
    for (;;) {
        char byte;
        long result;
        unsigned long before = handled_here;
        switch (which) {
        case READ: result = read(pipe_ends[0], &byte, 1); break;
        case EPOLL: result = epoll_wait(epoll, &event, 1, 36000 * 1000); break;
        case POLL: result = poll(&(struct pollfd){.fd = pipe_ends[0], .events = POLLIN}, 1, -1); break;
        case SLEEP: result = nanosleep(&(struct timespec){36000, 0}, NULL); break;
        default: result = recv(pair[0], &byte, 1, 0); break;
        }
        if (result != -1 || errno != EINTR || which < RESTARTED || handled_here == before)
            fail(EXIT_INTERRUPTED, "%s returned %ld, error %d, after %lu handlers", names[which], result, errno,
                 handled_here - before);
        interrupted++;
    }
}

static void account(void)
{
    /* It sees the last one handled, or says that it is lost. */
    ending = true;
    pthread_join(queuing, NULL);
    printf("\"queued\":%lu,\"handled\":%lu,\"alarms\":%lu,\"interrupted\":%lu,", queued, handled, alarms, interrupted);
    if (handled_sum != queued_sum)
        fail(EXIT_INTERRUPTED, "signals came with other values");
}

int main(void)
{
    for (int i = 1; i <= 4; i++)
        sigaction(SIGRTMIN + i, &(struct sigaction){.sa_sigaction = on_queued, .sa_flags = SA_SIGINFO | SA_RESTART}, NULL);
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_alarm, .sa_flags = SA_RESTART}, NULL);
    ending_start(account);
    copying_start(1);
    for (size_t which = 0; which < WAITS; which++)
        pthread_create(&waiters[which], NULL, waiting, (void *)which);
    pthread_create(&queuing, NULL, queue_signals, NULL);
    setitimer(ITIMER_REAL, &(struct itimerval){{0, 1000}, {0, 1000}}, NULL);
    say_ready();
    for (;;)
        sleep(3600);
}
