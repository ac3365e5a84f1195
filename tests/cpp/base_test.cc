// The small pure parts: the cut, the chooser, options from the environment, words of messages,
// descriptors across a fork.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <clocale>
#include <cstdlib>
#include <locale>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/aside.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/executor.h"
#include "base/fd.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "base/wait_clock.h"
#include "bootstrap/options.h"
#include "check.h"

using namespace ringreduce;

TEST(chunks_cover_a_message_once_in_order) {
  for (int P : {1, 2, 3, 8, 100})
    for (size_t n : {0, 1, 127, 128, 129, 1000, 12800, 99999}) {
      const Cut cut{n, P};
      CHECK_EQ(cut.chunkSize() % kChunkElements, 0u);
      size_t end = 0;
      for (int c = 0; c < P; ++c) {
        CHECK_EQ(cut.chunk(c).begin, end);
        end = cut.chunk(c).end();
      }
      CHECK_EQ(end, n);
      std::vector<int> seen(n);
      cut.forEachChunk({0, n}, [&](int c, size_t begin, size_t size) {
        CHECK(size > 0);
        for (size_t i = begin; i < begin + size; ++i) {
          CHECK_EQ(cut.chunkOf(i), c);
          ++seen[i];
        }
      });
      for (int times : seen) CHECK_EQ(times, 1);
    }
}

TEST(a_chunk_is_added_from_its_next_rank_to_its_owner) {
  for (int P : {1, 2, 5})
    for (int c = 0; c < P; ++c) {
      CHECK_EQ(kthToAdd(c, 0, P), (c + 1) % P);
      CHECK_EQ(kthToAdd(c, P - 1, P), c);
      for (int k = 0; k < P; ++k) CHECK_EQ(kthToAdd(c, k, P, AddOrder::kRank), k);
    }
}

TEST(the_user_has_the_last_word_on_the_algorithm) {
  const auto in_memory = [](size_t bytes, int P, Algorithm wanted) {
    const CallSize call{.kind = Kind::kAllReduce, .bytes = bytes, .wanted = wanted};
    return choose(call, {.ranks = P, .in_memory = true}, {}).taken.algorithm;
  };
  CHECK(in_memory(1 << 20, 4, Algorithm::kRing) == Algorithm::kRing);
  for (int P : {2, 3, 64})
    for (size_t bytes : {size_t{0}, size_t{1} << 30})
      CHECK(in_memory(bytes, P, Algorithm::kAuto) != Algorithm::kAuto);
  CHECK(in_memory(1 << 20, 4, Algorithm::kBruck) == Algorithm::kTwoShot);
  CHECK(in_memory(1 << 20, 4, Algorithm::kHierarchical) == Algorithm::kTwoShot);
  CHECK(algorithmNamed("twoshot") == Algorithm::kTwoShot);
  CHECK(algorithmNamed("bruck") == Algorithm::kBruck);
  CHECK(!algorithmNamed("treering"));
}

Algorithm allReduceOf(size_t bytes, size_t partial, const GroupShape& shape, Algorithm wanted,
                      const WireCost& cost) {
  const CallSize call{
      .kind = Kind::kAllReduce, .bytes = bytes, .partial_bytes = partial, .wanted = wanted};
  return choose(call, shape, cost).taken.algorithm;
}

TEST(between_hosts_hops_count_for_little_and_bytes_for_much) {
  const WireCost cost;
  WireCost crowded;
  crowded.ranks_on_host = 4;
  for (int P : {2, 3, 8, 64})
    for (const WireCost& wire : {cost, crowded}) {
      const auto choice = [&](size_t bytes, size_t partial) {
        return allReduceOf(bytes, partial, {P}, Algorithm::kAuto, wire);
      };
      CHECK(choice(0, 0) == Algorithm::kBruck);
      CHECK(choice(1024, 1024) == Algorithm::kBruck);
      CHECK(choice(1 << 30, 1 << 30) == Algorithm::kRing);
      bool bruck = true, ring = false;  // each only up to some size, or from some size on
      for (size_t bytes = 1; bytes <= 1 << 30; bytes *= 2) {
        const Algorithm now = choice(bytes, bytes);
        CHECK(bruck || now != Algorithm::kBruck);
        CHECK(!ring || now == Algorithm::kRing);
        bruck = now == Algorithm::kBruck;
        ring = now == Algorithm::kRing;
      }
      CHECK(allReduceOf(0, 0, {P}, Algorithm::kDirect, wire) == Algorithm::kDirect);
      CHECK(allReduceOf(1 << 30, 1 << 30, {P}, Algorithm::kDirect, wire) == Algorithm::kRing);
      // A ring cannot add in the order of ranks.
      for (size_t bytes = 1; bytes <= 1 << 30; bytes *= 2)
        for (Algorithm wanted : {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kBruck})
          CHECK(addsByRank(
              allReduceOf(bytes, bytes, {.ranks = P, .order = AddOrder::kRank}, wanted, wire)));
    }
  // Halves, whose partial sums are twice as long.
  CHECK(allReduceOf(size_t{1} << 30, size_t{2} << 30, {8}, Algorithm::kAuto, cost) ==
        Algorithm::kTwoShot);
}

