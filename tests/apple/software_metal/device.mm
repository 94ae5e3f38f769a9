// device.mm: the device: memory, libraries, pipelines, archives, residency sets, events.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "objects.h"

#pragma clang diagnostic ignored "-Wprotocol"
#pragma clang diagnostic ignored "-Wincomplete-implementation"
#pragma clang diagnostic ignored "-Wunguarded-availability-new"

using namespace software_metal;

namespace software_metal {
NSString* ns(const std::string& text) {
  return [[NSString alloc] initWithBytes:text.data()
                                  length:text.size()
                                encoding:NSUTF8StringEncoding];
}
std::string text(NSString* s) { return s ? s.UTF8String : ""; }
}  // namespace software_metal

NSString* const MTLCommandBufferEncoderInfoErrorKey = @"MTLCommandBufferEncoderInfoErrorKey";
NSString* const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";
NSString* const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";
NSString* const MTLBinaryArchiveDomain = @"MTLBinaryArchiveDomain";

namespace software_metal {
NSError* make_error(NSString* domain, NSInteger code, const std::string& what, NSArray* encoders) {
  NSDictionary* info =
      encoders
          ? @{NSLocalizedDescriptionKey : ns(what), MTLCommandBufferEncoderInfoErrorKey : encoders}
          : @{NSLocalizedDescriptionKey : ns(what)};
  return [NSError errorWithDomain:domain code:code userInfo:info];
}
}  // namespace software_metal

static void give(NSError* __autoreleasing* to, NSString* domain, NSInteger code,
                 const std::string& what) {
  if (to) *to = make_error(domain, code, what);
}

// ---- descriptors --------------------------------------------------------------------------------
#define STORED(type, name, Name) \
  -(type)name {                  \
    return name##_;              \
  }                              \
  -(void)set##Name : (type)value { name##_ = value; }

@implementation MTLCompileOptions {
  MTLLanguageVersion languageVersion_;
  BOOL fastMathEnabled_;
  MTLMathMode mathMode_;
  MTLMathFloatingPointFunctions mathFloatingPointFunctions_;
  MTLLibraryOptimizationLevel optimizationLevel_;
  NSDictionary* preprocessorMacros_;
  BOOL preserveInvariance_;
  NSUInteger maxTotalThreadsPerThreadgroup_;
}
// https://developer.apple.com/documentation/metal/mtlcompileoptions: fast math is the default, with fast
// functions.
- (instancetype)init {
  fastMathEnabled_ = YES;
  mathMode_ = MTLMathModeFast;
  mathFloatingPointFunctions_ = MTLMathFloatingPointFunctionsFast;
  return self;
}
STORED(MTLLanguageVersion, languageVersion, LanguageVersion)
STORED(BOOL, fastMathEnabled, FastMathEnabled)
STORED(MTLMathMode, mathMode, MathMode)
STORED(MTLMathFloatingPointFunctions, mathFloatingPointFunctions, MathFloatingPointFunctions)
STORED(MTLLibraryOptimizationLevel, optimizationLevel, OptimizationLevel)
STORED(NSDictionary*, preprocessorMacros, PreprocessorMacros)
STORED(BOOL, preserveInvariance, PreserveInvariance)
STORED(NSUInteger, maxTotalThreadsPerThreadgroup, MaxTotalThreadsPerThreadgroup)
@end
@implementation MTLComputePipelineDescriptor {
  NSString* label_;
  id<MTLFunction> computeFunction_;
  BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth_;
  NSUInteger maxTotalThreadsPerThreadgroup_;
  NSArray* binaryArchives_;
  BOOL supportIndirectCommandBuffers_;
}
STORED(NSString*, label, Label)
STORED(id<MTLFunction>, computeFunction, ComputeFunction)
STORED(BOOL, threadGroupSizeIsMultipleOfThreadExecutionWidth,
       ThreadGroupSizeIsMultipleOfThreadExecutionWidth)
