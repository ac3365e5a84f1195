// A test program in C++: TEST(name) { CHECK(...); CHECK_EQ(a, b); } and nothing else to set up.
//
// Each file that includes this is a program of its own; its main runs every TEST (or those whose
// name contains the first argument, or after "-" all but the one of that name), prints "N passed, N
// failed" and fails if a check did or if none ran.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

// Of a literal: the check's own code does not make the string.
[[noreturn, gnu::noinline]] inline void fail(const char* file, int line, const char* what) {
  fail(file, line, std::string(what));
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " != " << b;
  fail(file, line, out.str());
}

}  // namespace check

#ifdef __SANITIZE_THREAD__
// Exceptions are counted in libstdc++, which is not instrumented: ThreadSanitizer does not see that
// whoever frees one comes after all who have read its text.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}
#endif

#define TEST(name)                                            \
  static void test_##name();                                  \
  static check::Register register_##name(#name, test_##name); \
  static void test_##name()
#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(type, expression)                                            \
  do {                                                                            \
    bool thrown = false;                                                          \
    try {                                                                         \
      expression;                                                                 \
    } catch (const type&) {                                                       \
      thrown = true;                                                              \
    }                                                                             \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " threw no " #type); \
  } while (0)

namespace check {

// Runs the tests that `filter`, the first argument, chooses; returns main's exit status.
inline int runAll(const char* filter) {
  const auto isWanted = [filter](const char* name) {
    if (!filter) return true;
    if (*filter == '-') return std::strcmp(name, filter + 1) != 0;
    return std::strstr(name, filter) != nullptr;
  };
  int passed = 0, failed = 0;
  for (const Test& test : tests()) {
    if (!isWanted(test.name)) continue;
    try {
      test.run();
      ++passed;
    } catch (const std::exception& e) {
      ++failed;
      std::printf("FAILED %s: %s\n", test.name, e.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;
}

}  // namespace check

#ifndef CHECK_OWN_MAIN
int main(int argc, char** argv) {
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
#endif
