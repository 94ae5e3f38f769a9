// python.cpp: the bindings of lily._core: no logic here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>

#include "engine.h"
#include "metal_split.h"
#include "metal_text.h"
#include "python_exit.h"
#include "record.h"
#include "sim.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

// The GIL given up and taken back.
struct Released {
  PyThreadState* const state = PyEval_SaveThread();
  Released() = default;
  Released(const Released&) = delete;
  ~Released() { restore_thread(state); }
};
struct Acquired {
  const PyGILState_STATE state = ensure_gil();
  Acquired() = default;
  Acquired(const Acquired&) = delete;
  ~Acquired() { PyGILState_Release(state); }
};

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device ::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device ::cpu>;

// A piece of device memory for kernel tests and tools.
struct KernelBuffer {
  DeviceRef device;
  Tensor tensor;  // as u32
};

// Single ops by name, for kernel tests and benchmarks: the same recorder, devices and kernels.
struct Kernels {
  explicit Kernels(DeviceRef device_) : device(std::move(device_)) {}
  DeviceRef device;
  std::atomic<bool> cancelled = false;

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
  using Call =
      std::tuple<std::string, Bytes, std::vector<View>, std::vector<View>, std::vector<View>>;

  // Of each launch: bytes declared read and written; touched, and touched distinct, of both.
  using Traffic = std::vector<std::vector<uint64_t>>;
  static Traffic traffic(const std::vector<LaunchRecord>& records) {
    Traffic all;
    for (const LaunchRecord& r : records) {
      all.push_back({r.declared_read, r.declared_written, r.touched.read, r.touched.written,
                     r.touched.read_distinct, r.touched.written_distinct});
    }
    return all;
  }

  // Of each launch, of each argument, unbound range and Step: bytes read and written, every access
  // counted, then the same with every byte counted once. On sim.
  std::vector<Traffic> touched(const std::vector<Call>& calls) {
    const ProgramRef program = program_of(calls, false);
    {
      const Released released;
      device->wait(device->submit(program, &cancelled));
    }
    std::vector<Traffic> all;
    for (const LaunchRecord& r : sim_records(*program)) {
      all.emplace_back();
      for (const TouchedBytes& t : r.parts) {
        all.back().push_back({t.read, t.written, t.read_distinct, t.written_distinct});
      }
    }
    return all;
  }

  // The calls (op, params, args, step (0 or 1), unbound) as one list.
  CommandList list_of(const std::vector<Call>& calls) {
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
      recorder.any(Op(op), {reinterpret_cast<const std::byte*>(params.data()), params.size()},
                   tensors, step.empty() ? Tensor{} : view(step[0]), slabs);
    }
    return list;
  }
  ProgramRef program_of(const std::vector<Call>& calls, bool reuse) {
    return device->compile(list_of(calls), reuse);
  }
  // On sim what the last run did to memory; elsewhere nothing knows.
  Traffic run(const std::vector<Call>& calls, bool reuse, int times) {
    const ProgramRef program = program_of(calls, reuse);
    {
      const Released released;
      Ticket last = 0;
      for (int i = 0; i < times; ++i) last = device->submit(program, &cancelled);
      device->wait(last);
    }
    return device->family() == Family::sim ? traffic(sim_records(*program)) : Traffic{};
  }

  // Seconds of one run of the program (replayed where the device can), after one that warms up.
  double time(const std::vector<Call>& calls, uint32_t times) {
    const ProgramRef program = program_of(calls, true);
    device->wait(device->submit(program));
    const Released released;
    return device->time_program(program, times);
  }

  // Where Metal cuts such a list into command buffers, and the predicted seconds of each launch.
  std::pair<std::vector<size_t>, std::vector<double>> command_buffers(
      const std::vector<Call>& calls) {
    const CommandList list = list_of(calls);
    std::vector<double> seconds;
    for (const Launch& l : list.launches) seconds.push_back(predicted_seconds(list, l));
    return {command_buffer_ends(list), seconds};
  }

  using Foreign =
      std::tuple<std::string, std::vector<View>, std::vector<std::string>, std::vector<uint32_t>>;
  // Launches (symbol, args, access of each: "r", "w", "rw" or "", grid x, y, z, threads) of a library
  // of kernels, on sim.
  Traffic run_library(const std::string& path, const std::vector<Foreign>& calls) {
    CommandList list;
    list.label = path;
    std::vector<std::string> symbols;
    for (const auto& [symbol, args, access, grid] : calls) {
      check(args.size() == access.size() && grid.size() == 4, symbol, ": ", args.size(),
            " arguments, ", access.size(), " accesses, a grid of ", grid.size());
      Launch launch;
      launch.grid = {grid[0], grid[1], grid[2], grid[3]};
      for (size_t i = 0; i < args.size(); ++i) {
        const bool r = access[i].find('r') != std::string::npos,
                   w = access[i].find('w') != std::string::npos;
        launch.args.push_back({view(args[i]), Access(int(r) | int(w) << 1)});
      }
      symbols.push_back(symbol);
      list.launches.push_back(std::move(launch));
    }
    return traffic(sim_run_library(*device, path, symbols, std::move(list)));
  }
};

