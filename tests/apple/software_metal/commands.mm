// commands.mm: queues, command buffers and encoders: what is encoded, and the rules of encoding.
#include <unistd.h>

#include <cstring>

#include "objc_runtime.h"
#include "objects.h"

#pragma clang diagnostic ignored "-Wprotocol"
#pragma clang diagnostic ignored "-Wincomplete-implementation"
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

using namespace software_metal;

// What Metal returns for others to keep is autoreleased, whatever the compiler makes of the call here.
static void wants_pool(const char* what) {
  if (software_metal_pools() == 0) {
    broken_rule("autorelease pool", concat(what, " was called with no pool in place"));
  }
}

// ---- queues -------------------------------------------------------------------------------------
@implementation SoftwareQueue
- (NSString*)label {
  return label;
}
- (void)setLabel:(NSString*)value {
  label = value;
}
- (id<MTLDevice>)device {
  return the_device();
}
// https://developer.apple.com/documentation/metal/mtlcommandqueue/addresidencyset(_:): at most 32.
- (void)addResidencySet:(id<MTLResidencySet>)set {
  const std::lock_guard lock(mutex);
  if (sets.size() == 32) broken_rule("residency", "a queue takes at most 32 residency sets");
  sets.push_back(static_cast<SoftwareResidencySet*>(set));
}
- (void)addResidencySets:(const id<MTLResidencySet>[])all count:(NSUInteger)n {
  for (NSUInteger i = 0; i < n; ++i) [self addResidencySet:all[i]];
}
- (void)removeResidencySet:(id<MTLResidencySet>)set {
  const std::lock_guard lock(mutex);
  std::erase(sets, static_cast<SoftwareResidencySet*>(set));
}
- (void)removeResidencySets:(const id<MTLResidencySet>[])all count:(NSUInteger)n {
  for (NSUInteger i = 0; i < n; ++i) [self removeResidencySet:all[i]];
}
// https://developer.apple.com/documentation/metal/mtlcommandqueue/makecommandbuffer(): waits while as
// many as the queue takes are not complete.
- (SoftwareCommandBuffer*)make:(BOOL)retains errors:(MTLCommandBufferErrorOption)errors {
  wants_pool("commandBuffer");
  const double begin = now();
  while (*unfinished >= long(most)) {
    if (now() - begin > hang_seconds()) {
      broken_rule("command buffers",
                  concat("all ", most, " of the queue are in use, and none ends"));
      break;
    }
    usleep(200);
  }
  if (fault_due(Fault::no_command_buffer)) return nil;
  SoftwareCommandBuffer* made = [[SoftwareCommandBuffer alloc] init];
  made->queue = self;
  made->buffer = std::make_shared<CommandBuffer>();
  made->retains = retains;
  made->error_options = errors;
  made->unfinished = unfinished;
  ++*unfinished;
  return made;
}
- (id<MTLCommandBuffer>)commandBuffer {
  return [self make:YES errors:MTLCommandBufferErrorOptionNone];
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [self make:NO errors:MTLCommandBufferErrorOptionNone];
}
- (id<MTLCommandBuffer>)commandBufferWithDescriptor:(MTLCommandBufferDescriptor*)descriptor {
  return [self make:descriptor.retainedReferences errors:descriptor.errorOptions];
}
@end

@implementation SoftwareEncoderInfo
- (NSString*)label {
  return ns(name);
}
- (NSArray*)debugSignposts {
  std::vector<id> all;
  for (const std::string& s : signposts) all.push_back(ns(s));
  return [NSArray arrayWithObjects:all.data() count:all.size()];
}
- (MTLCommandEncoderErrorState)errorState {
  return state;
}
@end

// ---- command buffers ----------------------------------------------------------------------------
@implementation SoftwareCommandBuffer
- (void)broke:(const char*)rule what:(const std::string&)what {
  const std::string whole = concat("command buffer '", buffer->label, "': ", what);
  broken_rule(rule, whole);
  if (!committed) buffer->broken.push_back(whole);
}
- (void)needs:(id)object resource:(const ResourceRef&)resource {
  if (buffer->resources.insert(resource).second && retains) retained.push_back(object);
}
- (id<MTLDevice>)device {
  return the_device();
}
- (id<MTLCommandQueue>)commandQueue {
  return queue;
}
- (BOOL)retainedReferences {
  return retains;
}
- (MTLCommandBufferErrorOption)errorOptions {
  return error_options;
}
- (NSString*)label {
  return ns(buffer->label);
}
- (void)setLabel:(NSString*)label {
  buffer->label = text(label);
}
- (void)pushDebugGroup:(NSString*)name {
}
- (void)popDebugGroup {
}

- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
// https://developer.apple.com/documentation/metal/mtlcommandencoder: one encoder of a command buffer is
// active at a time, until endEncoding.
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  wants_pool("computeCommandEncoder");
  if (open) [self broke:"encoder state" what:"a second encoder while one is open"];
  if (committed) [self broke:"encoder state" what:"an encoder after commit"];
  if (fault_due(Fault::no_encoder)) return nil;
  if (type == MTLDispatchTypeSerial) count(Count::serial_encoders);
  SoftwareEncoder* made = [[SoftwareEncoder alloc] init];
  made->owner = self;
  made->encoder = std::make_shared<Encoder>();
  made->encoder->owner = buffer.get();
  made->encoder->concurrent = type == MTLDispatchTypeConcurrent;
  if (last_event) made->encoder->before.push_back(last_event);
  if (!committed) buffer->encoders.push_back(made->encoder);
  open = made;
  return made;
}

// https://developer.apple.com/documentation/metal/mtlcommandbuffer/encodesignalevent(_:value:) and
// encodewaitforevent(_:value:): between encoders only.
- (NodeRef)point:(const char*)what {
  if (open) [self broke:"encoder state" what:concat(what, " while an encoder is open")];
  if (committed) [self broke:"encoder state" what:concat(what, " after commit")];
  auto node = std::make_shared<Node>();
  node->owner = buffer.get();
  if (!committed) buffer->nodes.push_back(node);
  return node;
}
- (void)encodeSignalEvent:(id<MTLEvent>)event value:(uint64_t)value {
  const std::vector<NodeRef> before = buffer->nodes;
  const NodeRef node = [self point:"encodeSignalEvent"];
  node->after = before;
  node->signal_event = static_cast<SoftwareEvent*>(event)->event;
  node->event_value = value;
  [self needs:event resource:node->signal_event];
}
- (void)encodeWaitForEvent:(id<MTLEvent>)event value:(uint64_t)value {
  const NodeRef node = [self point:"encodeWaitForEvent"];
  if (last_event) node->after.push_back(last_event);
  node->wait_event = static_cast<SoftwareEvent*>(event)->event;
  node->event_value = value;
  last_event = node;
  [self needs:event resource:node->wait_event];
}
- (void)useResidencySet:(id<MTLResidencySet>)set {
  sets.push_back(static_cast<SoftwareResidencySet*>(set));
}
- (void)useResidencySets:(const id<MTLResidencySet>[])all count:(NSUInteger)n {
  for (NSUInteger i = 0; i < n; ++i) [self useResidencySet:all[i]];
}

// https://developer.apple.com/documentation/metal/mtlcommandbuffer/addcompletedhandler(_:): before
// commit.
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
  if (committed) [self broke:"encoder state" what:"a handler after commit"];
  else completed_handlers.push_back(handler);
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)handler {
  if (committed) [self broke:"encoder state" what:"a handler after commit"];
  else scheduled_handlers.push_back(handler);
}
- (void)enqueue {
  enqueued = true;
}
// https://developer.apple.com/documentation/metal/mtlcommandbuffer/commit(): once, with no encoder open.
- (void)commit {
  if (committed) {
    [self broke:"encoder state" what:"a second commit"];
    return;
  }
  if (open) [self broke:"encoder state" what:"commit while an encoder is open"];
  [self snapshot_residency];
  count(Count::command_buffers);
  if (buffer->label.empty()) count(Count::unlabelled);
  committed = true;
  for (MTLCommandBufferHandler handler : std::exchange(scheduled_handlers, {})) handler(self);
  SoftwareCommandBuffer* me = self;
  buffer->completed = [me] {
    @autoreleasepool {
      --*me->unfinished;
      for (MTLCommandBufferHandler handler : std::exchange(me->completed_handlers, {})) handler(me);
      me->retained.clear();
      me->sets.clear();
    }
  };
  ::commit(buffer);
}

