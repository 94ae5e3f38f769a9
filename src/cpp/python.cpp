// python.cpp: the bindings of lily._core: no logic here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "device.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A piece of device memory for kernel tests and tools.
struct KernelBuffer {
  DeviceRef device;
  Tensor tensor;  // as u32
};

// Single ops by name, for kernel tests and benchmarks: the same recorder, devices and kernels.
struct Kernels {
  DeviceRef device;

  KernelBuffer buffer(uint64_t bytes, const std::string& label) {
    return {device, device->tensor(DType::u32, (bytes + 3) / 4, label)};
  }
  static DType dtype(const std::string& name) {
    for (DType t : {DType::u32, DType::u64, DType::bf16, DType::f32}) {
      if (name == dtype_name(t)) return t;
    }
    throw std::invalid_argument("dtype \"" + name + "\" is unknown");
  }
  static Tensor view(const std::tuple<KernelBuffer*, uint64_t, uint64_t, std::string>& a) {
    Tensor t = std::get<0>(a)->tensor;
    t.dtype = dtype(std::get<3>(a));
    t.offset += std::get<1>(a);
    t.elements = std::get<2>(a);
    check(t.offset + t.bytes() <= t.buffer->size, t.buffer->label, ": view ends at byte ",
          t.offset + t.bytes(), " of ", t.buffer->size);
    return t;
  }
  using View = std::tuple<KernelBuffer*, uint64_t, uint64_t, std::string>;
  using Call = std::tuple<std::string, Bytes, std::vector<View>, std::vector<View>, std::vector<View>>;

  // Records the calls (op, params, args, step (0 or 1), unbound) into one program and runs it.
  void run(const std::vector<Call>& calls, bool reuse, int times) {
    CommandList list;
    list.label = "kernels";
    Recorder recorder(*device, list);
    for (const auto& [name, params, args, step, unbound] : calls) {
      size_t op = 0;
      while (op < size_t(Op::count) && name != op_name(Op(op))) ++op;
      if (op == size_t(Op::count)) throw std::invalid_argument("op \"" + name + "\" is unknown");
      std::vector<Tensor> tensors, slabs;
      for (const View& v : args) tensors.push_back(std::get<2>(v) ? view(v) : Tensor{});
      for (const View& v : unbound) slabs.push_back(view(v));
      recorder.any(Op(op), {reinterpret_cast<const std::byte*>(params.data()), params.size()}, tensors,
                   step.empty() ? Tensor{} : view(step[0]), slabs);
    }
    const ProgramRef program = device->compile(std::move(list), reuse);
    Ticket last = 0;
    for (int i = 0; i < times; ++i) last = device->submit(program);
    device->wait(last);
  }
};

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The compiled core of lily: devices, kernels, engine.";
  nb::set_leak_warnings(false);

  auto error = nb::exception<LilyError>(m, "LilyError", PyExc_RuntimeError);
  nb::exception<DeviceError>(m, "DeviceError", error);
  nb::exception<CheckpointError>(m, "CheckpointError", error);
  nb::exception<Cancelled>(m, "Cancelled", error);

  nb::class_<DeviceStatus>(m, "DeviceStatus", "Whether a device exists here, or why not.")
      .def_ro("name", &DeviceStatus::name)
      .def_ro("available", &DeviceStatus::available)
      .def_ro("description", &DeviceStatus::description);
  m.def("devices", &device_statuses, nb::call_guard<nb::gil_scoped_release>(),
        "The devices lily knows, with the reason where one is missing.");

  nb::class_<KernelBuffer>(m, "KernelBuffer", "Device memory of a Kernels object.")
      .def_prop_ro("address", [](KernelBuffer& b) { return b.device->address(b.tensor); })
      .def_prop_ro("nbytes", [](KernelBuffer& b) { return b.tensor.bytes(); })
      .def("write", [](KernelBuffer& b, uint64_t offset, Bytes data) {
        Tensor t = b.tensor;
        check(offset % 4 == 0 && data.size() % 4 == 0 && offset + data.size() <= t.bytes(),
              "write of ", data.size(), " bytes at ", offset, " into ", t.bytes());
        b.device->upload(t.slice(offset / 4, data.size() / 4), data.data());
      }, "offset"_a, "data"_a)
      .def("read", [](KernelBuffer& b, uint64_t offset, MutableBytes data) {
        Tensor t = b.tensor;
        check(offset % 4 == 0 && data.size() % 4 == 0 && offset + data.size() <= t.bytes(),
              "read of ", data.size(), " bytes at ", offset, " from ", t.bytes());
        b.device->download(t.slice(offset / 4, data.size() / 4), data.data());
      }, "offset"_a, "data"_a);

  nb::class_<Kernels>(m, "Kernels", "Single ops by name on one device, for tests and benchmarks.")
      .def("__init__", [](Kernels* self, const std::string& device, bool exact) {
        new (self) Kernels{make_device(device, exact)};
      }, "device"_a, "exact"_a)
      .def("buffer", &Kernels::buffer, "nbytes"_a, "label"_a)
      .def("run", &Kernels::run, "calls"_a, "reuse"_a = false, "times"_a = 1);
  m.def("variants", [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (const Variant& v : variants()) all.emplace_back(op_name(v.op), v.name);
    return all;
  }, "(op, pipeline) of every kernel.");
}

}  // namespace lily
