// loader.cpp: parallel reading of checkpoint files into weight layout v1.
#include "loader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

namespace lily {

FileType file_type(const std::string& name) {
  if (name == "U32") return FileType::u32;
  if (name == "BF16") return FileType::bf16;
  if (name == "F16") return FileType::f16;
  if (name == "F32") return FileType::f32;
  throw CheckpointError(concat("element type ", name, " is not supported"));
}

namespace {

constexpr uint64_t kArenaBytes = uint64_t(4) << 30;
constexpr uint64_t kAlign = 256;
constexpr uint64_t kJobBytes = uint64_t(4) << 20;
constexpr size_t kReaders = 6;

size_t type_size(FileType t) { return t == FileType::u32 || t == FileType::f32 ? 4 : 2; }

// Files opened for reading past the page cache: weights are read once.
class Files {
 public:
  explicit Files(const std::vector<std::string>& paths) : paths_(paths) {
    for (const std::string& path : paths) {
      // Without waiting for a writer, should a pipe have taken the place of the file that was checked.
      const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
      if (fd < 0) {
        const int error = errno;
        close_all();
        throw CheckpointError(concat(path, ": cannot be opened: ", std::strerror(error)));
      }
#ifdef __APPLE__
      fcntl(fd, F_NOCACHE, 1);
#endif
      fds_.push_back(fd);
      struct stat info;
      if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close_all();
        throw CheckpointError(concat(path, ": not a regular file"));
      }
    }
  }
  ~Files() { close_all(); }
  void read(const FileRange& r, uint64_t skip, void* to, uint64_t bytes,
            const std::string& tensor) const {
    uint64_t at = r.offset + skip;
    auto* out = static_cast<char*>(to);
    const int fd = fds_[r.file];
    for (uint64_t left = bytes; left > 0;) {
      const ssize_t got = pread(fd, out, left, off_t(at));
      if (got < 0 && errno == EINTR) continue;
      check<CheckpointError>(
          got > 0, paths_[r.file], ": ", tensor, ": byte ", at,
          " cannot be read: ", got < 0 ? std::strerror(errno) : "the file ends there");
      out += got, at += uint64_t(got), left -= uint64_t(got);
    }
#ifdef POSIX_FADV_DONTNEED
    posix_fadvise(fd, off_t(r.offset + skip), off_t(bytes), POSIX_FADV_DONTNEED);
#endif
  }
  const std::string& path(uint32_t file) const { return paths_[file]; }

 private:
  void close_all() {
    for (int fd : fds_) close(fd);
  }
  const std::vector<std::string>& paths_;
  std::vector<int> fds_;
};

// Source rows r of one entry go to rows row0 + r * step of the destination.
struct Source {
  const LinearEntry* entry;
  uint32_t row0, step;
};
struct Target {  // one matrix per expert to be filled
  Linear w{};
  uint32_t experts = 1;
  std::vector<Source> sources;
  Matrix* matrix = nullptr;
  size_t codes = 0, pairs = 0;  // places in the arenas
};

bool same_format(const LinearEntry& a, const LinearEntry& b) {
  return a.bits == b.bits && a.group == b.group && a.scale_type == b.scale_type && a.k == b.k;
}
Linear linear_of(const LinearEntry& e, uint32_t n) {
  uint32_t shift = 0;
  while ((1u << shift) < e.group) ++shift;
  return {n, e.k, e.bits, e.bits == 16 ? 6 : shift, e.scale_type == FileType::f16};
}
// 4-bit codes as 8-bit ones: the same numbers, so the same weights.
void widen(const char* from, uint64_t bytes, char* to) {
  for (uint64_t i = 0; i < bytes; ++i) {
    to[2 * i] = char(from[i] & 15);
    to[2 * i + 1] = char((uint8_t(from[i]) >> 4) & 15);
  }
}

// Sizes first, then few large buffers, then views.
class Arenas {
 public:
  size_t reserve(uint64_t elements) {
    const uint64_t bytes = (elements * 4 + kAlign - 1) / kAlign * kAlign;
    if (sizes_.empty() || (sizes_.back() + bytes > kArenaBytes && sizes_.back() > 0))
      sizes_.push_back(0);
    places_.push_back({sizes_.size() - 1, sizes_.back(), elements});
    sizes_.back() += bytes;
    return places_.size() - 1;
  }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (uint64_t s : sizes_) sum += s;
    return sum;
  }
  void allocate(Device& device) {
    for (uint64_t s : sizes_) buffers_.push_back(device.allocate(s, "weights"));
  }
  Tensor tensor(size_t place, DType dtype) const {
    const Place& p = places_[place];
    return {buffers_[p.arena], p.offset, dtype, p.elements};
  }