STORED(NSUInteger, maxTotalThreadsPerThreadgroup, MaxTotalThreadsPerThreadgroup)
STORED(NSArray*, binaryArchives, BinaryArchives)
STORED(BOOL, supportIndirectCommandBuffers, SupportIndirectCommandBuffers)
@end
@implementation MTLCommandBufferDescriptor {
  BOOL retainedReferences_;
  MTLCommandBufferErrorOption errorOptions_;
}
- (instancetype)init {
  retainedReferences_ = YES;
  return self;
}
STORED(BOOL, retainedReferences, RetainedReferences)
STORED(MTLCommandBufferErrorOption, errorOptions, ErrorOptions)
@end
@implementation MTLBinaryArchiveDescriptor {
  NSURL* url_;
}
STORED(NSURL*, url, Url)
@end
@implementation MTLResidencySetDescriptor {
  NSString* label_;
  NSUInteger initialCapacity_;
}
STORED(NSString*, label, Label)
STORED(NSUInteger, initialCapacity, InitialCapacity)
@end
@implementation MTLSharedEventListener
@end

// ---- memory -------------------------------------------------------------------------------------
@implementation SoftwareBuffer
- (NSUInteger)length {
  return memory->bytes;
}
// https://developer.apple.com/documentation/metal/mtlbuffer/contents(): none for private storage.
- (void*)contents {
  return options & MTLResourceStorageModePrivate ? nullptr : memory->at;
}
- (NSUInteger)allocatedSize {
  return memory->bytes;
}
- (MTLGPUAddress)gpuAddress {
  return reinterpret_cast<MTLGPUAddress>(memory->at);
}
- (MTLResourceOptions)resourceOptions {
  return options;
}
- (MTLStorageMode)storageMode {
  return options & MTLResourceStorageModePrivate ? MTLStorageModePrivate : MTLStorageModeShared;
}
- (id<MTLDevice>)device {
  return the_device();
}
- (NSString*)label {
  return ns(memory->label);
}
- (void)setLabel:(NSString*)label {
  memory->label = text(label);
}
- (void)dealloc {
  release(*memory);
  if (deallocator) deallocator(memory->at, memory->bytes);
}
@end

@implementation SoftwareResidencySet
- (id<MTLDevice>)device {
  return the_device();
}
- (NSString*)label {
  return label;
}
- (void)addAllocation:(id<MTLAllocation>)allocation {
  const std::lock_guard lock(mutex);
  staged[(__bridge void*)allocation] = allocation;
}
- (void)addAllocations:(const id<MTLAllocation>[])allocations count:(NSUInteger)n {
  for (NSUInteger i = 0; i < n; ++i) [self addAllocation:allocations[i]];
}
- (void)removeAllocation:(id<MTLAllocation>)allocation {
  const std::lock_guard lock(mutex);
  staged.erase((__bridge void*)allocation);
}
- (void)removeAllocations:(const id<MTLAllocation>[])allocations count:(NSUInteger)n {
  for (NSUInteger i = 0; i < n; ++i) [self removeAllocation:allocations[i]];
}
- (void)removeAllAllocations {
  const std::lock_guard lock(mutex);
  staged.clear();
}
- (BOOL)containsAllocation:(id<MTLAllocation>)allocation {
  const std::lock_guard lock(mutex);
  return staged.count((__bridge void*)allocation) > 0;
}
- (NSUInteger)allocationCount {
  const std::lock_guard lock(mutex);
  return staged.size();
}
- (uint64_t)allocatedSize {
  const std::lock_guard lock(mutex);
  uint64_t bytes = 0;
  for (const auto& [address, allocation] : staged) bytes += [allocation allocatedSize];
  return bytes;
}
// https://developer.apple.com/documentation/metal/mtlresidencyset/commit(): what was added or removed
// counts from here on.
- (void)commit {
  const std::lock_guard lock(mutex);
  auto list = std::make_shared<std::vector<MemoryRef>>();
  for (const auto& [address, allocation] : staged) {
    list->push_back(static_cast<SoftwareBuffer*>(allocation)->memory);
  }
  committed = list;
}
- (void)requestResidency {
  const std::lock_guard lock(mutex);
  requested = true;
}
- (void)endResidency {
  const std::lock_guard lock(mutex);
  requested = false;
}
@end

// ---- kernels ------------------------------------------------------------------------------------
@implementation SoftwareFunction
- (NSString*)name {
  return ns(kernel->name);
}
- (NSString*)label {
  return label;
}
- (void)setLabel:(NSString*)value {
  label = value;
}
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
- (id<MTLDevice>)device {
  return the_device();
}
@end

