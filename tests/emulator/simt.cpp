#include "simt.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>

alignas(1024) uint8_t flashattn::shared_memory[kSharedLimit + kSharedGuard];

// Saves the registers that a call preserves, and goes on where the other stack left off.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.globl emulator_switch
emulator_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

namespace emulator {

Thread* current;
dim3 current_block, current_grid, current_block_size;

namespace {

using flashattn::kSharedGuard;
using flashattn::shared_memory;

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr int kMostFruitlessPolls = 100;

struct Rendezvous {
  const char* what;
  Site site;
  uint32_t mask, arrived;
  void* arguments[kWarpSize];
};

struct Warp {
  uint32_t ready = 0, live = 0;
  uint64_t epoch = 1;           // counts its __syncwarp
  std::map<int, uint64_t> met;  // at named barriers: what another warp did up to this time lies before
  std::vector<Rendezvous> open;
};

// An access of shared memory.  One of an older block epoch lies before a barrier.
struct Stamp {
  uint64_t epoch, warp_epoch;
  int warp, lane;
  Site site;
  uint64_t time;
  uint32_t warps;  // as bits
};
constexpr int kSeveral = -1;  // warps or lanes

// The last accesses of four bytes.
struct Cell {
  Stamp write, read;
  uint64_t flight;  // the block that has a copy in flight to them
};

// Of Hopper: a phase ends when nothing is pending.
struct TransactionBarrier {
  int arrivals, pending;
  int64_t bytes;
  uint32_t parity;
};
struct NamedBarrier {
  int arrived = 0;
  uint64_t phase = 0;
  uint32_t warps = 0, waiting = 0;  // that have arrived in this phase, as bits
};

// Blocks that reach each other's shared memory; null: it has ended.
struct Cluster {
  std::vector<Block*> blocks;
  int arrived = 0;
  uint64_t phase = 0;
};

}  // namespace

struct Block {
  dim3 index;
  std::shared_ptr<Cluster> cluster;
  std::map<uint32_t, TransactionBarrier> transactions;
  NamedBarrier named[16];
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  size_t warp = 0;  // that ran last
  int live = 0, at_barrier = 0;
  uint64_t serial, epoch;  // epochs count barriers; no two blocks share one
  std::vector<Thread*> polling;
  std::vector<uint8_t> saved;  // its shared memory while another block runs
  char* stacks = nullptr;
  Cell* cells = nullptr;
};

namespace {

struct Device {
  Schedule schedule{Order::round_robin, 1};
  std::function<void()> kernel;
  size_t shared_bytes = 0;
  unsigned cluster = 1;  // blocks
  std::vector<std::unique_ptr<Block>> resident;
  Block* loaded = nullptr;  // whose shared memory is in place
  void* main_stack = nullptr;
  size_t turn = 0;  // of the resident blocks
  uint64_t epochs = 0, progress = 0, progress_before = 0;
  uint64_t time = 0;  // counts accesses of shared memory
  int fruitless = 0;  // polls since there was progress
  std::string error;
  std::vector<char*> free_stacks;
  std::vector<Cell*> free_cells;
} device;

char* map_pages(size_t bytes) {
  void* pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) fail("the emulator cannot get %zu bytes", bytes);
  return static_cast<char*>(pages);
}

// Stacks of a block, each above a page that faults.
char* take_stacks() {
  if (!device.free_stacks.empty()) {
    char* stacks = device.free_stacks.back();
    device.free_stacks.pop_back();
    return stacks;
  }
  constexpr int kMostThreads = 1024;
  char* stacks = map_pages(kMostThreads * kStackBytes);
  for (int i = 0; i < kMostThreads; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
  return stacks;
}

Cell* take_cells() {
  if (device.free_cells.empty())
    return reinterpret_cast<Cell*>(map_pages(flashattn::kSharedLimit / 4 * sizeof(Cell)));
  Cell* cells = device.free_cells.back();
  device.free_cells.pop_back();
  return cells;
}

Warp& warp_of(const Thread& thread) { return thread.block->warps[thread.id / kWarpSize]; }

void resume(Thread* next, void** save) {
  current = next;
  next->waits_for = nullptr;
  emulator_switch(save, next->stack_pointer);
}

// The next thread of the block that can go on, starting `ahead` warps after the last one.
Thread* next_ready(Block& block, size_t ahead) {
  const size_t count = block.warps.size();
  for (size_t i = ahead; i < count + ahead; ++i) {
    const size_t step = device.schedule.order == Order::greedy_backwards ? count - i % count : i;
    Warp& warp = block.warps[(block.warp + step) % count];
    if (!warp.ready) continue;
    block.warp = (block.warp + step) % count;
    const int lane = __builtin_ctz(warp.ready);
    warp.ready &= warp.ready - 1;
    return &block.threads[block.warp * kWarpSize + lane];
  }
  return nullptr;
}

// Another thread of the block goes on, or another block.
void leave(size_t ahead = 0) {
  Thread* me = current;
  if (Thread* next = next_ready(*me->block, ahead)) {
    if (next != me)
      resume(next, &me->stack_pointer);
    else
      me->waits_for = nullptr;
  } else {
    emulator_switch(&me->stack_pointer, device.main_stack);
  }
}

void wait(const char* what, Site site) {
  current->waits_for = what;
  current->site = site;
  leave();
}

void thread_main() {
  device.kernel();
  ++device.progress;
  Block& block = *current->block;
  warp_of(*current).live &= ~(1u << current->id % kWarpSize);
  --block.live;
  current->copies.clear();
  leave();
  __builtin_unreachable();
}

void load(Block& block) {
  if (device.loaded == &block) return;
  const size_t bytes = device.shared_bytes + kSharedGuard;
  if (device.loaded) device.loaded->saved.assign(shared_memory, shared_memory + bytes);
  if (!block.saved.empty()) memcpy(shared_memory, block.saved.data(), bytes);
  device.loaded = &block;
  current_block = block.index;
}

void start_block(dim3 index, std::shared_ptr<Cluster> cluster) {
  auto block = std::make_unique<Block>();
  block->index = index;
  block->cluster = std::move(cluster);
  block->cluster->blocks.push_back(block.get());
  block->saved.assign(device.shared_bytes + kSharedGuard, 0xFF);
  block->serial = block->epoch = ++device.epochs;
  block->stacks = take_stacks();
  block->cells = take_cells();
  const int threads = current_block_size.x * current_block_size.y * current_block_size.z;
  block->live = threads;
  block->threads.resize(threads);
  block->warps.resize((threads + kWarpSize - 1) / kWarpSize);
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    void** top = reinterpret_cast<void**>(block->stacks + (i + 1) * kStackBytes);
    *--top = nullptr;  // of thread_main's caller; aligns the stack
    *--top = reinterpret_cast<void*>(&thread_main);
    for (int r = 0; r < 6; ++r) *--top = nullptr;
    thread.stack_pointer = top;
    thread.id = i;
    thread.index = dim3(i % current_block_size.x, i / current_block_size.x % current_block_size.y,
                        i / (current_block_size.x * current_block_size.y));
    thread.block = block.get();
    Warp& warp = block->warps[i / kWarpSize];
    warp.ready |= 1u << i % kWarpSize;
    warp.live = warp.ready;
  }
  if (device.schedule.order == Order::greedy_backwards) block->warp = block->warps.size() - 1;
  device.resident.push_back(std::move(block));
}

void retire(Block& block) {
  load(block);
  for (int i = 0; i < kSharedGuard; ++i)
    if (shared_memory[device.shared_bytes + i] != 0xFF)
      fail("a write %d bytes past the %zu bytes of shared memory", i, device.shared_bytes);
  device.free_stacks.push_back(block.stacks);
  device.free_cells.push_back(block.cells);
  device.loaded = nullptr;
  for (Block*& other : block.cluster->blocks)
    if (other == &block) other = nullptr;
}

std::string waiting_threads() {
  std::map<std::string, int> counts;
  for (const auto& block : device.resident)
    for (const Thread& thread : block->threads) {
      if (!(warp_of(thread).live >> thread.id % kWarpSize & 1))
        ++counts["have ended"];
      else if (thread.waits_for)
        ++counts["wait at " + std::string(thread.waits_for) + " (" + thread.site.file + ":" +
                 std::to_string(thread.site.line) + ")"];
    }
  std::string text;
  for (const auto& [what, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads " + what;
  return text;
}

// Blocks take turns.
bool run_ready_block() {
  const size_t count = device.resident.size();
  for (size_t i = 0; i < count; ++i) {
    const size_t index = (device.turn + i) % count;
    Block& block = *device.resident[index];
    if (block.live == 0) {
      retire(block);
      device.resident.erase(device.resident.begin() + index);
      return true;
    }
    if (Thread* next = next_ready(block, 0)) {
      device.turn = index + 1;
      load(block);
      resume(next, &device.main_stack);
      return true;
    }
  }
  return false;
}

// Threads that poll look again; false when that will never help.
bool wake_polling() {
  device.fruitless = device.progress == device.progress_before ? device.fruitless + 1 : 0;
  device.progress_before = device.progress;
  bool woken = false;
  for (auto& block : device.resident) {
    for (Thread* thread : block->polling) warp_of(*thread).ready |= 1u << thread->id % kWarpSize;
    woken |= !block->polling.empty();
    block->polling.clear();
  }
  return woken && device.fruitless < kMostFruitlessPolls;
}

void run_blocks() {
  const uint64_t blocks = uint64_t{current_grid.x} * current_grid.y * current_grid.z;
  uint64_t started = 0;
  while (device.error.empty()) {
    const bool room = started < blocks && device.resident.size() < device.schedule.resident_blocks;
    if (!(room && device.schedule.order == Order::round_robin) && run_ready_block()) continue;
    if (room) {
      const auto cluster = std::make_shared<Cluster>();
      for (unsigned i = 0; i < device.cluster; ++i, ++started)
        start_block(dim3(started % current_grid.x, started / current_grid.x % current_grid.y,
                         started / current_grid.x / current_grid.y),
                    cluster);
    } else if (device.resident.empty()) {
      return;
    } else if (!wake_polling()) {
      device.error = "deadlock: " + waiting_threads();
    }
  }
}

void on_signal(int, siginfo_t* info, void*) { fail("invalid access of the memory at %p", info->si_addr); }

// Faults of a kernel are its errors.  The handler never returns: it leaves the kernel.
void catch_faults() {
  static bool done = false;
  if (done) return;
  done = true;
  constexpr size_t kBytes = 64 << 10;
  stack_t stack{};
  stack.ss_sp = map_pages(kBytes);
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(number, &action, nullptr);
}

}  // namespace

void fail(const char* message, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, message);
  vsnprintf(text, sizeof text, message, arguments);
  va_end(arguments);
  if (!device.main_stack || !current) {
    fprintf(stderr, "%s\n", text);
    _exit(2);
  }
  char where[64];
  snprintf(where, sizeof where, "block (%u, %u, %u) thread %d: ", current_block.x, current_block.y,
           current_block.z, current->id);
  device.error = where + std::string(text);
  void* abandoned;
  emulator_switch(&abandoned, device.main_stack);
  __builtin_unreachable();
}

bool run(dim3 grid, dim3 block, size_t shared_bytes, size_t shared_allowed, unsigned cluster,
         std::function<void()> kernel) {
  constexpr unsigned kMostCluster = 8;  // that every device has
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || shared_bytes > shared_allowed || grid.x == 0 || grid.y == 0 ||
      grid.z == 0 || grid.x > 0x7FFFFFFF || grid.y > 0xFFFF || grid.z > 0xFFFF || cluster > kMostCluster ||
      grid.x % cluster != 0)
    return false;
  if (!device.error.empty()) return true;
  catch_faults();
  current_grid = grid;
  current_block_size = block;
  device.kernel = std::move(kernel);
  device.shared_bytes = shared_bytes;
  device.cluster = cluster;
  device.loaded = nullptr;
  run_blocks();
  current = nullptr;
  for (auto& left : device.resident) {  // after an error
    device.free_stacks.push_back(left->stacks);
    device.free_cells.push_back(left->cells);
  }
  device.resident.clear();
  return true;
}

