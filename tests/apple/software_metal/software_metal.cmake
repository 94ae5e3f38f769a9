# software_metal.cmake: for tests on Linux: src/cpp/metal.mm as it is, compiled against the derived
# headers in the folder LILY_SOFTWARE_METAL, and a Metal of software to run it on. Wants what sim.cmake
# gave; gives lily_core LILY_HAS_METAL. All host code comes from one clang: see the top CMakeLists.txt.
set(metal_tests "${CMAKE_SOURCE_DIR}/tests/apple/software_metal")
set(metal_includes "${metal_tests}/include" "${LILY_SOFTWARE_METAL}" "${metal_tests}")
# Apple's ABI of Objective-C, in ELF sections. @available asks the software Metal.
set(metal_options -x objective-c++ -std=c++20 -fobjc-runtime=macosx-15.0 -fblocks)

set_source_files_properties(src/cpp/metal.mm PROPERTIES
  LANGUAGE CXX
  COMPILE_OPTIONS "${metal_options};-fobjc-arc;-include;${metal_tests}/include/available.h;-Wno-unsupported-availability-guard"
  INCLUDE_DIRECTORIES "${metal_includes}")
target_sources(lily_core PRIVATE src/cpp/metal.mm)
target_compile_definitions(lily_core PRIVATE LILY_HAS_METAL)

# The kernels by the names and arguments that Metal would see.
set(metal_dir "${CMAKE_BINARY_DIR}/software_metal")
file(MAKE_DIRECTORY "${metal_dir}")
function(software_metal_table out)
  add_custom_command(
    OUTPUT "${out}"
    COMMAND ${Python_EXECUTABLE} "${metal_tests}/kernel_table.py" "${out}" ${ARGN}
    DEPENDS ${ARGN} ${LILY_KERNEL_HEADERS} "${metal_tests}/kernel_table.py"
    COMMENT "Names and arguments of the kernels"
    VERBATIM)
endfunction()
software_metal_table("${metal_dir}/kernels.cpp" ${LILY_KERNELS})

# Kernels with a tile once more, on tensor operations; the symbols get names of their own.
foreach(source IN LISTS LILY_KERNELS)
  file(STRINGS "${source}" tile REGEX "^#include \"tile.h\"")
  if(NOT tile)
    continue()
  endif()
  get_filename_component(name "${source}" NAME_WE)
  set(object "${metal_dir}/${name}_tensor.o")
  set(rename "s/_bf16/_tops/g")
  if(LILY_SANITIZE STREQUAL "thread")
    string(APPEND rename ";s/__tsan_/__lily_/g")
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND ${LILY_CLANG} ${LILY_SIM_OPTIONS} -DLILY_TILE_TENSOR "-I${CMAKE_SOURCE_DIR}/src/metal/clang"
            "-I${CMAKE_SOURCE_DIR}/src/metal" -c "${source}" -o "${object}"
    COMMAND sed -i "${rename}" "${object}"
    DEPENDS "${source}" ${LILY_KERNEL_HEADERS}
    COMMENT "sim kernels of ${name} (tensor operations)"
    VERBATIM)
  list(APPEND tensor_objects "${object}")
