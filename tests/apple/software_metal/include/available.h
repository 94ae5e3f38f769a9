// available.h: included before metal.mm on Linux, where clang takes every @available for true: asks
// the software Metal which macOS it plays (SOFTWARE_METAL_MACOS).
#pragma once
extern "C" bool software_metal_available(const char* platforms);

// A macro is not expanded inside itself: the inner @available is clang's, true and never linked.
#define available(...) \
  available(macOS 10.0, *) && software_metal_available(#__VA_ARGS__)
#define __builtin_available(...) software_metal_available(#__VA_ARGS__)