@implementation SoftwareLibrary
- (NSString*)label {
  return label;
}
- (void)setLabel:(NSString*)value {
  label = value;
}
- (id<MTLDevice>)device {
  return the_device();
}
- (NSArray*)functionNames {
  std::vector<id> names;
  for (size_t k = 0; k < kKernelCount; ++k) {
    if (std::strcmp(kKernels[k].file, compiled.text->file) == 0 && kKernels[k].entry[compiled.form])
      names.push_back(ns(kKernels[k].name));
  }
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  const Kernel* kernel = find_kernel(*compiled.text, text(name));
  if (!kernel || !kernel->entry[compiled.form]) return nil;
  SoftwareFunction* function = [[SoftwareFunction alloc] init];
  function->kernel = kernel;
  function->form = compiled.form;
  return function;
}
@end

@implementation SoftwarePipeline
- (NSString*)label {
  return label;
}
- (id<MTLDevice>)device {
  return the_device();
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return pipeline_limits().most_threads;
}
- (NSUInteger)threadExecutionWidth {
  return pipeline_limits().simd;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return pipeline_limits().static_memory;
}
- (NSUInteger)allocatedSize {
  return 0;
}
- (void)dealloc {
  release(*resource);
}
@end

static std::string archive_key(const SoftwareFunction* f) {
  return concat(f->kernel->name, f->form == kBf16    ? " bf16"
                                 : f->form == kExact ? " exact"
                                                     : " tensor");
}

@implementation SoftwareArchive
- (NSString*)label {
  return label;
}
- (void)setLabel:(NSString*)value {
  label = value;
}
- (id<MTLDevice>)device {
  return the_device();
}
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError**)error {
  auto* function = static_cast<SoftwareFunction*>(descriptor.computeFunction);
  if (!function) {
    give(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorCompilationFailure, "no function");
    return NO;
  }
  functions.insert(archive_key(function));
  return YES;
}
// A line that names the system it was made on, one for each function, and their number.
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error {
  std::string content = concat("software Metal archive, macOS ", macos_version().first, "\n");
  for (const std::string& f : functions) content += f + "\n";
  content += concat("end ", functions.size(), "\n");
  std::ofstream out(text(url.path), std::ios::binary);
  const bool full = fault_due(Fault::archive_write);
  out << (full ? content.substr(0, content.size() / 2) : content) << std::flush;
  if (out && !full) return YES;
  give(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInternalError,
       concat("cannot write ", text(url.path)));
  return NO;
}
- (BOOL)load:(NSURL*)url error:(NSError**)error {
  std::ifstream in(text(url.path), std::ios::binary);
  std::string line, last;
  std::getline(in, line);
  const bool ours = line == concat("software Metal archive, macOS ", macos_version().first);
  while (std::getline(in, line)) {
    if (!last.empty()) functions.insert(last);
    last = line;
  }
  if (ours && last == concat("end ", functions.size()) && !fault_due(Fault::archive_read)) {
    return YES;
  }
  give(error, MTLBinaryArchiveDomain, MTLBinaryArchiveErrorInvalidFile,
       concat(text(url.path), " is no archive of this system"));
  return NO;
}
@end

// ---- order --------------------------------------------------------------------------------------
@implementation SoftwareFence
- (NSString*)label {
  return ns(fence->label);
}
- (void)setLabel:(NSString*)label {
  fence->label = text(label);
}
- (id<MTLDevice>)device {
  return the_device();
}
- (void)dealloc {
  release(*fence);
}
@end

@implementation SoftwareEvent
- (NSString*)label {
  return ns(event->label);
}
- (void)setLabel:(NSString*)label {
  event->label = text(label);
}
- (id<MTLDevice>)device {
  return the_device();
}
- (uint64_t)signaledValue {
  return event_value(event);
}
- (void)setSignaledValue:(uint64_t)value {
  set_event_value(event, value);
}
- (BOOL)waitUntilSignaledValue:(uint64_t)value timeoutMS:(uint64_t)milliseconds {
  return wait_for_event(event, value, milliseconds);
}
- (void)notifyListener:(MTLSharedEventListener*)listener
               atValue:(uint64_t)value
                 block:(MTLSharedEventNotificationBlock)block {
  SoftwareEvent* me = self;
  listen(event, value, [me, block](uint64_t now) {
    @autoreleasepool {
      block(me, now);
    }
  });
}
- (void)dealloc {
  release(*event);
}
@end

