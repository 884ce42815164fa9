// Measures the prefix index with its pool full: what finding, taking, publishing and evicting cost.
//
//   bench_prefix_index [--pages N] [--host-pages N] [--page-size N] [--rounds N]
//
// The cache is filled with sessions (chains of 10 to 100 pages below one of 100 shared prefixes of 32 pages), then 256
// refs grow by turns as decodes do: each round makes room for 16 pages and publishes 16. So every publish and every
// eviction touches nodes that were last touched long ago. Figures are nanoseconds per operation (per page for find),
// over batches: the median and the mean.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cache/prefix_index.h"

namespace {

using namespace tokenspeed::cache;

class Samples {
 public:
  explicit Samples(const char* name) : name_(name) {}
  // Runs `body`, which returns how many operations it was.
  template <class Body>
  void time(const Body& body) {
    const auto begin = std::chrono::steady_clock::now();
    const auto count = static_cast<double>(body());
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    if (count == 0) return;
    each_.push_back(took.count() / count);
    total_ += took.count();
    count_ += count;
  }
  void print() {
    if (each_.empty()) return;
    std::sort(each_.begin(), each_.end());
    std::printf("  %-30s median %7.1f ns   mean %7.1f ns   99%% of batches under %8.1f ns\n", name_,
                each_[each_.size() / 2], total_ / count_, each_[each_.size() * 99 / 100]);
  }

 private:
  const char* name_;
  std::vector<double> each_;
  double total_ = 0, count_ = 0;
};

class Bench {
 public:
  Bench(int32_t num_pages, int32_t num_host_pages, int32_t page_size)
      : page_size_(page_size), pool_(num_pages), index_(pool_, {.page_size = page_size,
                                                              .num_host_pages = num_host_pages}) {}

  void run(int num_rounds) {
    fill();
    std::printf("%d pages of %d tokens, %d on the host; %d nodes\n", pool_.num_pages(), page_size_,
                index_.num_host_pages_used(), index_.num_nodes());
    measure_find(num_rounds);
    measure_take(num_rounds);
    measure_growth(num_rounds);
    for (Samples* s : {&find_, &miss_, &take_, &release_, &evict_, &publish_}) s->print();
  }

 private:
  // A session's tokens follow from its number.
  std::vector<int32_t> tokens_of(uint32_t session) const {
    std::mt19937 shared(session % 100), own(1000 + session);
    const uint32_t num_own = 10 + own() % 91;
    std::vector<int32_t> tokens(static_cast<size_t>(page_size_) * (32 + num_own));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<int32_t>((i < 32 * static_cast<size_t>(page_size_) ? shared : own)() % 128000);
    }
    return tokens;
  }
  std::span<const int32_t> page_of(const std::vector<int32_t>& tokens, int32_t page) const {
    return std::span(tokens).subspan(static_cast<size_t>(page) * static_cast<size_t>(page_size_),
                                     static_cast<size_t>(page_size_));
  }
  int32_t whole(const std::vector<int32_t>& tokens) const { return static_cast<int32_t>(tokens.size()) / page_size_; }

  PrefixRef take(const std::vector<int32_t>& tokens) {
    return std::move(*index_.take("", index_.find("", tokens, INT32_MAX)));
  }
  void grow(PrefixRef& ref, std::span<const int32_t> page) { index_.publish(ref, page, std::move(*pool_.acquire(1))); }

  // Until sessions enough came for all pages of the device and the host, and half as many again.
  void fill() {
    const int64_t want = int64_t{pool_.num_pages()} + index_.num_host_pages();
    std::vector<PageCopy> out, in;
    for (int64_t made = 0; made < want + want / 2; ++num_sessions_) {
      const std::vector<int32_t> tokens = tokens_of(num_sessions_);
      PrefixRef ref = take(tokens);
      index_.make_room(whole(tokens) - ref.num_pages());
      while (ref.num_pages() < whole(tokens)) {
        grow(ref, page_of(tokens, ref.num_pages()));
        ++made;
      }
      index_.take_copies(out, in);
    }
  }

