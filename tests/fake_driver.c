// A stand-in for libcuda.so.1 in tests without a GPU: the functions that quantspec calls. Memory is the host's; kernels do nothing.
//
// FAKE_CUDA contains NAME=VALUE words, separated by blanks:
//   version, devices, major, minor, free    reported values; free in MB
//   others                                  compute capability major of devices after the first
//   busy                                    devices used exclusively by another program: the sum of 1 << index
//   delay                                   milliseconds per wait
//   CALL=N:STATUS                           the Nth and later calls of a function return STATUS
// With EMPTY defined the library has none of these functions.
// When a device is released, the file FAKE_CUDA_REPORT holds "calls CALL COUNT" for each function that was called, and "held BYTES". Until then it holds a
// letter for each wait that was delayed: "g" once a graph was launched, which decodes, and "w" before.
#ifndef EMPTY
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Status;
typedef uint64_t Address;

static long word(const char *name, long otherwise) {
  const char *text = getenv("FAKE_CUDA");
  size_t length = strlen(name);
  while (text && *text) {
    if (!strncmp(text, name, length) && text[length] == '=') return strtol(text + length + 1, NULL, 10);
    text = strchr(text, ' ');
    if (text) text++;
  }
  return otherwise;
}

static struct { const char *name; long count; } calls[64];
static size_t held;
static size_t code;  // bytes that kernels take, from the first launch on
static int decodes;

static Status called(const char *name) {
  int i = 0;
  while (calls[i].name && strcmp(calls[i].name, name)) i++;
  calls[i].name = name;
  const char *text = getenv("FAKE_CUDA");
  long at, status;
  size_t length = strlen(name);
  calls[i].count++;
  while (text && *text) {
    if (!strncmp(text, name, length) && sscanf(text + length, "=%ld:%ld", &at, &status) == 2 && calls[i].count >= at) return (Status)status;
    text = strchr(text, ' ');
    if (text) text++;
  }
  return 0;
}
#define CALL(name)                    \
  do {                                \
    Status status_ = called(name);    \
    if (status_) return status_;      \
  } while (0)