void set_schedule(Schedule schedule) { device.schedule = schedule; }

std::string take_error() {
  std::string error;
  error.swap(device.error);
  return error;
}

// ---- what threads do together ----------------------------------------------------------------------------

void** arrive(const char* what, Site site, uint32_t mask, void* arguments) {
  Warp& warp = warp_of(*current);
  const int lane = current->id % kWarpSize;
  if (!(mask >> lane & 1))
    fail("lane %d is not in the mask %08x of %s at %s:%d", lane, mask, what, site.file, site.line);
  Rendezvous* here = nullptr;
  for (Rendezvous& open : warp.open)
    if (open.mask == mask) here = &open;
  if (!here) {
    warp.open.push_back({what, site, mask, 0, {}});
    here = &warp.open.back();
  }
  if (here->what != what || here->site.line != site.line ||
      (here->site.file != site.file && strcmp(here->site.file, site.file) != 0))
    fail("lanes of a warp diverge: lane %d at %s (%s:%d), others at %s (%s:%d)", lane, what, site.file,
         site.line, here->what, here->site.file, here->site.line);
  here->arrived |= 1u << lane;
  here->arguments[lane] = arguments;
  if (here->arrived == mask) return here->arguments;
  wait(what, site);
  return nullptr;
}

void release(uint32_t mask) {
  ++device.progress;
  Warp& warp = warp_of(*current);
  for (size_t i = 0; i < warp.open.size(); ++i)
    if (warp.open[i].mask == mask) {
      warp.open.erase(warp.open.begin() + i);
      break;
    }
  const uint32_t me = 1u << current->id % kWarpSize;
  warp.ready |= mask & ~me;
  if (device.schedule.order != Order::round_robin) return;
  warp.ready |= me;
  leave(1);
}