// ---- the device ---------------------------------------------------------------------------------
@interface SoftwareDevice : NSObject <MTLDevice>
@end
@implementation SoftwareDevice
- (NSString*)name {
  return ns(concat("Software Metal of family Apple", apple_family()));
}
- (uint64_t)registryID {
  return 1;
}
// Metal3 begins with Apple7.
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  if (family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple10) {
    return family - MTLGPUFamilyApple1 + 1 <= apple_family();
  }
  if (family == MTLGPUFamilyMetal4) return tensor_units().there && macos_version().first >= 26;
  return family == MTLGPUFamilyMetal3 && apple_family() >= 7;
}
- (BOOL)hasUnifiedMemory {
  return YES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return working_set();
}
- (NSUInteger)maxBufferLength {
  return working_set() / 2;
}
- (NSUInteger)currentAllocatedSize {
  return allocated_bytes();
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return lily::sim::kSharedLimit;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(1024, 1024, 1024);
}
- (BOOL)shouldMaximizeConcurrentCompilation {
  return NO;
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)value {
}
- (NSUInteger)maximumConcurrentCompilationTaskCount {
  return 2;
}

- (SoftwareBuffer*)wrap:(void*)foreign
                 length:(NSUInteger)length
                options:(MTLResourceOptions)options {
  SoftwareBuffer* buffer = [[SoftwareBuffer alloc] init];
  // https://developer.apple.com/documentation/metal/mtlhazardtrackingmode: buffers are tracked unless
  // asked for otherwise.
  const bool tracked = !(options & MTLResourceHazardTrackingModeUntracked);
  if (tracked) count(Count::tracked_buffers);
  buffer->memory = std::make_shared<Memory>(length, tracked, foreign);
  buffer->options = options;
  return buffer;
}
// https://developer.apple.com/documentation/metal/mtldevice/makebuffer(length:options:): nil when it
// cannot be made.
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  if (length == 0 || length > self.maxBufferLength) {
    broken_rule("buffer length",
                concat(length, " bytes, a buffer has 1 to ", self.maxBufferLength));
    return nil;
  }
  if (fault_due(Fault::allocation)) return nil;
  return [self wrap:nullptr length:length options:options];
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes
                             length:(NSUInteger)length
                            options:(MTLResourceOptions)options {
  auto* buffer = static_cast<SoftwareBuffer*>([self newBufferWithLength:length options:options]);
  if (buffer) std::memcpy(buffer->memory->at, bytes, length);
  return buffer;
}
// https://developer.apple.com/documentation/metal/mtldevice/makebuffer(bytesnocopy:length:options:deallocator:):
// address and length are multiples of a page.
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)bytes
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  constexpr uintptr_t kPage = 16384;
  if (reinterpret_cast<uintptr_t>(bytes) % kPage || length % kPage || length == 0) {
    broken_rule("page alignment", concat("a buffer without a copy at ", bytes, " of ", length,
                                         " bytes: both are multiples of ", kPage));
    return nil;
  }
  if (fault_due(Fault::allocation)) return nil;
  SoftwareBuffer* buffer = [self wrap:bytes length:length options:options];
  buffer->deallocator = deallocator;
  return buffer;
}

- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source
                               options:(MTLCompileOptions*)options
                                 error:(NSError**)error {
  // https://developer.apple.com/documentation/metal/mtllanguageversion: each system has its newest.
  const auto [major, minor] = macos_version();
  const MTLLanguageVersion newest = major >= 26   ? MTLLanguageVersion4_0
                                    : major >= 15 ? MTLLanguageVersion3_2
                                                  : MTLLanguageVersion3_1;
  if (options.languageVersion > newest) {
    give(error, MTLLibraryErrorDomain, MTLLibraryErrorUnsupported,
         concat("language version ", options.languageVersion >> 16, ".",
                options.languageVersion & 0xffff, " is newer than macOS ", major));
    return nil;
  }
  // What runs here was compiled without fast math: with it the text means something else.
  const bool fast = major >= 15 ? options.mathMode != MTLMathModeSafe : options.fastMathEnabled;
  if (fast) broken_rule("math mode", "the kernel text is compiled with fast math");
  if (major >= 15 && options.mathFloatingPointFunctions != MTLMathFloatingPointFunctionsPrecise) {
    broken_rule("math mode", "the kernel text is compiled with fast functions");
  }
  CompiledText compiled = compile(text(source));
  if (compiled.text && compiled.form == kTensor &&
      options.languageVersion < MTLLanguageVersion4_0) {
    compiled.text = nullptr;
    compiled.error = "program_source:1:1: error: no member named 'tensor_ops' in namespace 'mpp'";
  }
  if (fault_due(Fault::compile)) {
    compiled.text = nullptr;
    compiled.error = "program_source:7:1: error: a fault that a test asked for";
  }
  if (!compiled.text) {
    give(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, compiled.error);
    return nil;
  }
  SoftwareLibrary* library = [[SoftwareLibrary alloc] init];
  library->compiled = compiled;
  return library;
}

