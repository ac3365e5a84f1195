// A job trains right whoever connects to its ports, and lets its own ranks in meanwhile.
#include "flood.h"

#include "check.h"
#include "messages.h"

using namespace ringreduce;

TEST(training_ends_right_while_strangers_connect) {
  flood::Scene& scene = flood::Scene::shared();
  const processes::Ends ends = flood::run(
      scene,
      [&](Group& group) {
        std::vector<float> gradients(200'000);
        for (int number = 0; !flood::step(group, gradients, number, scene.over); ++number) {
          // A connection for messages is made in the midst of it.
          if (number != 20) continue;
          const messages::Letter letter = messages::letter(0, 0, 100'000);
          if (group.rank() == 0) messages::send(group, 1, 0, letter);
          if (group.rank() == 1) CHECK(messages::receive(group, 0, 0, letter.size()) == letter);
        }
      },
      [&](flood::Strangers& strangers) {
        for (; scene.tried < 500 && !scene.over; ++scene.tried) {
          strangers.connectOne();
          if (scene.tried % 10 == 0) usleep(5000);
        }
        scene.over = true;
      });
  for (const std::string& end : ends) CHECK_EQ(end, "");
  CHECK_EQ(scene.tried.load(), uint64_t{500});
}

TEST(what_was_recorded_lets_nobody_in_and_is_what_a_rank_says) {
  const net::Secret secret = net::randomSecret();
  const std::string group = net::randomGroup();
  const std::string said = flood::recording(group, secret);
  CHECK_EQ(said.size(), size_t{96 + 32});
  net::Handshake door = net::Handshake::acceptor(
      [&](const net::PeerHello&) { return std::optional<net::Secret>(secret); });
  CHECK_EQ(door.feed(std::as_bytes(std::span(said))), said.size());
  CHECK(door.namedGroup());
  CHECK(door.state() == net::Handshake::State::kRefused);
}
