// What the prefix index must do, said plainly: nodes in a map, every question answered by walking over all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cache/prefix_index.h"

namespace tokenspeed::testing {

using Page = std::vector<int32_t>;  // the tokens of one

struct ModelNode {
  int parent = 0;  // 0: a root
  Page page;
  std::string key;  // of a root
  cache::NodeId id = cache::kNoNode;
  uint64_t tick = 0;
  bool on_device = false, on_host = false;
  bool is_stale = false, is_broken = false;
  uint64_t spare_since = 0;  // order among host pages whose contents are on the device as well; 0: none of these
};

class PrefixModel {
 public:
  PrefixModel(int num_device_pages, int num_host_pages)
      : num_free(num_device_pages), num_host_pages_(num_host_pages), has_tier_(num_host_pages > 0) {}

  struct Found {
    std::vector<int> path;
    int num_host = 0, num_unlocked = 0;
  };
  Found find(const std::string& key, const std::vector<Page>& pages, int max_pages) const {
    Found found;
    int node = root_of(key);
    for (int i = 0; node != 0 && i < std::min<int>(max_pages, static_cast<int>(pages.size())); ++i) {
      node = child_of(node, pages[static_cast<size_t>(i)]);
      if (node == 0) break;
      found.path.push_back(node);
      found.num_host += !nodes.at(node).on_device;
      found.num_unlocked += nodes.at(node).on_device && !is_locked(node);
    }
    return found;
  }

  // The name of the new ref, or 0: too few pages.
  int take(const std::string& key, const Found& found) {
    if (num_free + num_evictable() - found.num_unlocked - found.num_host < 0) return 0;
    ++tick_;
    int node = found.path.empty() ? root_of(key) : found.path.back();
    if (node == 0) {
      node = ++last_name_;
      nodes[node].key = key;
    }
    refs[++last_name_] = node;
    const int ref = last_name_;
    for (const int n : found.path) nodes[n].tick = tick_;
    evict_until(found.num_host);
    for (const int n : found.path) {
      if (nodes[n].on_device) continue;
      nodes[n].on_device = true;
      copies_in.push_back(n);
      --num_free;
    }
    return ref;
  }

  // Whether the page is kept (else the index had it). The caller has counted it as not free.
  bool publish(int ref, const Page& page) {
    ++tick_;
    int node = child_of(refs[ref], page);
    if (node == 0) {
      node = ++last_name_;
      nodes[node].parent = refs[ref];
      nodes[node].page = page;
    }
    refs[ref] = node;
    ModelNode& n = nodes[node];
    n.tick = tick_;
    if (n.on_device) return false;
    n.on_device = true;
    if (n.on_host) n.spare_since = ++num_spares_;
    return true;
  }

  void release(int ref) {
    ++tick_;
    int node = refs[ref];
    nodes[node].tick = tick_;
    refs.erase(ref);
    while (node != 0) {
      const int parent = nodes[node].parent;
      if (!is_locked(node) && (nodes[node].is_stale || is_idle_root(node))) erase(node);
      node = parent;
    }
  }

  bool make_room(int want) {
    if (num_free + num_evictable() < want) return false;
    evict_until(want);
    return true;
  }

  void flush() {
    for (const int root : select([](const ModelNode& n) { return n.parent == 0 && !n.is_stale; })) {
      make_stale(root, false);
    }
  }

  void invalidate(int node) {
    if (!nodes.contains(node)) return;
    const int parent = nodes[node].parent;
    make_stale(node, true);
    if (is_idle_root(parent)) erase(parent);
  }

  // `order`: of copies_in, which becomes the order in which host pages are given up.
  void take_copies(const std::vector<int>& order) {
    copies_out.clear();
    copies_in.clear();
    for (const int node : order) {
      if (nodes[node].is_stale) {
        nodes[node].on_host = false;
      } else {
        nodes[node].spare_since = ++num_spares_;
      }
    }
  }

  void drop_host_tier() {
    has_tier_ = false;
    while (!copies_in.empty()) invalidate(copies_in.back());
    for (const int node : select([](const ModelNode& n) { return n.on_host; })) {
      if (!nodes.contains(node)) continue;
      const int parent = nodes[node].parent;
      if (nodes[node].on_device) {
        lose_host_page(node);
      } else {
        erase_below(node);
        if (is_idle_root(parent)) erase(parent);
      }
    }
  }

  int num_nodes() const { return count([](const ModelNode& n) { return n.parent != 0; }); }
  int num_roots() const { return count([](const ModelNode& n) { return n.parent == 0; }); }
  int num_on_device() const { return count([](const ModelNode& n) { return n.on_device; }); }
  int num_on_host() const { return count([](const ModelNode& n) { return n.on_host; }); }
  int num_evictable() const {
    int all = 0;
    for (const auto& [name, n] : nodes) all += n.on_device && !is_locked(name);
    return all;
  }
  std::vector<int> path_of(int node) const {  // without the root
    std::vector<int> path;
    for (; nodes.at(node).parent != 0; node = nodes.at(node).parent) path.insert(path.begin(), node);
    return path;
  }

