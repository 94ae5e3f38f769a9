// fake_libcuda.cpp: a libcuda.so.1 without a GPU: host memory, no kernels, faults on demand. For
// test_cuda.py, which checks what cuda.cpp does around the kernels.
//
// LILY_FAKE_CUDA is a list "key=value,...": version, count, major, memory, pending=1 (an event is
// ready only once it was waited for), and fail=CALL:ERROR:N (call N, from 1, of CALL fails; an
// error from 700 on is then returned by every later call). Misuse is printed to stderr, and so is a
// summary when the context goes: what is left over, and the graphs built.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "../src/cpp/cuda_driver.h"

using namespace lily::cuda;

namespace {

std::recursive_mutex mutex;
std::map<std::string, int> calls;
std::map<Address, size_t> device_memory, host_memory;
std::set<void*> handles;  // streams, events, graphs
std::set<Event> pending;
int sticky = 0, retained = 0;
size_t in_use = 0, most_handles = 0;
thread_local int depth = 0;  // of the context stack

std::string setting(const std::string& key, const std::string& otherwise) {
  const char* env = std::getenv("LILY_FAKE_CUDA");
  const std::string all = "," + std::string(env ? env : "") + ",";
  const size_t at = all.find("," + key + "=");
  if (at == all.npos) return otherwise;
  const size_t from = at + key.size() + 2;
  return all.substr(from, all.find(',', from) - from);
}
long number(const std::string& key, long otherwise) {
  return std::strtol(setting(key, std::to_string(otherwise)).c_str(), nullptr, 10);
}
void misuse(const char* call, const char* what) {
  std::fprintf(stderr, "misuse: %s: %s\n", call, what);
}

// What every call begins with: the injected error, or 0. `current`: it needs a context.
Result enter(const char* call, bool current = true) {
  if (current && depth == 0) misuse(call, "no context is current on this thread");
  if (sticky) return sticky;
  const int n = ++calls[call];
  const std::string fail = setting("fail", "");
  const size_t first = fail.find(':'), second = fail.find(':', first + 1);
  if (first == fail.npos || fail.substr(0, first) != call) return 0;
  if (n != std::atoi(fail.c_str() + second + 1)) return 0;
  const Result r = std::atoi(fail.c_str() + first + 1);
  if (r >= 700) sticky = r;
  return r;
}
template <typename T>
T make_handle() {
  void* h = std::malloc(1);
  handles.insert(h);
  most_handles = std::max(most_handles, handles.size());
  return static_cast<T>(h);
}
void drop_handle(const char* call, void* h) {
  if (!handles.erase(h)) misuse(call, "unknown handle");
}
void use_handle(const char* call, void* h) {
  if (!handles.count(h)) misuse(call, "unknown handle");
}
void use_memory(const char* call, Address at, size_t bytes) {
  auto found = device_memory.upper_bound(at);
  if (found == device_memory.begin() ||
      at + bytes > std::prev(found)->first + std::prev(found)->second) {
    misuse(call, "outside of device memory");
  }
}
struct GraphSize {
  int nodes = 0, edges = 0;
};
std::map<Graph, GraphSize> graphs;

}  // namespace

#define ENTER(...)                   \
  const std::lock_guard lock(mutex); \
  if (const Result r = enter(__VA_ARGS__); r) return r
#define API extern "C" __attribute__((visibility("default"))) Result

