// objc/runtime.h: nothing of the reflective interface is needed beyond the types.
#pragma once
#include <objc/objc.h>