 private:
  struct Place {
    size_t arena;
    uint64_t offset, elements;
  };
  std::vector<uint64_t> sizes_;
  std::vector<Place> places_;
  std::vector<BufferRef> buffers_;
};

struct VectorTarget {
  const VectorEntry* entry;
  Tensor* tensor;
  size_t place;
};

class Loader {
 public:
  explicit Loader(const LoadTable& table) : table_(table), files_(table.files) {
    for (const LinearEntry& e : table.linears) linears_[{e.layer, e.name}] = &e;
    for (const VectorEntry& e : table.vectors) vectors_[{e.layer, e.name}] = &e;
    plan();
  }
  uint64_t arena_bytes() const { return arenas_.bytes(); }

  Weights load(Device& device, const Progress& progress) {
    place(device);
    upload_inv_freq(device);
    run_jobs(device, progress);
    return std::move(weights_);
  }
  Weights placed(Device& device) {
    place(device);
    return std::move(weights_);
  }

 private:
  void place(Device& device) {
    arenas_.allocate(device);
    for (Target& t : targets_) {
      t.matrix->w = t.w;
      t.matrix->codes = arenas_.tensor(t.codes, DType::u32);
      if (t.w.bits != 16) t.matrix->pairs = arenas_.tensor(t.pairs, DType::u32);
    }
    for (VectorTarget& v : vector_targets_) *v.tensor = arenas_.tensor(v.place, DType::f32);
    weights_.inv_freq = arenas_.tensor(inv_freq_, DType::f32);
  }
  const LinearEntry& linear(int layer, const char* name) const {
    const auto it = linears_.find({layer, name});
    check<CheckpointError>(it != linears_.end(), "layer ", layer, ": ", name, " is missing");
    return *it->second;
  }
  // Sources of different bits or groups meet in the finer format, which holds both exactly.
  void add(Matrix& matrix, uint32_t n, std::vector<Source> sources) {
    Target t;
    const LinearEntry& e = *sources[0].entry;
    t.w = linear_of(e, n);
    for (const Source& s : sources) {
      const Linear other = linear_of(*s.entry, n);
      t.w.bits = std::max(t.w.bits, other.bits);
      t.w.group_shift = std::min(t.w.group_shift, other.group_shift);
    }
    check_linear(t.w, e.tensor.c_str());
    t.experts = e.experts;
    t.sources = std::move(sources);
    t.matrix = &matrix;
    t.codes = arenas_.reserve(code_elements(t.w) * t.experts);
    if (t.w.bits != 16) t.pairs = arenas_.reserve(pair_elements(t.w) * t.experts);
    targets_.push_back(std::move(t));
  }
  void single(Matrix& matrix, int layer, const char* name) {
    const LinearEntry& e = linear(layer, name);
    add(matrix, e.n, {{&e, 0, 1}});
  }
  void interleaved(Matrix& matrix, int layer, const char* gate, const char* up) {
    const LinearEntry &g = linear(layer, gate), &u = linear(layer, up);
    const bool plain = g.bits == 16 && u.bits == 16;
    check<CheckpointError>(
        plain || (g.bits < 16 && u.bits < 16 && g.scale_type == u.scale_type), g.tensor, " has ",
        g.bits, " bits, ", u.tensor, " has ", u.bits,
        ": gate and up must both be bf16, or both quantised with scales of one type");
    add(matrix, 2 * g.n, {{&g, 0, 2}, {&u, 1, 2}});
  }
  // Neighbours of one format become one matrix, so one launch.
  void stack(Stack& out, int layer, std::initializer_list<const char*> names) {
    std::vector<std::vector<Source>> groups;
    std::vector<uint32_t> offsets, sizes;
    uint32_t column = 0;
    for (const char* name : names) {
      const LinearEntry& e = linear(layer, name);
      if (groups.empty() || !same_format(*groups.back()[0].entry, e)) {
        groups.emplace_back();
        offsets.push_back(column);
        sizes.push_back(0);
      }
      groups.back().push_back({&e, sizes.back(), 1});
      sizes.back() += e.n;
      column += e.n;
    }
    out.resize(groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      out[i].offset = offsets[i];
      add(out[i].matrix, sizes[i], std::move(groups[i]));
    }
  }
  void vector(Tensor& tensor, int layer, const char* name) {
    const auto it = vectors_.find({layer, name});
    check<CheckpointError>(it != vectors_.end(), "layer ", layer, ": ", name, " is missing");
    const VectorEntry& e = *it->second;
    vector_targets_.push_back({&e, &tensor, arenas_.reserve(e.range.bytes / type_size(e.type))});
  }
  void plan() {
    const Config& c = table_.config;
    weights_.layers.resize(c.layers());  // stays in place: targets point into it
    single(weights_.embed, -1, "embed_tokens");
    for (uint32_t i = 0; i < c.layers(); ++i) {
      LayerWeights& w = weights_.layers[i];
      vector(w.input_gain, int(i), "input_norm");
      vector(w.post_gain, int(i), "post_norm");
      if (c.attention[i]) {
        stack(w.projections, int(i), {"q_proj", "k_proj", "v_proj"});
        single(w.out, int(i), "o_proj");
        vector(w.q_gain, int(i), "q_norm");
        vector(w.k_gain, int(i), "k_norm");
      } else {
        stack(w.projections, int(i), {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"});
        single(w.out, int(i), "out_proj");
        vector(w.conv, int(i), "conv1d");
        vector(w.neg_exp_a, int(i), "A_log");
        vector(w.dt_bias, int(i), "dt_bias");
        vector(w.delta_gain, int(i), "delta_norm");
      }
      stack(w.router, int(i), {"router", "shared_gate"});
      interleaved(w.expert_up, int(i), "expert_gate_proj", "expert_up_proj");
      single(w.expert_down, int(i), "expert_down_proj");
      interleaved(w.shared_up, int(i), "shared_gate_proj", "shared_up_proj");
      single(w.shared_down, int(i), "shared_down_proj");
    }
    vector(weights_.final_gain, -1, "final_norm");
    single(weights_.head, -1, "lm_head");
    inv_freq_ = arenas_.reserve(std::max(1u, c.rotary / 2));
  }

  void upload_inv_freq(Device& device) {
    const Config& c = table_.config;
    std::vector<float> f(std::max(1u, c.rotary / 2), 0.0f);
    for (uint32_t i = 0; i < c.rotary / 2; ++i) {
      f[i] = float(std::pow(c.rope_theta, -2.0 * double(i) / double(c.rotary)));
    }
    device.upload(weights_.inv_freq, f.data());
  }

  // ---- jobs: a block of rows of one expert's matrix, or one vector --------------------------------
  struct Job {
    const Target* target = nullptr;
    uint32_t expert = 0, row0 = 0, row1 = 0;
    const VectorTarget* vector = nullptr;
  };
  void run_jobs(Device& device, const Progress& progress) {
    std::vector<Job> jobs;
    for (const VectorTarget& v : vector_targets_) {
      Job j;
      j.vector = &v;
      jobs.push_back(j);
      total_ += v.entry->range.bytes;
    }
    for (const Target& t : targets_) {
      const uint64_t row = uint64_t(t.w.k) * t.w.bits / 8;
      // Even, so that interleaved gate and up rows stay together.
      const uint32_t step = uint32_t(std::max<uint64_t>(2, kJobBytes / row / 2 * 2));
      for (uint32_t e = 0; e < t.experts; ++e) {
        for (uint32_t r = 0; r < t.w.n; r += step) {
          Job j;
          j.target = &t;
          j.expert = e;
          j.row0 = r;
          j.row1 = std::min(t.w.n, r + step);
          jobs.push_back(j);
        }
      }
      total_ += (code_elements(t.w) + pair_elements(t.w)) * 4 * t.experts;
    }

    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::condition_variable changed;
    std::exception_ptr error;
    size_t running = std::min(kReaders, jobs.size());
    std::vector<std::thread> readers;
    for (size_t i = 0, n = running; i < n; ++i) {
      readers.emplace_back([&] {
        std::vector<char> raw;
        std::vector<uint32_t> codes, pairs;
        try {
          for (size_t j; (j = next.fetch_add(1)) < jobs.size();) {
            jobs[j].vector ? load_vector(device, *jobs[j].vector)
                           : load_rows(device, jobs[j], raw, codes, pairs);
          }
        } catch (...) {
          std::lock_guard<std::mutex> lock(mutex);
          if (!error) error = std::current_exception();
          next = jobs.size();
        }
        std::lock_guard<std::mutex> lock(mutex);
        --running;
        changed.notify_all();
      });
    }
    std::unique_lock<std::mutex> lock(mutex);
    while (running > 0) {
      changed.wait_for(lock, std::chrono::milliseconds(50));
      if (!progress || error) continue;
      lock.unlock();
      std::exception_ptr stop;
      try {
        progress(std::min(done_.load(), total_), total_);
      } catch (...) {
        stop = std::current_exception();
      }
      lock.lock();
      if (stop) {
        if (!error) error = stop;
        next = jobs.size();
      }
    }
    lock.unlock();
    for (std::thread& t : readers) t.join();
    if (error) std::rethrow_exception(error);
    if (progress) progress(total_, total_);
  }

  void load_rows(Device& device, const Job& job, std::vector<char>& raw,
                 std::vector<uint32_t>& codes, std::vector<uint32_t>& pairs) {
    const Target& t = *job.target;
    const uint32_t rows = job.row1 - job.row0;
    const uint64_t row_words = uint64_t(t.w.k) * t.w.bits / 32;
    const uint64_t row_pairs = t.w.bits == 16 ? 0 : t.w.k >> t.w.group_shift;
    codes.resize(rows * row_words);
    pairs.resize(rows * row_pairs);
    for (const Source& s : t.sources) {
      const LinearEntry& e = *s.entry;
      // Source rows r with row0 <= s.row0 + r * step < row1.
      const uint32_t r0 = job.row0 <= s.row0 ? 0 : (job.row0 - s.row0 + s.step - 1) / s.step;
      const uint32_t r1 =
          job.row1 <= s.row0 ? 0 : std::min(e.n, (job.row1 - s.row0 + s.step - 1) / s.step);
      if (r0 >= r1) continue;
      const uint64_t row_bytes = uint64_t(e.k) * e.bits / 8;
      raw.resize((r1 - r0) * row_bytes);
      files_.read(e.weight, job.expert * e.stride + r0 * row_bytes, raw.data(), raw.size(),
                  e.tensor);
      for (uint32_t r = r0; r < r1; ++r) {
        char* to =
            reinterpret_cast<char*>(&codes[(s.row0 + uint64_t(r) * s.step - job.row0) * row_words]);
        const char* from = &raw[(r - r0) * row_bytes];
        e.bits == t.w.bits ? void(std::memcpy(to, from, row_bytes)) : widen(from, row_bytes, to);
      }
      if (t.w.bits == 16) {
        check_finite(raw.data(), raw.size() / 2, FileType::bf16, e, e.weight, "weight");
        continue;
      }
      const uint64_t source_pairs = e.k / e.group, side = source_pairs * 2,
                     base = (uint64_t(job.expert) * e.n + r0) * side;
      const uint64_t bytes = (r1 - r0) * side;
      raw.resize(2 * bytes);
      files_.read(e.scales, base, raw.data(), bytes, e.tensor);
      files_.read(e.biases, base, raw.data() + bytes, bytes, e.tensor);
      check_finite(raw.data(), bytes / 2, e.scale_type, e, e.scales, "scales");
      check_finite(raw.data() + bytes, bytes / 2, e.scale_type, e, e.biases, "biases");
      for (uint32_t r = r0; r < r1; ++r) {
        uint32_t* out = &pairs[(s.row0 + uint64_t(r) * s.step - job.row0) * row_pairs];
        for (uint64_t g = 0; g < row_pairs; ++g) {
          const uint64_t at = (r - r0) * side + g * source_pairs / row_pairs * 2;
          uint16_t scale, bias;
          std::memcpy(&scale, &raw[at], 2);
          std::memcpy(&bias, &raw[bytes + at], 2);
          out[g] = uint32_t(scale) | uint32_t(bias) << 16;
        }
      }
    }
    const uint64_t row = uint64_t(job.expert) * t.w.n + job.row0;
    device.upload(t.matrix->codes.slice(row * row_words, codes.size()), codes.data());
    if (!pairs.empty()) device
      .upload(t.matrix->pairs.slice(row * row_pairs, pairs.size()), pairs.data());
    done_ += (codes.size() + pairs.size()) * 4;
  }

  void check_finite(const char* raw, uint64_t n, FileType type, const LinearEntry& e,
                    const FileRange& range, const char* part) const {
    const uint16_t exponent = type == FileType::f16 ? 0x7c00 : 0x7f80;
    for (uint64_t i = 0; i < n; ++i) {
      uint16_t v;
      std::memcpy(&v, raw + 2 * i, 2);
      check<CheckpointError>((v & exponent) != exponent, files_.path(range.file), ": ", e.tensor,
                             ": ", part, " hold a value that is not finite (bits ", v, ")");
    }
  }

  void load_vector(Device& device, const VectorTarget& v) {
    const VectorEntry& e = *v.entry;
    const uint64_t n = v.tensor->elements;
    std::vector<char> raw(e.range.bytes);
    files_.read(e.range, 0, raw.data(), raw.size(), e.tensor);
    std::vector<float> out(n);
    for (uint64_t i = 0; i < n; ++i) {
      out[i] = to_float(&raw[i * type_size(e.type)], e.type) + (e.plus_one ? 1.0f : 0.0f);
      check<CheckpointError>(std::isfinite(out[i]), files_.path(e.range.file), ": ", e.tensor,
                             ": value ", i, " of ", n, " is not finite");
      // The decay is exp(-exp(A_log) softplus(a + dt_bias)).
      if (e.name == "A_log") out[i] = float(-std::exp(double(out[i])));
    }
    device.upload(*v.tensor, out.data());
    done_ += e.range.bytes;
  }
  static float to_float(const char* at, FileType type) {
    uint32_t bits = 0;
    std::memcpy(&bits, at, type_size(type));
    if (type == FileType::bf16) bits <<= 16;
    if (type == FileType::f16) {
      const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u,
                     mantissa = bits & 0x3ffu;
      if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(float(mantissa), -24);
      bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }

  const LoadTable& table_;
  Files files_;
  std::map<std::pair<int, std::string>, const LinearEntry*> linears_;
  std::map<std::pair<int, std::string>, const VectorEntry*> vectors_;
  Weights weights_;
  Arenas arenas_;
  std::vector<Target> targets_;
  std::vector<VectorTarget> vector_targets_;
  size_t inv_freq_ = 0;
  uint64_t total_ = 0;
  std::atomic<uint64_t> done_{0};
};

}  // namespace

Weights load_weights(Device& device, const LoadTable& table, const Progress& progress) {
  return Loader(table).load(device, progress);
}
Weights place_weights(Device& device, const LoadTable& table) {
  return Loader(table).placed(device);
}
uint64_t weight_arena_bytes(const LoadTable& table) { return Loader(table).arena_bytes(); }

}  // namespace lily
