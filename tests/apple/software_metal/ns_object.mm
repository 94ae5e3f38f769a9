// ns_object.mm: the root class. Compiled without ARC.
#import <objc/NSObject.h>

#include "objc_runtime.h"

extern "C" Method class_method(Class c, SEL name);
@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
@end

@implementation NSObject
+ (instancetype)alloc {
  return class_createInstance((Class)self);
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return (Class)self;
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  object_dispose(self);
}
- (instancetype)retain {
  return objc_retain(self);
}
- (oneway void)release {
  objc_release(self);
}
- (instancetype)autorelease {
  return objc_autorelease(self);
}
- (NSUInteger)retainCount {
  return NSUInteger(software_metal_references(self));
}
- (instancetype)self {
  return self;
}
- (Class)class {
  return object_getClass(self);
}
- (BOOL)isEqual:(id)other {
  return other == self;
}
- (NSUInteger)hash {
  return NSUInteger(self) >> 4;
}
- (BOOL)isKindOfClass:(Class)c {
  for (Class k = object_getClass(self); k; k = class_getSuperclass(k)) {
    if (k == c) return YES;
  }
  return NO;
}
- (BOOL)respondsToSelector:(SEL)selector {
  return class_method(object_getClass(self), selector) != nullptr;
}
- (NSString*)description {
  return [NSString stringWithUTF8String:class_getName(object_getClass(self))];
}
// What is copied here never changes.
- (id)copy {
  return objc_retain(self);
}
- (id)mutableCopy {
  return objc_retain(self);
}
- (id)copyWithZone:(struct _NSZone*)zone {
  return objc_retain(self);
}
@end