- (id<MTLComputePipelineState>)
    newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                  options:(MTLPipelineOption)options
                               reflection:(MTLAutoreleasedComputePipelineReflection*)reflection
                                    error:(NSError**)error {
  auto* function = static_cast<SoftwareFunction*>(descriptor.computeFunction);
  if (!function) {
    broken_rule("pipeline", "a pipeline without a function");
    give(error, MTLLibraryErrorDomain, MTLLibraryErrorFunctionNotFound, "no function");
    return nil;
  }
  bool archived = false;
  for (SoftwareArchive* archive in descriptor.binaryArchives) {
    archived |= archive->functions.count(archive_key(function)) > 0;
  }
  // https://developer.apple.com/documentation/metal/mtlpipelineoption/failonbinaryarchivemiss
  if (!archived && (options & MTLPipelineOptionFailOnBinaryArchiveMiss)) {
    give(error, @"AGXMetal", 2, concat(function->kernel->name, " is in no archive"));
    return nil;
  }
  if (fault_due(Fault::pipeline)) {
    give(error, @"AGXMetal", 3, "a fault that a test asked for");
    return nil;
  }
  count(archived ? Count::pipelines_loaded : Count::pipelines_compiled);
  SoftwarePipeline* pipeline = [[SoftwarePipeline alloc] init];
  pipeline->kernel = function->kernel;
  pipeline->form = function->form;
  pipeline->whole_simdgroups = descriptor.threadGroupSizeIsMultipleOfThreadExecutionWidth;
  pipeline->label = descriptor.label;
  pipeline->resource = std::make_shared<Resource>("pipeline", function->kernel->name);
  return pipeline;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function
                                                             error:(NSError**)error {
  MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor alloc] init];
  descriptor.computeFunction = function;
  return [self newComputePipelineStateWithDescriptor:descriptor
                                             options:MTLPipelineOptionNone
                                          reflection:nil
                                               error:error];
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor*)descriptor
                                                 error:(NSError**)error {
  SoftwareArchive* archive = [[SoftwareArchive alloc] init];
  if (descriptor.url && ![archive load:descriptor.url error:error]) return nil;
  return archive;
}

- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor*)descriptor
                                               error:(NSError**)error {
  if (fault_due(Fault::no_residency_set)) {
    give(error, @"MTLResidencySet", 1, "a fault that a test asked for");
    return nil;
  }
  SoftwareResidencySet* set = [[SoftwareResidencySet alloc] init];
  set->label = descriptor.label;
  return set;
}
- (id<MTLFence>)newFence {
  if (fault_due(Fault::no_event)) return nil;
  SoftwareFence* fence = [[SoftwareFence alloc] init];
  fence->fence = std::make_shared<Fence>("without a label");
  return fence;
}
- (id<MTLEvent>)newEvent {
  return [self newSharedEvent];
}
- (id<MTLSharedEvent>)newSharedEvent {
  if (fault_due(Fault::no_event)) return nil;
  SoftwareEvent* event = [[SoftwareEvent alloc] init];
  event->event = std::make_shared<Event>("without a label");
  return event;
}
- (id<MTLCommandQueue>)newCommandQueue {
  return [self newCommandQueueWithMaxCommandBufferCount:64];
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)most {
  if (fault_due(Fault::no_queue)) return nil;
  SoftwareQueue* queue = [[SoftwareQueue alloc] init];
  queue->most = most;
  queue->unfinished = std::make_shared<std::atomic<long>>(0);
  return queue;
}
@end

namespace software_metal {
id<MTLDevice> the_device() {
  static SoftwareDevice* const only = [[SoftwareDevice alloc] init];
  return only;
}
}  // namespace software_metal

id<MTLDevice> MTLCreateSystemDefaultDevice() {
  return fault_due(Fault::no_device) ? nil : the_device();
}
NSArray<id<MTLDevice>>* MTLCopyAllDevices() {
  if (fault_due(Fault::no_device)) return @[];
  return @[ the_device() ];
}
