// ringreduce_flood: what strangers at its ports cost a job that trains.
//
//     ringreduce_flood [CONNECTIONS [A SECOND [FLOATS]]]        10000 1000 1000000
//
// Two ranks train over loopback TCP in processes of their own; a third process connects to their
// ports as strangers do (tests/cpp/flood.h), for half a second, and is silent for half a second, in
// turns, until it has connected so often.  Prints how long a step took in either, what a connection
// cost the thread of rank 0 that looks after sockets (which a busy machine does not change much),
// and how much of a core the strangers themselves used, who would be on another machine.  Every sum
// is checked.
#include "../../tests/cpp/flood.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"

using namespace ringreduce;

namespace {

constexpr Nanos kWindow = kSecond / 2;

struct Times {
  std::vector<double> steps[2];  // ms: silence, flood

  static double median(std::vector<double> all) {
    if (all.empty()) return 0;
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
  }
  static double mean(const std::vector<double>& all) {
    return all.empty() ? 0 : std::accumulate(all.begin(), all.end(), 0.0) / double(all.size());
  }
  void print() const {
    for (int i : {0, 1})
      std::printf("%-22s %6zu steps, median %.3f ms, mean %.3f ms\n",
                  i ? "while strangers connect" : "while nobody does", steps[i].size(),
                  median(steps[i]), mean(steps[i]));
    std::printf("slowed by %.1f %% (median), %.1f %% (mean)\n",
                100 * (median(steps[1]) / median(steps[0]) - 1),
                100 * (mean(steps[1]) / mean(steps[0]) - 1));
  }
};

// Nanoseconds of processor time that this process's thread for sockets has used.
double usedBySockets() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    double used = 0;
    if (name == "ringreduce-net" && std::ifstream(task.path() / "schedstat") >> used) return used;
  }
  return 0;
}

void train(Group& group, flood::Scene& scene, size_t floats) {
  std::vector<float> gradients(floats);
  Times times;
  for (int i = 0; i < 20; ++i) flood::step(group, gradients, i, false);
  Nanos window = deadlineIn(kWindow), before = now();
  double used[2] = {}, used_before = usedBySockets();
  for (int number = 20;; ++number) {
    const bool on = scene.on;
    if (flood::step(group, gradients, number, scene.over)) break;
    const Nanos time = now();
    times.steps[on].push_back(static_cast<double>(time - before) / kMillisecond);
    before = time;
    if (group.rank() != 0 || time < window) continue;
    const double used_now = usedBySockets();
    used[on] += used_now - std::exchange(used_before, used_now);
    scene.on = !on;
    window = deadlineIn(kWindow);
  }
  if (group.rank() != 0) return;
  used[1] += usedBySockets() - used_before;
  times.print();
  // Half of them were at this rank's port.
  std::printf("a connection cost rank 0 %.1f us of a core; in silence its sockets used %.1f us\n",
              used[1] / 1000 / (static_cast<double>(scene.tried) / 2), used[0] / 1000);
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, unsigned long otherwise) {
    return argc > i ? std::strtoul(argv[i], nullptr, 10) : otherwise;
  };
  const unsigned long connections = argument(1, 10'000), rate = argument(2, 1'000);
  const unsigned long floats = argument(3, 1'000'000);
  if (connections == 0 || rate == 0 || floats < 2) {
    std::fprintf(stderr, "usage: %s [CONNECTIONS [A SECOND [FLOATS]]]\n", argv[0]);
    return 2;
  }
  double load[1] = {};
  if (getloadavg(load, 1) == 1)
    std::printf("load before: %.2f on %ld cores\n", load[0], sysconf(_SC_NPROCESSORS_ONLN));
  flood::Scene& scene = flood::Scene::shared();
  const processes::Ends ends = flood::run(
      scene, [&](Group& group) { train(group, scene, floats); },
      [&](flood::Strangers& strangers) {
        Nanos active = 0, last = now();
        while (scene.tried < connections && !scene.over) {
          usleep(1000);
          const Nanos time = now();
          if (scene.on) active += time - last;
          last = time;
          const auto due = static_cast<unsigned long>(active / 1000 * static_cast<Nanos>(rate) /
                                                      (kSecond / 1000));
          for (; scene.on && scene.tried < std::min(due, connections); ++scene.tried)
            strangers.connectOne();
        }
        rusage used{};
        getrusage(RUSAGE_SELF, &used);
        const double seconds = double(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                               1e-6 * double(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
        std::printf("%lu connections in %.1f s of flood; the strangers used %.2f s of a core\n",
                    static_cast<unsigned long>(scene.tried), double(active) / kSecond, seconds);
        scene.over = true;
      });
  bool right = true;
  for (size_t i = 0; i < ends.size(); ++i)
    if (!ends[i].empty()) {
      right = false;
      std::printf("process %zu: %s\n", i, ends[i].c_str());
    }
  std::printf("%s\n", right ? "all sums were right" : "FAILED");
  return right ? 0 : 1;
}
