// os/availability.h: clang knows no versions of macOS on Linux; the declarations are all there.
#pragma once
#define API_AVAILABLE(...)
#define API_DEPRECATED(...)
#define API_UNAVAILABLE(...)
