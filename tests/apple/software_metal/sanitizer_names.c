// sanitizer_names.c: names that newer clangs call and gcc's sanitizers do not have.
#include <string.h>

#ifdef FOR_thread
// The C library's functions are seen by the thread sanitizer.
void* __tsan_memcpy(void* to, const void* from, unsigned long n) { return memcpy(to, from, n); }
void* __tsan_memmove(void* to, const void* from, unsigned long n) { return memmove(to, from, n); }
void* __tsan_memset(void* to, int value, unsigned long n) { return memset(to, value, n); }
#else
// Unused room inside a deque: stays accessible.
void __sanitizer_annotate_double_ended_contiguous_container(const void* begin, const void* end,
                                                            const void* old_first,
                                                            const void* old_last,
                                                            const void* new_first,
                                                            const void* new_last) {
  (void)begin, (void)end, (void)old_first, (void)old_last, (void)new_first, (void)new_last;
}
#endif
