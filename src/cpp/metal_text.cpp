// metal_text.cpp: puts a kernel file and its headers together, from the embedded text or a folder.
#include "metal_text.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "device.h"

namespace lily {
namespace {

std::string folder() {
  const char* value = std::getenv("LILY_METAL_SOURCE");
  return value ? value : "";
}

std::string read(const std::string& name) {
  const std::string from = folder();
  if (!from.empty()) {
    std::ifstream in(from + "/" + name, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    check(bool(in), "LILY_METAL_SOURCE is ", from, ", which has no readable ", name);
    return text.str();
  }
  for (const MetalText& t : metal_texts()) {
    if (t.name == name) return std::string(t.text);
  }
  throw LilyError(concat("there is no kernel file ", name));
}

// Appends the file; `seen` holds what is in `out` already.
void inline_file(const std::string& name, std::set<std::string>& seen, std::string& out) {
  constexpr std::string_view kInclude = "#include \"";
  seen.insert(name);
  const std::string text = read(name);
  size_t line = 0;
  out += concat("#line 1 \"", name, "\"\n");
  for (size_t at = 0; at < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view one(text.data() + at, end - at);
    at = end + 1;
    if (one.substr(0, kInclude.size()) != kInclude) {
      out.append(one).push_back('\n');
      continue;
    }
    const size_t close = one.find('"', kInclude.size());
    check(close != one.npos, name, ":", line + 1, ": the include has no closing quote");
    const std::string header(one.substr(kInclude.size(), close - kInclude.size()));
    if (!seen.count(header)) inline_file(header, seen, out);
    out += concat("#line ", line + 2, " \"", name, "\"\n");
  }
}

}  // namespace

std::vector<std::string> metal_files() {
  std::vector<std::string> names, files;
  const std::string from = folder();
  if (from.empty()) {
    for (const MetalText& t : metal_texts()) names.emplace_back(t.name);
  } else {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(from, error)) {
      names.push_back(entry.path().filename().string());
    }
    check(!error, "LILY_METAL_SOURCE is ", from, ": ", error.message());
  }
  constexpr std::string_view kEnding = ".metal";
  for (const std::string& name : names) {
    if (name.size() > kEnding.size() && std::string_view(name).substr(name.size() - 6) == kEnding) {
      files.push_back(name.substr(0, name.size() - kEnding.size()));
    }
  }
  std::sort(files.begin(), files.end());
  check(!files.empty(), "there are no kernel files", from.empty() ? "" : " in ", from);
  return files;
}

std::string metal_source(std::string_view file, bool exact, bool tensor) {
  std::string out = exact ? "#define LILY_EXACT 1\n" : "";
  if (tensor) out += "#define LILY_TILE_TENSOR 1\n";
  std::set<std::string> seen;
  inline_file(concat(file, ".metal"), seen, out);
  return out;
}

}  // namespace lily
