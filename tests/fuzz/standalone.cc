// Runs a fuzz target without libFuzzer: a corpus, and random mutations of it.
//
//     handshake_fuzz MUTATIONS FOLDER [SEED]
//
// The seed is fixed unless given, so that a test finds the same each time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

const uint8_t* bytesOf(const std::string& text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

std::vector<std::string> corpusIn(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> corpus;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

class Mutations {
 public:
  Mutations(const std::vector<std::string>& corpus, uint64_t seed)
      : corpus_(corpus), random_(seed) {}

  std::string next() {
    std::string input = any();
    for (size_t steps = below(4) + 1; steps > 0; --steps) change(input);
    return input.substr(0, 1024);
  }

 private:
  size_t below(size_t bound) { return static_cast<size_t>(random_() % bound); }
  const std::string& any() { return corpus_[below(corpus_.size())]; }

  void change(std::string& input) {
    const size_t at = below(input.size() + 1), size = below(8) + 1;
    switch (below(6)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ 1 << below(8));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(random_());
        break;
      case 2:
        for (size_t i = 0; i < size; ++i) input.insert(at, 1, static_cast<char>(random_()));
        break;
      case 3:
        input.erase(at, size);
        break;
      case 4:
        input.insert(at, input.substr(below(input.size() + 1), size));
        break;
      default: {  // goes on as another does
        const std::string& other = any();
        input = input.substr(0, at) + other.substr(below(other.size() + 1));
      }
    }
  }

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s MUTATIONS FOLDER [SEED]\n", argv[0]);
    return 2;
  }
  const std::vector<std::string> corpus = corpusIn(argv[2]);
  size_t reached = 0, seen = 0;
  for (const std::string& input : corpus) {
    LLVMFuzzerTestOneInput(bytesOf(input), input.size());
    const fuzz::Trial trial = fuzz::control(bytesOf(input), input.size());
    reached += trial.reached;
    seen += trial.seen;
  }
  std::printf("%zu inputs, of which %zu get to what is protected; %zu see it unprotected\n",
              corpus.size(), reached, seen);
  if (reached == 0 || seen == 0) return 1;

  Mutations mutations(corpus, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
  const unsigned long count = std::strtoul(argv[1], nullptr, 10);
  for (unsigned long i = 0; i < count; ++i) {
    const std::string input = mutations.next();
    LLVMFuzzerTestOneInput(bytesOf(input), input.size());
  }
  std::printf("%lu mutations\n", count);
  return 0;
}
