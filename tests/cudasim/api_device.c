/* Entry points: devices and their properties. */
#include "sim.h"

#include <stdio.h>
#include <string.h>

static int peer_on[MOST_DEVICES][MOST_DEVICES];

static int bad(int device) { return device < 0 || device >= sim_devices; }

EXPORT int cudaDriverGetVersion(int *version) {
  *version = 13020;
  return OK;
}

EXPORT int cudaRuntimeGetVersion(int *version) {
  *version = 13020;
  return OK;
}

EXPORT int cudaGetDeviceCount(int *count) {
  ENTER("cudaGetDeviceCount");
  *count = sim_devices;
  return leave(sim_devices ? OK : E_NO_DEVICE);
}

EXPORT int cudaGetDevice(int *device) {
  *device = sim_device;
  return OK;
}

EXPORT int cudaSetDevice(int device) {
  if (bad(device)) return keep_error(E_BAD_DEVICE);
  sim_device = device;
  return OK;
}

EXPORT int cudaDeviceSynchronize(void) {
  ENTER("cudaDeviceSynchronize");
  run_device(sim_device);
  return leave(sim_sticky);
}

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  if (bad(device)) return keep_error(E_BAD_DEVICE);
  switch (attribute) {
    case 1: /* threads per block */
      *value = 1024;
      break;
    case 10: /* warp size */
      *value = 32;
      break;
    case 75: /* compute capability */
      *value = 9;
      break;
    case 41:  /* unified addressing */
    case 83:  /* managed memory */
    case 89:  /* concurrent managed access */
    case 115: /* memory pools */
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return OK;
}

/* cudaDeviceProp of CUDA 13, 1008 bytes; name, uuid and size are where CUDA 12 has them. */
EXPORT int cudaGetDeviceProperties(void *properties, int device) {
  if (bad(device)) return keep_error(E_BAD_DEVICE);
  uint8_t *p = properties;
  memset(p, 0, 1008);
  snprintf((char *)p, 256, "Simulated CUDA device %d", device);
  memset(p + 256, device + 1, 16);
  *(size_t *)(p + 288) = memory_total(device);
  *(int *)(p + 308) = 32;
  *(int *)(p + 320) = 1024;
  *(int *)(p + 360) = 9;
  *(int *)(p + 384) = 1;
  *(int *)(p + 568) = device + 1;
  *(int *)(p + 584) = 2;
  *(int *)(p + 588) = 1;
  return OK;
}

EXPORT int cudaGetDeviceProperties_v2(void *properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}

EXPORT int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  if (bad(device)) return keep_error(E_BAD_DEVICE);
  snprintf(text, (size_t)size, "0000:%02x:00.0", device + 1);
  return OK;
}

EXPORT int cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned bus;
  if (sscanf(text, "%*x:%x:", &bus) != 1 || bus < 1 || (int)bus > sim_devices) return keep_error(E_INVALID_VALUE);
  *device = (int)bus - 1;
  return OK;
}

EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  if (bad(device) || bad(peer)) return keep_error(E_BAD_DEVICE);
  *can = device != peer && sim_can_peer;
  return OK;
}

EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  (void)flags;
  ENTER("cudaDeviceEnablePeerAccess");
  if (bad(peer) || peer == sim_device || !sim_can_peer) return leave(E_BAD_DEVICE);
  if (peer_on[sim_device][peer]) return leave(E_PEER_ALREADY);
  peer_on[sim_device][peer] = 1;
  return leave(OK);
}

EXPORT int cudaDeviceDisablePeerAccess(int peer) {
  ENTER("cudaDeviceDisablePeerAccess");
  if (bad(peer) || !peer_on[sim_device][peer]) return leave(E_PEER_NOT_ENABLED);
  peer_on[sim_device][peer] = 0;
  return leave(OK);
}

EXPORT int cudaDeviceGetLimit(size_t *value, int limit) {
  (void)limit;
  *value = 0;
  return OK;
}

EXPORT int cudaDeviceSetLimit(int limit, size_t value) {
  (void)limit;
  (void)value;
  return OK;
}

EXPORT int cudaProfilerStart(void) { return OK; }
EXPORT int cudaProfilerStop(void) { return OK; }
