// objc_runtime.h: what the parts of the Objective-C runtime share.
#pragma once
#include <objc/objc.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*Method)(void);

id class_createInstance(Class c);
void object_dispose(id object);
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
Class object_getClass(id object);
Class class_getSuperclass(Class c);
const char* class_getName(Class c);
void objc_msgSend(void);

void* _Block_copy(const void* block);
void _Block_release(const void* block);
bool software_metal_is_block(id object);
extern void* _NSConcreteStackBlock[32];

long software_metal_references(id object);
long software_metal_live_objects(void);
size_t software_metal_pools(void);  // of this thread
// Of rules.cpp.
void software_metal_broken_rule(const char* rule, const char* what);

#ifdef __cplusplus
}
#endif