TEST(hosts_of_several_ranks_go_by_the_hierarchy_from_some_size_on) {
  const size_t much = size_t{1} << 30;
  for (int hosts : {2, 3, 8})
    for (int ranks : {2, 3, 8}) {
      WireCost cost;
      cost.ranks_on_host = ranks;
      const int P = hosts * ranks;
      const auto taken = [&](size_t bytes, size_t partial, Algorithm wanted = Algorithm::kAuto) {
        return allReduceOf(bytes, partial, {P, ranks}, wanted, cost) == Algorithm::kHierarchical;
      };
      CHECK(taken(much, much) && taken(much, 2 * much));
      CHECK(!taken(0, 0) && !taken(64, 64));
      CHECK(taken(0, 0, Algorithm::kHierarchical) && !taken(much, much, Algorithm::kRing));
      bool before = false;
      for (size_t bytes = 1; bytes <= much; bytes *= 2) {
        CHECK(!before || taken(bytes, bytes));
        before = taken(bytes, bytes);
      }
      for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter}) {
        const auto of = [&](size_t bytes, Algorithm wanted = Algorithm::kAuto) {
          const auto choice = choose({kind, bytes, bytes, 0, wanted}, {P, ranks}, cost);
          return choice.taken.algorithm == Algorithm::kHierarchical;
        };
        // Many hosts of few ranks save little of a line, and copy more.
        CHECK(of(much) == (hosts < 8 || ranks > 2));
        CHECK(of(1 << 20) && of(0, Algorithm::kHierarchical));
      }
      // Where there is no hierarchy, one of the others.
      CHECK(allReduceOf(much, much, {P}, Algorithm::kHierarchical, cost) ==
            allReduceOf(much, much, {P}, Algorithm::kAuto, cost));
    }
}

TEST(bruck_reaches_all_in_few_hops) {
  CHECK_EQ(bruckShape(8, 2).hops, 3);
  CHECK_EQ(bruckShape(8, 2).messages, 3);
  CHECK_EQ(bruckShape(9, 2).hops, 4);
  CHECK_EQ(bruckShape(9, 3).hops, 2);
  CHECK_EQ(bruckShape(9, 3).messages, 4);
  CHECK_EQ(bruckShape(7, 7).hops, 1);
  CHECK_EQ(bruckShape(7, 7).messages, 6);
  CHECK_EQ(bruckShape(6, 4).messages, 4);
  CHECK_EQ(bruckShape(1, 2).hops, 0);
  WireCost cost{.hop = 1, .message = 0};
  CHECK_EQ(bruckRadix(7, cost), 7);
  cost = {.hop = 0, .message = 1};
  CHECK_EQ(bruckShape(7, bruckRadix(7, cost)).messages, 3);
}

TEST(the_environment_is_read_with_care) {
  const auto read = [](const char* name, const char* text, const auto& field) {
    setenv(name, text, 1);
    const auto value = Config::read().*field;
    unsetenv(name);
    return value.get();
  };
  const auto bytes = [&](const char* t) {
    return read("RINGREDUCE_SLOT_BYTES", t, &Config::slot_bytes);
  };
  CHECK_EQ(bytes(""), 0);
  CHECK_EQ(bytes("64K"), 65536);
  for (const char* bad : {"65M", "-1", "x", "8192x", "8192.5", "nan", "1e99"})
    CHECK_THROWS(Error, bytes(bad));
  const auto round_trip = [&](const char* t) {
    return read("RINGREDUCE_ROUND_TRIP_MS", t, &Config::round_trip_ms);
  };
  CHECK_EQ(round_trip("0.25"), 0.25);
  for (const char* bad : {"-1", "0", "x", "1e9", "nan"}) CHECK_THROWS(Error, round_trip(bad));
  for (const char* name : std::span(kAlgorithmNames).first(kUsersAlgorithms))
    CHECK_EQ(read("RINGREDUCE_ALGORITHM", name, &Config::algorithm), name);
}

TEST(shared_options_travel_as_text) {
  const SharedOptions sent{.algorithm = Algorithm::kRing, .slot_bytes = 8192, .slots = 7};
  const SharedOptions got = SharedOptions::fromText(sent.toText());
  CHECK(got.algorithm == sent.algorithm);
  CHECK_EQ(got.slot_bytes, sent.slot_bytes);
  CHECK_EQ(got.slots, sent.slots);
  for (const SharedOptions& bad :
       {SharedOptions{.slot_bytes = 4097}, SharedOptions{.slot_bytes = 1},
        SharedOptions{.slots = 2}, SharedOptions{.slots = 33}})
    CHECK_THROWS(Error, bad.validate());
  CHECK_THROWS(Error, SharedOptions::fromText("nonsense"));
}

