// device.cpp: what all devices share: tensor views, hazards between launches, the device list.
#include "device.h"

#include <algorithm>
#include <chrono>

namespace lily {

const char* dtype_name(DType t) {
  switch (t) {
    case DType::u32:
      return "u32";
    case DType::u64:
      return "u64";
    case DType::bf16:
      return "bf16";
    case DType::f32:
      return "f32";
  }
  return "?";
}

Tensor Tensor::slice(uint64_t first, uint64_t count) const {
  check(first <= elements && count <= elements - first, "tensor of ", elements,
        " values: slice of ", count, " from ", first, " is out of range");
  Tensor t = *this;
  t.offset += first * dtype_size(dtype);
  t.elements = count;
  return t;
}

Tensor Device::tensor(DType dtype, uint64_t elements, std::string_view label, Memory memory) {
  Tensor t;
  t.dtype = dtype;
  t.elements = elements;
  t.buffer = allocate(std::max<size_t>(t.bytes(), 16), label, memory);
  return t;
}

double Device::time_program(const ProgramRef& program, uint32_t n) {
  check(n > 0, "time_program: 0 runs");
  const auto start = std::chrono::steady_clock::now();
  Ticket last = 0;
  for (uint32_t i = 0; i < n; ++i) last = submit(program);
  wait(last);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / n;
}

namespace {

bool writes(Access a) { return a == Access::write || a == Access::read_write; }
bool overlap(const Tensor& a, const Tensor& b) {
  return a.buffer == b.buffer && a.offset < b.offset + b.bytes() && b.offset < a.offset + a.bytes();
}
bool hazard(const Arg& a, const Arg& b) {
  if (a.access == Access::none || b.access == Access::none) return false;
  return (writes(a.access) || writes(b.access)) && overlap(a.tensor, b.tensor);
}
template <typename F>
bool any_arg(const Launch& l, F f) {
  for (const Arg& a : l.args) {
    if (f(a)) return true;
  }
  for (const Arg& a : l.unbound) {
    if (f(a)) return true;
  }
  return l.step.access != Access::none && f(l.step);
}

}  // namespace

bool conflicts(const Launch& a, const Launch& b) {
  return any_arg(
      a, [&](const Arg& x) { return any_arg(b, [&](const Arg& y) { return hazard(x, y); }); });
}

std::vector<uint32_t> hazard_levels(const CommandList& list) {
  std::vector<uint32_t> level(list.launches.size(), 0);
  for (size_t i = 0; i < level.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (level[j] >= level[i] && conflicts(list.launches[j], list.launches[i])) {
        level[i] = level[j] + 1;
      }
    }
  }
  return level;
}

#ifndef LILY_HAS_METAL
DeviceRef make_metal(bool, std::string& why) {
  why = "Metal is Apple's: this build is for another system";
  return nullptr;
}
#endif

namespace {
struct Factory {
  const char* name;
  DeviceRef (*make)(bool exact, std::string& why);
};
constexpr Factory kFactories[] = {
    {"metal", make_metal}, {"cuda", make_cuda}, {"cpu", make_cpu}, {"sim", make_sim}};
}  // namespace

std::vector<DeviceStatus> device_statuses() {
  std::vector<DeviceStatus> all;
  for (const Factory& f : kFactories) {
    std::string why;
    const DeviceRef device = f.make(false, why);
    all.push_back({f.name, device != nullptr, device ? device->description() : why});
  }
  return all;
}

DeviceRef make_device(const std::string& name, bool exact) {
  for (const Factory& f : kFactories) {
    if (name != f.name) continue;
    std::string why;
    DeviceRef device = f.make(exact, why);
    check(device != nullptr, "device ", name, " does not exist here: ", why);
    return device;
  }
  throw std::invalid_argument(
      concat("device \"", name, "\" is unknown; known: metal, cuda, cpu, sim"));
}

}  // namespace lily
