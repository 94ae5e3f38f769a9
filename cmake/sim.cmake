# sim.cmake: the emulated device: every LILY_KERNELS file compiled for the host, in bf16 and exact
# (fp32), with each access reported to the hooks in sim_shadow.cpp. Wants LILY_CLANG, LILY_KERNELS,
# LILY_KERNEL_HEADERS; gives lily_core the objects and LILY_HAS_SIM.

# x86-64-v3: fused multiply-adds inline, as on a GPU. make_sim() refuses an older processor.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(sim_target -target x86_64-linux-gnu -march=x86-64-v3)
  set(sim_host_options -march=${LILY_X86_64_V}3)
else()
  set(sim_target -target aarch64-linux-gnu)
  set(sim_host_options "")
endif()
# -fsanitize=thread inserts the hooks, no runtime is linked. Vectorisers would report accesses that
# the text does not make; reads before writes are reported too; entry hooks are of no use here.
set(LILY_SIM_OPTIONS ${sim_target} -x c++ -std=c++17 -O2 -fno-vectorize -fno-slp-vectorize
  -DLILY_SIM -fsanitize=thread -mllvm -tsan-instrument-read-before-write=1
  -mllvm -tsan-instrument-func-entry-exit=0 -fno-math-errno -ffp-contract=off
  -ffreestanding -nostdinc -fPIC -Wall -Wno-unknown-attributes -Wno-unused-function)

include("${CMAKE_CURRENT_LIST_DIR}/tile.cmake")
set(sim_dir "${CMAKE_BINARY_DIR}/sim")
file(MAKE_DIRECTORY "${sim_dir}")
foreach(source IN LISTS LILY_KERNELS)
  get_filename_component(name "${source}" NAME_WE)
  foreach(mode act exact)
    set(object "${sim_dir}/${name}_${mode}.o")
    set(define "")
    if(mode STREQUAL "exact")
      set(define -DLILY_EXACT)
    endif()
    # Under the thread sanitizer of the host's code the hooks need names of their own.
    set(LILY_SIM_RENAME "")
    if(LILY_SANITIZE STREQUAL "thread")
      set(LILY_SIM_RENAME COMMAND sed -i "s/__tsan_/__lily_/g" "${object}")
    endif()
    add_custom_command(
      OUTPUT "${object}"
      COMMAND ${LILY_CLANG} ${LILY_SIM_OPTIONS} ${LILY_TILE_OPTIONS} ${define}
              "-I${CMAKE_SOURCE_DIR}/src/metal/clang" "-I${CMAKE_SOURCE_DIR}/src/metal"
              -c "${source}" -o "${object}"
      ${LILY_SIM_RENAME}
      DEPENDS "${source}" ${LILY_KERNEL_HEADERS} "${CMAKE_CURRENT_LIST_FILE}"
      COMMENT "sim kernels of ${name} (${mode})"
      VERBATIM)
    list(APPEND sim_objects "${object}")
  endforeach()
endforeach()
set_source_files_properties(${sim_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)

target_sources(lily_core PRIVATE src/cpp/sim_shadow.cpp src/cpp/sim_scheduler.cpp)
# Straight into what links the core: from inside an archive nothing would draw them.
target_sources(lily_core INTERFACE ${sim_objects})
target_compile_definitions(lily_core PRIVATE LILY_HAS_SIM)
# The checks run once per emulated access. No contraction: the same sums on every processor. No
# sanitizer: fibers leave their stacks without returning.
set_source_files_properties(src/cpp/sim_shadow.cpp src/cpp/sim_scheduler.cpp PROPERTIES
  COMPILE_OPTIONS "-O3;-ffp-contract=off;-fno-sanitize=all;${sim_host_options}")
if(LILY_SANITIZE STREQUAL "thread")  # it would count the frames of fibers as one thread's
  set_source_files_properties(src/cpp/sim_shadow.cpp PROPERTIES COMPILE_DEFINITIONS LILY_SIM_OWN_HOOKS)
  set_property(SOURCE src/cpp/sim_shadow.cpp src/cpp/sim_scheduler.cpp APPEND PROPERTY
    COMPILE_OPTIONS -mllvm -tsan-instrument-func-entry-exit=0)
endif()