API cuInit(unsigned) {
  ENTER("cuInit", false);
  return number("count", 1) ? 0 : kNoDevice;
}
API cuDriverGetVersion(int* v) {
  *v = int(number("version", 13000));
  return 0;
}
API cuGetErrorName(Result r, const char** name) {
  *name = r == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY"
                   : "CUDA_ERROR_OTHER";
  return 0;
}
API cuGetErrorString(Result, const char** text) {
  *text = "injected";
  return 0;
}
API cuDeviceGetCount(int* n) {
  *n = int(number("count", 1));
  return 0;
}
API cuDeviceGet(DeviceId* d, int ordinal) {
  *d = ordinal;
  return 0;
}
API cuDeviceGetName(char* name, int size, DeviceId) {
  std::snprintf(name, size_t(size), "Fake GPU");
  return 0;
}
API cuDeviceGetAttribute(int* v, int attribute, DeviceId) {
  *v = attribute == kAttributeMajor ? int(number("major", 9)) : 5;
  return 0;
}
API cuDevicePrimaryCtxRetain(Context* c, DeviceId) {
  ENTER("cuDevicePrimaryCtxRetain", false);
  ++retained;
  *c = reinterpret_cast<Context>(&retained);
  return 0;
}
API cuDevicePrimaryCtxRelease_v2(DeviceId) {
  const std::lock_guard lock(mutex);
  if (--retained == 0) {
    std::fprintf(stderr,
                 "released: %zu buffers, %zu pinned, %zu handles left, at most %zu handles\n",
                 device_memory.size(), host_memory.size(), handles.size(), most_handles);
  }
  return 0;
}
API cuCtxPushCurrent_v2(Context) {
  const std::lock_guard lock(mutex);
  ++depth;
  return 0;
}
API cuCtxPopCurrent_v2(Context*) {
  if (--depth < 0) misuse("cuCtxPopCurrent", "stack is empty");
  return 0;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER("cuMemGetInfo");
  *total = size_t(number("memory", 4L << 30));
  *free = *total - in_use;
  return 0;
}
API cuMemAlloc_v2(Address* a, size_t bytes) {
  ENTER("cuMemAlloc");
  *a = reinterpret_cast<Address>(std::malloc(bytes));
  device_memory[*a] = bytes;
  in_use += bytes;
  return 0;
}
API cuMemFree_v2(Address a) {
  const std::lock_guard lock(mutex);
  if (!device_memory.count(a)) {
    misuse("cuMemFree", "unknown address");
    return 1;
  }
  in_use -= device_memory[a];
  device_memory.erase(a);
  std::free(reinterpret_cast<void*>(a));
  return 0;
}
API cuMemHostAlloc(void** p, size_t bytes, unsigned) {
  ENTER("cuMemHostAlloc");
  *p = std::malloc(bytes);
  host_memory[reinterpret_cast<Address>(*p)] = bytes;
  return 0;
}
API cuMemFreeHost(void* p) {
  const std::lock_guard lock(mutex);
  if (!host_memory.erase(reinterpret_cast<Address>(p))) misuse("cuMemFreeHost", "unknown address");
  std::free(p);
  return 0;
}
API cuMemHostGetDevicePointer_v2(Address* a, void* host, unsigned) {
  ENTER("cuMemHostGetDevicePointer");
  *a = reinterpret_cast<Address>(host);
  return 0;
}
API cuMemsetD8Async(Address to, unsigned char v, size_t bytes, Stream s) {
  ENTER("cuMemsetD8Async");
  use_handle("cuMemsetD8Async", s);
  use_memory("cuMemsetD8Async", to, bytes);
  std::memset(reinterpret_cast<void*>(to), v, bytes);
  return 0;
}
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream s) {
  ENTER("cuMemcpyHtoDAsync");
  use_handle("cuMemcpyHtoDAsync", s);
  use_memory("cuMemcpyHtoDAsync", to, bytes);
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream s) {
  ENTER("cuMemcpyDtoHAsync");
  use_handle("cuMemcpyDtoHAsync", s);
  use_memory("cuMemcpyDtoHAsync", from, bytes);
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
API cuStreamCreate(Stream* s, unsigned) {
  ENTER("cuStreamCreate");
  *s = make_handle<Stream>();
  return 0;
}
API cuStreamDestroy_v2(Stream s) {
  const std::lock_guard lock(mutex);
  drop_handle("cuStreamDestroy", s);
  return 0;
}
API cuStreamSynchronize(Stream s) {
  ENTER("cuStreamSynchronize");
  use_handle("cuStreamSynchronize", s);
  pending.clear();
  return 0;
}
API cuEventCreate(Event* e, unsigned) {
  ENTER("cuEventCreate");
  *e = make_handle<Event>();
  return 0;
}
API cuEventDestroy_v2(Event e) {
  const std::lock_guard lock(mutex);
  drop_handle("cuEventDestroy", e);
  return 0;
}
API cuEventRecord(Event e, Stream s) {
  ENTER("cuEventRecord");
  use_handle("cuEventRecord", e);
  use_handle("cuEventRecord", s);
  if (pending.count(e)) misuse("cuEventRecord", "recorded again before it was seen ready");
  if (number("pending", 0)) pending.insert(e);
  return 0;
}
API cuEventQuery(Event e) {
  ENTER("cuEventQuery");
  use_handle("cuEventQuery", e);
  return pending.count(e) ? kNotReady : 0;
}
API cuEventSynchronize(Event e) {
  ENTER("cuEventSynchronize");
  use_handle("cuEventSynchronize", e);
  pending.clear();  // everything before is done too, and the stream has nothing behind it
  return 0;
}
API cuEventElapsedTime(float* ms, Event, Event) {
  ENTER("cuEventElapsedTime");
  *ms = 1;
  return 0;
}
API cuModuleLoadDataEx(Module* m, const void* image, unsigned count, int* options, void** values) {
  ENTER("cuModuleLoadDataEx");
  *m = reinterpret_cast<Module>(const_cast<void*>(image));
  return 0;
}
API cuModuleUnload(Module) { return 0; }
API cuModuleGetFunction(Function* f, Module m, const char* name) {
  ENTER("cuModuleGetFunction");
  const std::string entry = std::string(".entry ") + name + "(";
  if (!std::strstr(reinterpret_cast<const char*>(m), entry.c_str())) return 500;
  *f = reinterpret_cast<Function>(m);
  return 0;
}
API cuFuncGetAttribute(int* v, int, Function) {
  ENTER("cuFuncGetAttribute");
  *v = 512;  // threads a group
  return 0;
}
API cuLaunchKernel(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   Stream s, void** params, void**) {
  ENTER("cuLaunchKernel");
  use_handle("cuLaunchKernel", s);
  if (!params[0]) misuse("cuLaunchKernel", "no parameters");
  return 0;
}
API cuGraphCreate(Graph* g, unsigned) {
  ENTER("cuGraphCreate");
  *g = make_handle<Graph>();
  graphs[*g] = {};
  return 0;
}
API cuGraphDestroy(Graph g) {
  const std::lock_guard lock(mutex);
  drop_handle("cuGraphDestroy", g);
  return 0;
}
API cuGraphAddKernelNode(GraphNode* node, Graph g, const GraphNode*, size_t count,
                         const KernelNode*) {
  ENTER("cuGraphAddKernelNode");
  use_handle("cuGraphAddKernelNode", g);
  ++graphs[g].nodes;
  graphs[g].edges += int(count);
  *node = reinterpret_cast<GraphNode>(&graphs[g]);
  return 0;
}
API cuGraphInstantiateWithFlags(GraphExec* e, Graph g, unsigned long long) {
  ENTER("cuGraphInstantiate");
  std::fprintf(stderr, "graph: %d nodes, %d edges\n", graphs[g].nodes, graphs[g].edges);
  *e = make_handle<GraphExec>();
  return 0;
}
API cuGraphExecDestroy(GraphExec e) {
  const std::lock_guard lock(mutex);
  drop_handle("cuGraphExecDestroy", e);
  return 0;
}
API cuGraphLaunch(GraphExec e, Stream s) {
  ENTER("cuGraphLaunch");
  use_handle("cuGraphLaunch", e);
  use_handle("cuGraphLaunch", s);
  return 0;
}