void synchronize_block(Site site) {
  Block& block = *current->block;
  if (++block.at_barrier < static_cast<int>(block.threads.size())) {
    wait("__syncthreads", site);
    return;
  }
  ++device.progress;
  block.at_barrier = 0;
  block.epoch = ++device.epochs;
  for (const Thread& thread : block.threads)
    if (&thread != current) warp_of(thread).ready |= 1u << thread.id % kWarpSize;
  if (device.schedule.order != Order::round_robin) return;
  warp_of(*current).ready |= 1u << current->id % kWarpSize;
  emulator_switch(&current->stack_pointer, device.main_stack);  // other blocks go on
}

void synchronize_warp(Site site, uint32_t mask) {
  struct {
  } nothing;
  collective("__syncwarp", site, mask, nothing, [mask](auto**) {
    if (mask == kFullMask) ++warp_of(*current).epoch;
  });
}

void wait_for_other_blocks(Site site) {
  current->block->polling.push_back(current);
  wait("a poll", site);
}

void made_progress() { ++device.progress; }

// ---- barriers of Hopper ----------------------------------------------------------------------------------

void init_barrier(uint32_t address, int arrivals) {
  current->block->transactions[address] = {arrivals, arrivals, 0, 0};
}

namespace {

void arrive(Block& block, uint32_t address, int arrivals, int64_t expected_bytes, Site site) {
  const auto found = block.transactions.find(address);
  if (found == block.transactions.end())
    fail("there is no transaction barrier at %u, %s:%d", address - kSharedWindow, site.file, site.line);
  TransactionBarrier& barrier = found->second;
  barrier.pending -= arrivals;
  barrier.bytes += expected_bytes;
  if (barrier.pending < 0) fail("one arrival too many at %s:%d", site.file, site.line);
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  barrier.parity ^= 1;
  made_progress();
}

}  // namespace

