// objc_runtime.c: an Objective-C runtime for Linux, as much as an ARC file needs: Apple's ABI, which
// clang emits into ELF sections too. No categories, weak references, forwarding or exceptions.
#define _GNU_SOURCE
#include "objc_runtime.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// What clang emits for a class; names are ours, the layout is Apple's.
typedef const char* Selector;
typedef struct {
  Selector name;
  const char* types;
  Method function;
} MethodEntry;
typedef struct {
  uint32_t entry_bytes, count;
  MethodEntry entries[];
} MethodList;
typedef struct {
  uint32_t flags, start, size, reserved;
  const void* ivar_layout;
  const char* name;
  MethodList* methods;
  const void *protocols, *ivars, *weak_layout, *properties;
} ClassData;
struct objc_class {
  struct objc_class *isa, *super;
  void *cache, *vtable;
  ClassData* data;
};
enum { kMetaClass = 1, kHasCxx = 4 };

// The class of string literals: filled in with __NSCFConstantString, whose place it takes.
long __CFConstantStringClassReference[16];
void *_objc_empty_cache, *_objc_empty_vtable;

_Noreturn static void stop(const char* what, const char* about) {
  fprintf(stderr, "software Metal: %s: %s\n", what, about);
  abort();
}

// ---- selectors ----------------------------------------------------------------------------------
// One pointer for each name. A fixed table: a test build knows some hundreds.
enum { kSelectors = 1 << 14 };
static Selector selectors[kSelectors];
static pthread_mutex_t selector_lock = PTHREAD_MUTEX_INITIALIZER;

static Selector unique_selector(Selector name) {
  uint64_t hash = 1469598103934665603u;
  for (const char* p = name; *p; ++p) hash = (hash ^ (uint8_t)*p) * 1099511628211u;
  for (size_t i = 0; i < kSelectors; ++i) {
    Selector* at = &selectors[(hash + i) % kSelectors];
    if (!*at) *at = name;
    if (strcmp(*at, name) == 0) return *at;
  }
  stop("too many selectors", name);
}
// The name must stay: a literal.
Selector sel_registerName(Selector name) {
  pthread_mutex_lock(&selector_lock);
  Selector unique = unique_selector(name);
  pthread_mutex_unlock(&selector_lock);
  return unique;
}

// ---- classes ------------------------------------------------------------------------------------
extern Selector __start_objc_selrefs[] __attribute__((weak, visibility("hidden")));
extern Selector __stop_objc_selrefs[] __attribute__((weak, visibility("hidden")));
extern Class __start_objc_classlist[] __attribute__((weak, visibility("hidden")));
extern Class __stop_objc_classlist[] __attribute__((weak, visibility("hidden")));

static void unique_methods(Class c) {
  MethodList* list = c->data->methods;
  for (uint32_t i = 0; list && i < list->count; ++i) {
    list->entries[i].name = unique_selector(list->entries[i].name);
  }
}
// Before any constructor of a C++ file could send a message.
__attribute__((constructor(101))) static void start_image(void) {
  for (Selector* s = __start_objc_selrefs; s < __stop_objc_selrefs; ++s) *s = unique_selector(*s);
  for (Class* c = __start_objc_classlist; c < __stop_objc_classlist; ++c) {
    unique_methods(*c);
    unique_methods((*c)->isa);
    if (strcmp((*c)->data->name, "__NSCFConstantString") == 0) {
      memcpy(__CFConstantStringClassReference, *c, sizeof(struct objc_class));
    }
  }
}
const char* class_getName(Class c) { return c ? c->data->name : "nil"; }
Class class_getSuperclass(Class c) { return c->super; }
Class object_getClass(id object) { return object ? object->isa : NULL; }
static bool is_class(id object) { return object->isa->data->flags & kMetaClass; }

static Method own_method(Class c, Selector name) {
  MethodList* list = c->data->methods;
  for (uint32_t i = 0; list && i < list->count; ++i) {
    if (list->entries[i].name == name) return list->entries[i].function;
  }
  return NULL;
}
Method class_method(Class c, Selector name) {
  Method found = NULL;
  for (; c && !found; c = c->super) found = own_method(c, name);
  return found;
}