  std::vector<int32_t> any_recent() {
    const auto recent = static_cast<uint32_t>(pool_.num_pages() / 80);
    return tokens_of(num_sessions_ - 1 - static_cast<uint32_t>(random_()) % std::min(recent, num_sessions_));
  }

  void measure_find(int num_rounds) {
    for (int i = 0; i < num_rounds; ++i) {
      const std::vector<int32_t> tokens = any_recent();
      find_.time([&] { return index_.find("", tokens, INT32_MAX).num_pages; });
      std::vector<int32_t> unknown = tokens;
      unknown.front() = -1;
      miss_.time([&] { return 1 + index_.find("", unknown, INT32_MAX).num_pages; });
    }
  }

  void measure_take(int num_rounds) {
    std::vector<PrefixRef> refs;
    for (int i = 0; i < num_rounds; ++i) {
      const std::vector<int32_t> tokens = any_recent();
      const PrefixIndex::Found found = index_.find("", tokens, INT32_MAX);
      if (found.num_pages == 0 || found.num_host_pages > 0) continue;
      take_.time([&] {
        refs.push_back(std::move(*index_.take("", found)));
        return found.num_pages;
      });
      if (refs.size() < 256) continue;
      std::shuffle(refs.begin(), refs.end(), random_);
      release_.time([&] {
        refs.clear();
        return 256;
      });
    }
  }

  void measure_growth(int num_rounds) {
    std::vector<PrefixRef> refs(256);
    std::vector<std::vector<int32_t>> pages(16);
    std::vector<PageCopy> out, in;
    size_t turn = 0;
    for (int i = 0; i < num_rounds; ++i) {
      for (std::vector<int32_t>& page : pages) {
        page.resize(static_cast<size_t>(page_size_));
        for (int32_t& token : page) token = static_cast<int32_t>(random_() % 128000);
      }
      PrefixRef& renewed = refs[random_() % refs.size()];  // a request ends and another comes
      renewed = PrefixRef{};
      renewed = take(any_recent());
      for (PrefixRef& ref : refs) {
        if (!ref) ref = take({});
      }
      evict_.time([&] {
        index_.make_room(16);
        return 16;
      });
      std::vector<PageLease> leases;
      for (size_t k = 0; k < 16; ++k) leases.push_back(std::move(*pool_.acquire(1)));
      publish_.time([&] {
        for (size_t k = 0; k < 16; ++k) index_.publish(refs[(turn + k) % 256], pages[k], std::move(leases[k]));
        return 16;
      });
      turn += 16;
      index_.take_copies(out, in);
    }
  }

  const int32_t page_size_;
  PagePool pool_;
  PrefixIndex index_;
  std::mt19937 random_{1};
  uint32_t num_sessions_ = 0;
  Samples find_{"find, per page found"}, miss_{"find of something unknown"}, take_{"take, per page"},
      release_{"release"}, evict_{"evict"}, publish_{"publish"};
};

}  // namespace

int main(int argc, char** argv) {
  int32_t num_pages = 1'000'000, num_host_pages = 0, page_size = 16, num_rounds = 20'000;
  const std::vector<std::pair<const char*, int32_t*>> options = {
      {"--pages", &num_pages}, {"--host-pages", &num_host_pages}, {"--page-size", &page_size},
      {"--rounds", &num_rounds}};
  for (int i = 1; i < argc; i += 2) {
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const auto& o) { return std::strcmp(o.first, argv[i]) == 0; });
    if (option == options.end() || i + 1 == argc || std::atoi(argv[i + 1]) < 0) {
      std::fprintf(stderr, "need --pages, --host-pages, --page-size or --rounds and a number, have %s\n", argv[i]);
      return 2;
    }
    *option->second = std::atoi(argv[i + 1]);
  }
  if (num_pages < 100'000 || page_size < 1) {
    std::fprintf(stderr, "need 100000 pages or more, of 1 token or more\n");
    return 2;
  }
  Bench(num_pages, num_host_pages, page_size).run(num_rounds);
}