void arrive_at_barrier(uint32_t address, int arrivals, int64_t expected_bytes, Site site) {
  arrive(*current->block, address, arrivals, expected_bytes, site);
}

bool test_barrier(uint32_t address, uint32_t parity) {
  return current->block->transactions[address].parity != parity;
}

void wait_for_barrier(uint32_t address, uint32_t parity, Site site) {
  while (!test_barrier(address, parity)) wait_for_other_blocks(site);
}

void named_barrier(int barrier, int threads, bool wait, Site site) {
  NamedBarrier& named = current->block->named[barrier];
  const uint64_t phase = named.phase;
  const uint32_t me = 1u << current->id / kWarpSize;
  named.warps |= me;
  if (wait) named.waiting |= me;
  if (++named.arrived == threads) {
    auto& warps = current->block->warps;
    for (size_t waits = 0; waits < warps.size(); ++waits)
      for (size_t other = 0; other < warps.size(); ++other)
        if (named.waiting >> waits & named.warps >> other & 1) warps[waits].met[other] = device.time;
    named.arrived = 0, named.warps = named.waiting = 0;
    ++named.phase;
    made_progress();
  }
  while (wait && named.phase == phase) wait_for_other_blocks(site);
}

// ---- clusters --------------------------------------------------------------------------------------------