Status cuDriverGetVersion(int *version) { *version = (int)word("version", 12040); return 0; }
Status cuInit(unsigned flags) { (void)flags; CALL("cuInit"); return 0; }
Status cuDeviceGetCount(int *count) { *count = (int)word("devices", 1); return 0; }
Status cuDeviceGet(int *device, int index) { *device = index; return 0; }
Status cuDeviceGetName(char *name, int length, int device) { (void)device; snprintf(name, (size_t)length, "Fake GPU"); return 0; }
Status cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)word("free", 8000) << 20; return 0; }
Status cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (int)(device ? word("others", word("major", 9)) : word("major", 9)) : attribute == 76 ? (int)word("minor", 0) : attribute == 16 ? 132 : 227 << 10;
  return 0;
}
Status cuGetErrorName(Status status, const char **name) {
  *name = status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : status == 46 ? "CUDA_ERROR_DEVICE_UNAVAILABLE"
        : status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
static FILE *report(const char *mode) {
  const char *path = getenv("FAKE_CUDA_REPORT");
  return path ? fopen(path, mode) : NULL;
}
Status cuDevicePrimaryCtxRetain(void **context, int device) {
  CALL("cuDevicePrimaryCtxRetain");
  if (word("busy", 0) >> device & 1) return 46;
  FILE *file = report("w");
  if (file) fclose(file);
  *context = calls;
  return 0;
}
Status cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  FILE *file = report("w");
  if (!file) return 0;
  for (int i = 0; calls[i].name; i++) fprintf(file, "calls %s %ld\n", calls[i].name, calls[i].count);
  fprintf(file, "held %zu\n", held);
  fclose(file);
  return 0;
}
Status cuCtxGetCurrent(void **context) { *context = calls; return 0; }
Status cuCtxSetCurrent(void *context) { (void)context; return 0; }
Status cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = calls; return 0; }
Status cuStreamDestroy_v2(void *stream) { (void)stream; return 0; }
Status cuStreamQuery(void *stream) { (void)stream; CALL("cuStreamQuery"); return 0; }
Status cuStreamSynchronize(void *stream) {
  (void)stream;
  CALL("cuStreamSynchronize");
  long delay = word("delay", 0);
  FILE *file = delay ? report("a") : NULL;
  if (file) {
    fputc(decodes ? 'g' : 'w', file);
    fclose(file);
  }
  usleep((useconds_t)delay * 1000);
  return 0;
}
Status cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream, (void)mode; CALL("cuStreamBeginCapture"); return 0; }
Status cuStreamEndCapture(void *stream, void **graph) { (void)stream; *graph = calls; return 0; }
Status cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { (void)graph, (void)flags; *exec = calls; return 0; }
Status cuGraphLaunch(void *exec, void *stream) { (void)exec, (void)stream; CALL("cuGraphLaunch"); decodes = 1; return 0; }
Status cuGraphDestroy(void *graph) { (void)graph; return 0; }
Status cuGraphExecDestroy(void *exec) { (void)exec; return 0; }
Status cuEventCreate(void **event, unsigned flags) { (void)flags; *event = calls; return 0; }
Status cuEventDestroy_v2(void *event) { (void)event; return 0; }
Status cuEventRecordWithFlags(void *event, void *stream, unsigned flags) { (void)event, (void)stream, (void)flags; return 0; }
Status cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream, (void)event, (void)flags; CALL("cuStreamWaitEvent"); return 0; }
Status cuEventSynchronize(void *event) { (void)event; CALL("cuEventSynchronize"); return 0; }
Status cuEventElapsedTime(float *ms, void *from, void *to) { (void)from, (void)to; *ms = 1; return 0; }
Status cuModuleLoadData(void **module, const void *image) { (void)image; CALL("cuModuleLoadData"); *module = calls; return 0; }
Status cuModuleUnload(void *module) { (void)module; return 0; }
Status cuModuleGetFunction(void **function, void *module, const char *name) { (void)module, (void)name; *function = calls; return 0; }
Status cuFuncGetAttribute(int *value, int attribute, void *function) { (void)attribute, (void)function; *value = 48 << 10; return 0; }
Status cuFuncSetAttribute(void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; return 0; }
Status cuTensorMapEncodeTiled(void *map) { (void)map; return 0; }
Status cuLaunchKernelEx(const void *config, void *function, void **arguments, void **extra) {
  (void)config, (void)function, (void)arguments, (void)extra;
  CALL("cuLaunchKernelEx");
  code = 20 << 20;
  return 0;
}

// Each piece of memory has its size in front of it.
static void *take(size_t bytes) {
  size_t *at = calloc(1, bytes + 256);
  if (!at) return NULL;
  *at = bytes;
  held += bytes;
  return (char *)at + 256;
}
static void give(void *pointer) {
  size_t *at = (size_t *)((char *)pointer - 256);
  held -= *at;
  free(at);
}
Status cuMemGetInfo_v2(size_t *left, size_t *total) {
  *total = (size_t)word("free", 8000) << 20;
  *left = *total > held + code ? *total - held - code : 0;
  return 0;
}
Status cuMemAlloc_v2(Address *address, size_t bytes) { CALL("cuMemAlloc"); *address = (Address)take(bytes); return *address ? 0 : 2; }
Status cuMemFree_v2(Address address) { give((void *)address); return 0; }
Status cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) { (void)flags; CALL("cuMemHostAlloc"); *pointer = take(bytes); return *pointer ? 0 : 2; }
Status cuMemFreeHost(void *pointer) { give(pointer); return 0; }
Status cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream) { (void)stream; memmove((void *)to, from, bytes); return 0; }
Status cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream) { (void)stream; memmove(to, (const void *)from, bytes); return 0; }
Status cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void *stream) { (void)stream; memmove((void *)to, (const void *)from, bytes); return 0; }
Status cuMemsetD8Async(Address to, unsigned char byte, size_t bytes, void *stream) { (void)stream; memset((void *)to, byte, bytes); return 0; }
Status cuMemsetD2D8Async(Address to, size_t pitch, unsigned char byte, size_t width, size_t rows, void *stream) {
  (void)stream;
  for (size_t row = 0; row < rows; row++) memset((char *)to + row * pitch, byte, width);
  return 0;
}
#endif
