/* Devices, contexts and memory of an emulated NPU runtime.
 *
 * Device memory is host memory, so that a tensor on the device can be looked at where it lies. Each device has a limit
 * of its own, and allocation beyond it fails as on a full device. A thread has no device until it sets one.
 *
 * Read from the environment: PD_EMULATED_NPUS, how many devices the host has (2); PD_EMULATED_NPU_BYTES, the memory of
 * each (2 GiB); ASCEND_RT_VISIBLE_DEVICES, the ones that this process sees and counts from 0, such as "1" or "1,0".
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OK = 0, INVALID_PARAM = 107000, INVALID_DEVICE = 107001, NO_CONTEXT = 107002, NO_MEMORY = 207001 };
enum { MOST_DEVICES = 16, HEADER_BYTES = 4096 };

/* Lies in the page before each allocation. */
struct header {
    size_t mapped_bytes;
    int device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes[MOST_DEVICES]; /* by the device's number on the host */
static char contexts[MOST_DEVICES];     /* their addresses stand for contexts, by the number in this process */
static __thread char *context = NULL;

static size_t setting(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static int num_on_host(void) {
    size_t num = setting("PD_EMULATED_NPUS", 2);
    return num < MOST_DEVICES ? (int)num : MOST_DEVICES;
}

/* The numbers on the host of the devices that this process sees; returns how many. */
static int visible_devices(int *devices) {
    const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    int num = 0;
    if (!text) {
        for (; num < num_on_host(); num++) devices[num] = num;
        return num;
    }
    while (*text && num < MOST_DEVICES) {
        char *rest;
        long device = strtol(text, &rest, 10);
        if (rest == text || device < 0 || device >= num_on_host()) break;
        devices[num++] = (int)device;
        text = *rest == ',' ? rest + 1 : rest;
    }
    return num;
}

static size_t bytes_per_device(void) { return setting("PD_EMULATED_NPU_BYTES", (size_t)2 << 30); }

/* The current device's number on the host. */
static int current_on_host(void) {
    int devices[MOST_DEVICES];
    int num = visible_devices(devices), index = (int)(context - contexts);
    return index < num ? devices[index] : 0;
}

int aclrtGetDeviceCount(uint32_t *count) {
    int devices[MOST_DEVICES];
    *count = (uint32_t)visible_devices(devices);
    return OK;
}

int aclrtSetDevice(int32_t device) {
    int devices[MOST_DEVICES];
    if (device < 0 || device >= visible_devices(devices)) return INVALID_DEVICE;
    context = &contexts[device];
    return OK;
}

int aclrtResetDevice(int32_t device) {
    (void)device;
    context = NULL;
    return OK;
}

int aclrtGetDevice(int32_t *device) {
    if (!context) return NO_CONTEXT;
    *device = (int32_t)(context - contexts);
    return OK;
}

int aclrtGetCurrentContext(void **current) {
    if (!context) return NO_CONTEXT;
    *current = context;
    return OK;
}

int aclrtSetCurrentContext(void *wanted) {
    context = wanted;
    return OK;
}

int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
    (void)device;
    *flags = 0;
    *is_active = 1;
    return OK;
}

int aclrtGetLogicDevIdByUserDevId(int32_t asked, int32_t *device) {
    *device = asked;
    return OK;
}

int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    (void)kind;
    if (!context) return NO_CONTEXT;
    pthread_mutex_lock(&lock);
    *total_bytes = bytes_per_device();
    *free_bytes = *total_bytes - used_bytes[current_on_host()];
    pthread_mutex_unlock(&lock);
    return OK;
}

int aclrtMalloc(void **memory, size_t num_bytes, int policy) {
    (void)policy;
    if (!context) return NO_CONTEXT;
    int device = current_on_host();
    pthread_mutex_lock(&lock);
    int fits = num_bytes <= bytes_per_device() - used_bytes[device];
    if (fits) used_bytes[device] += num_bytes;
    pthread_mutex_unlock(&lock);
    if (!fits) return NO_MEMORY;
    size_t mapped = num_bytes + HEADER_BYTES;
    char *start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NO_MEMORY;
    *(struct header *)start = (struct header){mapped, device};
    *memory = start + HEADER_BYTES;
    return OK;
}

int aclrtMallocAlign32(void **memory, size_t num_bytes, int policy) { return aclrtMalloc(memory, num_bytes, policy); }

int aclrtFree(void *memory) {
    char *start = (char *)memory - HEADER_BYTES;
    struct header header = *(struct header *)start;
    pthread_mutex_lock(&lock);
    used_bytes[header.device] -= header.mapped_bytes - HEADER_BYTES;
    pthread_mutex_unlock(&lock);
    munmap(start, header.mapped_bytes);
    return OK;
}

int aclrtMallocHost(void **memory, size_t num_bytes) {
    return posix_memalign(memory, HEADER_BYTES, num_bytes ? num_bytes : 1) ? NO_MEMORY : OK;
}

int aclrtFreeHost(void *memory) {
    free(memory);
    return OK;
}

int aclrtMemcpy(void *to, size_t room, const void *from, size_t num_bytes, int kind) {
    (void)kind;
    if (num_bytes > room) return INVALID_PARAM;
    memmove(to, from, num_bytes);
    return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t num_bytes, int kind, void *stream) {
    (void)stream;
    return aclrtMemcpy(to, room, from, num_bytes, kind);
}

int aclrtMemset(void *to, size_t room, int32_t value, size_t num_bytes) {
    if (num_bytes > room) return INVALID_PARAM;
    memset(to, value, num_bytes);
    return OK;
}

int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t num_bytes, void *stream) {
    (void)stream;
    return aclrtMemset(to, room, value, num_bytes);
}

int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    (void)device;
    (void)peer;
    *can = 1;
    return OK;
}

int aclrtPointerGetAttributes(const void *pointer, void *attributes) {
    (void)pointer;
    memset(attributes, 0, 64);
    return OK;
}
