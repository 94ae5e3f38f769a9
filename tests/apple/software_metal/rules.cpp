// rules.cpp: see rules.h.
#include "rules.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "objc_runtime.h"

namespace software_metal {
namespace {

struct Pending {
  Fault fault;
  long code;
  int skip;
};
struct State {
  std::mutex mutex;
  std::vector<std::string> broken;
  std::vector<Pending> faults;
  bool read_environment = false;
};
State& state() {
  static State* const only = new State;  // never destroyed: other threads may still run at exit
  return *only;
}

constexpr std::string_view kCounts[] = {"dispatches",         "barriers",         "command_buffers",
                                        "pipelines_compiled", "pipelines_loaded", "serial_encoders",
                                        "tracked_buffers",    "unlabelled",       "most_in_flight"};
std::atomic<long> counts[std::size(kCounts)];

struct Name {
  std::string_view name;
  Fault fault;
};
constexpr Name kNames[kFaults] = {{"allocation", Fault::allocation},
                                  {"command_buffer", Fault::command_buffer},
                                  {"compile", Fault::compile},
                                  {"pipeline", Fault::pipeline},
                                  {"archive_read", Fault::archive_read},
                                  {"archive_write", Fault::archive_write},
                                  {"no_device", Fault::no_device},
                                  {"no_queue", Fault::no_queue},
                                  {"no_residency_set", Fault::no_residency_set},
                                  {"no_event", Fault::no_event},
                                  {"no_command_buffer", Fault::no_command_buffer},
                                  {"no_encoder", Fault::no_encoder}};

// Needs the mutex.
bool add_fault(std::string_view text, int skip) {
  const size_t equals = text.find('=');
  for (const Name& n : kNames) {
    if (n.name != text.substr(0, equals)) continue;
    const long code = equals == text.npos
                          ? 0
                          : std::strtol(std::string(text.substr(equals + 1)).c_str(), nullptr, 10);
    state().faults.push_back({n.fault, code, skip});
    return true;
  }
  return false;
}
void read_environment() {
  if (std::exchange(state().read_environment, true)) return;
  const char* text = std::getenv("SOFTWARE_METAL_FAULTS");
  std::string_view rest = text ? text : "";
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string one(rest.substr(0, comma));
    const size_t at = one.find('@');
    const int skip = at == one.npos ? 0 : std::atoi(one.c_str() + at + 1);
    if (!add_fault(std::string_view(one).substr(0, at), skip)) std::abort();
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
}
double number(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtod(text, nullptr) : otherwise;
}

}  // namespace

void broken_rule(std::string_view rule, const std::string& what) {
  std::string line = concat(rule, ": ", what);
  std::replace(line.begin(), line.end(), '\n', ' ');
  {
    const std::lock_guard lock(state().mutex);
    state().broken.push_back(line);
  }
  const char* path = std::getenv("SOFTWARE_METAL_REPORT");
  if (!path || !*path) return;
  line += '\n';
  // One write, so that processes that share the file do not mix their lines.
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file < 0 || write(file, line.data(), line.size()) != ssize_t(line.size())) {
    std::fprintf(stderr, "software Metal: cannot write to %s: %s", path, line.c_str());
    std::abort();
  }
  close(file);
}

bool fault_due(Fault fault, long* code) {
  const std::lock_guard lock(state().mutex);
  read_environment();
  auto& all = state().faults;
  for (auto i = all.begin(); i != all.end(); ++i) {
    if (i->fault != fault) continue;
    if (i->skip-- > 0) return false;
    if (code) *code = i->code;
    all.erase(i);
    return true;
  }
  return false;
}

void count(Count what) { ++counts[size_t(what)]; }
void count_most(Count what, long n) {
  std::atomic<long>& most = counts[size_t(what)];
  for (long old = most; old < n && !most.compare_exchange_weak(old, n);) {
  }
}

std::pair<long, long> macos_version() {
  const char* text = std::getenv("SOFTWARE_METAL_MACOS");
  if (!text || !*text) return {26, 0};
  char* end = nullptr;
  const long major = std::strtol(text, &end, 10);
  return {major, *end == '.' ? std::strtol(end + 1, nullptr, 10) : 0};
}
long apple_family() { return long(number("SOFTWARE_METAL_FAMILY", 9)); }
uint64_t physical_memory() {
  return uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGE_SIZE));
}
uint64_t working_set() {
  return uint64_t(number("SOFTWARE_METAL_WORKING_SET", double(physical_memory() / 4 * 3)));
}
PipelineLimits pipeline_limits() {
  return {uint32_t(number("SOFTWARE_METAL_MOST_THREADS", 1024)),
          uint32_t(number("SOFTWARE_METAL_SIMD", 32)),
          uint32_t(number("SOFTWARE_METAL_STATIC_MEMORY", 0))};
}
TensorUnits tensor_units() {
  const double speed = number("SOFTWARE_METAL_TENSOR", 0);
  return {speed > 0, speed, number("SOFTWARE_METAL_WRONG", 0),
          number("SOFTWARE_METAL_IDLE", 0) != 0};
}
uint64_t random_seed() { return uint64_t(number("SOFTWARE_METAL_SEED", 1)); }
double hang_seconds() { return number("SOFTWARE_METAL_HANG", 5); }

}  // namespace software_metal

using namespace software_metal;

extern "C" void software_metal_broken_rule(const char* rule, const char* what) {
  broken_rule(rule, what);
}
// The text between the parentheses of an @available: "macOS 15.0, *".
extern "C" bool software_metal_available(const char* platforms) {
  const char* at = std::strstr(platforms, "macOS ");
  if (!at) return true;
  char* end = nullptr;
  const long major = std::strtol(at + 6, &end, 10);
  const long minor = *end == '.' ? std::strtol(end + 1, nullptr, 10) : 0;
  return macos_version() >= std::pair(major, minor);
}

int software_metal_broken_rules(char* text, int bytes) {
  const std::lock_guard lock(state().mutex);
  std::string all;
  for (const std::string& line : state().broken) all += line + '\n';
  if (bytes > 0) {
    const size_t n = std::min(all.size(), size_t(bytes) - 1);
    std::memcpy(text, all.data(), n);
    text[n] = 0;
  }
  return int(state().broken.size());
}
void software_metal_forget() {
  const std::lock_guard lock(state().mutex);
  state().broken.clear();
  state().faults.clear();
}
int software_metal_inject(const char* fault, int skip) {
  const std::lock_guard lock(state().mutex);
  read_environment();
  return add_fault(fault, skip);
}
int software_metal_faults_left() {
  const std::lock_guard lock(state().mutex);
  read_environment();
  return int(state().faults.size());
}
long software_metal_count(const char* what) {
  for (size_t i = 0; i < std::size(kCounts); ++i) {
    if (kCounts[i] == what) return counts[i];
  }
  return -1;
}
long software_metal_objects() { return software_metal_live_objects(); }
