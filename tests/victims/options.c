/* The command line of the copying victims. */
#define _GNU_SOURCE
#include "victim.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct options options = {.threads = 1, .sizes = {1 << 20}, .size_count = 1};

static const char usage[] =
    "usage: %s [--threads N] [--bytes A[,B...]] [--seconds S | --calls N] [--async] [--fresh] [--default-kind]\n"
    "          [--pinned] [--per-thread] [--two-d] [--fail-every N] [--idle-threads N] [--malloc-storm N]\n"
    "          [--pause-ms N] [--fork-at S|signal] [--load-after S] [--exact] [--allow-errors]\n"
    "          [--hold] [--count-interrupted]\n"
    "Sizes take K, M or G. --calls counts the copies of one thread. Without --seconds and --calls: until SIGTERM.\n"
    "--fork-at signal: at SIGUSR1.\n"
    "--hold: is ready once CUDA is, and starts to allocate and copy at SIGUSR1.\n";

static size_t size(const char *text, char **end)
{
    double value = strtod(text, end);
    switch (**end) {
    case 'K': value *= 1 << 10; ++*end; break;
    case 'M': value *= 1 << 20; ++*end; break;
    case 'G': value *= 1 << 30; ++*end; break;
    }
    return (size_t)value;
}

static void parse_sizes(char *text, const char *program)
{
    options.size_count = 0;
    for (char *at = text; *at;) {
        char *end;
        size_t bytes = size(at, &end);
        if (end == at || bytes == 0 || options.size_count == 16 || (*end && *end != ',')) {
            fprintf(stderr, usage, program);
            exit(EXIT_USAGE);
        }
        options.sizes[options.size_count++] = bytes;
        at = *end ? end + 1 : end;
    }
}

void options_parse(int argc, char **argv)
{
    static const struct option names[] = {
        {"threads", 1, 0, 't'},      {"bytes", 1, 0, 'b'},        {"seconds", 1, 0, 's'},
        {"calls", 1, 0, 'c'},        {"async", 0, 0, 'a'},        {"fresh", 0, 0, 'f'},
        {"default-kind", 0, 0, 'd'}, {"pinned", 0, 0, 'p'},       {"per-thread", 0, 0, 'P'},
        {"two-d", 0, 0, '2'},        {"fail-every", 1, 0, 'F'},   {"idle-threads", 1, 0, 'i'},
        {"malloc-storm", 1, 0, 'm'}, {"pause-ms", 1, 0, 'w'},     {"fork-at", 1, 0, 'k'},
        {"load-after", 1, 0, 'l'},   {"exact", 0, 0, 'x'},        {"allow-errors", 0, 0, 'e'},
        {"hold", 0, 0, 'h'},         {"count-interrupted", 0, 0, 'I'},
        {0}};
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1)
        switch (option) {
        case 't': options.threads = atoi(optarg); break;
        case 'b': parse_sizes(optarg, argv[0]); break;
        case 's': options.seconds = atof(optarg); break;
        case 'c': options.calls = atol(optarg); break;
        case 'a': options.async = true; break;
        case 'f': options.fresh = true; break;
        case 'd': options.default_kind = true; break;
        case 'p': options.pinned = true; break;
        case 'P': options.per_thread = true; break;
        case '2': options.two_d = true; break;
        case 'F': options.fail_every = atol(optarg); break;
        case 'i': options.idle_threads = atoi(optarg); break;
        case 'm': options.malloc_storm = atoi(optarg); break;
        case 'w': options.pause_ms = atol(optarg); break;
        case 'k': options.fork_at = strcmp(optarg, "signal") ? atof(optarg) : -1; break;
        case 'l': options.load_after = atof(optarg); break;
        case 'x': options.exact = true; break;
        case 'e': options.allow_errors = true; break;
        case 'h': options.hold = true; break;
        case 'I': options.count_interrupted = true; break;
        default: fprintf(stderr, usage, argv[0]); exit(EXIT_USAGE);
        }
    if (optind < argc) {
        fprintf(stderr, usage, argv[0]);
        exit(EXIT_USAGE);
    }
}
