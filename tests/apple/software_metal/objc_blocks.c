// objc_blocks.c: closures: copies to the heap, captured variables; the ABI is the public one of
// clang's "Block Implementation Specification".
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "objc_runtime.h"

void *_NSConcreteStackBlock[32], *_NSConcreteMallocBlock[32], *_NSConcreteGlobalBlock[32];

typedef struct {
  void* isa;
  _Atomic int flags;  // references in steps of 2
  int reserved;
  void (*invoke)(void*, ...);
  struct {
    unsigned long reserved, size;
    void (*copy)(void* to, const void* from);
    void (*dispose)(const void* block);
  }* descriptor;
} Block;
typedef struct Variable {  // __block
  void* isa;
  struct Variable* forwarding;
  _Atomic int flags;
  int size;
  void (*keep)(struct Variable* to, struct Variable* from);
  void (*destroy)(struct Variable* v);
} Variable;
enum { kReferences = 0xfffe, kOnHeap = 1 << 24, kHasHelpers = 1 << 25, kGlobal = 1 << 28 };
// Kinds of captured fields.
enum { kObjectField = 3, kBlockField = 7, kVariableField = 8, kFieldMask = 0x8f };

bool software_metal_is_block(id object) {
  const void* isa = object->isa;
  return isa == _NSConcreteStackBlock || isa == _NSConcreteMallocBlock ||
         isa == _NSConcreteGlobalBlock;
}

static void* copy_to_heap(const void* from, size_t bytes) {
  void* to = malloc(bytes);
  if (!to) abort();
  return memcpy(to, from, bytes);
}

void* _Block_copy(const void* from) {
  Block* block = (Block*)from;
  if (!block || (block->flags & kGlobal)) return block;
  if (block->flags & kOnHeap) {
    block->flags += 2;
    return block;
  }
  Block* copy = copy_to_heap(block, block->descriptor->size);
  copy->isa = _NSConcreteMallocBlock;
  copy->flags = (block->flags & ~kReferences) | kOnHeap | 2;
  if (copy->flags & kHasHelpers) copy->descriptor->copy(copy, block);
  return copy;
}
void _Block_release(const void* from) {
  Block* block = (Block*)from;
  if (!block || !(block->flags & kOnHeap)) return;
  if ((block->flags -= 2) & kReferences) return;
  if (block->flags & kHasHelpers) block->descriptor->dispose(block);
  free(block);
}

static Variable* keep_variable(Variable* v) {
  v = v->forwarding;
  if (v->flags & kOnHeap) {
    v->flags += 2;
    return v;
  }
  // One reference for the stack frame, one for the block.
  Variable* copy = copy_to_heap(v, (size_t)v->size);
  copy->flags = v->flags | kOnHeap | 4;
  copy->forwarding = copy;
  v->forwarding = copy;
  if (copy->flags & kHasHelpers) copy->keep(copy, v);
  return copy;
}
static void drop_variable(Variable* v) {
  v = v->forwarding;
  if (!(v->flags & kOnHeap) || ((v->flags -= 2) & kReferences)) return;
  if (v->flags & kHasHelpers) v->destroy(v);
  free(v);
}

void _Block_object_assign(void* to, const void* object, int flags) {
  const void** at = to;
  if ((flags & kFieldMask) == kObjectField) *at = objc_retain((id)object);
  else if ((flags & kFieldMask) == kBlockField) *at = _Block_copy(object);
  else if (flags & kVariableField) *at = keep_variable((Variable*)object);
  else *at = object;
}
void _Block_object_dispose(const void* object, int flags) {
  if ((flags & kFieldMask) == kObjectField) objc_release((id)object);
  else if ((flags & kFieldMask) == kBlockField) _Block_release(object);
  else if (flags & kVariableField) drop_variable((Variable*)object);
}
