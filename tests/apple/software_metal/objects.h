// objects.h: the classes that stand behind Metal's protocols.
#pragma once
#import <Metal/Metal.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gpu.h"
#include "library.h"

namespace software_metal {

NSString* ns(const std::string& text);
std::string text(NSString* s);
NSError* make_error(NSString* domain, NSInteger code, const std::string& what,
                    NSArray* encoders = nil);
// The one device: there is no other, and it lives for ever.
id<MTLDevice> the_device();

}  // namespace software_metal

@interface SoftwareBuffer : NSObject <MTLBuffer> {
 @public
  software_metal::MemoryRef memory;
  MTLResourceOptions options;
  void (^deallocator)(void*, NSUInteger);
}
@end

@interface SoftwareFunction : NSObject <MTLFunction> {
 @public
  const software_metal::Kernel* kernel;
  software_metal::Form form;
  NSString* label;
}
@end
@interface SoftwareLibrary : NSObject <MTLLibrary> {
 @public
  software_metal::CompiledText compiled;
  NSString* label;
}
@end
@interface SoftwarePipeline : NSObject <MTLComputePipelineState> {
 @public
  const software_metal::Kernel* kernel;
  software_metal::Form form;
  bool whole_simdgroups;
  NSString* label;
  software_metal::ResourceRef resource;
}
@end
@interface SoftwareArchive : NSObject <MTLBinaryArchive> {
 @public
  std::set<std::string> functions;
  NSString* label;
}
@end

@interface SoftwareResidencySet : NSObject <MTLResidencySet> {
 @public
  std::mutex mutex;
  std::map<void*, id> staged;  // by address, so that an allocation counts once
  software_metal::Residents committed;
  bool requested;
  NSString* label;
}
@end

@interface SoftwareFence : NSObject <MTLFence> {
 @public
  software_metal::FenceRef fence;
}
@end
@interface SoftwareEvent : NSObject <MTLSharedEvent> {
 @public
  software_metal::EventRef event;
}
@end

@interface SoftwareQueue : NSObject <MTLCommandQueue> {
 @public
  std::mutex mutex;
  std::vector<SoftwareResidencySet*> sets;
  std::shared_ptr<std::atomic<long>> unfinished;  // command buffers
  NSUInteger most;
  NSString* label;
}
@end

@interface SoftwareEncoderInfo : NSObject <MTLCommandBufferEncoderInfo> {
 @public
  std::string name;
  std::vector<std::string> signposts;
  MTLCommandEncoderErrorState state;
}
@end

@class SoftwareEncoder;
@interface SoftwareCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  SoftwareQueue* queue;
  software_metal::CommandBufferRef buffer;
  BOOL retains;
  MTLCommandBufferErrorOption error_options;
  std::vector<id> retained;
  std::vector<SoftwareResidencySet*> sets;
  std::vector<MTLCommandBufferHandler> scheduled_handlers, completed_handlers;
  SoftwareEncoder* __unsafe_unretained open;
  std::atomic<bool> enqueued, committed;
  software_metal::NodeRef last_event;  // a wait between encoders: what comes after it
  std::shared_ptr<std::atomic<long>> unfinished;
}
// Records the rule and keeps the buffer from running.
- (void)broke:(const char*)rule what:(const std::string&)what;
- (void)needs:(id)object resource:(const software_metal::ResourceRef&)resource;
@end

@interface SoftwareEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  SoftwareCommandBuffer* owner;
  std::shared_ptr<software_metal::Encoder> encoder;
  SoftwarePipeline* pipeline;
  std::array<software_metal::Binding, software_metal::kBufferArguments> bindings;
  bool ended;
}
@end
