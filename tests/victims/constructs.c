/* A library whose constructor has the program copy, on a thread that it waits for (launched constructor). */
void launched_copies(void);

__attribute__((constructor)) static void construct(void)
{
    launched_copies();
}
