// cuda_driver.h: the part of the CUDA driver API that lily calls, found by dlopen; embedded PTX.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lily {

// A .metal file compiled to PTX, in the source that cmake/ptx.cmake generates.
struct PtxText {
  const char* file;
  bool exact;
  const char* text;  // zero-terminated
};
std::span<const PtxText> ptx_texts();

namespace cuda {

// Types and numbers of the driver's binary interface. The driver never takes entry points away,
// so the oldest form of each call that does the work is named.
using Result = int;
using DeviceId = int;
using Address = uint64_t;
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Graph = struct GraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using GraphExec = struct GraphExecHandle*;

struct KernelNode {
  Function function;
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void** params;
  void** extra;
};

constexpr Result kSuccess = 0, kOutOfMemory = 2, kNoDevice = 100, kNotReady = 600;
constexpr unsigned kStreamNonBlocking = 1, kEventNoTiming = 2, kHostMapped = 2;
constexpr int kAttributeMajor = 75, kAttributeMinor = 76;  // of the compute capability
constexpr int kFunctionMaxThreads = 0;
constexpr int kJitErrorLog = 5, kJitErrorLogBytes = 6;

// clang-format off
#define LILY_CUDA_CALLS(X)                                                                        \
  X(init, "cuInit", (unsigned flags))                                                             \
  X(driver_version, "cuDriverGetVersion", (int* version))                                         \
  X(error_name, "cuGetErrorName", (Result error, const char** name))                              \
  X(error_string, "cuGetErrorString", (Result error, const char** text))                          \
  X(device_count, "cuDeviceGetCount", (int* count))                                               \
  X(device_get, "cuDeviceGet", (DeviceId* device, int ordinal))                                   \
  X(device_name, "cuDeviceGetName", (char* name, int size, DeviceId device))                      \
  X(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, DeviceId device))       \
  X(context_retain, "cuDevicePrimaryCtxRetain", (Context* context, DeviceId device))              \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (DeviceId device))                           \
  X(context_push, "cuCtxPushCurrent_v2", (Context context))                                       \
  X(context_pop, "cuCtxPopCurrent_v2", (Context* context))                                        \
  X(memory_info, "cuMemGetInfo_v2", (size_t* free, size_t* total))                                \
  X(memory_allocate, "cuMemAlloc_v2", (Address* address, size_t bytes))                           \
  X(memory_free, "cuMemFree_v2", (Address address))                                               \
  X(host_allocate, "cuMemHostAlloc", (void** pointer, size_t bytes, unsigned flags))              \
  X(host_free, "cuMemFreeHost", (void* pointer))                                                  \
  X(host_address, "cuMemHostGetDevicePointer_v2", (Address* address, void* host, unsigned flags)) \
  X(fill, "cuMemsetD8Async", (Address to, unsigned char value, size_t bytes, Stream stream))      \
  X(copy_in, "cuMemcpyHtoDAsync_v2", (Address to, const void* from, size_t bytes, Stream stream)) \
  X(copy_out, "cuMemcpyDtoHAsync_v2", (void* to, Address from, size_t bytes, Stream stream))      \
  X(stream_create, "cuStreamCreate", (Stream* stream, unsigned flags))                            \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream stream))                                        \
  X(stream_wait, "cuStreamSynchronize", (Stream stream))                                          \
  X(event_create, "cuEventCreate", (Event* event, unsigned flags))                                \
  X(event_destroy, "cuEventDestroy_v2", (Event event))                                            \
  X(event_record, "cuEventRecord", (Event event, Stream stream))                                  \
  X(event_query, "cuEventQuery", (Event event))                                                   \
  X(event_wait, "cuEventSynchronize", (Event event))                                              \
  X(event_elapsed, "cuEventElapsedTime", (float* milliseconds, Event from, Event to))             \
  X(module_load, "cuModuleLoadDataEx",                                                            \
    (Module* module, const void* image, unsigned count, int* options, void** values))             \
  X(module_unload, "cuModuleUnload", (Module module))                                             \
  X(module_function, "cuModuleGetFunction",                                                       \
    (Function* function, Module module, const char* name))                                        \
  X(function_attribute, "cuFuncGetAttribute", (int* value, int attribute, Function function))     \
  X(launch, "cuLaunchKernel",                                                                     \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,      \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** params,     \
     void** extra))                                                                               \
  X(graph_create, "cuGraphCreate", (Graph* graph, unsigned flags))                                \
  X(graph_destroy, "cuGraphDestroy", (Graph graph))                                               \
  X(graph_add_kernel, "cuGraphAddKernelNode",                                                     \
    (GraphNode* node, Graph graph, const GraphNode* after, size_t count,                          \
     const KernelNode* params))                                                                   \
  X(graph_instantiate, "cuGraphInstantiateWithFlags",                                             \
    (GraphExec* exec, Graph graph, unsigned long long flags))                                     \
  X(graph_exec_destroy, "cuGraphExecDestroy", (GraphExec exec))                                   \
  X(graph_launch, "cuGraphLaunch", (GraphExec exec, Stream stream))
// clang-format on

struct Driver {
#define X(name, symbol, args) Result(*name) args = nullptr;
  LILY_CUDA_CALLS(X)
#undef X
};

// Fills the table; returns why not when it cannot. The library stays loaded: buffers may be freed
// late, by whoever holds them last.
inline std::string load_driver(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return "no NVIDIA driver: libcuda.so.1 was not found";
#define X(name, symbol, args)                                             \
  driver.name = reinterpret_cast<Result(*) args>(dlsym(library, symbol)); \
  if (!driver.name) {                                                     \
    return "the NVIDIA driver is too old: libcuda.so.1 has no " symbol;   \
  }
  LILY_CUDA_CALLS(X)
#undef X
  return "";
}

// Errors after which the context, and with it every later call, is of no use.
constexpr bool is_fatal(Result r) {
  switch (r) {
    case 4:    // driver shut down
    case 46:   // device unavailable
    case 101:  // invalid device
    case 201:  // invalid context
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 700:  // illegal address
    case 702:  // launch timed out
    case 709:  // context is destroyed
    case 710:  // device-side assert
    case 714:  // stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 721:  // contained error
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

}  // namespace cuda
}  // namespace lily