void arrive_at_cluster() {
  Cluster& cluster = *current->block->cluster;
  size_t threads = 0;
  for (const Block* block : cluster.blocks) threads += block ? block->threads.size() : 0;
  if (static_cast<size_t>(++cluster.arrived) < threads) return;
  cluster.arrived = 0;
  ++cluster.phase;
  made_progress();
}

// A thread waits after each of its arrivals.
void wait_for_cluster(Site site) {
  const uint64_t phase = ++current->cluster_waits;
  while (current->block->cluster->phase < phase) wait_for_other_blocks(site);
}

void store_in_cluster(uint32_t address, uint32_t barrier, int to, const void* from, uint32_t size,
                      Site site) {
  const Cluster& cluster = *current->block->cluster;
  const uint32_t offset = address - kSharedWindow;
  if (address < kSharedWindow || offset + size > device.shared_bytes || offset % size != 0 || to < 0 ||
      static_cast<size_t>(to) >= cluster.blocks.size())
    fail("%u bytes at offset %d of block %d of a cluster: outside or misaligned, at %s:%d", size,
         static_cast<int>(offset), to, site.file, site.line);
  Block* block = cluster.blocks[to];
  if (current->cluster_waits == 0 || !block || block->live == 0)
    fail("block %d of the cluster may not run yet or has ended, at %s:%d", to, site.file, site.line);
  memcpy((block == device.loaded ? shared_memory : block->saved.data()) + offset, from, size);
  arrive(*block, barrier, 0, -int64_t{size}, site);
}

// ---- shared memory ---------------------------------------------------------------------------------------

