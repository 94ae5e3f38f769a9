// foundation.mm: the few Foundation classes that a Metal host needs. Values never change once made.
#import <Foundation/Foundation.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "objc_runtime.h"
#include "rules.h"

#pragma clang diagnostic ignored "-Wincomplete-implementation"
#pragma clang diagnostic ignored "-Wobjc-property-implementation"
#pragma clang diagnostic ignored "-Wprotocol"

// ---- strings ------------------------------------------------------------------------------------
@interface HeapString : NSString {
 @public
  std::string text;
}
@end
// What the compiler lays out for a literal.
@interface __NSCFConstantString : NSString {
 @public
  int flags;
  const char* text;
  long bytes;
}
@end

@implementation NSString
@dynamic length, UTF8String;  // the subclasses'; a literal has room for its own three fields only
+ (instancetype)alloc {
  return self == [NSString class] ? (id)[HeapString alloc] : [super alloc];
}
+ (instancetype)string {
  return [NSString stringWithUTF8String:""];
}
+ (instancetype)stringWithUTF8String:(const char*)text {
  return [[NSString alloc] initWithUTF8String:text];
}
+ (instancetype)stringWithCString:(const char*)text encoding:(NSUInteger)encoding {
  return [[NSString alloc] initWithUTF8String:text];
}
+ (instancetype)stringWithFormat:(NSString*)format, ... {
  va_list values;
  va_start(values, format);
  char text[4096];
  vsnprintf(text, sizeof text, format.UTF8String, values);
  va_end(values);
  return [NSString stringWithUTF8String:text];
}
- (instancetype)initWithUTF8String:(const char*)text {
  return [self initWithBytes:text length:strlen(text) encoding:NSUTF8StringEncoding];
}
- (instancetype)initWithCString:(const char*)text encoding:(NSUInteger)encoding {
  return [self initWithUTF8String:text];
}
- (BOOL)isEqualToString:(NSString*)other {
  return strcmp(self.UTF8String, other.UTF8String) == 0;
}
- (BOOL)isEqual:(id)other {
  return [other isKindOfClass:[NSString class]] && [self isEqualToString:other];
}
- (NSUInteger)hash {
  return std::hash<std::string>()(self.UTF8String);
}
- (NSUInteger)lengthOfBytesUsingEncoding:(NSUInteger)encoding {
  return strlen(self.UTF8String);
}
- (NSString*)stringByAppendingString:(NSString*)other {
  return [NSString stringWithUTF8String:(std::string(self.UTF8String) + other.UTF8String).c_str()];
}
- (NSString*)stringByAppendingPathComponent:(NSString*)name {
  return [NSString
      stringWithUTF8String:(std::string(self.UTF8String) + "/" + name.UTF8String).c_str()];
}
- (NSString*)description {
  return self;
}
@end
@implementation HeapString
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)length
                     encoding:(NSStringEncoding)encoding {
  text.assign(static_cast<const char*>(bytes), length);
  return self;
}
- (NSUInteger)length {
  return text.size();
}
// https://developer.apple.com/documentation/foundation/nsstring/utf8string: the bytes may be a copy that
// the pool frees.
- (const char*)UTF8String {
  if (software_metal_pools() == 0) {
    software_metal_broken_rule("autorelease pool", "UTF8String was called with no pool in place");
  }
  return text.c_str();
}
@end
@implementation __NSCFConstantString
- (NSUInteger)length {
  return NSUInteger(bytes);
}
- (const char*)UTF8String {
  return text;
}
@end

// ---- collections --------------------------------------------------------------------------------
@interface HeapArray : NSArray {
 @public
  std::vector<id> items;
}
@end
static const std::vector<id>& items_of(NSArray* array) {
  return static_cast<HeapArray*>(array)->items;
}
// Hands over items from state->state on, at most `room`.
static NSUInteger enumerate(const std::vector<id>& items, NSFastEnumerationState* state,
                            id __unsafe_unretained* buffer, NSUInteger room) {
  static unsigned long never;
  state->mutationsPtr = &never;
  state->itemsPtr = buffer;
  NSUInteger n = 0;
  while (n < room && state->state < items.size()) buffer[n++] = items[state->state++];
  return n;
}
@implementation NSArray
+ (instancetype)array {
  return [[HeapArray alloc] init];
}
+ (instancetype)arrayWithObjects:(const id[])objects count:(NSUInteger)count {
  HeapArray* array = [[HeapArray alloc] init];
  array->items.assign(objects, objects + count);
  return array;
}
+ (instancetype)arrayWithObject:(id)object {
  return [NSArray arrayWithObjects:&object count:1];
}
- (NSUInteger)count {
  return items_of(self).size();
}
- (id)objectAtIndex:(NSUInteger)i {
  return items_of(self).at(i);
}
- (id)objectAtIndexedSubscript:(NSUInteger)i {
  return items_of(self).at(i);
}
- (id)firstObject {
  return items_of(self).empty() ? nil : items_of(self).front();
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)count {
  return enumerate(items_of(self), state, buffer, count);
}
@end
@implementation HeapArray
@end

