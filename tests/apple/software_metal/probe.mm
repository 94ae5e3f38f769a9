// probe.mm: `software_metal_probe CASE`: breaks one rule, or keeps all of them; prints what became of
// each command buffer and which rules were broken.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "objects.h"

using namespace software_metal;

namespace {

constexpr NSUInteger kWords = 256, kBytes = 4 * kWords;
constexpr MTLResourceOptions kUntracked =
    MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked;

struct Copy {
  uint32_t from, to, count;
};

// A device with a queue, a residency set and the pipelines.
struct Bench {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  id<MTLCommandQueue> queue = [device newCommandQueue];
  id<MTLResidencySet> set;
  id<MTLLibrary> library;
  id<MTLFence> fence = [device newFence];
  id<MTLSharedEvent> gate = [device newSharedEvent];
  std::vector<id<MTLBuffer>> kept;
  std::vector<id<MTLComputePipelineState>> pipelines;
  bool resident, keeps_pipelines = true;

  explicit Bench(bool resident_ = true) : resident(resident_) {
    if (resident) {
      MTLResidencySetDescriptor* descriptor = [[MTLResidencySetDescriptor alloc] init];
      set = [device newResidencySetWithDescriptor:descriptor error:nil];
      [queue addResidencySet:set];
      [set requestResidency];
    }
    std::string source;
    for (size_t p = 0; p < kTexts[0].piece_count; ++p) source += kTexts[0].pieces[p];
    NSError* error = nil;
    library = [device newLibraryWithSource:ns(source) options:options() error:&error];
    if (!library) {
      std::printf("library: %s\n", error.localizedDescription.UTF8String);
      std::exit(2);
    }
  }
  static MTLCompileOptions* options() {
    MTLCompileOptions* made = [[MTLCompileOptions alloc] init];
    made.languageVersion = MTLLanguageVersion3_1;
    made.fastMathEnabled = NO;
    made.mathMode = MTLMathModeSafe;
    made.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
    return made;
  }
  id<MTLComputePipelineState> pipeline(const char* name) {
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
    descriptor.computeFunction = [library newFunctionWithName:ns(name)];
    id<MTLComputePipelineState> made =
        [device newComputePipelineStateWithDescriptor:descriptor
                                              options:MTLPipelineOptionNone
                                           reflection:nil
                                                error:nil];
    if (keeps_pipelines) pipelines.push_back(made);
    return made;
  }
  id<MTLBuffer> buffer(NSUInteger bytes = kBytes, MTLResourceOptions how = kUntracked) {
    id<MTLBuffer> made = [device newBufferWithLength:bytes options:how];
    made.label = ns(concat("number ", kept.size()));
    kept.push_back(made);
    if (resident) {
      [set addAllocation:made];
      [set commit];
    }
    return made;
  }
  id<MTLBuffer> words(uint32_t first) {
    id<MTLBuffer> made = buffer();
    for (NSUInteger i = 0; i < kWords; ++i) static_cast<uint32_t*>(made.contents)[i] = first + i;
    return made;
  }
  id<MTLBuffer> params(Copy copy, NSUInteger at = 0) {
    id<MTLBuffer> made = buffer(at + sizeof copy);
    std::memcpy(static_cast<char*>(made.contents) + at, &copy, sizeof copy);
    return made;
  }
  id<MTLCommandBuffer> commands(const char* label, bool retained = true) {
    id<MTLCommandBuffer> made =
        retained ? [queue commandBuffer] : [queue commandBufferWithUnretainedReferences];
    made.label = ns(label);
    return made;
  }
  id<MTLComputeCommandEncoder> encoder(id<MTLCommandBuffer> commands, bool concurrent = true) {
    return [commands computeCommandEncoderWithDispatchType:concurrent ? MTLDispatchTypeConcurrent
                                                                      : MTLDispatchTypeSerial];
  }
  void copy(id<MTLComputeCommandEncoder> encoder, id<MTLBuffer> from, id<MTLBuffer> to,
            Copy what = {0, 0, kWords}) {
    [encoder setComputePipelineState:pipeline("copy_words")];
    [encoder setBuffer:from offset:0 atIndex:0];
    [encoder setBuffer:to offset:0 atIndex:1];
    [encoder setBuffer:params(what) offset:0 atIndex:2];
    dispatch(encoder, (what.count + 31) / 32);
  }
  void dispatch(id<MTLComputeCommandEncoder> encoder, NSUInteger groups = 1,
                NSUInteger threads = 32) {
    [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1)
            threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
  }
  void finish(id<MTLCommandBuffer> commands) {
    [commands commit];
    report(commands);
  }
  void report(id<MTLCommandBuffer> commands) {
    [commands waitUntilCompleted];
    std::printf("%s: status %lu, error %ld\n", commands.label.UTF8String,
                static_cast<unsigned long>(commands.status), long(commands.error.code));
  }
  void expect(id<MTLBuffer> buffer, uint32_t first) {
    for (NSUInteger i = 0; i < kWords; ++i) {
      if (static_cast<uint32_t*>(buffer.contents)[i] != first + i) {
        std::printf("wrong word %lu\n", i);
        return;
      }
    }
  }
  // One copy with something of its encoding changed.
  void one(const std::function<void(id<MTLComputeCommandEncoder>)>& change, NSUInteger groups = 8,
           NSUInteger threads = 32) {
    id<MTLCommandBuffer> all = commands("one");
    id<MTLComputeCommandEncoder> e = encoder(all);
    [e setComputePipelineState:pipeline("copy_words")];
    [e setBuffer:words(5) offset:0 atIndex:0];
    [e setBuffer:buffer() offset:0 atIndex:1];
    [e setBuffer:params({0, 0, kWords}) offset:0 atIndex:2];
    change(e);
    dispatch(e, groups, threads);
    [e endEncoding];
    finish(all);
  }
  // Two command buffers in flight at once, held by the gate until both are committed.
  void two(const std::function<void(id<MTLComputeCommandEncoder>, int)>& encode,
           const std::function<void(id<MTLCommandBuffer>, int)>& before = {},
           const std::function<void(id<MTLCommandBuffer>, int)>& after = {}) {
    id<MTLCommandBuffer> both[2];
    for (int i = 0; i < 2; ++i) {
      both[i] = commands(i ? "second" : "first");
      [both[i] encodeWaitForEvent:gate value:1];
      if (before) before(both[i], i);
      id<MTLComputeCommandEncoder> e = encoder(both[i]);
      encode(e, i);
      [e endEncoding];
      if (after) after(both[i], i);
      [both[i] commit];
    }
    gate.signaledValue = 1;
    for (id<MTLCommandBuffer> b : both) report(b);
  }
  // A command buffer that is committed and held by the gate.
  id<MTLCommandBuffer> held(const std::function<void(id<MTLComputeCommandEncoder>)>& encode) {
    id<MTLCommandBuffer> all = commands("held", false);
    [all encodeWaitForEvent:gate value:1];
    id<MTLComputeCommandEncoder> e = encoder(all);
    encode(e);
    [e endEncoding];
    [all commit];
    return all;
  }
  void let_go(id<MTLCommandBuffer> all) {
    gate.signaledValue = 1;
    report(all);
  }
};

// The copy a -> b -> c in one encoder, with something between the two.
void chain(
    bool concurrent,
    const std::function<void(Bench&, id<MTLComputeCommandEncoder>, id<MTLBuffer>)>& between = {}) {
  Bench t;
  id<MTLBuffer> a = t.words(100), b = t.words(0), c = t.buffer();
  id<MTLCommandBuffer> all = t.commands("chain");
  id<MTLComputeCommandEncoder> e = t.encoder(all, concurrent);
  t.copy(e, a, b);
  if (between) between(t, e, b);
  t.copy(e, b, c);
  [e endEncoding];
  t.finish(all);
  t.expect(c, 100);
}
// A barrier before the copies a -> b -> c.
void early(const std::function<void(id<MTLComputeCommandEncoder>, id<MTLBuffer>)>& barrier) {
  Bench t;
  id<MTLBuffer> a = t.words(1), b = t.buffer(), c = t.buffer();
  id<MTLCommandBuffer> all = t.commands("early");
  id<MTLComputeCommandEncoder> e = t.encoder(all);
  barrier(e, b);
  t.copy(e, a, b);
  t.copy(e, b, c);
  [e endEncoding];
  t.finish(all);
}
// The copies of chain() in two command buffers in flight.
void relay(MTLResourceOptions how,
           const std::function<void(Bench&, id<MTLComputeCommandEncoder>, int, bool)>& fence = {},
           const std::function<void(Bench&, id<MTLCommandBuffer>, int, bool)>& event = {}) {
  Bench t;
  id<MTLBuffer> a = t.words(100), b = t.buffer(kBytes, how), c = t.buffer();
  t.two(
      [&](id<MTLComputeCommandEncoder> e, int i) {
        if (fence) fence(t, e, i, false);
        if (i == 0) t.copy(e, a, b);
        else t.copy(e, b, c);
        if (fence) fence(t, e, i, true);
      },
      [&](id<MTLCommandBuffer> all, int i) {
        if (event) event(t, all, i, false);
      },
      [&](id<MTLCommandBuffer> all, int i) {
        if (event) event(t, all, i, true);
      });
  t.expect(c, 100);
}
void hand_over(Bench& t, id<MTLComputeCommandEncoder> e, int i, bool after) {
  if (i == 0 && after) [e updateFence:t.fence];
  if (i == 1 && !after) [e waitForFence:t.fence];
}

// A kernel follows an address into `target`: reads there, or writes.
void reach(Bench& t, id<MTLComputeCommandEncoder> e, id<MTLBuffer> target, const char* kernel,
           id<MTLBuffer> other) {
  id<MTLBuffer> place = t.buffer(16);
  const uint64_t address = target.gpuAddress;
  std::memcpy(place.contents, &address, sizeof address);
  [e setComputePipelineState:t.pipeline(kernel)];
  [e setBuffer:place offset:0 atIndex:0];
  [e setBuffer:other offset:0 atIndex:1];
  t.dispatch(e);
}
void chase(Bench& t, id<MTLComputeCommandEncoder> e, id<MTLBuffer> target) {
  reach(t, e, target, "chase", t.buffer());
}
// Without residency sets.
void deliver_to_used(MTLResourceUsage usage) {
  Bench t(false);
  id<MTLBuffer> target = t.words(7);
  id<MTLCommandBuffer> all = t.commands("delivers");
  id<MTLComputeCommandEncoder> e = t.encoder(all);
  [e useResource:target usage:usage];
  reach(t, e, target, "deliver", t.words(9));
  [e endEncoding];
  t.finish(all);
}

using Case = void (*)();
const std::map<std::string, Case> kCases = {
    // ---- all rules kept ----
    {"clean_serial", [] { chain(false); }},
    {"clean_barrier",
     [] {
       chain(true, [](Bench&, id<MTLComputeCommandEncoder> e, id<MTLBuffer>) {
         [e memoryBarrierWithScope:MTLBarrierScopeBuffers];
       });
     }},
    {"clean_resource_barrier",
     [] {
       chain(true, [](Bench&, id<MTLComputeCommandEncoder> e, id<MTLBuffer> b) {
         id<MTLResource> list[] = {b};
         [e memoryBarrierWithResources:list count:1];
       });
     }},
    {"clean_fence", [] { relay(kUntracked, hand_over); }},
    {"clean_event",
     [] {
       relay(kUntracked, {}, [](Bench& t, id<MTLCommandBuffer> all, int i, bool after) {
         if (i == 0 && after) [all encodeSignalEvent:t.gate value:2];
         if (i == 1 && !after) [all encodeWaitForEvent:t.gate value:2];
       });
     }},
    {"clean_tracked", [] { relay(MTLResourceStorageModeShared); }},
    {"clean_readers",
     [] {  // the same bytes read twice
       Bench t;
       id<MTLBuffer> a = t.words(1);
       t.two([&](id<MTLComputeCommandEncoder> e, int) {
         t.copy(e, a, t.buffer());
         t.copy(e, a, t.buffer());
       });
     }},
    {"clean_neighbours",
     [] {  // two writers of one buffer, next to each other
       Bench t;
       id<MTLBuffer> a = t.words(1), b = t.buffer();
       t.two([&](id<MTLComputeCommandEncoder> e, int i) {
         t.copy(e, a, b, {0, uint32_t(i) * 64, 32});
         t.copy(e, a, b, {0, uint32_t(i) * 64 + 32, 32});
       });
     }},
    {"clean_host",
     [] {  // the host waits in between
       Bench t;
       id<MTLBuffer> a = t.words(100), b = t.buffer(), c = t.buffer();
       for (int i = 0; i < 2; ++i) {
         id<MTLCommandBuffer> all = t.commands("part");
         id<MTLComputeCommandEncoder> e = t.encoder(all);
         t.copy(e, i ? b : a, i ? c : b);
         [e endEncoding];
         t.finish(all);
       }
       t.expect(c, 100);
     }},
    {"clean_use_resource",
     [] {  // without residency sets
       Bench t(false);
       id<MTLCommandBuffer> all = t.commands("used");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       id<MTLBuffer> target = t.words(7);
       [e useResource:target usage:MTLResourceUsageRead];
       chase(t, e, target);
       [e endEncoding];
       t.finish(all);
     }},
    {"clean_use_resource_to_write",
     [] { deliver_to_used(MTLResourceUsageRead | MTLResourceUsageWrite); }},
    {"clean_resident_address",
     [] {
       Bench t;
       id<MTLBuffer> target = t.words(7);
       id<MTLCommandBuffer> all = t.commands("chased");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       chase(t, e, target);
       [e endEncoding];
       t.finish(all);
     }},
    {"clean_set_bytes",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) {
         const Copy copy = {0, 0, kWords};
         [e setBytes:&copy length:sizeof copy atIndex:2];
       });
     }},

    // ---- arguments ----
    {"offset_beyond",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) {
         [e setBuffer:t.kept[0] offset:kBytes atIndex:0];
       });
     }},
    {"offset_beyond_later",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) { [e setBufferOffset:kBytes + 4 atIndex:0]; });
     }},
    {"offset_of_device_memory",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) { [e setBufferOffset:2 atIndex:0]; });
     }},
    {"offset_of_constants",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) {
         [e setBuffer:t.params({0, 0, 32}, 16) offset:16 atIndex:2];
       });
     }},
    {"index_31",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) { [e setBuffer:t.kept[0] offset:0 atIndex:31]; });
     }},
    {"offset_for_nothing",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) { [e setBufferOffset:0 atIndex:3]; });
     }},
    {"bytes_31",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) {
         const uint32_t word = 1;
         [e setBytes:&word length:sizeof word atIndex:31];
       });
     }},
    {"nothing_bound",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) { [e setBuffer:nil offset:0 atIndex:1]; });
     }},
    {"many_bytes",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) {
         char bytes[4097] = {};
         [e setBytes:bytes length:sizeof bytes atIndex:3];
       });
     }},
    {"threads_2048",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder>) {}, 1, 2048);
     }},
    {"threads_33",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder>) {}, 1, 33);
     }},
    {"ragged_group",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) {
         [e dispatchThreads:MTLSizeMake(40, 1, 1) threadsPerThreadgroup:MTLSizeMake(32, 1, 1)];
       });
     }},
    {"no_groups",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder>) {}, 0, 32);
     }},
    {"threadgroup_length",
     [] {
       Bench t;
       t.one([](id<MTLComputeCommandEncoder> e) {
         [e setThreadgroupMemoryLength:32 * 1024 + 16 atIndex:0];
       });
     }},
    {"large_group",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("large");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       [e setComputePipelineState:t.pipeline("large_group")];
       [e setBuffer:t.buffer() offset:0 atIndex:0];
       t.dispatch(e);
       [e endEncoding];
       t.finish(all);
     }},
    {"kernel_beyond",
     [] {
       Bench t;
       t.one(
           [&](id<MTLComputeCommandEncoder> e) {
             [e setBuffer:t.params({0, 0, 320}) offset:0 atIndex:2];
           },
           10);
     }},
    {"no_length",
     [] {
       Bench t;
       (void)[t.device newBufferWithLength:0 options:kUntracked];
     }},
    {"page_alignment",
     [] {
       Bench t;
       static char memory[65536];
       (void)[t.device newBufferWithBytesNoCopy:memory + 8
                                         length:16384
                                        options:kUntracked
                                    deallocator:nil];
     }},
    {"fast_math",
     [] {
       Bench t;
       MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
       options.languageVersion = MTLLanguageVersion3_1;
       options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
       (void)[t.device newLibraryWithSource:@"" options:options error:nil];
     }},
    {"fast_functions",
     [] {
       Bench t;
       MTLCompileOptions* options = [[MTLCompileOptions alloc] init];
       options.mathMode = MTLMathModeSafe;
       (void)[t.device newLibraryWithSource:@"" options:options error:nil];
     }},
    {"no_function",
     [] {
       Bench t;
       if (t.pipeline("of_another_library")) std::printf("a pipeline of nothing\n");
     }},

    // ---- residency ----
    {"not_committed_to_set",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) {
         id<MTLBuffer> late = [t.device newBufferWithLength:kBytes options:kUntracked];
         [t.set addAllocation:late];
         t.kept.push_back(late);
         [e setBuffer:late offset:0 atIndex:1];
       });
     }},
    {"never_requested",
     [] {
       Bench t;
       [t.set endResidency];
       t.one([](id<MTLComputeCommandEncoder>) {});
     }},
    {"address_not_in_set",
     [] {
       Bench t;
       id<MTLBuffer> target = t.words(7);
       [t.set removeAllocation:target];
       [t.set commit];
       id<MTLCommandBuffer> all = t.commands("chased");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       chase(t, e, target);
       [e endEncoding];
       t.finish(all);
     }},
    {"address_used_for_reading", [] { deliver_to_used(MTLResourceUsageRead); }},
    {"sets_33",
     [] {
       Bench t;
       for (int i = 0; i < 32; ++i) {
         [t.queue
             addResidencySet:[t.device
                                 newResidencySetWithDescriptor:[[MTLResidencySetDescriptor alloc]
                                                                   init]
                                                         error:nil]];
       }
     }},
    {"address_not_used",
     [] {
       Bench t(false);
       id<MTLBuffer> target = t.words(7);
       id<MTLCommandBuffer> all = t.commands("chased");
       id<MTLComputeCommandEncoder> first = t.encoder(all);
       [first useResource:target usage:MTLResourceUsageRead];  // holds for this encoder alone
       [first endEncoding];
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       chase(t, e, target);
       [e endEncoding];
       t.finish(all);
     }},

    // ---- encoder state ----
    {"dispatch_after_end",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("late");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       [e endEncoding];
       t.dispatch(e);
       t.finish(all);
     }},
    {"end_twice",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("twice");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       [e endEncoding];
       [e endEncoding];
       t.finish(all);
     }},
    {"two_encoders",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("two");
       id<MTLComputeCommandEncoder> e = t.encoder(all), f = t.encoder(all);
       [f endEncoding];
       [e endEncoding];
       t.finish(all);
     }},
    {"commit_open",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("open");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       t.finish(all);
       [e endEncoding];
     }},
    {"commit_twice",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("again");
       [all commit];
       t.finish(all);
     }},
    {"handler_after_commit",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("handled");
       [all commit];
       [all addCompletedHandler:^(id<MTLCommandBuffer>) {
         std::printf("the handler ran\n");
       }];
       t.report(all);
     }},
    {"scheduled_handler_after_commit",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("handled");
       [all commit];
       [all addScheduledHandler:^(id<MTLCommandBuffer>) {
         std::printf("the handler ran\n");
       }];
       t.report(all);
     }},
    {"encoder_after_commit",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("late");
       [all commit];
       [t.encoder(all) endEncoding];
       t.report(all);
     }},
    {"signal_after_commit",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("late");
       [all commit];
       [all encodeSignalEvent:t.gate value:3];
       t.report(all);
     }},
    {"signal_inside",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("signals");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       [all encodeSignalEvent:t.gate value:3];
       [e endEncoding];
       t.finish(all);
     }},
    {"encoder_dropped",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("dropped");
       @autoreleasepool {
         (void)t.encoder(all);
       }
       t.finish(all);
     }},
    {"no_pipeline",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("bare");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       t.dispatch(e);
       [e endEncoding];
       t.finish(all);
     }},
    {"wait_before_commit",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("idle");
       [all waitUntilCompleted];
     }},
    {"all_command_buffers",
     [] {
       Bench t;
       std::vector<id<MTLCommandBuffer>> many;
       for (int i = 0; i < 65; ++i) many.push_back([t.queue commandBuffer]);
     }},

    // ---- order ----
    {"missing_barrier", [] { chain(true); }},
    {"barrier_of_another",
     [] {
       chain(true, [](Bench& t, id<MTLComputeCommandEncoder> e, id<MTLBuffer>) {
         id<MTLResource> list[] = {t.buffer()};
         [e memoryBarrierWithResources:list count:1];
       });
     }},
    {"write_after_read",
     [] {
       Bench t;
       id<MTLBuffer> a = t.words(1), b = t.words(2), c = t.buffer();
       id<MTLCommandBuffer> all = t.commands("war");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       t.copy(e, a, c);
       t.copy(e, b, a, {0, 255, 1});
       [e endEncoding];
       t.finish(all);
     }},
    {"write_after_write",
     [] {
       Bench t;
       id<MTLBuffer> a = t.words(1), c = t.buffer();
       id<MTLCommandBuffer> all = t.commands("waw");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       t.copy(e, a, c, {0, 0, 64});
       t.copy(e, a, c, {0, 32, 64});
       [e endEncoding];
       t.finish(all);
     }},
    {"barrier_too_early",
     [] {
       early([](id<MTLComputeCommandEncoder> e, id<MTLBuffer>) {
         [e memoryBarrierWithScope:MTLBarrierScopeBuffers];
       });
     }},
    {"resource_barrier_too_early",
     [] {
       early([](id<MTLComputeCommandEncoder> e, id<MTLBuffer> b) {
         id<MTLResource> list[] = {b};
         [e memoryBarrierWithResources:list count:1];
       });
     }},
    {"missing_fence", [] { relay(kUntracked); }},
    {"tracked_reached_by_address",  // Metal does not see the second use
     [] {
       Bench t;
       id<MTLBuffer> a = t.words(100), b = t.buffer(kBytes, MTLResourceStorageModeShared);
       t.two([&](id<MTLComputeCommandEncoder> e, int i) {
         if (i == 0) t.copy(e, a, b);
         else chase(t, e, b);
       });
     }},
    {"fence_not_waited_for",
     [] {
       relay(kUntracked, [](Bench& t, id<MTLComputeCommandEncoder> e, int i, bool after) {
         if (i == 0 && after) [e updateFence:t.fence];
       });
     }},
    {"fence_not_updated",
     [] {
       relay(kUntracked, [](Bench& t, id<MTLComputeCommandEncoder> e, int i, bool after) {
         if (i == 1 && !after) [e waitForFence:t.fence];
       });
     }},
    {"fence_too_early",
     [] {
       relay(kUntracked, [](Bench& t, id<MTLComputeCommandEncoder> e, int i, bool after) {
         if (i == 0 && !after) [e updateFence:t.fence];
         if (i == 1 && !after) [e waitForFence:t.fence];
       });
     }},
    {"fence_too_late",
     [] {
       relay(kUntracked, [](Bench& t, id<MTLComputeCommandEncoder> e, int i, bool after) {
         if (i == 0 && after) [e updateFence:t.fence];
         if (i == 1 && after) [e waitForFence:t.fence];
       });
     }},
    {"fence_of_oneself",
     [] {
       Bench t;
       t.one([&](id<MTLComputeCommandEncoder> e) {
         [e updateFence:t.fence];
         [e waitForFence:t.fence];
       });
     }},
    {"missing_event",
     [] {
       relay(kUntracked, {}, [](Bench& t, id<MTLCommandBuffer> all, int i, bool after) {
         if (i == 0 && after) [all encodeSignalEvent:t.gate value:2];
       });
     }},
    {"event_too_early",
     [] {
       relay(kUntracked, {}, [](Bench& t, id<MTLCommandBuffer> all, int i, bool after) {
         if (i == 0 && !after) [all encodeSignalEvent:t.gate value:2];
         if (i == 1 && !after) [all encodeWaitForEvent:t.gate value:2];
       });
     }},
    {"two_encoders_without_fence",
     [] {
       Bench t;
       id<MTLBuffer> a = t.words(1), b = t.buffer();
       id<MTLCommandBuffer> all = t.commands("passes");
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       t.copy(e, a, b);
       [e endEncoding];
       id<MTLComputeCommandEncoder> f = t.encoder(all);
       t.copy(f, b, t.buffer());
       [f endEncoding];
       t.finish(all);
     }},
    {"event_never_signalled",
     [] {
       Bench t;
       id<MTLCommandBuffer> all = t.commands("stuck");
       [all encodeWaitForEvent:t.gate value:9];
       t.finish(all);
     }},

    // ---- lifetime ----
    {"buffer_released",
     [] {
       Bench t(false);
       id<MTLCommandBuffer> all;
       @autoreleasepool {
         id<MTLBuffer> a = t.words(1);
         t.kept.clear();
         all = t.held([&](id<MTLComputeCommandEncoder> e) { t.copy(e, a, t.buffer()); });
       }
       t.let_go(all);
     }},
    {"buffer_released_before_commit",
     [] {
       Bench t(false);
       id<MTLCommandBuffer> all = t.commands("late", false);
       id<MTLComputeCommandEncoder> e = t.encoder(all);
       @autoreleasepool {
         id<MTLBuffer> a = t.words(1);
         t.kept.clear();
         t.copy(e, a, t.buffer());
       }
       [e endEncoding];
       t.finish(all);
     }},
    {"clean_retained",
     [] {  // a command buffer that keeps what it needs
       Bench t(false);
       id<MTLCommandBuffer> all = t.commands("keeps");
       [all encodeWaitForEvent:t.gate value:1];
       @autoreleasepool {
         id<MTLComputeCommandEncoder> e = t.encoder(all);
         t.copy(e, t.words(1), t.buffer());
         [e endEncoding];
         t.kept.clear();
       }
       [all commit];
       t.let_go(all);
     }},
    {"pipeline_released",
     [] {
       Bench t;
       t.keeps_pipelines = false;
       id<MTLBuffer> a = t.words(1), b = t.buffer();
       id<MTLCommandBuffer> all;
       @autoreleasepool {
         all = t.held([&](id<MTLComputeCommandEncoder> e) { t.copy(e, a, b); });
       }
       t.let_go(all);
     }},
    {"address_released",
     [] {
       Bench t;
       id<MTLCommandBuffer> all;
       @autoreleasepool {
         id<MTLBuffer> target = t.words(7);
         all = t.commands("chased");
         [all encodeWaitForEvent:t.gate value:1];
         id<MTLComputeCommandEncoder> e = t.encoder(all);
         chase(t, e, target);
         [e endEncoding];
         [all commit];
         [t.set removeAllocation:target];
         [t.set commit];
         t.kept.erase(t.kept.begin());
       }
       t.let_go(all);
     }},
    {"no_pool",
     [] {
       std::thread([] {
         Bench t;
         t.finish(t.commands("poolless"));
       }).join();
     }},
    {"string_without_pool",
     [] {
       std::thread([] {
         NSString* name = [[NSString alloc] initWithBytes:"abc"
                                                   length:3
                                                 encoding:NSUTF8StringEncoding];
         (void)name.UTF8String;
       }).join();
     }},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    for (const auto& [name, run] : kCases) std::printf("%s\n", name.c_str());
    return 0;
  }
  const auto found = kCases.find(argv[1]);
  if (found == kCases.end()) return 3;
  @autoreleasepool {
    (void)MTLCreateSystemDefaultDevice();
  }
  const long before = software_metal_objects();
  @autoreleasepool {
    found->second();
  }
  // The handler's thread lets go of the command buffer a moment after who waits for it.
  for (int i = 0; i < 1000 && software_metal_objects() != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::printf("leaked %ld\n", software_metal_objects() - before);
  std::vector<char> text(1 << 16);
  software_metal_broken_rules(text.data(), int(text.size()));
  std::printf("%s", text.data());
}