namespace {

void check_order(const Stamp& before, uint64_t epoch, const Stamp& now, const char* first, const char* then,
                 uint32_t offset) {
  if (before.epoch != epoch || !current->block->transactions.empty()) return;
  const bool same_thread = before.warp == now.warp && before.lane == now.lane;
  if (same_thread || (before.warp == now.warp && before.warp_epoch < now.warp_epoch)) return;
  const auto& met = warp_of(*current).met;
  bool all_met = true;
  for (uint32_t warps = before.warps; warps; warps &= warps - 1) {
    const auto found = met.find(__builtin_ctz(warps));
    all_met &= found != met.end() && before.time <= found->second;
  }
  if (all_met) return;
  fail(
      "warp %d lane %d %s byte %u of shared memory (%s:%d), which warp %d lane %d (-1: several) %s (%s:%d): "
      "no barrier lies between",
      now.warp, now.lane, then, offset, now.site.file, now.site.line, before.warp, before.lane, first,
      before.site.file, before.site.line);
}

void note_read(Stamp& last, Stamp now) {
  if (last.epoch == now.epoch) {
    now.warp_epoch = std::max(now.warp_epoch, last.warp_epoch);
    if (last.lane != now.lane) now.lane = kSeveral;
    if (last.warp != now.warp) now.warp = now.lane = kSeveral;
    now.warps |= last.warps;
  }
  last = now;
}

void check_cell(uint32_t index, Access access, const Stamp& now) {
  const bool write = access == Access::write;
  const Block& block = *current->block;
  Cell& cell = block.cells[index];
  if (cell.flight == block.serial)
    fail("warp %d lane %d uses byte %u of shared memory (%s:%d) before its copy (%s:%d) has been waited for",
         now.warp, now.lane, index * 4, now.site.file, now.site.line, cell.write.site.file,
         cell.write.site.line);
  check_order(cell.write, block.epoch, now, "wrote", write ? "overwrites" : "reads", index * 4);
  if (write) {
    check_order(cell.read, block.epoch, now, "reads", "overwrites", index * 4);
    cell.write = now;
  } else {
    // When all lanes read in one instruction, nothing that the warp does later comes before it.
    Stamp mark = now;
    if (access == Access::read_by_warp) mark.warp_epoch = 0;
    note_read(cell.read, mark);
  }
}

void finish_copy(const Copy& copy) {
  const uint32_t first = (copy.to - kSharedWindow) / 4;
  for (uint32_t cell = first; cell < first + kCopyBytes / 4; ++cell) {
    Cell& landed = current->block->cells[cell];
    landed.flight = 0;
    landed.write.epoch = current->block->epoch;
    landed.write.warp_epoch = warp_of(*current).epoch;
    landed.write.time = device.time;
  }
  uint8_t* to = shared_memory + (copy.to - kSharedWindow);
  if (copy.from)
    memcpy(to, copy.from, kCopyBytes);
  else
    memset(to, 0, kCopyBytes);
}

}  // namespace

uint32_t shared_address(const void* pointer, Site site) {
  const auto offset = static_cast<const uint8_t*>(pointer) - shared_memory;
  if (offset < 0 || offset > static_cast<int64_t>(device.shared_bytes))
    fail("a pointer is not one into shared memory at %s:%d", site.file, site.line);
  return kSharedWindow + static_cast<uint32_t>(offset);
}

uint8_t* shared(uint32_t address, uint32_t size, Access access, Site site, int lane) {
  const uint32_t offset = address - kSharedWindow;
  if (address < kSharedWindow || offset + size > device.shared_bytes || offset % size != 0)
    fail("%u bytes at offset %d of %zu bytes of shared memory: outside or misaligned, at %s:%d", size,
         static_cast<int>(offset), device.shared_bytes, site.file, site.line);
  const int warp = current->id / kWarpSize;
  const Stamp now{current->block->epoch,
                  warp_of(*current).epoch,
                  warp,
                  lane < 0 ? current->id % kWarpSize : lane,
                  site,
                  ++device.time,
                  1u << warp};
  for (uint32_t cell = offset / 4; cell < (offset + size) / 4; ++cell) check_cell(cell, access, now);
  return shared_memory + offset;
}

void start_copy(uint32_t to, const void* from, Site site) {
  if (reinterpret_cast<uintptr_t>(from) % kCopyBytes != 0)
    fail("a copy from the misaligned address %p at %s:%d", from, site.file, site.line);
  memset(shared(to, kCopyBytes, Access::write, site), 0xFF, kCopyBytes);
  const uint32_t first = (to - kSharedWindow) / 4;
  for (uint32_t cell = first; cell < first + kCopyBytes / 4; ++cell)
    current->block->cells[cell].flight = current->block->serial;
  current->copies.push_back({to, from});
}

void commit_copies() { current->groups.push_back(current->copies.size()); }

void wait_for_copies(size_t groups) {
  if (current->groups.size() <= groups) return;
  const size_t landed = current->groups.size() - groups, copies = current->groups[landed - 1];
  for (size_t i = 0; i < copies; ++i) finish_copy(current->copies[i]);
  current->copies.erase(current->copies.begin(), current->copies.begin() + copies);
  current->groups.erase(current->groups.begin(), current->groups.begin() + landed);
  for (size_t& end : current->groups) end -= copies;
}

}  // namespace emulator
