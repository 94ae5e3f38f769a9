// objc/objc.h: the types of the Objective-C language, for the Linux build of the Metal device.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct objc_class* Class;
struct objc_object {
  Class isa;
};
#ifndef __OBJC__
typedef struct objc_object* id;
#endif
typedef struct objc_selector* SEL;
typedef void (*IMP)(void);
typedef bool BOOL;
#define OBJC_BOOL_IS_BOOL 1
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#ifdef __cplusplus
#define nil nullptr
#else
#define nil ((id)0)
#endif
#define Nil ((Class)0)