@interface HeapDictionary : NSDictionary {
 @public
  std::vector<id> keys, values;
}
@end
static HeapDictionary* contents_of(NSDictionary* dictionary) {
  return static_cast<HeapDictionary*>(dictionary);
}
@implementation NSDictionary
+ (instancetype)dictionary {
  return [[HeapDictionary alloc] init];
}
+ (instancetype)dictionaryWithObjects:(const id[])objects
                              forKeys:(const id<NSCopying>[])keys
                                count:(NSUInteger)count {
  HeapDictionary* dictionary = [[HeapDictionary alloc] init];
  dictionary->keys.assign(keys, keys + count);
  dictionary->values.assign(objects, objects + count);
  return dictionary;
}
- (NSUInteger)count {
  return contents_of(self)->keys.size();
}
- (id)objectForKey:(id)key {
  HeapDictionary* all = contents_of(self);
  for (size_t i = 0; i < all->keys.size(); ++i) {
    if ([all->keys[i] isEqual:key]) return all->values[i];
  }
  return nil;
}
- (id)objectForKeyedSubscript:(id)key {
  return [self objectForKey:key];
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)count {
  return enumerate(contents_of(self)->keys, state, buffer, count);
}
@end
@implementation HeapDictionary
@end

// ---- numbers and data ---------------------------------------------------------------------------
@implementation NSNumber {
  double value;
}
+ (NSNumber*)numberWithDouble:(double)v {
  NSNumber* number = [[NSNumber alloc] init];
  number->value = v;
  return number;
}
+ (NSNumber*)numberWithInt:(int)v {
  return [NSNumber numberWithDouble:v];
}
+ (NSNumber*)numberWithBool:(BOOL)v {
  return [NSNumber numberWithDouble:v];
}
+ (NSNumber*)numberWithInteger:(NSInteger)v {
  return [NSNumber numberWithDouble:double(v)];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)v {
  return [NSNumber numberWithDouble:double(v)];
}
- (int)intValue {
  return int(value);
}
- (BOOL)boolValue {
  return value != 0;
}
- (double)doubleValue {
  return value;
}
- (NSInteger)integerValue {
  return NSInteger(value);
}
- (NSUInteger)unsignedIntegerValue {
  return NSUInteger(value);
}
- (BOOL)isEqual:(id)other {
  return [other isKindOfClass:[NSNumber class]] && static_cast<NSNumber*>(other)->value == value;
}
@end

@implementation NSData {
  std::string content;
}
+ (instancetype)dataWithBytes:(const void*)bytes length:(NSUInteger)length {
  NSData* data = [[NSData alloc] init];
  data->content.assign(static_cast<const char*>(bytes), length);
  return data;
}
- (NSUInteger)length {
  return content.size();
}
- (const void*)bytes {
  return content.data();
}
@end

// ---- errors, paths, the process -----------------------------------------------------------------
NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";
NSErrorUserInfoKey const NSUnderlyingErrorKey = @"NSUnderlyingError";

@implementation NSError {
  NSString* domain_;
  NSInteger code_;
  NSDictionary* info_;
}
+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary*)info {
  NSError* error = [[NSError alloc] init];
  error->domain_ = domain;
  error->code_ = code;
  error->info_ = info;
  return error;
}
- (NSErrorDomain)domain {
  return domain_;
}
- (NSInteger)code {
  return code_;
}
- (NSDictionary*)userInfo {
  return info_;
}
- (NSString*)localizedDescription {
  NSString* text = [info_ objectForKey:NSLocalizedDescriptionKey];
  return text ? text : @"The operation couldn’t be completed.";
}
- (NSString*)description {
  return self.localizedDescription;
}
@end

@implementation NSURL {
  NSString* path_;
}
+ (instancetype)fileURLWithPath:(NSString*)path {
  NSURL* url = [[NSURL alloc] init];
  url->path_ = path;
  return url;
}
+ (instancetype)fileURLWithPath:(NSString*)path isDirectory:(BOOL)folder {
  return [NSURL fileURLWithPath:path];
}
- (NSString*)path {
  return path_;
}
@end

@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
  static NSProcessInfo* const only = [[NSProcessInfo alloc] init];
  return only;
}
- (NSOperatingSystemVersion)operatingSystemVersion {
  const auto [major, minor] = software_metal::macos_version();
  return {major, minor, 0};
}
- (NSString*)operatingSystemVersionString {
  const auto [major, minor] = software_metal::macos_version();
  return [NSString stringWithFormat:@"Version %ld.%ld (Build SOFT%ld)", major, minor, major];
}
- (BOOL)isOperatingSystemAtLeastVersion:(NSOperatingSystemVersion)v {
  const auto version = software_metal::macos_version();
  return version >= std::pair<long, long>(v.majorVersion, v.minorVersion);
}
- (unsigned long long)physicalMemory {
  return software_metal::physical_memory();
}
@end

void NSLog(NSString* format, ...) {
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format.UTF8String, values);
  va_end(values);
  fputc('\n', stderr);
}

// What the compiler takes for @[] and @{}.
extern "C" {
extern id __NSArray0__, __NSDictionary0__;
id __NSArray0__, __NSDictionary0__;
}
__attribute__((constructor(102))) static void make_empty_collections() {
  __NSArray0__ = [[HeapArray alloc] init];
  __NSDictionary0__ = [[HeapDictionary alloc] init];
}
