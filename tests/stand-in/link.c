/* The modelled link between host and device: real bytes, modelled time.
 *
 * Each direction has a DMA engine with a rate, and the driver's slow path for pageable memory with another one. A lane
 * remembers until when it is booked; who moves bytes books the time they take and sleeps until it is over. */
#define _GNU_SOURCE
#include "internal.h"

#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum { STAGING_BYTES = 256 << 10 };

struct line {
    _Atomic uint64_t booked_until_ns;
};
static struct line dma[2], pageable[2];
static pthread_mutex_t staging_lock[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};
static char staging[2][STAGING_BYTES];

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Pages of the driver's own buffer are there from the start, as in a real driver. */
void link_init(void)
{
    memset(staging, 0, sizeof staging);
}

/* Books the time for `bytes`, from `from_ns` at the earliest, and returns when it is over. */
static uint64_t book(struct line *line, double gbps, size_t bytes, uint64_t extra_ns, uint64_t from_ns)
{
    uint64_t cost = (uint64_t)((double)bytes / gbps) + extra_ns;
    uint64_t booked = line->booked_until_ns, end;
    do
        end = (booked > from_ns ? booked : from_ns) + cost;
    while (!atomic_compare_exchange_weak_explicit(&line->booked_until_ns, &booked, end, memory_order_relaxed,
                                                  memory_order_relaxed));
    return end;
}

static void wait_until(uint64_t deadline_ns)
{
    for (;;) {
        uint64_t now = now_ns();
        if (now >= deadline_ns)
            return;
        if (deadline_ns - now < 30000) {
            __builtin_ia32_pause();
            continue;
        }
        struct timespec until = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    }
}

static size_t total(const struct transfer *t)
{
    return t->width * t->height * t->depth;
}

static const char *src_row(const struct transfer *t, size_t row)
{
    return t->src + row / t->height * t->src_slice + row % t->height * t->src_pitch;
}

static char *dst_row(const struct transfer *t, size_t row)
{
    return t->dst + row / t->height * t->dst_slice + row % t->height * t->dst_pitch;
}

void link_dma(enum lane lane, const struct transfer *t)
{
    uint64_t end = lane == LANE_LOCAL ? 0 : book(&dma[lane], knobs.pinned_gbps, total(t), knobs.call_ns, now_ns());
    for (size_t row = 0; row < t->height * t->depth; row++)
        memmove(dst_row(t, row), src_row(t, row), t->width);
    wait_until(end);
}

void link_pageable(enum lane lane, const struct transfer *t)
{
    if (lane == LANE_LOCAL) {
        link_dma(lane, t);
        return;
    }
    uint64_t extra_ns = knobs.call_ns, end = now_ns();
    for (size_t row = 0; row < t->height * t->depth; row++) {
        for (size_t at = 0; at < t->width;) {
            size_t part = t->width - at < STAGING_BYTES ? t->width - at : STAGING_BYTES;
            /* From the end of the last part: a sleep that took too long is not paid for again. */
            end = book(&pageable[lane], knobs.pageable_gbps, part, extra_ns, end);
            extra_ns = 0;
            pthread_mutex_lock(&staging_lock[lane]);
            memcpy(staging[lane], src_row(t, row) + at, part);
            memcpy(dst_row(t, row) + at, staging[lane], part);
            pthread_mutex_unlock(&staging_lock[lane]);
            at += part;
            /* Short rows are not waited for one by one: the booking carries over. */
            if (part == STAGING_BYTES || (at == t->width && row + 1 == t->height * t->depth))
                wait_until(end);
        }
    }
}

void link_stage(const struct transfer *t, char *buffer)
{
    uint64_t end = book(&pageable[LANE_HTOD], knobs.pageable_gbps, total(t), 0, now_ns());
    for (size_t row = 0; row < t->height * t->depth; row++, buffer += t->width)
        memcpy(buffer, src_row(t, row), t->width);
    wait_until(end);
}
