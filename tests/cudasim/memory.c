/* Device memory: addresses that the host cannot touch, and the bytes behind them.
 *
 * The address handed out lies in a reservation without access rights; the content is in a mapping of its own. Ranges
 * that were freed are remembered for ever, so that whoever uses one later is found out.
 */
#include "sim.h"

#include <string.h>
#include <sys/mman.h>

static const size_t arena_bytes = (size_t)64 << 30;
static const size_t page = 4096;

static Range *ranges; /* by address */
static size_t n_ranges, room;
static size_t total[MOST_DEVICES], used[MOST_DEVICES], peak[MOST_DEVICES];
static uintptr_t arena[MOST_DEVICES], arena_next[MOST_DEVICES];

static size_t ranges_up_to(uintptr_t address) {
  size_t lo = 0, hi = n_ranges;
  while (lo < hi) {
    const size_t middle = (lo + hi) / 2;
    if (ranges[middle].address <= address)
      lo = middle + 1;
    else
      hi = middle;
  }
  return lo;
}

Range *range_at(const void *p) {
  const uintptr_t address = (uintptr_t)p;
  const size_t i = ranges_up_to(address);
  if (!i) return NULL;
  Range *range = &ranges[i - 1];
  return address <= range->address + range->size || address < range->address + range->mapped ? range : NULL;
}

Range *live_range_at(const void *p) {
  Range *range = range_at(p);
  return range && range->live && (uintptr_t)p < range->address + range->size ? range : NULL;
}

static void insert(Range range) {
  if (n_ranges == room) {
    room = room ? 2 * room : 256;
    ranges = must_alloc(ranges, room * sizeof *ranges);
  }
  const size_t i = ranges_up_to(range.address);
  memmove(ranges + i + 1, ranges + i, (n_ranges - i) * sizeof *ranges);
  ranges[i] = range;
  n_ranges++;
}

static void erase(Range *range) {
  memmove(range, range + 1, (size_t)(ranges + n_ranges - range - 1) * sizeof *ranges);
  n_ranges--;
}

uint8_t *resolve(const void *p, size_t n, int *type, int *device) {
  const Range *range = range_at(p);
  const int outside = range && (uintptr_t)p + n > range->address + range->size;
  if (!range || (range->type == PINNED_HOST && outside)) {
    *type = UNREGISTERED;
    *device = -1;
    return (uint8_t *)p;
  }
  *type = range->type;
  *device = range->device;
  return range->live && !outside ? range->bytes + ((uintptr_t)p - range->address) : NULL;
}

static void *new_address(size_t mapped) {
  const int d = sim_device;
  if (!arena[d]) {
    void *p = mmap(NULL, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return p;
    arena[d] = arena_next[d] = (uintptr_t)p;
  }
  if (arena_next[d] + mapped > arena[d] + arena_bytes) return MAP_FAILED;
  void *p = (void *)arena_next[d];
  arena_next[d] += mapped;
  return p;
}

int allocate(void **out, size_t nbytes, int type) {
  const int d = sim_device;
  if (!out) return E_INVALID_VALUE;
  *out = NULL;
  if (!nbytes) return OK;
  const size_t charged = (nbytes + 511) & ~(size_t)511;
  const size_t mapped = (nbytes + 2 * page - 1) & ~(page - 1); /* at least one page that faults behind it */
  if (charged < nbytes || used[d] + charged > total[d]) return E_NOMEM;
  uint8_t *bytes = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bytes == MAP_FAILED) return E_NOMEM;
  void *address = type == ON_DEVICE ? new_address(mapped) : bytes;
  if (address == MAP_FAILED) {
    munmap(bytes, mapped);
    return E_NOMEM;
  }
  memset(bytes, 0xCC, nbytes);
  used[d] += charged;
  if (used[d] > peak[d]) peak[d] = used[d];
  insert((Range){(uintptr_t)address, nbytes, mapped, charged, bytes, d, type, 1, 1});
  *out = address;
  return OK;
}

int release(void *p) {
  Range *range = range_at(p);
  if (!range || !range->live || range->address != (uintptr_t)p || range->type == PINNED_HOST) return E_INVALID_VALUE;
  used[range->device] -= range->charged;
  range->live = 0;
  if (range->type == ON_DEVICE)
    munmap(range->bytes, range->mapped);
  else
    mprotect((void *)range->address, range->mapped, PROT_NONE);
  return OK;
}

int allocate_pinned(void **out, size_t nbytes) {
  if (!out) return E_INVALID_VALUE;
  *out = NULL;
  if (!nbytes) return OK;
  const size_t mapped = (nbytes + page - 1) & ~(page - 1);
  uint8_t *p = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return E_NOMEM;
  memset(p, 0xCC, nbytes);
  insert((Range){(uintptr_t)p, nbytes, mapped, 0, p, sim_device, PINNED_HOST, 1, 1});
  *out = p;
  return OK;
}

int release_pinned(void *p) {
  Range *range = live_range_at(p);
  if (!range || range->address != (uintptr_t)p || range->type != PINNED_HOST || !range->owned) return E_INVALID_VALUE;
  run_device(-1);
  range = live_range_at(p);
  munmap(p, range->mapped);
  erase(range);
  return OK;
}

int register_host(void *p, size_t nbytes) {
  if (!p || !nbytes) return E_INVALID_VALUE;
  const Range *range = live_range_at(p);
  if (range) return range->type == PINNED_HOST ? E_ALREADY_REGISTERED : E_INVALID_VALUE;
  insert((Range){(uintptr_t)p, nbytes, nbytes, 0, p, sim_device, PINNED_HOST, 1, 0});
  return OK;
}

int unregister_host(void *p) {
  const Range *range = live_range_at(p);
  if (!range || range->address != (uintptr_t)p || range->type != PINNED_HOST || range->owned) return E_NOT_REGISTERED;
  run_device(-1);
  erase(live_range_at(p));
  return OK;
}

size_t memory_total(int device) { return total[device]; }
size_t memory_used(int device) { return used[device]; }
size_t memory_peak(int device) { return peak[device]; }
void memory_limit(int device, size_t nbytes) { total[device] = nbytes; }

int live_allocations(void) {
  int count = 0;
  for (size_t i = 0; i < n_ranges; i++) count += ranges[i].live && ranges[i].type != PINNED_HOST;
  return count;
}

/* ---- for the tests ---- */

EXPORT void cudasim_set_total(int device, size_t nbytes) {
  pthread_mutex_lock(&sim_lock);
  memory_limit(device, nbytes);
  pthread_mutex_unlock(&sim_lock);
}

EXPORT size_t cudasim_used(int device) { return used[device]; }

EXPORT int cudasim_live_allocations(void) {
  pthread_mutex_lock(&sim_lock);
  const int count = live_allocations();
  pthread_mutex_unlock(&sim_lock);
  return count;
}

/* Device bytes as they are at this moment, whatever is queued. */
EXPORT int cudasim_peek(const void *p, void *out, size_t nbytes) {
  int type, device;
  pthread_mutex_lock(&sim_lock);
  const uint8_t *bytes = resolve(p, nbytes, &type, &device);
  if (bytes) memcpy(out, bytes, nbytes);
  pthread_mutex_unlock(&sim_lock);
  return bytes ? OK : E_INVALID_VALUE;
}