  std::map<int, ModelNode> nodes;
  std::map<int, int> refs;  // to the node they end in
  std::vector<int> copies_out, copies_in;
  int num_free;

 private:
  template <class Which>
  int count(const Which& which) const {
    return static_cast<int>(std::count_if(nodes.begin(), nodes.end(), [&](const auto& n) { return which(n.second); }));
  }
  template <class Which>
  std::vector<int> select(const Which& which) const {
    std::vector<int> names;
    for (const auto& [name, n] : nodes) {
      if (which(n)) names.push_back(name);
    }
    return names;
  }
  int root_of(const std::string& key) const {
    const auto found = select([&](const ModelNode& n) { return n.parent == 0 && !n.is_stale && n.key == key; });
    return found.empty() ? 0 : found.front();
  }
  int child_of(int parent, const Page& page) const {
    const auto same = [&](const ModelNode& n) { return n.parent == parent && !n.is_stale && n.page == page; };
    const auto found = select(same);
    return found.empty() ? 0 : found.front();
  }
  std::vector<int> children_of(int node) const {
    return select([&](const ModelNode& n) { return n.parent == node; });
  }
  bool is_locked(int node) const {
    for (const auto& [name, end] : refs) {
      for (int n = end; n != 0; n = nodes.at(n).parent) {
        if (n == node) return true;
      }
    }
    return false;
  }
  bool is_idle_root(int node) const {
    return nodes.at(node).parent == 0 && children_of(node).empty() && !is_locked(node);
  }

  void erase(int node) {
    lose_host_page(node);
    num_free += nodes[node].on_device;
    nodes.erase(node);
  }
  void erase_below(int node) {
    for (const int child : children_of(node)) erase_below(child);
    erase(node);
  }
  void lose_host_page(int node) {
    nodes[node].on_host = false;
    nodes[node].spare_since = 0;
    cancel(copies_in, node);
    cancel(copies_out, node);
  }
  static bool cancel(std::vector<int>& copies, int node) {
    const auto found = std::find(copies.begin(), copies.end(), node);
    if (found == copies.end()) return false;
    *found = copies.back();
    copies.pop_back();
    return true;
  }

  // The name of the least of those of which `key` is not 0, or 0.
  template <class Key>
  int least(const Key& key) const {
    int best = 0;
    for (const auto& [name, n] : nodes) {
      if (key(name, n) != 0 && (best == 0 || key(name, n) < key(best, nodes.at(best)))) best = name;
    }
    return best;
  }
  void evict_until(int want) {
    while (num_free < want) {
      evict(least([&](int name, const ModelNode& n) -> uint64_t {
        if (!n.on_device || is_locked(name)) return 0;
        for (const int child : children_of(name)) {
          if (nodes.at(child).on_device) return 0;
        }
        return n.tick;
      }));
    }
  }
  void evict(int node) {
    if (nodes[node].on_host) {
      if (!cancel(copies_in, node)) nodes[node].spare_since = 0;
    } else if (has_host_page()) {
      nodes[node].on_host = true;
      copies_out.push_back(node);
    }
    const int parent = nodes[node].parent;
    nodes[node].on_device = false;
    ++num_free;
    if (!nodes[node].on_host) erase_below(node);
    if (is_idle_root(parent)) erase(parent);
  }
  // Whether there is one to be had, after which there is.
  bool has_host_page() {
    if (!has_tier_) return false;
    if (num_on_host() < num_host_pages_) return true;
    if (const int spare = least([](int, const ModelNode& n) { return n.spare_since; }); spare != 0) {
      lose_host_page(spare);
      return true;
    }
    const int leaf = least([&](int name, const ModelNode& n) -> uint64_t {
      return n.on_host && !n.on_device && !is_locked(name) && children_of(name).empty() ? n.tick : 0;
    });
    if (leaf == 0) return false;
    const int parent = nodes[leaf].parent;
    erase(leaf);
    if (is_idle_root(parent)) erase(parent);
    return true;
  }
  void make_stale(int node, bool is_broken) {
    for (const int child : children_of(node)) make_stale(child, is_broken);
    if (!is_locked(node)) {
      erase(node);
      return;
    }
    ModelNode& n = nodes[node];
    n.is_stale = true;
    n.is_broken |= is_broken;
    const bool is_read = std::find(copies_in.begin(), copies_in.end(), node) != copies_in.end();
    if (is_broken || !is_read) lose_host_page(node);
  }

  const int num_host_pages_;
  bool has_tier_;
  int last_name_ = 0;
  uint64_t tick_ = 0;
  uint64_t num_spares_ = 0;
};

}  // namespace tokenspeed::testing