// ---- messages -----------------------------------------------------------------------------------
typedef struct {
  Class c;
  Selector name;
  Method function;
} CacheEntry;
enum { kCacheEntries = 1024 };
static __thread CacheEntry method_cache[kCacheEntries];

static Method find_in(Class c, Selector name) {
  CacheEntry* entry = &method_cache[((uintptr_t)c >> 4 ^ (uintptr_t)name) % kCacheEntries];
  if (entry->c != c || entry->name != name) {
    Method function = class_method(c, name);
    if (!function) {
      char text[256];
      snprintf(text, sizeof text, "%c[%s %s]", c->data->flags & kMetaClass ? '+' : '-',
               c->data->name, name);
      stop("unrecognized selector", text);
    }
    *entry = (CacheEntry){c, name, function};
  }
  return entry->function;
}
__attribute__((visibility("hidden"), used)) Method software_metal_find(id self, Selector name) {
  return find_in(self->isa, name);
}
typedef struct {
  id self;
  Class c;
} SuperCall;
__attribute__((visibility("hidden"), used)) Method software_metal_find_super(SuperCall* call,
                                                                             Selector name) {
  return find_in(call->c->super, name);
}

// Saves every register that may hold an argument, asks for the method, jumps to it.
#if defined(__x86_64__)
#define SAVE                                                                                    \
  "push %rbp\n mov %rsp,%rbp\n sub $208,%rsp\n mov %rdi,-8(%rbp)\n mov %rsi,-16(%rbp)\n"        \
  "mov %rdx,-24(%rbp)\n mov %rcx,-32(%rbp)\n mov %r8,-40(%rbp)\n mov %r9,-48(%rbp)\n"           \
  "mov %rax,-56(%rbp)\n movups %xmm0,-80(%rbp)\n movups %xmm1,-96(%rbp)\n"                      \
  "movups %xmm2,-112(%rbp)\n movups %xmm3,-128(%rbp)\n movups %xmm4,-144(%rbp)\n"               \
  "movups %xmm5,-160(%rbp)\n movups %xmm6,-176(%rbp)\n movups %xmm7,-192(%rbp)\n"
#define RESTORE                                                                                 \
  "mov %rax,%r11\n movups -80(%rbp),%xmm0\n movups -96(%rbp),%xmm1\n"                           \
  "movups -112(%rbp),%xmm2\n movups -128(%rbp),%xmm3\n movups -144(%rbp),%xmm4\n"               \
  "movups -160(%rbp),%xmm5\n movups -176(%rbp),%xmm6\n movups -192(%rbp),%xmm7\n"               \
  "mov -8(%rbp),%rdi\n mov -16(%rbp),%rsi\n mov -24(%rbp),%rdx\n mov -32(%rbp),%rcx\n"          \
  "mov -40(%rbp),%r8\n mov -48(%rbp),%r9\n mov -56(%rbp),%rax\n leave\n"
#define FUNCTION(name) ".globl " name "\n.hidden " name "\n.type " name ",@function\n" name ":\n"
#define END(name) ".size " name ",.-" name "\n"
__asm__(".text\n" FUNCTION("objc_msgSend") "test %rdi,%rdi\n jz 1f\n" SAVE
                                           "call software_metal_find\n" RESTORE
                                           "jmp *%r11\n"
                                           "1: xor %eax,%eax\n xor %edx,%edx\n xorps %xmm0,%xmm0\n "
                                           "xorps %xmm1,%xmm1\n ret\n" END("objc_msgSend")
        // The result's place comes first.
        FUNCTION("objc_msgSend_stret") "test %rsi,%rsi\n jz 1f\n" SAVE
                                       "mov %rsi,%rdi\n mov %rdx,%rsi\n"
                                       "call software_metal_find\n" RESTORE
                                       "jmp *%r11\n"
                                       "1: mov %rdi,%rax\n ret\n" END("objc_msgSend_stret")
                                           FUNCTION("objc_msgSendSuper2") SAVE
        "call software_metal_find_super\n" RESTORE
        "mov (%rdi),%rdi\n jmp *%r11\n" END("objc_msgSendSuper2"));