// ---- recorded launches ---------------------------------------------------------------------------
struct RecordedLaunch {
  // Number and label of the buffer, byte offset, dtype, elements, access.
  using Arg = std::tuple<size_t, std::string, uint64_t, std::string, uint64_t, std::string>;
  std::string op, variant, params;
  std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> grid;
  uint32_t level = 0;
  double flops = 0;
  std::vector<Arg> args, unbound, step;
};

std::vector<RecordedLaunch> recorded(const RecordedPasses& passes, const CommandList& list) {
  static constexpr const char* kAccess[] = {"", "r", "w", "rw"};
  std::map<const Buffer*, size_t> numbers;
  for (size_t i = 0; i < passes.buffers.size(); ++i) numbers[passes.buffers[i].get()] = i;
  const auto arg = [&](const Arg& a) -> RecordedLaunch::Arg {
    const Tensor& t = a.tensor;
    if (!t.buffer) return {0, "", 0, dtype_name(t.dtype), 0, ""};
    return {numbers.at(t.buffer.get()), t.buffer->label, t.offset,
            dtype_name(t.dtype),        t.elements,      kAccess[size_t(a.access)]};
  };
  const std::vector<uint32_t> levels = hazard_levels(list);
  std::vector<RecordedLaunch> all;
  for (size_t i = 0; i < levels.size(); ++i) {
    const Launch& l = list.launches[i];
    const Variant& v = variants()[l.variant];
    RecordedLaunch r;
    r.op = op_name(v.op), r.variant = v.name;
    r.params.assign(reinterpret_cast<const char*>(list.params.data()) + l.params_offset,
                    l.params_size);
    r.grid = {l.grid.x, l.grid.y, l.grid.z, l.grid.threads};
    r.level = levels[i], r.flops = launch_flops(list, l);
    for (const Arg& a : l.args) r.args.push_back(arg(a));
    for (const Arg& a : l.unbound) r.unbound.push_back(arg(a));
    if (l.step.access != Access::none) r.step.push_back(arg(l.step));
    all.push_back(std::move(r));
  }
  return all;
}

Family family_of(const std::string& device) {
  if (device == "metal") return Family::apple;
  if (device == "cuda") return Family::cuda;
  if (device == "cpu") return Family::cpu;
  if (device == "sim") return Family::sim;
  throw std::invalid_argument("device \"" + device + "\" is unknown; known: metal, cuda, cpu, sim");
}

// ---- engine --------------------------------------------------------------------------------------
// Taken with noconvert: a conversion to uint32 would wrap what is too large and cut fractions.
using Ids = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device ::cpu>;
using Range = std::tuple<uint32_t, uint64_t, uint64_t>;  // file, offset, bytes
using LinearTuple = std::tuple<int32_t, std::string, std::string, uint32_t, uint32_t, std::string,
                               uint32_t, uint32_t, uint32_t, Range, uint64_t, Range, Range>;
using VectorTuple = std::tuple<int32_t, std::string, std::string, std::string, bool, Range>;

