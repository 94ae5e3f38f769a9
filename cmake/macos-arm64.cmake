# macos-arm64.cmake: toolchain: Linux builds for Apple silicon with zig. tests/apple/wheel.py uses it.
#
# Wants LILY_APPLE_SDK (what tests/apple/sdk.py wrote) and LILY_PYTHON (has ziglang installed).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_SYSTEM_VERSION 23)  # macOS 14
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LILY_APPLE_SDK LILY_PYTHON)

# The oldest macOS is part of the target in the wrapper; CMake's own ways need an SDK.
set(CMAKE_OSX_ARCHITECTURES "" CACHE STRING "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "" CACHE STRING "")
set(CMAKE_OSX_SYSROOT "" CACHE PATH "")

set(wrappers "${CMAKE_BINARY_DIR}/zig-apple")
foreach(tool cc c++ ar ranlib)
  set(command "-m ziglang ${tool}")
  if(tool MATCHES "^c")
    set(command "\"${CMAKE_CURRENT_LIST_DIR}/../tests/apple/zig_cxx.py\" ${tool}")
  endif()
  file(WRITE "${wrappers}/${tool}" "#!/bin/sh\nexec \"${LILY_PYTHON}\" ${command} \"$@\"\n")
  file(CHMOD "${wrappers}/${tool}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()
foreach(language C OBJC)
  set(CMAKE_${language}_COMPILER "${wrappers}/cc")
endforeach()
foreach(language CXX OBJCXX)
  set(CMAKE_${language}_COMPILER "${wrappers}/c++")
  set(CMAKE_${language}_FLAGS_INIT "-isystem ${LILY_APPLE_SDK}/include")
endforeach()
set(CMAKE_AR "${wrappers}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "${wrappers}/ranlib" CACHE FILEPATH "")
set(CMAKE_INSTALL_NAME_TOOL true CACHE FILEPATH "")  # there are no paths to rewrite
set(CMAKE_STRIP true CACHE FILEPATH "")
set(CMAKE_SKIP_RPATH ON)

# Apple's Foundation passes these two on; its stub does not.
set(CMAKE_MODULE_LINKER_FLAGS_INIT
  "-F${LILY_APPLE_SDK}/Frameworks -L${LILY_APPLE_SDK}/lib -framework CoreFoundation -lobjc")
foreach(kind PROGRAM LIBRARY INCLUDE PACKAGE)
  set(CMAKE_FIND_ROOT_PATH_MODE_${kind} NEVER)
endforeach()