#elif defined(__aarch64__)
#define SAVE                                                                                    \
  "stp x29,x30,[sp,#-16]!\n mov x29,sp\n sub sp,sp,#208\n stp x0,x1,[sp]\n stp x2,x3,[sp,#16]\n" \
  "stp x4,x5,[sp,#32]\n stp x6,x7,[sp,#48]\n str x8,[sp,#64]\n stp q0,q1,[sp,#80]\n"            \
  "stp q2,q3,[sp,#112]\n stp q4,q5,[sp,#144]\n stp q6,q7,[sp,#176]\n"
#define RESTORE                                                                                 \
  "mov x17,x0\n ldp x0,x1,[sp]\n ldp x2,x3,[sp,#16]\n ldp x4,x5,[sp,#32]\n"                      \
  "ldp x6,x7,[sp,#48]\n ldr x8,[sp,#64]\n ldp q0,q1,[sp,#80]\n ldp q2,q3,[sp,#112]\n"           \
  "ldp q4,q5,[sp,#144]\n ldp q6,q7,[sp,#176]\n mov sp,x29\n ldp x29,x30,[sp],#16\n"
#define FUNCTION(name) ".globl " name "\n.hidden " name "\n.type " name ",%function\n" name ":\n"
#define END(name) ".size " name ",.-" name "\n"
__asm__(".text\n" FUNCTION(
    "objc_msgSend") "cbz x0,1f\n" SAVE "bl software_metal_find\n" RESTORE
                    "br x17\n"
                    "1: mov x1,xzr\n movi d0,#0\n movi d1,#0\n movi d2,#0\n movi d3,#0\n ret\n" END(
                        "objc_msgSend") FUNCTION("objc_msgSendSuper2") SAVE
        "bl software_metal_find_super\n" RESTORE
        "ldr x0,[x0]\n br x17\n" END("objc_msgSendSuper2"));
#else
#error "the software Metal has no objc_msgSend for this processor"
#endif

// ---- objects ------------------------------------------------------------------------------------
// 16 bytes before each object hold its count of references.
enum { kHeader = 16 };
static _Atomic long live;
long software_metal_live_objects(void) { return live; }

static _Atomic long* references(id object) { return (_Atomic long*)((char*)object - kHeader); }
// Literals and classes live for ever.
static bool counted(id object) {
  return (long*)object->isa != __CFConstantStringClassReference && !is_class(object);
}
static void run_cxx(id object, Class c, const char* which) {
  if (!(c->data->flags & kHasCxx)) return;
  Method function = own_method(c, sel_registerName(which));
  if (function) ((void (*)(id, Selector))function)(object, which);
}
static void construct(id object, Class c) {
  if (!c) return;
  construct(object, c->super);
  run_cxx(object, c, ".cxx_construct");
}
id class_createInstance(Class c) {
  char* memory = calloc(1, kHeader + c->data->size);
  if (!memory) stop("no memory for an object of", c->data->name);
  id object = (id)(memory + kHeader);
  object->isa = c;
  *references(object) = 1;
  ++live;
  construct(object, c);
  return object;
}
void object_dispose(id object) {
  for (Class c = object->isa; c; c = c->super) run_cxx(object, c, ".cxx_destruct");
  --live;
  free((char*)object - kHeader);
}
id objc_retain(id object) {
  if (!object) return object;
  // Retaining does not move a closure to the heap, objc_retainBlock does.
  if (software_metal_is_block(object)) {
    return (void**)object->isa == _NSConcreteStackBlock ? object : _Block_copy(object);
  }
  if (counted(object) && ++*references(object) < 2) {
    stop("retain of a dead object of", object->isa->data->name);
  }
  return object;
}
void objc_release(id object) {
  if (!object) return;
  if (software_metal_is_block(object)) {
    _Block_release(object);
    return;
  }
  if (!counted(object)) return;
  const long left = --*references(object);
  if (left < 0) stop("release of a dead object of", object->isa->data->name);
  if (left > 0) return;
  static _Atomic(Selector) dealloc;
  if (!dealloc) dealloc = sel_registerName("dealloc");
  ((void (*)(id, Selector))objc_msgSend)(object, dealloc);
}
long software_metal_references(id object) { return *references(object); }

// ---- autorelease pools --------------------------------------------------------------------------
// An autoreleased result waits in `pending` until its caller claims it, as with Apple's fast path; if
// nobody does, it goes to the pool. https://developer.apple.com/documentation/foundation/nsautoreleasepool:
// without a pool in place an autoreleased object leaks.
static __thread struct {
  id* objects;
  size_t count, capacity, depth;
  id pending;
} pool;

