// library.cpp: see library.h.
#include "library.h"

#include <cstring>

namespace software_metal {
namespace {

std::string_view next_line(std::string_view& rest) {
  const size_t end = std::min(rest.find('\n'), rest.size());
  const std::string_view line = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return line;
}
bool starts_with(std::string_view line, std::string_view with) {
  return line.substr(0, with.size()) == with;
}

// Where a line of the source comes from, as the compiler would say.
struct Place {
  std::string file = "program_source";
  size_t line = 0;
  std::string error(std::string_view what) const {
    return concat("program_source:", file == "program_source" ? "" : file + ":", line,
                  ":1: error: ", what);
  }
};

// The lines that count, with their places.
struct Line {
  std::string_view text;
  Place place;
};

}  // namespace

CompiledText compile(std::string_view source) {
  CompiledText result;
  std::vector<Line> lines;
  Place place;
  for (std::string_view rest = source; !rest.empty();) {
    const std::string_view line = next_line(rest);
    ++place.line;
    if (starts_with(line, "#line ")) {
      char* end = nullptr;
      place.line = std::strtoul(line.data() + 6, &end, 10) - 1;
      const size_t open = line.find('"'), close = line.rfind('"');
      if (close != line.npos && close > open) place.file = line.substr(open + 1, close - open - 1);
    } else if (starts_with(line, "#error")) {
      result.error = place.error(line.substr(std::min<size_t>(7, line.size())));
      return result;
    } else if (starts_with(line, "#include \"")) {
      result.error =
          place.error("a text that is compiled at run time has no folder to include from");
      return result;
    } else if (starts_with(line, "#define LILY_EXACT") && lines.empty()) {
      result.form = kExact;
    } else if (starts_with(line, "#define LILY_TILE_TENSOR") && lines.empty()) {
      result.form = kTensor;
    } else {
      lines.push_back({line, place});
    }
  }
  // The text that goes along longest is the one that is meant.
  size_t most = 0;
  for (size_t t = 0; t < kTextCount; ++t) {
    const Text& text = kTexts[t];
    std::string whole;
    for (size_t p = 0; p < text.piece_count; ++p) whole += text.pieces[p];
    size_t same = 0;
    std::string_view rest = whole;
    while (!rest.empty() && same < lines.size() && next_line(rest) == lines[same].text) ++same;
    if (rest.empty() && same == lines.size() && same > 0) {
      result.text = &text;
      return result;
    }
    if (same < most && t > 0) continue;
    most = same;
    result.error =
        same < lines.size()
            ? lines[same].place.error(concat("the software Metal was built from another ",
                                             text.file, "; here it has: ", lines[same].text))
            : place.error(concat("unexpected end of ", text.file));
  }
  return result;
}

const Kernel* find_kernel(const Text& text, std::string_view name) {
  for (size_t k = 0; k < kKernelCount; ++k) {
    if (kKernels[k].name == name && std::strcmp(kKernels[k].file, text.file) == 0)
      return &kKernels[k];
  }
  return nullptr;
}

}  // namespace software_metal