endforeach()
set_source_files_properties(${tensor_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
target_sources(lily_core INTERFACE ${tensor_objects})

# The C part is small and has no language of its own in this project.
set(metal_c_objects "")
set(metal_c_options -fPIC -O2 -g1 -Wall -Wextra -fno-sanitize=all)
if(LILY_SANITIZE)
  list(APPEND metal_c_options -Xclang -fsanitize=${LILY_SANITIZE})  # counts of references are order
endif()
foreach(name objc_runtime objc_blocks)
  add_custom_command(
    OUTPUT "${metal_dir}/${name}.o"
    COMMAND ${Python_EXECUTABLE} -m ziglang cc ${metal_c_options} "-I${metal_tests}/include" -c "${metal_tests}/${name}.c" -o "${metal_dir}/${name}.o"
    DEPENDS "${metal_tests}/${name}.c" "${metal_tests}/objc_runtime.h"
    COMMENT "Objective-C runtime: ${name}"
    VERBATIM)
  list(APPEND metal_c_objects "${metal_dir}/${name}.o")
endforeach()
# clang's checks with gcc's runtime, which run.py names: zig has none that a library can be loaded
# with. What that lacks of the newer names is here.
if(LILY_SANITIZE)
  add_custom_command(
    OUTPUT "${metal_dir}/sanitizer_names.o"
    COMMAND ${Python_EXECUTABLE} -m ziglang cc -fPIC -O1 -fno-builtin -DFOR_${LILY_SANITIZE} -c "${metal_tests}/sanitizer_names.c"
            -o "${metal_dir}/sanitizer_names.o"
    DEPENDS "${metal_tests}/sanitizer_names.c"
    VERBATIM)
  list(APPEND metal_c_objects "${metal_dir}/sanitizer_names.o")
endif()
set_source_files_properties(${metal_c_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)

set(metal_objc ns_object foundation device commands)
list(TRANSFORM metal_objc PREPEND "${metal_tests}/")
list(TRANSFORM metal_objc APPEND ".mm")
add_library(software_metal OBJECT ${metal_objc} "${metal_tests}/gpu.cpp" "${metal_tests}/library.cpp"
            "${metal_tests}/rules.cpp")
target_compile_options(software_metal PRIVATE -O2 -g1 -Wall -Wextra -Wno-unused-parameter)
target_include_directories(software_metal PRIVATE ${metal_includes})
set_source_files_properties(${metal_objc} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${metal_options};-fobjc-arc")
set_source_files_properties("${metal_tests}/ns_object.mm" PROPERTIES COMPILE_OPTIONS "${metal_options}")
set_source_files_properties("${metal_dir}/kernels.cpp" "${metal_dir}/probe_kernels.cpp" PROPERTIES INCLUDE_DIRECTORIES "${metal_includes}")

# Straight into what links the core: classes are found by their sections, which nothing refers to.
target_sources(lily_core PRIVATE "${metal_dir}/kernels.cpp")
target_sources(lily_core INTERFACE $<TARGET_OBJECTS:software_metal> ${metal_c_objects})
target_link_options(lily_core INTERFACE -Wl,--no-gc-sections)

# The program whose cases break one rule each.
set(probe_objects "")
foreach(mode act exact)
  set(object "${metal_dir}/probe_${mode}.o")
  set(define "")
  if(mode STREQUAL "exact")
    set(define -DLILY_EXACT)
  endif()
  set(rename "")
  if(LILY_SANITIZE STREQUAL "thread")
    set(rename COMMAND sed -i "s/__tsan_/__lily_/g" "${object}")
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND ${LILY_CLANG} ${LILY_SIM_OPTIONS} ${define} "-I${CMAKE_SOURCE_DIR}/src/metal/clang"
            "-I${CMAKE_SOURCE_DIR}/src/metal" -c "${metal_tests}/probe.metal" -o "${object}"
    ${rename}
    DEPENDS "${metal_tests}/probe.metal" ${LILY_KERNEL_HEADERS}
    COMMENT "sim kernels of the probe (${mode})"
    VERBATIM)
  list(APPEND probe_objects "${object}")
endforeach()
set_source_files_properties(${probe_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
software_metal_table("${metal_dir}/probe_kernels.cpp" "${metal_tests}/probe.metal")
add_executable(software_metal_probe "${metal_tests}/probe.mm" "${metal_dir}/probe_kernels.cpp"
               src/cpp/sim_shadow.cpp src/cpp/sim_scheduler.cpp $<TARGET_OBJECTS:software_metal>
               ${metal_c_objects} ${probe_objects})
target_compile_options(software_metal_probe PRIVATE -O1 -g1)
target_include_directories(software_metal_probe PRIVATE ${metal_includes})
set_source_files_properties("${metal_tests}/probe.mm" PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "${metal_options};-fobjc-arc")
target_link_libraries(software_metal_probe PRIVATE Threads::Threads)
target_link_options(software_metal_probe PRIVATE -Wl,--no-gc-sections)