static void park(id object) {
  if (pool.depth == 0) {
    char text[256];
    snprintf(text, sizeof text, "an object of %s was autoreleased with no pool in place",
             object->isa->data->name);
    software_metal_broken_rule("autorelease pool", text);
  }
  if (pool.count == pool.capacity) {
    pool.capacity = pool.capacity ? pool.capacity * 2 : 64;
    pool.objects = realloc(pool.objects, pool.capacity * sizeof(id));
    if (!pool.objects) stop("no memory for", "an autorelease pool");
  }
  pool.objects[pool.count++] = object;
}
static void park_pending(void) {
  id object = pool.pending;
  pool.pending = NULL;
  if (object) park(object);
}
static bool pooled(id object) {
  return object && !software_metal_is_block(object) && counted(object);
}
void* objc_autoreleasePoolPush(void) {
  park_pending();
  ++pool.depth;
  return (void*)(pool.count + 1);
}
void objc_autoreleasePoolPop(void* token) {
  park_pending();
  while (pool.count > (size_t)token - 1) {
    objc_release(pool.objects[--pool.count]);
    park_pending();
  }
  if (--pool.depth > 0) return;
  free(pool.objects);
  pool.objects = NULL;
  pool.capacity = 0;
}
size_t software_metal_pools(void) { return pool.depth; }
id objc_autorelease(id object) {
  if (pooled(object)) park(object);
  return object;
}
id objc_autoreleaseReturnValue(id object) {
  if (pooled(object)) {
    park_pending();
    pool.pending = object;
  }
  return object;
}
id objc_retainAutorelease(id object) { return objc_autorelease(objc_retain(object)); }
id objc_retainAutoreleaseReturnValue(id object) {
  return objc_autoreleaseReturnValue(objc_retain(object));
}
id objc_retainAutoreleasedReturnValue(id object) {
  if (object && object == pool.pending) {
    pool.pending = NULL;
    return object;
  }
  return objc_retain(object);
}
id objc_claimAutoreleasedReturnValue(id object) {
  return objc_retainAutoreleasedReturnValue(object);
}
id objc_unsafeClaimAutoreleasedReturnValue(id object) {
  if (object && object == pool.pending) {
    pool.pending = NULL;
    objc_release(object);
  }
  return object;
}

// ---- what else the compiler calls ---------------------------------------------------------------
id objc_retainBlock(id block) { return _Block_copy(block); }
void objc_storeStrong(id* to, id object) {
  id old = *to;
  objc_retain(object);
  *to = object;
  objc_release(old);
}
static id send(id object, Selector name) {
  return ((id (*)(id, Selector))objc_msgSend)(object, sel_registerName(name));
}
id objc_alloc(Class c) { return send((id)c, "alloc"); }
id objc_alloc_init(Class c) { return send(objc_alloc(c), "init"); }
id objc_opt_new(Class c) { return objc_alloc_init(c); }
id objc_opt_self(id object) { return object; }
Class objc_opt_class(id object) {
  if (!object) return NULL;
  return is_class(object) ? (Class)object : object->isa;
}
bool objc_opt_isKindOfClass(id object, Class c) {
  for (Class k = object_getClass(object); k; k = k->super) {
    if (k == c) return true;
  }
  return false;
}
bool objc_opt_respondsToSelector(id object, Selector name) {
  return object && class_method(object->isa, name) != NULL;
}
void objc_enumerationMutation(id object) {
  stop("mutated while it was enumerated", object->isa->data->name);
}
id objc_getProperty(id object, Selector name, ptrdiff_t offset, bool is_atomic) {
  (void)name, (void)is_atomic;
  return objc_retainAutorelease(*(id*)((char*)object + offset));
}
void objc_setProperty_nonatomic_copy(id object, Selector name, id value, ptrdiff_t offset) {
  (void)name;
  id* at = (id*)((char*)object + offset);
  id old = *at;
  *at = value ? send(value, "copy") : NULL;
  objc_release(old);
}
void objc_setProperty_nonatomic(id object, Selector name, id value, ptrdiff_t offset) {
  (void)name;
  objc_storeStrong((id*)((char*)object + offset), value);
}
