// objc/NSObject.h: the root class and protocol, as far as the software Metal implements them.
#pragma once
#include <objc/objc.h>

typedef long NSInteger;
typedef unsigned long NSUInteger;
#define NSIntegerMax __LONG_MAX__
#define NSUIntegerMax (__LONG_MAX__ * 2UL + 1UL)

#if __has_feature(objc_arc)
#define SOFTWARE_METAL_NOT_UNDER_ARC __attribute__((unavailable("the compiler counts references")))
#else
#define SOFTWARE_METAL_NOT_UNDER_ARC
#endif

@class NSString;
@protocol NSObject
- (BOOL)isEqual:(id)other;
- (NSUInteger)hash;
- (Class)class;
- (instancetype)self;
- (BOOL)isKindOfClass:(Class)c;
- (BOOL)respondsToSelector:(SEL)selector;
- (NSString*)description;
- (instancetype)retain SOFTWARE_METAL_NOT_UNDER_ARC;
- (oneway void)release SOFTWARE_METAL_NOT_UNDER_ARC;
- (instancetype)autorelease SOFTWARE_METAL_NOT_UNDER_ARC;
- (NSUInteger)retainCount SOFTWARE_METAL_NOT_UNDER_ARC;
@end

__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (instancetype)alloc;
+ (instancetype)new;
+ (Class)class;
- (instancetype)init;
- (void)dealloc;
- (id)copy;
- (id)mutableCopy;
@end