TEST(hexadecimal_text_is_read_as_written) {
  const std::array<unsigned char, 3> bytes{0x00, 0x9a, 0xff};
  std::array<unsigned char, 3> read{};
  CHECK_EQ(hexText(bytes), "009aff");
  CHECK(fromHex("009aff", read.data(), read.size()) && read == bytes);
  for (const char* other : {"", "009af", "009aff0", "009afg", "009AFF", " 09aff"})
    CHECK(!fromHex(other, read.data(), read.size()));
}

TEST(messages_read_well) {
  CHECK_EQ(seconds(2500 * kMillisecond), "2.5 s");
  CHECK_EQ(seconds(3 * kSecond), "3 s");
  CHECK_EQ(seconds(1800 * kSecond), "1800 s");
  CHECK_EQ(joined({1, 2, 5}, " > "), "1 > 2 > 5");
  CHECK_EQ(describe(OpSignature{.sequence = 4}), "barrier #4");
  CHECK_EQ(describe({.sequence = 0,
                     .count = 1,
                     .kind = Kind::kAllReduce,
                     .dtype = DType::kBFloat16,
                     .op = static_cast<uint8_t>(ReduceOp::kMax)}),
           "all_reduce #0 (bfloat16, 1 element, MAX)");
}

// A decimal comma and groups of digits, as of many countries.
struct Commas : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(numbers_are_the_same_in_every_locale) {
  const std::string before = std::setlocale(LC_NUMERIC, nullptr);
  const std::locale streams = std::locale::global(std::locale(std::locale::classic(), new Commas));
  std::setlocale(LC_NUMERIC, "de_DE.UTF-8");  // where it is installed
  setenv("RINGREDUCE_STALL_SECONDS", "0.5", 1);
  setenv("RINGREDUCE_SLOT_BYTES", "1.5M", 1);
  const Config config = Config::read();
  const SharedOptions shared{.slot_bytes = 1 << 20};
  const std::string text = shared.toText();
  CHECK_EQ(seconds(2500 * kMillisecond), "2.5 s");
  CHECK_EQ(shortText(1234567, 10), "1234567");
  CHECK_EQ(config.stall_seconds.get(), 0.5);
  CHECK_EQ(config.slot_bytes.get(), 3 << 19);
  std::locale::global(streams);
  std::setlocale(LC_NUMERIC, before.c_str());
  unsetenv("RINGREDUCE_STALL_SECONDS");
  unsetenv("RINGREDUCE_SLOT_BYTES");
  CHECK_EQ(text, shared.toText());
  CHECK_EQ(SharedOptions::fromText(text).slot_bytes, shared.slot_bytes);
}

TEST(a_hosts_id_fits_small_messages) {
  const std::string longest(255, 'h');
  setenv("RINGREDUCE_HOSTID", longest.c_str(), 1);
  CHECK_EQ(Config::read().host_id.get(), longest);
  setenv("RINGREDUCE_HOSTID", (longest + "h").c_str(), 1);
  CHECK_THROWS(Error, Config::read().host_id.get());
  unsetenv("RINGREDUCE_HOSTID");
}

TEST(numbers_are_taken_off_a_text) {
  std::string_view text = " +1.5M";
  CHECK_EQ(takeNumber(text).value_or(0), 1.5);
  CHECK_EQ(std::string(text), "M");
  for (const char* none : {"", " ", "M", "+-1", "+", ","}) {
    text = none;
    CHECK(!takeNumber(text));
  }
}

TEST(a_forked_child_holds_no_descriptor_of_ours) {
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  Fd reader(ends[0]), writer(ends[1]);
  const int generation = forkGeneration();
  const pid_t child = fork();
  if (child == 0) {
    // The handler has closed both, so that their numbers can be used again, and we must not close
    // what has them then.
    int again[2];
    const bool closed = pipe(again) == 0 && again[0] == ends[0] && again[1] == ends[1];
    writer.reset();
    const bool kept = write(again[1], "x", 1) == 1;
    _exit(closed && kept && forkGeneration() == generation + 1 ? 0 : 1);
  }
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  writer.reset();
  char byte;
  CHECK_EQ(read(reader.get(), &byte, 1), 0);  // end of file: nobody else holds the other end
}

