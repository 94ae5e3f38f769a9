// record.cpp: a device that only writes down what it is given, and a session on it.
#include "record.h"

#include "engine.h"

namespace lily {
namespace {

class NoBuffer : public Buffer {};
class NoProgram : public Program {
 public:
  explicit NoProgram(CommandList list_) : list(std::move(list_)) {}
  CommandList list;
};

class RecordingDevice : public Device {
 public:
  RecordingDevice(Family family, bool exact) : Device(exact), family_(family) {}
  std::string name() const override { return "recording"; }
  std::string description() const override { return "keeps nothing, runs nothing"; }
  Family family() const override { return family_; }
  uint64_t memory_limit() const override { return uint64_t(1) << 40; }

  BufferRef allocate(size_t bytes, std::string_view label, Memory) override {
    auto buffer = std::make_shared<NoBuffer>();
    buffer->size = bytes;
    buffer->label = label;
    buffers.push_back(buffer);
    return buffer;
  }
  void upload(const Tensor&, const void*) override {}
  void download(const Tensor& from, void*) override {
    throw LilyError(concat("nothing can be read from ", from.buffer->label,
                           ": the launches were recorded, not run"));
  }
  uint64_t address(const Tensor& t) override { return t.offset; }
  ProgramRef compile(CommandList list, bool) override {
    return std::make_shared<NoProgram>(std::move(list));
  }
  Ticket submit(const ProgramRef& program, const std::atomic<bool>*) override {
    submitted.push_back(static_cast<const NoProgram&>(*program).list);
    return submitted.size();
  }
  void wait(Ticket) override {}

  std::vector<BufferRef> buffers;
  std::vector<CommandList> submitted;

 private:
  const Family family_;
};

}  // namespace

RecordedPasses record_passes(Family family, bool exact, const LoadTable& table, uint32_t context) {
  const auto device = std::make_shared<RecordingDevice>(family, exact);
  const auto engine = std::make_shared<Engine>(
      device, table, 0, std::function<Weights()>([&] { return place_weights(*device, table); }));
  Session session(engine);
  session.sync(std::vector<uint32_t>(context, 0), {}, {});
  RecordedPasses passes;
  passes.prefill = std::move(device->submitted);
  passes.step = session.step_list();
  passes.buffers = device->buffers;
  return passes;
}

}  // namespace lily
