// A CUDA device on the CPU: every thread of a block is a fiber, and the instructions of a warp are rendezvous
// of its lanes.  It is stricter than a card: shared memory is NaN at the start of every block and where a
// copy is in flight, accesses of two threads without a barrier between them are errors, and so are bad
// addresses, lanes that diverge and threads that wait for ever.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace flashattn {
constexpr int kSharedLimit = 227 * 1024;  // of a block
constexpr int kSharedGuard = 4096;        // behind it; nothing may write there
extern uint8_t shared_memory[kSharedLimit + kSharedGuard];
}  // namespace flashattn

namespace emulator {

constexpr int kWarpSize = 32;
constexpr uint32_t kCopyBytes = 16;
constexpr uint32_t kFullMask = 0xFFFFFFFF;
constexpr uint32_t kSharedWindow = 1 << 20;  // address of shared memory: an offset is no address

// Where in the kernels something was called: as a default argument it is the caller's line.
struct Site {
  const char* file;
  int line;
  Site(const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE()) : file(file_), line(line_) {}
};

// Which warp goes on when a rendezvous of lanes is complete: another one, or the same as far as barriers let
// it, so that it meets the others as far apart as can be; then the next warp or the one before.  In round
// robin blocks take turns at barriers too; else they run one after another unless they wait for each other.
enum class Order { round_robin, greedy, greedy_backwards };

struct Schedule {
  Order order;
  size_t resident_blocks;  // that may run side by side
};

struct Block;

// A copy to shared memory that has not been waited for.
struct Copy {
  uint32_t to;
  const void* from;  // null: zeros
};

struct Thread {
  void* stack_pointer;
  dim3 index;
  int id;
  Block* block;
  const char* waits_for;  // null: it runs or has ended
  Site site;
  uint64_t cluster_waits;  // how often it has waited for its cluster
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // the copies before this index are in the group
};

extern Thread* current;
extern dim3 current_block, current_grid, current_block_size;

// Ends the launch: its error is `message`.
[[noreturn]] void fail(const char* message, ...) __attribute__((format(printf, 1, 2)));

// Runs the kernel's blocks, so many of which are a cluster.  False when it cannot be launched so; later
// launches do nothing after an error.
bool run(dim3 grid, dim3 block, size_t shared_bytes, size_t shared_allowed, unsigned cluster,
         std::function<void()> kernel);

void set_schedule(Schedule schedule);
std::string take_error();  // of the launches since the last call, empty when there was none

// ---- what threads do together ----------------------------------------------------------------------------

// A lane arrives with its arguments; the last of `mask` gets those of all lanes and must call `release`, the
// others wait for that and get null.
void** arrive(const char* what, Site site, uint32_t mask, void* arguments);
void release(uint32_t mask);

// combine(arguments of the lanes) runs once, when all lanes of the mask are here.
template <class Arguments, class Combine>
void collective(const char* what, Site site, uint32_t mask, Arguments& arguments, Combine combine) {
  if (void** all = arrive(what, site, mask, &arguments)) {
    combine(reinterpret_cast<Arguments**>(all));
    release(mask);
  }
}

void synchronize_block(Site site);
void synchronize_warp(Site site, uint32_t mask);
void wait_for_other_blocks(Site site);  // a poll of memory that they write
void made_progress();                   // which they may wait for

// ---- barriers of Hopper ----------------------------------------------------------------------------------

// A phase of a transaction barrier ends when all have arrived and all expected bytes have landed.  The order
// of accesses to shared memory is not checked in blocks that have one.
void init_barrier(uint32_t address, int arrivals);
void arrive_at_barrier(uint32_t address, int arrivals, int64_t expected_bytes, Site site);
bool test_barrier(uint32_t address, uint32_t parity);
void wait_for_barrier(uint32_t address, uint32_t parity, Site site);

void named_barrier(int barrier, int threads, bool wait, Site site);

// ---- clusters --------------------------------------------------------------------------------------------

void arrive_at_cluster();
void wait_for_cluster(Site site);
// To the same address in another block, which must run by then and still, and whose barrier counts the bytes.
void store_in_cluster(uint32_t address, uint32_t barrier, int block, const void* from, uint32_t size,
                      Site site);

// ---- shared memory ---------------------------------------------------------------------------------------

enum class Access { read, read_by_warp, write };  // a warp's lanes read in one instruction

// The bytes at this address, checked for an access of the running thread, or of another one of its warp.
uint8_t* shared(uint32_t address, uint32_t size, Access access, Site site, int lane = -1);
uint32_t shared_address(const void* pointer, Site site);

void start_copy(uint32_t to, const void* from, Site site);
void commit_copies();
void wait_for_copies(size_t groups);

}  // namespace emulator