// https://developer.apple.com/documentation/metal/simplifying-gpu-resource-management-with-residency-sets:
// what a queue's sets hold at commit is resident. Bound buffers are made so by Metal as well; with a
// set in use we want everything in it, wired beforehand.
- (void)snapshot_residency {
  {
    const std::lock_guard lock(queue->mutex);
    sets.insert(sets.end(), queue->sets.begin(), queue->sets.end());
  }
  std::set<MemoryRef> resident;
  for (SoftwareResidencySet* set : sets) {
    const std::lock_guard lock(set->mutex);
    if (!set->requested) {
      [self broke:"residency"
             what:concat("residency of set '", text(set->label), "' was never requested")];
    }
    if (!set->committed) continue;
    buffer->residents.push_back(set->committed);
    resident.insert(set->committed->begin(), set->committed->end());
  }
  if (sets.empty()) return;
  for (const ResourceRef& r : buffer->resources) {
    const auto memory = std::dynamic_pointer_cast<Memory>(r);
    if (memory && !resident.count(memory)) {
      [self broke:"residency"
             what:concat(memory->name(), " is bound and in no residency set as "
                                         "committed")];
    }
  }
}
- (void)waitUntilCompleted {
  if (!committed) {
    [self broke:"encoder state" what:"waitUntilCompleted before commit"];
    return;
  }
  wait_until_completed(buffer);
}
- (void)waitUntilScheduled {
}
- (MTLCommandBufferStatus)status {
  if (!committed)
    return enqueued ? MTLCommandBufferStatusEnqueued : MTLCommandBufferStatusNotEnqueued;
  if (!is_over(buffer)) return MTLCommandBufferStatusCommitted;
  return buffer->error ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
}
// Encoders before the one at fault are complete, those after it were not begun.
- (NSError*)error {
  if (!committed || !is_over(buffer) || buffer->error == 0) return nil;
  wants_pool("error");
  std::vector<id> infos;
  MTLCommandEncoderErrorState state =
      buffer->faulted ? MTLCommandEncoderErrorStateCompleted : MTLCommandEncoderErrorStatePending;
  for (const auto& encoder : buffer->encoders) {
    SoftwareEncoderInfo* info = [[SoftwareEncoderInfo alloc] init];
    info->name = encoder->label;
    info->signposts = encoder->signposts;
    info->state = state;
    if (encoder == buffer->faulted) {
      info->state = MTLCommandEncoderErrorStateFaulted;
      info->signposts.resize(buffer->signposts_begun);
      state = MTLCommandEncoderErrorStatePending;
    }
    infos.push_back(info);
  }
  NSArray* encoders = error_options & MTLCommandBufferErrorOptionEncoderExecutionStatus
                          ? [NSArray arrayWithObjects:infos.data() count:infos.size()]
                          : nil;
  return make_error(MTLCommandBufferErrorDomain, buffer->error, buffer->error_text, encoders);
}
- (CFTimeInterval)GPUStartTime {
  return committed && is_over(buffer) ? buffer->start : 0;
}
- (CFTimeInterval)GPUEndTime {
  return committed && is_over(buffer) ? buffer->end : 0;
}
- (CFTimeInterval)kernelStartTime {
  return self.GPUStartTime;
}
- (CFTimeInterval)kernelEndTime {
  return self.GPUEndTime;
}
- (void)dealloc {
  if (!committed) --*unfinished;
}
@end

// ---- encoders -----------------------------------------------------------------------------------
@implementation SoftwareEncoder
- (BOOL)usable:(const char*)what {
  if (!ended) return YES;
  [owner broke:"encoder state" what:concat(what, " after endEncoding")];
  return NO;
}
- (id<MTLDevice>)device {
  return the_device();
}
- (NSString*)label {
  return ns(encoder->label);
}
- (void)setLabel:(NSString*)label {
  encoder->label = text(label);
}
- (MTLDispatchType)dispatchType {
  return encoder->concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
}
- (void)insertDebugSignpost:(NSString*)name {
  if ([self usable:"insertDebugSignpost"]) encoder->signposts.push_back(text(name));
}
- (void)pushDebugGroup:(NSString*)name {
}
- (void)popDebugGroup {
}

