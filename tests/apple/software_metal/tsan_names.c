// tsan_names.c: names that newer clangs call and gcc's thread sanitizer does not have; the functions
// of the C library, which it does see, do the work.
#include <string.h>

void* __tsan_memcpy(void* to, const void* from, unsigned long n) { return memcpy(to, from, n); }
void* __tsan_memmove(void* to, const void* from, unsigned long n) { return memmove(to, from, n); }
void* __tsan_memset(void* to, int value, unsigned long n) { return memset(to, value, n); }
