/* An allocator of the program's own behind one lock, which is held most of the time: as where jemalloc or the like is
 * linked in. For victim-drv, whose malloc storm then stands in it nearly always. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

/* A block is its size and what was asked for; sizes are rounded up to a power of two, and freed blocks kept by that. */
enum { HEAD = 16, CLASSES = 48 };
struct block {
    size_t class;
    struct block *next;
};
static char arena[1l << 30] __attribute__((aligned(4096)));
static size_t used;
static struct block *kept[CLASSES];
static atomic_flag lock = ATOMIC_FLAG_INIT;

static void take(void)
{
    while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire))
        ;
    for (volatile int i = 0; i < 300; i++)
        ;
}

static void give(void)
{
    atomic_flag_clear_explicit(&lock, memory_order_release);
}

void *malloc(size_t bytes)
{
    size_t class = 5;
    while (((size_t)1 << class) < bytes + HEAD)
        class++;
    take();
    struct block *block = kept[class];
    if (block) {
        kept[class] = block->next;
    } else if (used + ((size_t)1 << class) <= sizeof arena) {
        block = (struct block *)(arena + used);
        block->class = class;
        used += (size_t)1 << class;
    }
    give();
    if (!block)
        errno = ENOMEM;
    return block ? (char *)block + HEAD : NULL;
}

void free(void *pointer)
{
    if (!pointer)
        return;
    struct block *block = (struct block *)((char *)pointer - HEAD);
    take();
    /* Aligned ones, whose head is not where it was, are not reused. */
    if (block->class < CLASSES) {
        block->next = kept[block->class];
        kept[block->class] = block;
    }
    give();
}

void *calloc(size_t count, size_t bytes)
{
    void *pointer = malloc(count * bytes);
    return pointer ? memset(pointer, 0, count * bytes) : NULL;
}

void *realloc(void *pointer, size_t bytes)
{
    void *grown = malloc(bytes);
    if (grown && pointer) {
        size_t had = ((size_t)1 << ((struct block *)((char *)pointer - HEAD))->class) - HEAD;
        memcpy(grown, pointer, had < bytes ? had : bytes);
        free(pointer);
    }
    return grown;
}

void *memalign(size_t alignment, size_t bytes)
{
    char *pointer = malloc(bytes + alignment + HEAD);
    if (!pointer)
        return NULL;
    char *aligned = pointer + HEAD;
    aligned += -(size_t)aligned & (alignment - 1);
    ((struct block *)(aligned - HEAD))->class = CLASSES;
    return aligned;
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return memalign(alignment, bytes);
}

int posix_memalign(void **pointer, size_t alignment, size_t bytes)
{
    *pointer = memalign(alignment, bytes);
    return *pointer ? 0 : ENOMEM;
}