// ---- arguments ----
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  if (![self usable:"setComputePipelineState"]) return;
  pipeline = static_cast<SoftwarePipeline*>(state);
  if (pipeline) [owner needs:pipeline resource:pipeline->resource];
}
// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/setbuffer(_:offset:index:):
// index 0 to 30, the offset inside the buffer.
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  if (![self usable:"setBuffer"]) return;
  if (index >= kBufferArguments) {
    [owner broke:"argument index"
            what:concat("buffer ", index, ", the last is ", kBufferArguments - 1)];
    return;
  }
  auto* given = static_cast<SoftwareBuffer*>(buffer);
  if (!given) {
    bindings[index] = {};
    return;
  }
  if (offset >= given->memory->bytes) {
    [owner broke:"bounds"
            what:concat("offset ", offset, " of ", given->memory->name(), " of ",
                        given->memory->bytes, " bytes")];
    return;
  }
  [owner needs:given resource:given->memory];
  bindings[index] = {given->memory, offset};
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; ++i) {
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
  }
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  if (![self usable:"setBufferOffset"]) return;
  if (index >= kBufferArguments || !bindings[index].memory) {
    [owner broke:"argument index"
            what:concat("an offset for index ", index, ", where no buffer is bound")];
  } else if (offset >= bindings[index].memory->bytes) {
    [owner broke:"bounds"
            what:concat("offset ", offset, " of ", bindings[index].memory->name(), " of ",
                        bindings[index].memory->bytes, " bytes")];
  } else {
    bindings[index].offset = offset;
  }
}
// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/setbytes(_:length:index:): for
// less than 4 KB.
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  if (![self usable:"setBytes"]) return;
  if (length == 0 || length > 4096) {
    [owner broke:"setBytes" what:concat(length, " bytes, 1 to 4096 are taken")];
    return;
  }
  id<MTLBuffer> copy = [the_device() newBufferWithBytes:bytes
                                                 length:length
                                                options:MTLResourceStorageModeShared];
  auto* made = static_cast<SoftwareBuffer*>(copy);
  if (index >= kBufferArguments) {
    [owner broke:"argument index"
            what:concat("bytes ", index, ", the last is ", kBufferArguments - 1)];
    return;
  }
  // Part of the command buffer itself: it lives as long, and needs no residency set.
  owner->retained.push_back(made);
  bindings[index] = {made->memory, 0};
}
// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/setthreadgroupmemorylength(_:index:)
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  if (![self usable:"setThreadgroupMemoryLength"]) return;
  if (length % 16 || length > lily::sim::kSharedLimit || index >= kBufferArguments) {
    [owner broke:"threadgroup memory"
            what:concat(length, " bytes at index ", index, ": a multiple of 16, at most ",
                        lily::sim::kSharedLimit)];
  }
}
// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/useresource(_:usage:): what
// kernels reach by address alone, and whether they may write it.
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  if (![self usable:"useResource"]) return;
  auto* given = static_cast<SoftwareBuffer*>(resource);
  [owner needs:given resource:given->memory];
  encoder->used[given->memory] |= (usage & MTLResourceUsageWrite) != 0;
  if (given->memory->tracked)
    encoder->tracked[given->memory] |= (usage & MTLResourceUsageWrite) != 0;
}
- (void)useResources:(const id<MTLResource>[])resources
               count:(NSUInteger)n
               usage:(MTLResourceUsage)usage {
  for (NSUInteger i = 0; i < n; ++i) [self useResource:resources[i] usage:usage];
}