// A process that was stopped has not waited for all that time.
TEST(the_clock_of_waits_leaves_out_what_nobody_saw) {
  constexpr Nanos kDay = 86'400 * kSecond;
  constexpr Nanos kGap = ProcessClock::kLongestGap, kMost = kGap + 100 * kMillisecond;
  for (const Nanos start : {kSecond, 3 * kDay, 3000 * kDay}) {
    ProcessClock clock;
    Nanos time = start;
    const auto look = [&] { return clock.now([&] { return time; }); };
    CHECK_EQ(look(), start);
    for (int i = 0; i < 1000; ++i) {
      time += 3 * kMillisecond;
      CHECK_EQ(look(), time);
    }
    Nanos before = look();
    for (const Nanos stop : {2 * kSecond, 3600 * kSecond, 300 * kDay}) {
      time += stop;
      const Nanos after = look();
      CHECK(after >= before && after - before <= kMost);
      time += kGap / 2;  // it goes on as before
      CHECK_EQ(look() - after, kGap / 2);
      before = look();
    }
    // A wait ends even if each of its rounds blocks.
    for (int i = 0; i < 10; ++i) {
      time += 2 * kSecond;
      look();
    }
    CHECK(look() - before >= 4 * kSecond);
  }
}

// Threads that look at once agree on what was left out, and for none does time go back.
TEST(the_clock_of_waits_is_one_for_all_threads) {
  ProcessClock clock;
  std::atomic<Nanos> time = kSecond;
  std::atomic<bool> over = false, went_back = false;
  const auto look = [&] { return clock.now([&] { return time.load(); }); };
  const Nanos began = look();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (Nanos last = 0; !over;) {
        const Nanos seen = look();
        if (seen < last) went_back = true;
        last = seen;
      }
    });
  constexpr int kStops = 200;
  for (int i = 0; i < kStops; ++i) {
    look();
    time += 10 * kSecond;
    std::this_thread::yield();
  }
  const Nanos counted = look() - began;
  over = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(!went_back);
  CHECK(counted <= kStops * (ProcessClock::kLongestGap + 100 * kMillisecond));
}

TEST(a_wait_is_told_of_each_time_it_has_lasted_twice_as_long) {
  WaitClock wait(/*timeout=*/100 * kSecond, /*stall=*/10 * kSecond, /*started=*/kSecond);
  std::vector<Nanos> told;
  for (Nanos time = kSecond; time < 110 * kSecond; time += kSecond)
    if (wait.reportIsDue(time)) told.push_back(wait.waited(time) / kSecond);
  CHECK(told == (std::vector<Nanos>{10, 20, 40, 80}));
  CHECK(!wait.isOver(101 * kSecond - 1) && wait.isOver(101 * kSecond));
  wait.extend(103 * kSecond);
  wait.extend(102 * kSecond);
  CHECK(!wait.isOver(103 * kSecond - 1) && wait.isOver(103 * kSecond));
  CHECK(!WaitClock(kNever, kNever, kSecond).isOver(kNever - 1));
}

TEST(a_handler_steps_aside_for_what_it_interrupted) {
  std::string seen;
  const auto operation = [&](const char* name, auto handlers) {
    {
      const OperationHere here;
      seen += std::string(name) + "{";
      handlers();
      seen += "}";
    }
    finishAsides();
  };
  stepAside();  // in no handler
  operation("a", [&] {
    runAside([&] { seen += "1"; });
    runAside([&] {
      stepAside();
      seen += "2";
      try {
        operation("b", [&] {
          runAside([&] {
            stepAside();
            seen += "3";
            throw Error(Failure::kArgument, "of 3");
          });
        });
      } catch (const Error& error) {
        // Another stack catches while this one does.
        operation("c", [&] {
          runAside([&] {
            try {
              throw Error(Failure::kArgument, "of 4");
            } catch (const Error&) {
              stepAside();
              seen += "4";
              try {
                throw;
              } catch (const Error& again) {
                seen += again.what();
              }
            }
          });
        });
        seen += error.what();
      }
    });
    runAside([&] {
      stepAside();
      seen += "5";
    });
    try {
      runAside([] { throw Error(Failure::kArgument, "at once"); });
    } catch (const Error& error) {
      seen += error.what();
    }
  });
  CHECK_EQ(seen, "a{1at once}52b{}3c{}4of 4of 3");
  seen.clear();
  runAside([&] {
    operation("d", [&] {
      runAside([&] {
        stepAside();
        seen += "6";
      });
    });
  });
  CHECK_EQ(seen, "d{}6");
}

TEST(the_error_of_a_handler_follows_the_operation) {
  Executor executor;
  const auto errorOf = [&](auto work) -> std::string {
    try {
      executor.tryRunHere(work);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto handler = [] {
    stepAside();
    throw Error(Failure::kArgument, "of the handler");
  };
  CHECK_EQ(errorOf([&] { runAside(handler); }), "of the handler");
  CHECK_EQ(errorOf([&] {
             runAside(handler);
             throw Error(Failure::kPeerLost, "of the operation");
           }),
           "of the operation");
  CHECK(executor.isIdle());
}