std::span<const uint32_t> span_of(const Ids& ids) { return {ids.data(), ids.size()}; }
FileRange range_of(const Range& r) { return {std::get<0>(r), std::get<1>(r), std::get<2>(r)}; }

// Ctrl-C in a long call: looked at while it waits.
void check_signals() {
  const Acquired gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

template <typename T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

LoadTable make_table(const nb::typed<nb::dict, nb::str, nb::any>& config,
                     std::vector<std::string> files, const std::vector<LinearTuple>& linears,
                     const std::vector<VectorTuple>& vectors) {
  LoadTable t;
  const auto number = [&](const char* name) { return nb::cast<uint32_t>(config[name]); };
  Config& c = t.config;
  c.attention = nb::cast<std::vector<bool>>(config["attention"]);
  c.hidden = number("hidden"), c.vocab = number("vocab"), c.token_limit = number("token_limit");
  c.heads = number("heads"), c.kv_heads = number("kv_heads"), c.rotary = number("rotary");
  c.key_heads = number("key_heads"), c.value_heads = number("value_heads");
  c.experts = number("experts"), c.top_k = number("top_k");
  c.expert_width = number("expert_width"), c.shared_width = number("shared_width");
  c.max_position = number("max_position");
  c.rope_theta = nb::cast<double>(config["rope_theta"]);
  c.eps = nb::cast<float>(config["eps"]);
  t.files = std::move(files);
  for (const auto& [layer, name, tensor, bits, group, scale, n, k, experts, weight, stride, scales,
                    biases] : linears) {
    LinearEntry e;
    e.layer = layer, e.name = name, e.tensor = tensor, e.bits = bits, e.group = group, e.n = n,
    e.k = k;
    e.experts = experts, e.stride = stride, e.scale_type = file_type(scale);
    e.weight = range_of(weight), e.scales = range_of(scales), e.biases = range_of(biases);
    t.linears.push_back(std::move(e));
  }
  for (const auto& [layer, name, tensor, type, plus_one, range] : vectors) {
    t.vectors.push_back({layer, name, tensor, file_type(type), plus_one, range_of(range)});
  }
  return t;
}

std::shared_ptr<Engine> make_engine(
    const std::string& device, bool exact, const nb::typed<nb::dict, nb::str, nb::any>& config,
    std::vector<std::string> files, const std::vector<LinearTuple>& linears,
    const std::vector<VectorTuple>& vectors, uint32_t max_context,
    std::optional<std::function<void(uint64_t, uint64_t)>> progress) {
  const LoadTable t = make_table(config, std::move(files), linears, vectors);
  const Released released;
  Progress report = [&](uint64_t done, uint64_t total) {
    const Acquired gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress) (*progress)(done, total);
  };
  return std::make_shared<Engine>(make_device(device, exact), t, max_context, report);
}

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
  m.def("metal_files", &metal_files, "The kernel files that Apple's compiler is given.");
  m.def("metal_source", &metal_source, "file"_a, "exact"_a, "tensor"_a = false,
        "Such a file's text with its headers in place; see LILY_METAL_SOURCE.");
  m.def("devices", &device_statuses, nb::call_guard<Released>(),
        "The devices lily knows, with the reason where one is missing.");

  nb::class_<KernelBuffer>(m, "KernelBuffer", "Device memory of a Kernels object.")
      .def_prop_ro("address", [](KernelBuffer& b) { return b.device->address(b.tensor); })
      .def_prop_ro("nbytes", [](KernelBuffer& b) { return b.tensor.bytes(); })
      .def(
          "write",
          [](KernelBuffer& b, uint64_t offset, Bytes data) {
            Tensor t = b.tensor;
            check(offset % 4 == 0 && data.size() % 4 == 0 && offset + data.size() <= t.bytes(),
                  "write of ", data.size(), " bytes at ", offset, " into ", t.bytes());
            b.device->upload(t.slice(offset / 4, data.size() / 4), data.data());
          },
          "offset"_a, "data"_a)
      .def(
          "read",
          [](KernelBuffer& b, uint64_t offset, MutableBytes data) {
            Tensor t = b.tensor;
            check(offset % 4 == 0 && data.size() % 4 == 0 && offset + data.size() <= t.bytes(),
                  "read of ", data.size(), " bytes at ", offset, " from ", t.bytes());
            b.device->download(t.slice(offset / 4, data.size() / 4), data.data());
          },
          "offset"_a, "data"_a);

  nb::class_<Kernels>(m, "Kernels", "Single ops by name on one device, for tests and benchmarks.")
      .def(
          "__init__",
          [](Kernels* self, const std::string& device, bool exact) {
            new (self) Kernels(make_device(device, exact));
          },
          "device"_a, "exact"_a)
      .def_prop_ro("description", [](const Kernels& k) { return k.device->description(); })
      .def("buffer", &Kernels::buffer, "nbytes"_a, "label"_a)
      .def("run", &Kernels::run, "calls"_a, "reuse"_a = false, "times"_a = 1)
      .def("time", &Kernels::time, "calls"_a, "times"_a,
           "Seconds of one run of the calls as one program, the mean of `times` replays.")
      .def(
          "cancel", [](Kernels& k, bool on) { k.cancelled = on; }, "on"_a = true,
          "From any thread: ends a run in progress, and those that follow until it is taken back.")
      .def("touched", &Kernels::touched, "calls"_a,
           "On sim, of each launch, of each argument, unbound range and Step: bytes read and "
           "written,\n"
           "every access counted, then the same with every byte counted once.")
      .def("command_buffers", &Kernels::command_buffers, "calls"_a)
      .def("run_library", &Kernels::run_library, "path"_a, "calls"_a);
  nb::class_<MemoryTable>(m, "MemoryTable", "Bytes by purpose.")
      .def_ro("weights", &MemoryTable::weights)
      .def_ro("state", &MemoryTable::state)
      .def_ro("kv_per_block", &MemoryTable::kv_per_block)
      .def_ro("decode_scratch", &MemoryTable::decode_scratch)
      .def_ro("prefill_scratch", &MemoryTable::prefill_scratch)
      .def_ro("limit", &MemoryTable::limit)
      .def_ro("context", &MemoryTable::context,
              "Tokens of one session at most; 0: the weights do not fit.");
  nb::class_<SampledToken>(m, "SampledToken", "A drawn token.")
      .def_ro("id", &SampledToken::id)
      .def_ro("logprob", &SampledToken::logprob, "Of the raw model distribution.")
      .def_ro("top", &SampledToken::top, "(id, log-probability) of the most likely alternatives.");

  nb::class_<Engine>(m, "Engine", "A loaded model; immutable, shared by its sessions.")
      .def_prop_ro("device", [](const Engine& e) { return e.device->name(); })
      .def_prop_ro("device_description", [](const Engine& e) { return e.device->description(); })
      .def_prop_ro("exact", [](const Engine& e) { return e.device->exact(); })
      .def_prop_ro("max_context", [](const Engine& e) { return e.max_context; })
      .def_prop_ro("chunk", [](const Engine& e) { return e.chunk; })
      .def_prop_ro("vocab", [](const Engine& e) { return e.config.vocab; })
      .def_prop_ro("allocated", [](const Engine& e) { return e.device->allocated(); })
      .def("memory", &Engine::memory)
      .def("close", &Engine::close);
  m.def("load_engine", &make_engine, "device"_a, "exact"_a, "config"_a, "files"_a, "linears"_a,
        "vectors"_a, "max_context"_a, "progress"_a.none() = nb::none(),
        "Loads weights from a validated table of file ranges; see lily.engine.");

  m.def(
      "memory_table",
      [](const std::string& device, bool exact, const nb::typed<nb::dict, nb::str, nb::any>& config,
         std::vector<std::string> files, const std::vector<LinearTuple>& linears,
         const std::vector<VectorTuple>& vectors) {
        return memory_table(*make_device(device, exact),
                            make_table(config, std::move(files), linears, vectors));
      },
      "device"_a, "exact"_a, "config"_a, "files"_a, "linears"_a, "vectors"_a,
      "What load_engine would take; reads no weights.");

  nb::class_<RecordedLaunch>(m, "RecordedLaunch", "A launch that was written down.")
      .def_ro("op", &RecordedLaunch::op)
      .def_ro("variant", &RecordedLaunch::variant)
      .def_prop_ro(
          "params",
          [](const RecordedLaunch& r) { return nb::bytes(r.params.data(), r.params.size()); },
          "The op's struct of kernels.h.")
      .def_ro("grid", &RecordedLaunch::grid, "Threadgroups in x, y, z; threads of each.")
      .def_ro("level", &RecordedLaunch::level, "Launches that it has to follow, one after another.")
      .def_ro("flops", &RecordedLaunch::flops, "Of ops that can be bound by them, else 0.")
      .def_ro("args", &RecordedLaunch::args,
              "(number and label of the buffer, byte offset, dtype, elements, access) of each.")
      .def_ro("unbound", &RecordedLaunch::unbound, "Ranges reached through addresses.")
      .def_ro("step", &RecordedLaunch::step, "The session's Step, where the kernel takes it.");
  m.def(
      "record_passes",
      [](const std::string& device, bool exact, const nb::typed<nb::dict, nb::str, nb::any>& config,
         std::vector<std::string> files, const std::vector<LinearTuple>& linears,
         const std::vector<VectorTuple>& vectors, uint32_t context) {
        const RecordedPasses passes =
            record_passes(family_of(device), exact,
                          make_table(config, std::move(files), linears, vectors), context);
        std::vector<std::vector<RecordedLaunch>> prefill;
        for (const CommandList& list : passes.prefill) prefill.push_back(recorded(passes, list));
        return std::make_pair(std::move(prefill), recorded(passes, passes.step));
      },
      "device"_a, "exact"_a, "config"_a, "files"_a, "linears"_a, "vectors"_a, "context"_a,
      "(launches of each prefill chunk of a prompt of `context` tokens, those of the step after "
      "it),\n"
      "as a session on such a device would submit them; needs neither the device nor the weights.");

  using Unlocked = nb::call_guard<Released>;
  nb::class_<Session>(
      m, "Session",
      "One timeline of tokens on an Engine. One thread at a time: a second one gets LilyError.")
      .def(nb::init<std::shared_ptr<Engine>>(), "engine"_a, Unlocked())
      .def(
          "sync",
          [](Session& s, const Ids& ids, const std::vector<uint32_t>& snapshot_at) {
            const Released released;
            return s.sync(span_of(ids), snapshot_at, check_signals);
          },
          "ids"_a.noconvert(), nb::kw_only(), "snapshot_at"_a = std::vector<uint32_t>(),
          "Makes the timeline `ids` (uint32 [n]); returns how many leading tokens were reused.\n\n"
          "Prefill is split at snapshot_at and a snapshot kept at each. Ctrl-C and cancel() leave "
          "the\n"
          "session at the prefix that was done.")
      .def(
          "step",
          [](Session& s, const std::optional<Ids>& allowed) {
            std::vector<uint32_t> mask;
            if (allowed) mask.assign(allowed->data(), allowed->data() + allowed->size());
            const Released released;
            return s.step(allowed ? &mask : nullptr);
          },
          "allowed"_a.noconvert().none() = nb::none(),
          "Draws the next token and appends it. allowed: uint32 [(vocab + 31) / 32], one bit per "
          "id.")
      .def(
          "rewind",
          [](Session& s, uint32_t position) {
            const Released released;
            s.rewind(position, check_signals);
          },
          "position"_a, "Cuts the timeline to `position` tokens: nearest snapshot, then replay.")
      .def("snapshot", &Session::snapshot, Unlocked(),
           "Keeps the present position for sync and rewind.")
      .def("cancel", &Session::cancel,
           "From any thread: ends a running call within one step or chunk.")
      .def(
          "set_sampling",
          [](Session& s, float temperature, float top_p, uint32_t top_k, float min_p,
             float presence, float frequency, float repetition, uint64_t seed, uint32_t logprobs,
             const std::vector<std::pair<uint32_t, float>>& bias) {
            const Released released;
            SamplingOptions o;
            o.temperature = temperature, o.top_p = top_p, o.top_k = top_k, o.min_p = min_p,
            o.presence = presence;
            o.frequency = frequency, o.repetition = repetition, o.seed = seed,
            o.logprobs = logprobs, o.bias = bias;
            s.set_sampling(o);
          },
          nb::kw_only(), "temperature"_a = 0.0f, "top_p"_a = 1.0f, "top_k"_a = 0, "min_p"_a = 0.0f,
          "presence"_a = 0.0f, "frequency"_a = 0.0f, "repetition"_a = 1.0f, "seed"_a = 0,
          "logprobs"_a = 0, "bias"_a = std::vector<std::pair<uint32_t, float>>(),
          "For the following steps; values are checked in lily.engine.")
      .def(
          "logits",
          [](Session& s) {
            std::vector<float> v;
            {
              const Released released;
              v = s.logits();
            }
            const size_t n = v.size();
            return array_of(std::move(v), {n});
          },
          "float32 [vocab] of the next token, or of the one that the last step returned.")
      .def(
          "forward",
          [](Session& s, const Ids& ids) {
            std::vector<float> v;
            {
              const Released released;
              v = s.forward(span_of(ids), check_signals);
            }
            const size_t rows = ids.size(), vocab = s.engine()->config.vocab;
            return array_of(std::move(v), {rows, vocab});
          },
          "ids"_a.noconvert(), "Appends ids; float32 [n, vocab] logits after each, n <= 512.")
      .def(
          "score",
          [](Session& s, const Ids& ids, const Ids& targets) {
            std::pair<std::vector<float>, std::vector<uint32_t>> v;
            {
              const Released released;
              v = s.score(span_of(ids), span_of(targets), check_signals);
            }
            const size_t n = ids.size();
            return std::make_pair(array_of(std::move(v.first), {n}),
                                  array_of(std::move(v.second), {n}));
          },
          "ids"_a.noconvert(), "targets"_a.noconvert(),
          "Appends ids; (log-probability of each target, most likely id) after each.")
      .def(
          "verify",
          [](Session& s, const Ids& ids) {
            std::vector<float> v;
            {
              const Released released;
              v = s.verify(span_of(ids));
            }
            const size_t rows = ids.size(), vocab = s.engine()->config.vocab;
            return array_of(std::move(v), {rows, vocab});
          },
          "ids"_a.noconvert(),
          "float32 [n, vocab] logits of up to 16 further tokens; changes nothing visible.")
      .def("commit", &Session::commit, "n"_a, Unlocked(), "Appends the first n verified tokens.")
      .def(
          "recurrent_state",
          [](Session& s) {
            std::pair<std::vector<float>, std::vector<float>> v;
            {
              const Released released;
              v = s.recurrent_state();
            }
            const Config& c = s.engine()->config;
            const size_t d = LILY_DELTA_DIM;
            return std::make_pair(
                array_of(std::move(v.first), {c.delta_layers(), 3, c.channels()}),
                array_of(std::move(v.second), {c.delta_layers(), c.value_heads, d, d}));
          },
          "(conv float32 [layers, 3, channels], delta float32 [layers, Hv, Dv, Dk]) after all "
          "tokens.")
      .def_prop_ro(
          "tokens",
          [](const Session& s) {
            std::vector<uint32_t> v = s.tokens();
            const size_t n = v.size();
            return array_of(std::move(v), {n});
          },
          nb::rv_policy::automatic, "uint32 [n]: the timeline.")
      .def_prop_ro("position", &Session::position, "Tokens in the timeline.")
      .def_prop_ro("snapshots", &Session::snapshots, "Positions of the kept snapshots.");

  m.def(
      "variants",
      [] {
        std::vector<std::pair<std::string, std::string>> all;
        for (const Variant& v : variants()) all.emplace_back(op_name(v.op), v.name);
        return all;
      },
      "(op, pipeline) of every kernel.");
}

}  // namespace lily