// ---- dispatches ----
- (NodeRef)new_node {
  auto made = std::make_shared<Node>();
  made->owner = owner->buffer.get();
  made->encoder = encoder;
  owner->buffer->nodes.push_back(made);
  return made;
}
- (std::vector<NodeRef>)predecessors {
  std::vector<NodeRef> all = encoder->before;
  all.insert(all.end(), encoder->waits.begin(), encoder->waits.end());
  return all;
}
// Everything encoded so far comes before everything later.
- (void)close {
  if (encoder->open.empty()) return;
  encoder->before = std::exchange(encoder->open, {});
  encoder->before.insert(encoder->before.end(), encoder->waits.begin(), encoder->waits.end());
  encoder->waits.clear();
  encoder->held.clear();
  encoder->current = nullptr;
}
// https://developer.apple.com/documentation/metal/mtlcomputecommandencoder/dispatchthreadgroups(_:threadsperthreadgroup:)
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
  if (![self usable:"dispatch"]) return;
  if (!pipeline) {
    [owner broke:"encoder state" what:"dispatch without a pipeline"];
    return;
  }
  const Kernel& kernel = *pipeline->kernel;
  const std::string name = concat("kernel ", kernel.name);
  const NSUInteger n = threads.width * threads.height * threads.depth;
  if (n == 0 || n > pipeline.maxTotalThreadsPerThreadgroup) {
    [owner broke:"threadgroup size"
            what:concat(name, ": ", n, " threads a group, 1 to ",
                        pipeline.maxTotalThreadsPerThreadgroup)];
    return;
  }
  // https://developer.apple.com/documentation/metal/mtlcomputepipelinedescriptor/threadgroupsizeismultipleofthreadexecutionwidth:
  // a promise; the kernels count on whole simdgroups whether it was made or not.
  if (n % pipeline.threadExecutionWidth != 0) {
    [owner broke:"threadgroup size"
            what:concat(name, ": ", n, " threads a group, no multiple of ",
                        pipeline.threadExecutionWidth)];
    return;
  }
  if (groups.width * groups.height * groups.depth == 0) {
    [owner broke:"grid" what:concat(name, ": a grid without groups")];
    return;
  }
  Dispatch d;
  d.kernel = &kernel;
  d.form = pipeline->form;
  d.grid = {uint32_t(groups.width), uint32_t(groups.height), uint32_t(groups.depth), uint32_t(n)};
  d.bindings = bindings;
  d.number = encoder->dispatched++;
  d.signposts = encoder->signposts.size();
  for (size_t a = 0; a < kernel.argument_count; ++a) {
    const Argument& argument = kernel.arguments[a];
    const Binding& binding = bindings[argument.index];
    if (!binding.memory) {
      [owner broke:"missing argument"
              what:concat(name, ": nothing is bound at index ", argument.index)];
      return;
    }
    // The page of setBuffer:offset:atIndex: says what an offset is a multiple of: the type's
    // alignment, in the constant address space 256.
    if (binding.offset % argument.align != 0) {
      [owner broke:"offset alignment"
              what:concat(name, ": offset ", binding.offset, " at index ", argument.index,
                          ", must be a multiple of ", argument.align)];
      return;
    }
    if (binding.memory->tracked) encoder->tracked[binding.memory] |= argument.written;
  }
  count(Count::dispatches);
  if (!encoder->concurrent) [self close];
  if (!encoder->current) {
    encoder->current = [self new_node];
    encoder->current->after = [self predecessors];
    encoder->current->held_by = encoder->held;
    encoder->open.push_back(encoder->current);
  }
  encoder->current->dispatches.push_back(std::move(d));
}
- (void)dispatchThreads:(MTLSize)all threadsPerThreadgroup:(MTLSize)threads {
  if (all.width % std::max<NSUInteger>(threads.width, 1) ||
      all.height % std::max<NSUInteger>(threads.height, 1) ||
      all.depth % std::max<NSUInteger>(threads.depth, 1)) {
    [owner broke:"threadgroup size" what:"a ragged last group, which the kernels do not expect"];
    return;
  }
  [self dispatchThreadgroups:MTLSizeMake(all.width / threads.width, all.height / threads.height,
                                         all.depth / threads.depth)
       threadsPerThreadgroup:threads];
}

// ---- order ----
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  if (![self usable:"memoryBarrier"]) return;
  count(Count::barriers);
  if (scope & MTLBarrierScopeBuffers) [self close];
}
- (void)memoryBarrierWithResources:(const id<MTLResource>[])resources count:(NSUInteger)n {
  if (![self usable:"memoryBarrier"]) return;
  count(Count::barriers);
  std::set<MemoryRef> memory;
  for (NSUInteger i = 0; i < n; ++i) {
    memory.insert(static_cast<SoftwareBuffer*>(resources[i])->memory);
  }
  encoder->partial.emplace_back(encoder->dispatched, std::move(memory));
  encoder->held = encoder->open;
  encoder->current = nullptr;
}
// https://developer.apple.com/documentation/metal/mtlfence: an update covers what was encoded before it, a
// wait holds what is encoded after it, and an encoder does not wait for what it updated itself.
- (void)updateFence:(id<MTLFence>)fence {
  if (![self usable:"updateFence"]) return;
  auto* given = static_cast<SoftwareFence*>(fence);
  [owner needs:given resource:given->fence];
  const NodeRef made = [self new_node];
  made->after = [self predecessors];
  made->after.insert(made->after.end(), encoder->open.begin(), encoder->open.end());
  made->update_fence = given->fence;
  encoder->updated.insert(given->fence);
  encoder->current = nullptr;  // what follows is no part of it
}
- (void)waitForFence:(id<MTLFence>)fence {
  if (![self usable:"waitForFence"]) return;
  auto* given = static_cast<SoftwareFence*>(fence);
  if (encoder->updated.count(given->fence)) {
    [owner broke:"fence" what:"an encoder waits for a fence that it has updated"];
    return;
  }
  [owner needs:given resource:given->fence];
  const NodeRef made = [self new_node];
  made->wait_fences.push_back(given->fence);
  encoder->waits.push_back(made);
  encoder->current = nullptr;
}
- (void)endEncoding {
  if (![self usable:"endEncoding"]) return;
  ended = true;
  if (encoder->label.empty()) count(Count::unlabelled);
  owner->open = nil;
}
- (void)dealloc {
  if (ended) return;
  [owner broke:"encoder state" what:"an encoder was released without endEncoding"];
  owner->open = nil;
}
@end
